"""Counters of what the optimizer has done on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from ssd_allreduce.schedule import Stage


@dataclass
class StageStats:
    """Counters of one stage on this rank.

    Attributes:
        steps: calls of ``step()``.
        sync_points: sync events taken part in (every warm-up step is one).
        allreduces: allreduces of each tensor; the number that plain Horovod would have issued is the
            number of steps.
        bytes_sent: bytes handed to allreduce.
        wait_seconds: time in which the training loop stood still for communication.
    """

    steps: int = 0
    sync_points: int = 0
    allreduces: int = 0
    bytes_sent: int = 0
    wait_seconds: float = 0.0


@dataclass
class Stats(StageStats):
    """Totals over both stages, and the stages apart.

    Attributes:
        warmup: counters of the warm-up stage.
        delay: counters of the delay stage.
    """

    warmup: StageStats = field(default_factory=StageStats)
    delay: StageStats = field(default_factory=StageStats)


_COUNTERS = tuple(StageStats.__dataclass_fields__)


class StatsRecorder:
    """Keeps the counters by stage."""

    def __init__(self) -> None:
        self._stages = {stage: StageStats() for stage in Stage}
        self.stage = Stage.WARMUP
        """The stage that new counts belong to."""
        self._last_completed: int | None = None

    def step(self) -> None:
        self._stages[self.stage].steps += 1

    def sync_event(self, completed: int | None = None) -> None:
        current = self._stages[self.stage]
        current.sync_points += 1
        current.allreduces += 1
        if completed is not None:
            self.completed(completed)

    def completed(self, event: int) -> None:
        self._last_completed = event

    def sent(self, count: int) -> None:
        self._stages[self.stage].bytes_sent += count

    def waited(self, seconds: float) -> None:
        self._stages[self.stage].wait_seconds += seconds

    def snapshot(self) -> Stats:
        """The counters as they stand, detached from the recorder."""
        warmup, delay = (StageStats(**vars(self._stages[stage])) for stage in Stage)
        totals = {name: getattr(warmup, name) + getattr(delay, name) for name in _COUNTERS}
        return Stats(**totals, warmup=warmup, delay=delay)

    def describe_progress(self) -> str:
        """For messages of what went wrong: how far this rank has come."""
        now = self.snapshot()
        last = "none" if self._last_completed is None else str(self._last_completed)
        return (
            f"This rank has made {now.steps} steps and issued {now.sync_points} sync events; the last "
            f"completed one is {last}."
        )
