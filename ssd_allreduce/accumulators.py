"""Where gradients are summed over the steps of a period, and the sums that are travelling."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce import ops
from ssd_allreduce.parameters import Parameters


@dataclass(frozen=True)
class Sums:
    """Sums of one period, laid out like the parameters, float32 at least.

    Attributes:
        gradients: summed gradients.
        squares: summed squares of gradients, where the optimizer's second moment needs them.
    """

    gradients: list[Tensor]
    squares: list[Tensor] | None

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return self.gradients + (self.squares or [])


class Accumulators:
    """The sums of the current period, and those in flight of the last one.

    At most two buffers exist, and the second only once sums travel while new ones accumulate.

    Args:
        parameters: the trained parameters.
        with_squares: whether squares are summed too.
    """

    def __init__(self, parameters: Parameters, with_squares: bool) -> None:
        self._parameters = parameters
        self._with_squares = with_squares
        self._current: Sums | None = None
        self._spare: Sums | None = None
        self.travelling: Sums | None = None
        self.empty = True
        """Whether no gradient has been added in this period; the buffers hold garbage then."""

    @property
    def current(self) -> Sums:
        """This period's sums; garbage while :attr:`empty`."""
        if self._current is None:
            self._current, self._spare = self._spare or self._new(), None
            self.empty = True
        return self._current

    def _new(self) -> Sums:
        squares = self._parameters.new_accumulators() if self._with_squares else None
        return Sums(self._parameters.new_accumulators(), squares)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add one parameter's gradient, and its square where those are kept."""
        ops.accumulate_([self.current.gradients[index]], [gradient], overwrite=self.empty)
        if self.current.squares is not None:
            ops.accumulate_squares_([self.current.squares[index]], [gradient], overwrite=self.empty)

    def begin_with_zeros(self) -> None:
        """Make the sums of a period without any gradient so far zeros, to which one may be added."""
        torch._foreach_zero_(self.current.tensors)
        self.empty = False

    def add_squares(
        self, gradients: Sequence[Tensor], except_for: Collection[int], found_inf: Tensor | None = None
    ) -> None:
        """Add the squares of gradients whose sums a local step has updated, where squares are kept."""
        squares = self.current.squares
        if squares is not None:
            chosen = [index for index in range(len(gradients)) if index not in except_for]
            ops.accumulate_squares_(
                [squares[i] for i in chosen], [gradients[i] for i in chosen], self.empty, found_inf
            )

    def depart(self) -> None:
        """The current sums travel; the next gradient begins new ones."""
        self.travelling, self._current = self.current, None
        self.empty = True

    def release(self) -> None:
        """The arrived sums have been used; their memory serves the next period."""
        self._spare, self.travelling = self.travelling, None

    def drop(self) -> None:
        """Forget everything. What is in flight must have arrived."""
        self.empty = True
        if self.travelling is not None:
            self.release()

    def export_state(self) -> dict[str, Any]:
        """Partial and arrived sums, for a checkpoint."""
        return {
            "accumulators": None if self.empty else self.current.tensors,
            "arrived_sums": None if self.travelling is None else self.travelling.tensors,
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Undo :meth:`export_state`."""
        self.drop()
        if state["accumulators"] is not None:
            torch._foreach_copy_(self.current.tensors, state["accumulators"])
            self.empty = False
        if state["arrived_sums"] is not None:
            self.travelling = self._new()
            torch._foreach_copy_(self.travelling.tensors, state["arrived_sums"])
