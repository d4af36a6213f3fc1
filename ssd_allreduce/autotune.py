"""Chooses the period by what a step and a transfer cost. Pure numbers: no torch, no communication."""

from __future__ import annotations

from dataclasses import dataclass

_MARGIN = 1.25
"""A transfer beside computation takes longer than one alone, and steps vary: the guess before it was seen."""
_GOOD_ENOUGH = 0.98
"""Share of the best predicted speed for which a shorter period, which drifts less, is taken."""
SHORTEST = 2


@dataclass(frozen=True)
class Costs:
    """What was measured, the slowest rank's of each, in seconds.

    Attributes:
        compute: one local step: forward, backward and local update.
        transfer: one allreduce of all tensors, nothing else running.
        processor: processor time that the transfer takes from the steps of each rank.
        update: one global update with its rebase, which every period makes once; 0 where none was seen.
        transfer_beside_steps: one allreduce beside local steps, seen where even the rank that waited
            least had to wait for its end; 0 where none did.
    """

    compute: float
    transfer: float
    processor: float
    update: float = 0.0
    transfer_beside_steps: float = 0.0

    @property
    def to_hide(self) -> float:
        """What the steps of an overlap have to take together so that nobody waits."""
        return max(_MARGIN * self.transfer, self.transfer_beside_steps)


@dataclass(frozen=True)
class Limits:
    """What may be chosen.

    Attributes:
        longest: largest k.
        overlap: largest d, if the user has set one; by default half of k.
    """

    longest: int
    overlap: int | None = None

    def overlap_at(self, delay_steps: int) -> int:
        """The largest d for a k."""
        return delay_steps // 2 if self.overlap is None else min(self.overlap, delay_steps - 1)


def step_seconds(costs: Costs, delay_steps: int, overlap_steps: int) -> float:
    """Predicted mean time of a step."""
    exposed = max(0.0, costs.to_hide - overlap_steps * costs.compute)
    return costs.compute + (costs.processor + costs.update + exposed) / delay_steps


def choose_period(costs: Costs, limits: Limits) -> tuple[int, int]:
    """The smallest k whose predicted speed is close to the best one's, and the smallest d that it needs."""
    candidates = range(min(SHORTEST, limits.longest), limits.longest + 1)
    predicted = {k: step_seconds(costs, k, limits.overlap_at(k)) for k in candidates}
    bar = min(predicted.values()) / _GOOD_ENOUGH
    delay_steps = next(k for k, seconds in predicted.items() if seconds <= bar)
    most = limits.overlap_at(delay_steps)
    needed = (d for d in range(most) if d * costs.compute >= costs.to_hide)
    return delay_steps, next(needed, most)
