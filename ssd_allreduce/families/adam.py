"""``torch.optim.Adam`` and ``AdamW``, with a second moment corrected for the noise that averaging hides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce import layout
from ssd_allreduce.compensation import GlobalState, LocalRule
from ssd_allreduce.families import noise
from ssd_allreduce.group_options import StepOptions
from ssd_allreduce.ops import Accumulation, Correction, accumulate_
from ssd_allreduce.settings import Settings
from ssd_allreduce.update_family import Family, Replay

FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"


class AdamFamily(Family):
    """Adam and AdamW."""

    needs_squares = True

    def check(self, settings: Settings) -> None:
        for index, group in enumerate(self.base.groups):
            if group["amsgrad"]:
                raise ValueError(
                    f"param_groups[{index}] has amsgrad=True, whose running maximum cannot be replayed from "
                    "accumulated gradients. Allowed: amsgrad=False."
                )
        if settings.warmup_steps < 1 and settings.delay_steps > 1:
            raise ValueError(
                f"warmup_steps={settings.warmup_steps} with {self.base.kind.__name__}: its second moment has "
                "to start from synchronous steps. Allowed: at least 1; a few hundred are usual."
            )

    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            STEP: torch.tensor(0.0, dtype=torch.float32),
            FIRST: layout.zeros_like(parameter),
            SECOND: layout.zeros_like(parameter),
        }

    def momentum_rule(self, gradient_scale: float) -> LocalRule:
        return AdamRule(self, gradient_scale)

    def decoupled(self, group: int) -> bool:
        """Whether a group's weight decay acts on the weights (AdamW), not on the gradient (L2)."""
        return bool(self.base.groups[group].get("decoupled_weight_decay", False))

    def replay(self, weights: Sequence[Tensor], replay: Replay) -> None:
        for batch in self.parameters.batches:
            for index in batch.indices:
                self._replay_one(batch.group, index, weights[index], replay)

    def _replay_one(self, group: int, index: int, weight: Tensor, replay: Replay) -> None:
        entry = self.base.state[self.parameters.tensors[index]]
        if not entry:
            entry.update(self.initial_state(self.parameters.tensors[index], self.base.groups[group]))
        moments = Moments(
            noise.widened(weight).clone(), noise.widened(entry[FIRST]), noise.widened(entry[SECOND])
        )
        gradient = noise.mean_gradient(replay, index)
        variance = noise.gradient_variance(replay, index)
        before = int(entry[STEP])
        for position, options in enumerate(replay.steps):
            step = AdamStep(options, group, self.decoupled(group), before + position + 1)
            extra = variance * noise.missing_noise(replay, position)
            moments.advance(step, gradient, extra)
        if replay.corrections is not None:
            rate = sum(options(group, "lr") for options in replay.steps)
            _store_correction(replay, index, gradient, weight, moments.weight, rate)
        weight.copy_(moments.weight)
        entry[FIRST].copy_(moments.first)
        entry[SECOND].copy_(moments.second)
        entry[STEP].add_(len(replay.steps))


def _store_correction(
    replay: Replay, index: int, gradient: Tensor, before: Tensor, after: Tensor, rate: float
) -> None:
    assert replay.corrections is not None
    if replay.correction == Correction.MEAN_GRADIENT:
        replay.corrections[index].copy_(gradient)
    elif rate != 0.0:
        replay.corrections[index].copy_(before).sub_(after).div_(rate)


class AdamStep:
    """The numbers of one Adam step of one group."""

    def __init__(self, options: StepOptions, group: int, decoupled: bool, step: int) -> None:
        self.lr = options(group, "lr")
        self.beta1 = options(group, "betas[0]")
        self.beta2 = options(group, "betas[1]")
        self.eps = options(group, "eps")
        self.weight_decay = options(group, "weight_decay")
        self.sign = -1.0 if options(group, "maximize") else 1.0
        self.decoupled = decoupled
        self.bias1 = 1.0 - self.beta1**step
        self.bias2 = 1.0 - self.beta2**step


class Moments:
    """A weight with its two moments, all of one computing dtype."""

    def __init__(self, weight: Tensor, first: Tensor, second: Tensor) -> None:
        self.weight = weight
        self.first = first
        self.second = second

    def advance(self, step: AdamStep, gradient: Tensor, variance: Tensor | None) -> None:
        """One Adam step, with extra variance in the second moment's input."""
        gradient = gradient * step.sign
        if step.decoupled:
            self.weight.mul_(1.0 - step.lr * step.weight_decay)
        elif step.weight_decay != 0.0:
            gradient = gradient.add_(self.weight, alpha=step.weight_decay)
        self.first.mul_(step.beta1).add_(gradient, alpha=1.0 - step.beta1)
        square = gradient.square() if variance is None else gradient.square().add_(variance)
        self.second.mul_(step.beta2).add_(square, alpha=1.0 - step.beta2)
        denominator = (self.second / step.bias2).sqrt_().add_(step.eps)
        self.weight.addcdiv_(self.first, denominator, value=-step.lr / step.bias1)


