"""Counters of what the optimizer has done on this rank."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ssd_allreduce.clocks import Clock, HostClock
from ssd_allreduce.schedule import Stage


@dataclass
class StageStats:
    """Counters of one stage on this rank.

    Seconds are the host's. Work on a GPU counts where the host waits for it, which may be in a later step.

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


@dataclass(frozen=True)
class _Span:
    """From one mark of the clock to another, and what of it does not count.

    What it took is asked of the clock late: on a device, the work may not even have begun yet.
    """

    begin: Any
    end: Any
    pauses: tuple[_Span, ...] = ()


class StatsRecorder:
    """Keeps the counters by stage, and what the last steps, updates and transfers took.

    Args:
        clock: tells how long steps, updates and transfers take; the counters are the host's in any case.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or HostClock()
        self._stages = {stage: StageStats() for stage in Stage}
        self.stage = Stage.WARMUP
        """The stage that new counts belong to."""
        self._last_completed: int | None = None
        self._issued_at: float | None = None
        """When what is in flight was sent; None where nothing is, or where it came from a checkpoint."""
        self._issued: Any = None
        self._last_step_end: float | None = None
        self._last_step: Any = None
        self._elsewhere = 0.0
        """Seconds since the last step's end that were no computation."""
        self._pauses: list[_Span] = []
        """The same on the clock: a device computes on for a while, though the host waits already."""
        self._recent: deque[tuple[_Span, bool]] = deque(maxlen=_RECENT_STEPS)
        self._waited_since_issue = 0.0
        self._update: _Span | None = None
        """The last global update."""
        self._recent_transfers: deque[_Span | None] = deque(maxlen=_RECENT_EVENTS)
        """None for one that nobody had to wait for."""
        self._recent_updates: deque[_Span] = deque(maxlen=_RECENT_EVENTS)

    @property
    def clock(self) -> Clock:
        """Tells how long work takes where it is done."""
        return self._clock

    def step(self, undisturbed: bool = False) -> None:
        """Count a step that ends now.

        Args:
            undisturbed: whether it neither sent anything nor had anything in flight.
        """
        now, mark = time.monotonic(), self._clock.mark()
        current = self._stages[self.stage]
        current.steps += 1
        if self._last_step_end is not None:
            current.compute_seconds += now - self._last_step_end - self._elsewhere
            self._recent.append((_Span(self._last_step, mark, tuple(self._pauses)), undisturbed))
        self._last_step_end, self._last_step = now, mark
        self._elsewhere, self._pauses = 0.0, []

    def recent_compute_seconds(self) -> float:
        """Median of the last steps' computation: of the undisturbed ones, if there are any."""
        undisturbed = [span for span, flag in self._recent if flag]
        return self._median(undisturbed or [span for span, _ in self._recent])

    def recent_transfer_seconds(self) -> float:
        """Median of the last transfers beside local steps; one that nobody had to wait for counts as 0."""
        return self._median(self._recent_transfers)

    def recent_update_seconds(self) -> float:
        """Median of the last global updates and rebases; 0 where there was none."""
        return self._median(self._recent_updates)

    def _median(self, spans: Iterable[_Span | None]) -> float:
        return statistics.median([0.0 if span is None else self._seconds(span) for span in spans] or [0.0])

    def _seconds(self, span: _Span) -> float:
        pauses = sum(self._seconds(pause) for pause in span.pauses)
        return max(0.0, self._clock.seconds(span.begin, span.end) - pauses)

    def sync_event(self, completed: int | None = None) -> None:
        current = self._stages[self.stage]
        current.sync_points += 1
        current.allreduces += 1
        self._issued_at, self._issued = time.monotonic(), self._clock.mark()
        self._waited_since_issue = 0.0
        self._update = None
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
        if self._update is not None and not empty:
            self._recent_updates.append(self._update)
        if self._issued_at is not None:
            in_flight = time.monotonic() - self._issued_at
            self._stages[self.stage].in_flight_seconds += in_flight
            if overlapped and self._update is not None:
                waited_for = self._waited_since_issue > _WAITED_FOR * in_flight
                transfer = _Span(self._issued, self._update.begin)
                self._recent_transfers.append(transfer if waited_for else None)
        self._issued_at = self._issued = None

    def dropped(self) -> None:
        """What was in flight will never complete: another event may take its place."""
        self._issued_at = self._issued = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around a global update."""
        began, mark = time.monotonic(), self._clock.mark()
        try:
            yield
        finally:
            seconds = self._paused(began, mark)
            self._stages[self.stage].update_seconds += seconds
            self._update = self._pauses[-1]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for communication."""
        began, mark = time.monotonic(), self._clock.mark()
        try:
            yield
        finally:
            seconds = self._paused(began, mark)
            self._stages[self.stage].wait_seconds += seconds
            self._waited_since_issue += seconds

    def _paused(self, began: float, mark: Any) -> float:
        """Note that what lies between then and now was no computation; returns the host's seconds."""
        seconds = time.monotonic() - began
        self._elsewhere += seconds
        self._pauses.append(_Span(mark, self._clock.mark()))
        return seconds

    def sent(self, count: int) -> None:
        self._stages[self.stage].bytes_sent += count

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
