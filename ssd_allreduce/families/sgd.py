"""``torch.optim.SGD``: momentum, dampening, weight decay, nesterov, maximize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ssd_allreduce import layout, ops
from ssd_allreduce.accumulators import Sums
from ssd_allreduce.compensation import GlobalState, LocalRule, PlainRule
from ssd_allreduce.group_options import StepOptions
from ssd_allreduce.ops import Accumulation
from ssd_allreduce.parameters import Batch, Parameters
from ssd_allreduce.update_family import Family, Replay

MOMENTUM = "momentum_buffer"


class SGDFamily(Family):
    """SGD by fused kernels."""

    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {MOMENTUM: layout.zeros_like(parameter)} if group["momentum"] != 0 else {}

    def momentum_rule(self, gradient_scale: float) -> LocalRule:
        return MomentumRule(self.parameters, gradient_scale)

    def replay(self, weights: Sequence[Tensor], replay: Replay) -> None:
        for batch in self.parameters.batches:
            for indices, initialised in self._by_momentum(batch, replay.steps):
                self._replay(batch.group, indices, initialised, weights, replay)

    def _by_momentum(self, batch: Batch, steps: Sequence[StepOptions]) -> list[tuple[list[int], bool]]:
        """The batch's indices, apart for tensors with and without a momentum, which gets created."""
        if all(options(batch.group, "momentum") == 0.0 for options in steps):
            return [(list(batch.indices), False)]
        momenta = self.base.state_tensors(self.parameters.tensors, MOMENTUM)
        present = [i for i in batch.indices if momenta[i] is not None]
        absent = [i for i in batch.indices if momenta[i] is None]
        for index in absent:
            parameter = self.parameters.tensors[index]
            self.base.state[parameter][MOMENTUM] = layout.zeros_like(parameter)
        return [(indices, flag) for indices, flag in ((present, True), (absent, False)) if indices]

    def _replay(
        self, group: int, indices: list[int], initialised: bool, weights: Sequence[Tensor], replay: Replay
    ) -> None:
        steps, corrections = replay.steps, replay.corrections
        factors = [options(group, "momentum") for options in steps]
        with_momentum = any(factor != 0.0 for factor in factors)
        state, tensors = self.base.state, self.parameters.tensors
        ops.replay_sgd_(
            [weights[i] for i in indices],
            [state[tensors[i]][MOMENTUM] for i in indices] if with_momentum else [],
            [replay.sums[i] for i in indices],
            [] if corrections is None else [corrections[i] for i in indices],
            divisor=replay.divisor,
            lrs=[options(group, "lr") for options in steps],
            momentum_factors=factors,
            dampenings=[options(group, "dampening") for options in steps],
            weight_decays=[options(group, "weight_decay") for options in steps],
            nesterov=steps[-1](group, "nesterov") != 0.0,
            maximize=steps[-1](group, "maximize") != 0.0,
            momentum_initialised=initialised,
            correction=replay.correction,
        )