class AdamRule(LocalRule):
    """Adam's own update on the local weights, its moments seeded with the global ones."""

    def __init__(self, family: AdamFamily, gradient_scale: float) -> None:
        super().__init__(family.parameters, gradient_scale)
        self._family = family
        count = len(family.parameters)
        self._first: list[Tensor | None] = [None] * count
        self._second: list[Tensor | None] = [None] * count
        self._first_snapshots: list[Tensor | None] = [None] * count
        self._second_snapshots: list[Tensor | None] = [None] * count
        self._steps = [0] * count

    def seed(self, state: GlobalState) -> None:
        self._first = self._copy_over(self._first, state.tensors(FIRST))
        self._second = self._copy_over(self._second, state.tensors(SECOND))
        self._steps = _step_counts(state)

    def _copy_over(self, own: list[Tensor | None], values: Sequence[Tensor | None]) -> list[Tensor | None]:
        result: list[Tensor | None] = []
        for index, (mine, value) in enumerate(zip(own, values, strict=True)):
            target = self.new_state(index) if mine is None else mine
            result.append(target.zero_() if value is None else target.copy_(value))
        return result

    def update(
        self,
        group: int,
        indices: list[int],
        options: StepOptions,
        gradients: Sequence[Tensor],
        accumulators: Sequence[Tensor],
        accumulation: Accumulation,
    ) -> None:
        if accumulation != Accumulation.NONE:
            chosen = [gradients[i] for i in indices]
            accumulate_([accumulators[i] for i in indices], chosen, accumulation == Accumulation.OVERWRITE)
        for index in indices:
            weight = self.parameters.tensors[index].detach()
            moments = self._moments(index, noise.widened(weight))
            self._steps[index] += 1
            step = AdamStep(options, group, self._family.decoupled(group), self._steps[index])
            moments.advance(step, noise.widened(gradients[index]) * self.gradient_scale, None)
            if moments.weight.data_ptr() != weight.data_ptr():
                weight.copy_(moments.weight)

    def _moments(self, index: int, weight: Tensor) -> Moments:
        first, second = self._first[index], self._second[index]
        assert first is not None
        assert second is not None
        return Moments(weight, first, second)

    def snapshot(self) -> None:
        super().snapshot()
        self._first_snapshots = self._copy_over(self._first_snapshots, self._first)
        self._second_snapshots = self._copy_over(self._second_snapshots, self._second)

    def rebase(self, weights: Sequence[Tensor], state: GlobalState, steps: Sequence[StepOptions]) -> None:
        first, second, counts = state.tensors(FIRST), state.tensors(SECOND), _step_counts(state)
        for batch in self.parameters.batches:
            for index in batch.indices:
                self._rebase_one(
                    batch.group, index, weights[index], first[index], second[index], counts[index], steps
                )

    def _rebase_one(
        self,
        group: int,
        index: int,
        global_weight: Tensor,
        global_first: Tensor | None,
        global_second: Tensor | None,
        count: int,
        steps: Sequence[StepOptions],
    ) -> None:
        first_snapshot, second_snapshot = self._first_snapshots[index], self._second_snapshots[index]
        assert global_first is not None
        assert global_second is not None
        assert first_snapshot is not None
        assert second_snapshot is not None
        weight = self.parameters.tensors[index].detach()
        local = self._moments(index, noise.widened(weight))
        decay1, decay2, reach = 1.0, 1.0, 0.0
        for position, options in enumerate(steps, start=1):
            step = AdamStep(options, group, self._family.decoupled(group), count + position)
            decay1 *= step.beta1
            decay2 *= step.beta2
            reach += step.lr * decay1 / step.bias1
        self._steps[index] = count + len(steps)
        first_change = noise.widened(global_first) - first_snapshot
        second_change = noise.widened(global_second) - second_snapshot
        denominator = (local.second / step.bias2).sqrt_().add_(step.eps)
        shift = noise.widened(global_weight) - self.weight_snapshots[index]
        weight.copy_(local.weight + shift.addcdiv_(first_change, denominator, value=-reach))
        local.first.add_(first_change, alpha=decay1)
        local.second.add_(second_change, alpha=decay2).clamp_(min=0.0)

    def export_state(self) -> dict[str, Any]:
        return {
            **super().export_state(),
            "first": self._first,
            "second": self._second,
            "first_snapshots": self._first_snapshots,
            "second_snapshots": self._second_snapshots,
            "steps": list(self._steps),
        }

    def import_state(self, state: dict[str, Any]) -> None:
        super().import_state(state)
        self._first = self.copied(state["first"])
        self._second = self.copied(state["second"])
        self._first_snapshots = self.copied(state["first_snapshots"])
        self._second_snapshots = self.copied(state["second_snapshots"])
        self._steps = list(state["steps"])


def _step_counts(state: GlobalState) -> list[int]:
    return [0 if step is None else int(step) for step in state.tensors(STEP)]
