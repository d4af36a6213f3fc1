"""The global weights ``W`` and the replay of the base optimizer on them.

The state that belongs to ``W`` is the base optimizer's own, where checkpoint code expects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ssd_allreduce import layout, ops
from ssd_allreduce.base_optimizer import MOMENTUM, BaseOptimizer
from ssd_allreduce.ops import Correction
from ssd_allreduce.parameters import Batch, Parameters

StepOptions: TypeAlias = Callable[[int, str], float]
"""The value of an option of a param group in one step: ``options(group, "lr")``."""


class GlobalModel:
    """Global weights and their optimizer state, bitwise equal on all ranks.

    In the warm-up stage the model itself holds the global weights, and :attr:`weights` is None.
    """

    def __init__(self, parameters: Parameters, base: BaseOptimizer) -> None:
        self._parameters = parameters
        self._base = base
        self.weights: list[Tensor] | None = None

    def take_from_model(self) -> None:
        """Make the model's present weights the global ones."""
        if self.weights is None:
            self.weights = [layout.empty_like(p) for p in self._parameters.tensors]
        torch._foreach_copy_(self.weights, self._parameters.tensors)

    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Take over stored global weights."""
        if self.weights is None:
            self.weights = [layout.empty_like(p) for p in self._parameters.tensors]
        torch._foreach_copy_(self.weights, list(weights))

    def current(self) -> list[Tensor]:
        """The global weights, wherever they are kept."""
        return self._parameters.tensors if self.weights is None else self.weights

    def momenta(self) -> list[Tensor | None]:
        """The global momentum of each parameter, None where there is none yet."""
        state = self._base.state
        return [state[p].get(MOMENTUM) if p in state else None for p in self._parameters.tensors]

    def replay(
        self,
        sums: Sequence[Tensor],
        divisor: float,
        steps: Sequence[StepOptions],
        corrections: Sequence[Tensor] | None,
        correction: Correction,
    ) -> None:
        """Run the base optimizer on the global weights, once per step, with the same mean gradient.

        Args:
            sums: gradients summed over ranks and steps.
            divisor: number of gradients in each sum.
            steps: the options of each step to replay.
            corrections: tensors that receive what the GLU rule reads, if it does.
            correction: what they receive; see ``ops.replay_sgd_``.
        """
        assert self.weights is not None
        for batch in self._parameters.batches:
            for indices, initialised in self._by_momentum(batch, steps):
                self._replay_batch(
                    batch.group, indices, initialised, sums, divisor, steps, corrections, correction
                )

    def _by_momentum(self, batch: Batch, steps: Sequence[StepOptions]) -> list[tuple[list[int], bool]]:
        """The batch's indices, apart for tensors with and without a momentum, which gets created."""
        if all(options(batch.group, "momentum") == 0.0 for options in steps):
            return [(list(batch.indices), False)]
        momenta = self.momenta()
        present = [i for i in batch.indices if momenta[i] is not None]
        absent = [i for i in batch.indices if momenta[i] is None]
        for index in absent:
            parameter = self._parameters.tensors[index]
            self._base.state[parameter][MOMENTUM] = layout.zeros_like(parameter)
        return [(indices, flag) for indices, flag in ((present, True), (absent, False)) if indices]

    def _replay_batch(
        self,
        group: int,
        indices: list[int],
        initialised: bool,
        sums: Sequence[Tensor],
        divisor: float,
        steps: Sequence[StepOptions],
        corrections: Sequence[Tensor] | None,
        correction: Correction,
    ) -> None:
        assert self.weights is not None
        factors = [options(group, "momentum") for options in steps]
        with_momentum = any(factor != 0.0 for factor in factors)
        state, tensors = self._base.state, self._parameters.tensors
        ops.replay_sgd_(
            [self.weights[i] for i in indices],
            [state[tensors[i]][MOMENTUM] for i in indices] if with_momentum else [],
            [sums[i] for i in indices],
            [] if corrections is None else [corrections[i] for i in indices],
            divisor=divisor,
            lrs=[options(group, "lr") for options in steps],
            momentum_factors=factors,
            dampenings=[options(group, "dampening") for options in steps],
            weight_decays=[options(group, "weight_decay") for options in steps],
            nesterov=steps[-1](group, "nesterov") != 0.0,
            maximize=steps[-1](group, "maximize") != 0.0,
            momentum_initialised=initialised,
            correction=correction,
        )
