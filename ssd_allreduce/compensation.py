"""The GLU rules: how the global gradient enters the local updates, and the rebase after a completion.

One class per form of rule. Sections named are those of the SSD-SGD paper (doi 10.1145/3563038), whose
local update is the ``displacement`` rule; the others read the global gradient off other quantities.
"""

from __future__ import annotations

import abc
from collections.abc import Container, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ssd_allreduce import layout, ops
from ssd_allreduce.accumulators import Sums
from ssd_allreduce.group_options import StepOptions
from ssd_allreduce.ops import Accumulation, Correction
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.settings import Settings
from ssd_allreduce.update_family import Family


class GlobalState(Protocol):
    """The optimizer state that belongs to the global weights."""

    def tensors(self, key: str) -> list[Tensor | None]:
        """One kind of state of each parameter, None where there is none yet."""

    def entries(self) -> list[dict[str, object]]:
        """The whole state of each parameter."""


class LocalRule(abc.ABC):
    """A GLU rule over all parameters.

    Args:
        parameters: the trained parameters, whose local weights the rule updates.
        gradient_scale: factor on local gradients; the world size where the user chose ``op=Sum``.
    """

    correction = Correction.NONE
    accumulates_squares = False
    """Whether the local step sums the squares of gradients too."""
    can_be_gated = True
    """Whether the device alone can keep a local step from changing anything."""

    def __init__(self, parameters: Parameters, gradient_scale: float) -> None:
        self.parameters = parameters
        self.gradient_scale = gradient_scale
        self._snapshots: list[Tensor] | None = None
        self.counted: list[int] = []
        """Indices of which the host remembers that the last local step was made."""

    @property
    def corrections(self) -> list[Tensor] | None:
        """Tensors that the replay fills for this rule, if it reads any."""
        return None

    @abc.abstractmethod
    def seed(self, state: GlobalState) -> None:
        """Take the rule's state from the global state. Called when local equals global weights."""

    def observe_warmup(self, before: Sequence[Tensor] | None, options: StepOptions) -> None:  # noqa: B027
        """Follow a step of the warm-up stage; ``before`` holds the weights before it if asked for."""

    @property
    def wants_weights_before_warmup_step(self) -> bool:
        """Whether :meth:`observe_warmup` needs the weights before the step."""
        return False

    def local_step(
        self,
        options: StepOptions,
        gradients: Sequence[Tensor],
        sums: Sums,
        already_accumulated: frozenset[int],
        accumulation: Accumulation,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update the local weights and accumulate, in one pass over memory.

        Args:
            options: options in force.
            gradients: local gradient of every parameter.
            sums: where gradients are summed, and squares where :attr:`accumulates_squares`.
            already_accumulated: indices whose gradient is in the accumulator already.
            accumulation: how the others are accumulated.
            found_inf: where it is not 0, no tensor changes. The host does not know.
        """
        self.counted = []
        for group, indices, mode in self._passes(already_accumulated, accumulation):
            self.update(group, indices, options, gradients, sums, mode, found_inf)

    def uncount(self) -> None:
        """No tensor has changed in the last local step: the host must not remember one either."""
        self.counted = []

    def _passes(
        self, already_accumulated: frozenset[int], accumulation: Accumulation
    ) -> Iterator[tuple[int, list[int], Accumulation]]:
        for batch in self.parameters.batches:
            if not already_accumulated:
                yield batch.group, list(batch.indices), accumulation
                continue
            done = [i for i in batch.indices if i in already_accumulated]
            rest = [i for i in batch.indices if i not in already_accumulated]
            if done:
                yield batch.group, done, Accumulation.NONE
            if rest:
                yield batch.group, rest, accumulation

    @abc.abstractmethod
    def update(
        self,
        group: int,
        indices: list[int],
        options: StepOptions,
        gradients: Sequence[Tensor],
        sums: Sums,
        accumulation: Accumulation,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update the parameters at the given indices."""

    def _sign(self, group: int, options: StepOptions) -> float:
        return -1.0 if options(group, "maximize") else 1.0

    def snapshot(self) -> None:
        """Remember the local state of the sync point, for the rebase."""
        if self._snapshots is None:
            self._snapshots = self.parameters.new_accumulators()
        torch._foreach_copy_(self._snapshots, self.parameters.tensors)

    def follow(self, weights: Sequence[Tensor], state: GlobalState) -> None:
        """Copy the global state: no local step has been made since the sync point."""
        torch._foreach_copy_(self.parameters.tensors, list(weights))
        self.seed(state)

    def rebase(self, weights: Sequence[Tensor], state: GlobalState, steps: Sequence[StepOptions]) -> None:
        """Move the local steps made since the sync point to the new global state.

        Args:
            weights: the new global weights.
            state: the new global state.
            steps: the options of the local steps since the sync point.
        """
        self.shift(range(len(self.parameters)), weights)

    @property
    def weight_snapshots(self) -> list[Tensor]:
        """The local weights of the sync point."""
        assert self._snapshots is not None
        return self._snapshots

    def new_state(self, index: int) -> Tensor:
        """An uninitialised tensor for local state of a parameter, float32 at least."""
        parameter = self.parameters.tensors[index]
        return layout.empty_like(parameter, layout.compute_dtype(parameter.dtype))

    def shift(self, indices: Container[int], weights: Sequence[Tensor]) -> None:
        snapshots = self.weight_snapshots
        for batch in self.parameters.batches:
            chosen = [i for i in batch.indices if i in indices]
            if chosen:
                ops.rebase_shift_(
                    [self.parameters.tensors[i] for i in chosen],
                    [weights[i] for i in chosen],
                    [snapshots[i] for i in chosen],
                )

    def export_state(self) -> dict[str, Any]:
        """The rule's tensors, for a checkpoint."""
        return {"weight_snapshots": self._snapshots}

    def import_state(self, state: dict[str, Any]) -> None:
        """Undo :meth:`export_state`."""
        self._snapshots = self.copied(state["weight_snapshots"])

    def copied(self, tensors: Sequence[Tensor | None] | None) -> Any:
        """Copies of stored tensors in the layout and dtype of this rule's own."""
        if tensors is None:
            return None
        return [
            None if tensor is None else layout.empty_like(p, layout.compute_dtype(p.dtype)).copy_(tensor)
            for tensor, p in zip(tensors, self.parameters.tensors, strict=True)
        ]


class PlainRule(LocalRule):
    """``none``: ``w -= lr (g + wd w)``, local SGD without compensation."""

    def seed(self, state: GlobalState) -> None:
        pass

    def update(
        self,
        group: int,
        indices: list[int],
        options: StepOptions,
        gradients: Sequence[Tensor],
        sums: Sums,
        accumulation: Accumulation,
        found_inf: Tensor | None = None,
    ) -> None:
        ops.local_plain_(
            [self.parameters.tensors[i] for i in indices],
            [gradients[i] for i in indices],
            [sums.gradients[i] for i in indices] if accumulation != Accumulation.NONE else [],
            step_size=options(group, "lr"),
            gradient_weight=self.gradient_scale * self._sign(group, options),
            weight_decay=options(group, "weight_decay"),
            accumulation=accumulation,
            found_inf=found_inf,
        )


class CorrectedRule(LocalRule):
    """``gradient`` and ``displacement``: ``w -= c lr (alpha g + beta s + wd w)``.

    ``s`` is the last global mean gradient, or the last displacement of the global weights over the sum
    of its learning rates (the paper's form). Both are zero until the first global update.
    """

    def __init__(self, parameters: Parameters, gradient_scale: float, settings: Settings) -> None:
        super().__init__(parameters, gradient_scale)
        self._settings = settings
        self.correction = Correction.MEAN_GRADIENT if settings.glu == "gradient" else Correction.DISPLACEMENT
        self._made_corrections: list[Tensor] | None = None

    @property
    def corrections(self) -> list[Tensor]:
        if self._made_corrections is None:
            # When they are first needed: the model may be given another dtype or device after it was wrapped.
            self._made_corrections = [tensor.zero_() for tensor in self.parameters.new_accumulators()]
        return self._made_corrections

    @property
    def wants_weights_before_warmup_step(self) -> bool:
        return self.correction == Correction.DISPLACEMENT

    def seed(self, state: GlobalState) -> None:
        pass

    def observe_warmup(self, before: Sequence[Tensor] | None, options: StepOptions) -> None:
        if before is None:
            gradients = [p.grad for p in self.parameters.tensors]
            for correction, gradient in zip(self.corrections, gradients, strict=True):
                if gradient is not None:
                    correction.copy_(gradient)
            return
        for batch in self.parameters.batches:
            lr = options(batch.group, "lr")
            for i in batch.indices if lr != 0.0 else ():
                now = self.parameters.tensors[i]
                self.corrections[i].copy_(before[i]).sub_(now).div_(lr)

    def update(
        self,
        group: int,
        indices: list[int],
        options: StepOptions,
        gradients: Sequence[Tensor],
        sums: Sums,
        accumulation: Accumulation,
        found_inf: Tensor | None = None,
    ) -> None:
        settings, sign = self._settings, self._sign(group, options)
        # A displacement already has the direction in which the optimizer moves.
        correction_sign = sign if self.correction == Correction.MEAN_GRADIENT else 1.0
        ops.local_corrected_(
            [self.parameters.tensors[i] for i in indices],
            [gradients[i] for i in indices],
            [self.corrections[i] for i in indices],
            [sums.gradients[i] for i in indices] if accumulation != Accumulation.NONE else [],
            step_size=settings.local_lr_scale * options(group, "lr"),
            gradient_weight=settings.alpha * self.gradient_scale * sign,
            correction_weight=settings.beta * correction_sign,
            weight_decay=options(group, "weight_decay"),
            accumulation=accumulation,
            found_inf=found_inf,
        )

    def export_state(self) -> dict[str, Any]:
        return {**super().export_state(), "corrections": self.corrections}

    def import_state(self, state: dict[str, Any]) -> None:
        super().import_state(state)
        self._made_corrections = self.copied(state["corrections"])


def make_rule(settings: Settings, family: Family, gradient_scale: float) -> LocalRule:
    """The rule that ``glu`` names."""
    if settings.glu == "momentum":
        return family.momentum_rule(gradient_scale)
    if settings.glu == "none":
        return PlainRule(family.parameters, gradient_scale)
    return CorrectedRule(family.parameters, gradient_scale, settings)