class MomentumRule(LocalRule):
    """SGD's own update on the local weights, its momentum seeded with the global one."""

    def __init__(self, parameters: Parameters, gradient_scale: float) -> None:
        super().__init__(parameters, gradient_scale)
        self._plain = PlainRule(parameters, gradient_scale)
        # None until a step with momentum is made: SGD's first momentum is the gradient, undampened.
        self._momenta: list[Tensor | None] = [None] * len(parameters)
        self._momentum_snapshots: list[Tensor | None] = [None] * len(parameters)

    def seed(self, state: GlobalState) -> None:
        self.counted = []
        for index, momentum in enumerate(state.tensors(MOMENTUM)):
            own = self._momenta[index]
            if momentum is None:
                self._momenta[index] = None
            elif own is None:
                self._momenta[index] = self.new_state(index).copy_(momentum)
            else:
                own.copy_(momentum)

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
        if options(group, "momentum") == 0.0:
            self._plain.update(group, indices, options, gradients, sums, accumulation, found_inf)
            return
        started = [i for i in indices if self._momenta[i] is not None]
        if started:
            dampening = options(group, "dampening")
            self._step(group, started, options, dampening, gradients, sums, accumulation, found_inf)
        if len(started) == len(indices):
            return
        fresh = [i for i in indices if self._momenta[i] is None]
        for index in fresh:
            self._momenta[index] = self.new_state(index).zero_()
        self.counted += fresh
        self._step(group, fresh, options, 0.0, gradients, sums, accumulation, found_inf)

    def uncount(self) -> None:
        for index in self.counted:
            self._momenta[index] = None
        super().uncount()

    def _step(
        self,
        group: int,
        indices: list[int],
        options: StepOptions,
        dampening: float,
        gradients: Sequence[Tensor],
        sums: Sums,
        accumulation: Accumulation,
        found_inf: Tensor | None,
    ) -> None:
        ops.local_momentum_(
            [self.parameters.tensors[i] for i in indices],
            [gradients[i] for i in indices],
            [self._momenta[i] for i in indices],  # type: ignore[misc]
            [sums.gradients[i] for i in indices] if accumulation != Accumulation.NONE else [],
            lr=options(group, "lr"),
            momentum=options(group, "momentum"),
            dampening=dampening,
            weight_decay=options(group, "weight_decay"),
            nesterov=options(group, "nesterov") != 0.0,
            maximize=options(group, "maximize") != 0.0,
            gradient_scale=self.gradient_scale,
            accumulation=accumulation,
            found_inf=found_inf,
        )

    def snapshot(self) -> None:
        super().snapshot()
        for index, momentum in enumerate(self._momenta):
            kept = self._momentum_snapshots[index]
            if momentum is None:
                self._momentum_snapshots[index] = None
            elif kept is None:
                self._momentum_snapshots[index] = momentum.clone()
            else:
                kept.copy_(momentum)

    def rebase(self, weights: Sequence[Tensor], state: GlobalState, steps: Sequence[StepOptions]) -> None:
        momenta = state.tensors(MOMENTUM)
        for batch in self.parameters.batches:
            with_momentum = [i for i in batch.indices if momenta[i] is not None]
            self.shift(frozenset(batch.indices) - frozenset(with_momentum), weights)
            if not with_momentum:
                continue
            decay, reach = momentum_reach(batch.group, steps)
            for index in with_momentum:
                self._momenta[index] = self._or_zeros(self._momenta[index], index)
                self._momentum_snapshots[index] = self._or_zeros(self._momentum_snapshots[index], index)
            ops.rebase_momentum_(
                [self.parameters.tensors[i] for i in with_momentum],
                [self._momenta[i] for i in with_momentum],  # type: ignore[misc]
                [weights[i] for i in with_momentum],
                [momenta[i] for i in with_momentum],  # type: ignore[misc]
                [self.weight_snapshots[i] for i in with_momentum],
                [self._momentum_snapshots[i] for i in with_momentum],  # type: ignore[misc]
                momentum_decay=decay,
                displacement_factor=reach,
            )

    def _or_zeros(self, tensor: Tensor | None, index: int) -> Tensor:
        return self.new_state(index).zero_() if tensor is None else tensor

    def export_state(self) -> dict[str, Any]:
        return {
            **super().export_state(),
            "momenta": self._momenta,
            "momentum_snapshots": self._momentum_snapshots,
        }

    def import_state(self, state: dict[str, Any]) -> None:
        super().import_state(state)
        self._momenta = self.copied(state["momenta"])
        self._momentum_snapshots = self.copied(state["momentum_snapshots"])


def momentum_reach(group: int, steps: Sequence[StepOptions]) -> tuple[float, float]:
    """What is left of a momentum difference after the steps, and how far it moved the weights."""
    decay, reach = 1.0, 0.0
    for options in steps:
        momentum = options(group, "momentum")
        decay *= momentum
        lookahead = momentum if options(group, "nesterov") else 1.0
        reach += options(group, "lr") * decay * lookahead
    return decay, reach
