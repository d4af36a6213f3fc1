"""The global weights ``W`` and the replay of the base optimizer on them.

The state that belongs to ``W`` is the base optimizer's own, where checkpoint code expects it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_allreduce import layout
from ssd_allreduce.base_optimizer import BaseOptimizer
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.update_family import Family, Replay


class GlobalModel:
    """Global weights and their optimizer state, bitwise equal on all ranks.

    In the warm-up stage the model itself holds the global weights, and :attr:`weights` is None.
    """

    def __init__(self, parameters: Parameters, base: BaseOptimizer, family: Family) -> None:
        self._parameters = parameters
        self._base = base
        self._family = family
        self.weights: list[Tensor] | None = None

    def take_from_model(self) -> None:
        """Make the model's present weights the global ones."""
        self.set_weights(self._parameters.tensors)

    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Make copies of the given weights the global ones."""
        if self.weights is None:
            self.weights = [layout.empty_like(p) for p in self._parameters.tensors]
        torch._foreach_copy_(self.weights, list(weights))

    def current(self) -> list[Tensor]:
        """The global weights, wherever they are kept."""
        return self._parameters.tensors if self.weights is None else self.weights

    def tensors(self, key: str) -> list[Tensor | None]:
        """One kind of state of each parameter, None where there is none yet."""
        return self._base.state_tensors(self._parameters.tensors, key)

    def entries(self) -> list[dict[str, object]]:
        """The whole state of each parameter."""
        state = self._base.state
        return [state.get(p, {}) for p in self._parameters.tensors]

    def shared_state(self) -> dict[object, object]:
        """State that belongs to no single parameter."""
        return self._base.shared_state

    def replay(self, replay: Replay) -> None:
        """Run the base optimizer on the global weights, once per step, with the same mean gradient."""
        assert self.weights is not None
        self._family.replay(self.weights, replay)
