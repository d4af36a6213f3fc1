"""``torch.optim.Adam`` and ``AdamW``, with a second moment corrected for the noise that averaging hides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce import layout, ops
from ssd_allreduce.accumulators import Sums
from ssd_allreduce.compensation import GlobalState, LocalRule
from ssd_allreduce.families import noise
from ssd_allreduce.group_options import StepOptions
from ssd_allreduce.ops import Accumulation
from ssd_allreduce.update_family import Family, Replay

FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"


class AdamFamily(Family):
    """Adam and AdamW."""

    needs_squares = True

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for index, group in enumerate(groups):
            if group.get("amsgrad"):
                raise ValueError(
                    f"param_groups[{index}] has amsgrad=True, whose running maximum cannot be replayed from "
                    "accumulated gradients. Allowed: amsgrad=False."
                )

    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        # Where torch's own step looks for it: its fused and capturable forms read it on the device.
        on_device = group.get("fused") or group.get("capturable")
        return {
            STEP: torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
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
            counts = [self._steps_made(index, batch.group) for index in batch.indices]
            for before, indices in by_value(batch.indices, counts):
                self._replay(batch.group, indices, before, weights, replay)

    def _steps_made(self, index: int, group: int) -> int:
        """Steps in a parameter's state, which is created where there is none yet."""
        parameter = self.parameters.tensors[index]
        entry = self.base.state[parameter]
        if not entry:
            entry.update(self.initial_state(parameter, self.base.groups[group]))
        return int(entry[STEP])

    def _replay(
        self, group: int, indices: list[int], before: int, weights: Sequence[Tensor], replay: Replay
    ) -> None:
        assert replay.squares is not None
        steps, squares, corrections = replay.steps, replay.squares, replay.corrections
        entries = [self.base.state[self.parameters.tensors[i]] for i in indices]
        ops.replay_adam_(
            [weights[i] for i in indices],
            [entry[FIRST] for entry in entries],
            [entry[SECOND] for entry in entries],
            [replay.sums[i] for i in indices],
            [squares[i] for i in indices],
            [] if corrections is None else [corrections[i] for i in indices],
            count=replay.contributions,
            divisor=replay.divisor,
            steps_before=before,
            lrs=[options(group, "lr") for options in steps],
            beta1s=[options(group, "betas[0]") for options in steps],
            beta2s=[options(group, "betas[1]") for options in steps],
            epsilons=[options(group, "eps") for options in steps],
            weight_decays=[options(group, "weight_decay") for options in steps],
            missing_noises=[noise.missing_noise(replay, position) for position in range(len(steps))],
            decoupled=self.decoupled(group),
            maximize=steps[-1](group, "maximize") != 0.0,
            correction=replay.correction,
        )
        torch._foreach_add_([entry[STEP] for entry in entries], len(steps))


def by_value(indices: Sequence[int], values: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The indices that belong to each value, in order; usually all belong to one."""
    for value in dict.fromkeys(values):
        yield value, [i for i, v in zip(indices, values, strict=True) if v == value]


class AdamRule(LocalRule):
    """Adam's own update on the local weights, its moments seeded with the global ones."""

    accumulates_squares = True

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
        self.counted = []
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
        sums: Sums,
        accumulation: Accumulation,
        found_inf: Tensor | None = None,
    ) -> None:
        accumulating = accumulation != Accumulation.NONE
        assert sums.squares is not None
        for before, chosen in by_value(indices, [self._steps[i] for i in indices]):
            ops.local_adam_(
                [self.parameters.tensors[i] for i in chosen],
                [gradients[i] for i in chosen],
                self._present(self._first, chosen),
                self._present(self._second, chosen),
                [sums.gradients[i] for i in chosen] if accumulating else [],
                [sums.squares[i] for i in chosen] if accumulating else [],
                lr=options(group, "lr"),
                beta1=options(group, "betas[0]"),
                beta2=options(group, "betas[1]"),
                eps=options(group, "eps"),
                weight_decay=options(group, "weight_decay"),
                decoupled=self._family.decoupled(group),
                maximize=options(group, "maximize") != 0.0,
                gradient_scale=self.gradient_scale,
                step=before + 1,
                accumulation=accumulation,
                found_inf=found_inf,
            )
            for index in chosen:
                self._steps[index] = before + 1
        self.counted += indices

    def uncount(self) -> None:
        for index in self.counted:
            self._steps[index] -= 1
        super().uncount()

    def _present(self, tensors: Sequence[Tensor | None], indices: Sequence[int]) -> list[Tensor]:
        chosen = [tensors[i] for i in indices]
        assert all(tensor is not None for tensor in chosen)
        return chosen  # type: ignore[return-value]

    def snapshot(self) -> None:
        super().snapshot()
        self._first_snapshots = self._copy_over(self._first_snapshots, self._first)
        self._second_snapshots = self._copy_over(self._second_snapshots, self._second)

    def rebase(self, weights: Sequence[Tensor], state: GlobalState, steps: Sequence[StepOptions]) -> None:
        first, second, counts = state.tensors(FIRST), state.tensors(SECOND), _step_counts(state)
        for batch in self.parameters.batches:
            for count, indices in by_value(batch.indices, [counts[i] for i in batch.indices]):
                last = steps[-1]
                decays, reach = moment_reach(batch.group, steps, count)
                ops.rebase_adam_(
                    [self.parameters.tensors[i] for i in indices],
                    self._present(self._first, indices),
                    self._present(self._second, indices),
                    [weights[i] for i in indices],
                    self._present(first, indices),
                    self._present(second, indices),
                    [self.weight_snapshots[i] for i in indices],
                    self._present(self._first_snapshots, indices),
                    self._present(self._second_snapshots, indices),
                    first_decay=decays[0],
                    second_decay=decays[1],
                    displacement_factor=reach,
                    beta2=last(batch.group, "betas[1]"),
                    eps=last(batch.group, "eps"),
                    step=count + len(steps),
                )
                for index in indices:
                    self._steps[index] = count + len(steps)

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


def moment_reach(group: int, steps: Sequence[StepOptions], count: int) -> tuple[tuple[float, float], float]:
    """What is left of a difference of the moments after the steps, and how far the first one's reached.

    Args:
        group: index of the param group.
        steps: the options of the local steps since the sync point.
        count: steps of the global state on which they now follow.
    """
    decay1, decay2, reach = 1.0, 1.0, 0.0
    for position, options in enumerate(steps, start=1):
        beta1 = options(group, "betas[0]")
        decay1 *= beta1
        decay2 *= options(group, "betas[1]")
        reach += options(group, "lr") * decay1 / (1.0 - beta1 ** (count + position))
    return (decay1, decay2), reach


def _step_counts(state: GlobalState) -> list[int]:
    return [0 if step is None else int(step) for step in state.tensors(STEP)]
