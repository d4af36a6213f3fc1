"""Counters of what the optimizer has done on this rank."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
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
        compute_seconds: time from one step's end to the next one's, without waiting and global updates;
            what the script does between its steps counts too.
        update_seconds: time of global updates and rebases.
        in_flight_seconds: time from sync points to their completions, in the delay stage.
    """

    steps: int = 0
    sync_points: int = 0
    allreduces: int = 0
    bytes_sent: int = 0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    update_seconds: float = 0.0
    in_flight_seconds: float = 0.0

    @property
    def overlap(self) -> float:
        """Share of the time in flight that was not waited for: 1 where all transfers are hidden.

        ``flush()`` and the measuring of ``delay_steps="auto"`` wait on purpose, and count as not hidden.
        """
        if self.in_flight_seconds == 0.0:
            return 0.0
        return max(0.0, 1.0 - self.wait_seconds / self.in_flight_seconds)


@dataclass
class Stats(StageStats):
    """Totals over both stages, and the stages apart.

    Attributes:
        warmup: counters of the warm-up stage.
        delay: counters of the delay stage.
        delay_steps: steps in a period, k, now in force.
        overlap_steps: steps between a sync point and its completion, d, now in force.
    """

    warmup: StageStats = field(default_factory=StageStats)
    delay: StageStats = field(default_factory=StageStats)
    delay_steps: int = 1
    overlap_steps: int = 0


_COUNTERS = tuple(StageStats.__dataclass_fields__)
_RECENT_STEPS = 32
_RECENT_EVENTS = 8
_WAITED_FOR = 0.05
"""Share of its time in flight for which a transfer must have been waited for to tell how long it takes."""


class StatsRecorder:
    """Keeps the counters by stage."""

    def __init__(self) -> None:
        self._stages = {stage: StageStats() for stage in Stage}
        self.stage = Stage.WARMUP
        """The stage that new counts belong to."""
        self._last_completed: int | None = None
        self._issued_at: float | None = None
        """When what is in flight was sent; None where nothing is, or where it came from a checkpoint."""
        self._last_step_end: float | None = None
        self._elsewhere = 0.0
        """Seconds since the last step's end that were no computation."""
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_RECENT_STEPS)
        self._waited_since_issue = self._updated_since_issue = 0.0
        self._recent_transfers: deque[float] = deque(maxlen=_RECENT_EVENTS)
        self._recent_updates: deque[float] = deque(maxlen=_RECENT_EVENTS)

    def step(self, undisturbed: bool = False) -> None:
        """Count a step that ends now.

        Args:
            undisturbed: whether it neither sent anything nor had anything in flight.
        """
        now = time.monotonic()
        current = self._stages[self.stage]
        current.steps += 1
        if self._last_step_end is not None:
            seconds = now - self._last_step_end - self._elsewhere
            current.compute_seconds += seconds
            self._recent.append((seconds, undisturbed))
        self._last_step_end, self._elsewhere = now, 0.0

    def recent_compute_seconds(self) -> float:
        """Median of the last steps' computation: of the undisturbed ones, if there are any."""
        undisturbed = [seconds for seconds, flag in self._recent if flag]
        return statistics.median(undisturbed or [seconds for seconds, _ in self._recent] or [0.0])

    def recent_transfer_seconds(self) -> float:
        """Median of the last transfers beside local steps; one that nobody had to wait for counts as 0."""
        return statistics.median(self._recent_transfers or [0.0])

    def recent_update_seconds(self) -> float:
        """Median of the last global updates and rebases; 0 where there was none."""
        return statistics.median(self._recent_updates or [0.0])

    def sync_event(self, completed: int | None = None) -> None:
        current = self._stages[self.stage]
        current.sync_points += 1
        current.allreduces += 1
        self._issued_at = time.monotonic()
        self._waited_since_issue = self._updated_since_issue = 0.0
        if completed is not None:
            self._last_completed = completed

    def completed(self, event: int, overlapped: bool = False, empty: bool = False) -> None:
        """The sync event in flight has been waited for and used.

        Args:
            event: its number.
            overlapped: whether it travelled beside as many steps as the period says.
            empty: whether no rank contributed to it.
        """
        self._last_completed = event
        if not empty:
            self._recent_updates.append(self._updated_since_issue)
        if self._issued_at is not None:
            in_flight = time.monotonic() - self._issued_at
            self._stages[self.stage].in_flight_seconds += in_flight
            if overlapped:
                waited_for = self._waited_since_issue > _WAITED_FOR * in_flight
                self._recent_transfers.append(in_flight - self._updated_since_issue if waited_for else 0.0)
        self._issued_at = None

    def dropped(self) -> None:
        """What was in flight will never complete: another event may take its place."""
        self._issued_at = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around a global update."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._stages[self.stage].update_seconds += seconds
            self._updated_since_issue += seconds
            self._elsewhere += seconds

    def sent(self, count: int) -> None:
        self._stages[self.stage].bytes_sent += count

    def waited(self, seconds: float) -> None:
        self._stages[self.stage].wait_seconds += seconds
        self._waited_since_issue += seconds
        self._elsewhere += seconds

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
