"""When a step communicates: the stages and sync points as a pure state machine.

No tensors and no communication here. A *sync event* is one moment at which every rank hands all its
tensors to allreduce: each step of the warm-up stage, and each sync point of the delay stage. Events
are numbered from 0; the number is the clock that all ranks share, however many steps each has made.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Stage(enum.Enum):
    """The stage a step belongs to."""

    WARMUP = "warmup"
    """Synchronous SGD: every step is a sync event that completes at once."""
    DELAY = "delay"
    """Periods of ``delay_steps`` local steps with one sync event at the end of each."""


class StepPlan(NamedTuple):
    """What the step about to be made will do.

    Attributes:
        stage: the stage it belongs to.
        event: number of the sync event that it issues or works towards.
        position: steps already made in the current period (0 in warm-up).
        is_sync_point: whether it hands tensors to allreduce.
        completes: whether the allreduce in flight (or issued by it) is completed at its end.
    """

    stage: Stage
    event: int
    position: int
    is_sync_point: bool
    completes: bool


@dataclass
class Schedule:
    """Counts steps and sync events; the only place that knows which step communicates.

    Args:
        warmup_steps: steps of synchronous SGD at the start (T in the paper).
        delay_steps: steps in a period (k), at least 1.
        overlap_steps: steps between a sync point and its completion (d), ``0 <= d < k``.
    """

    warmup_steps: int
    delay_steps: int
    overlap_steps: int
    events: int = 0
    warmup_done: int = 0
    position: int = 0
    steps_since_sync: int | None = None

    def set_period(self, delay_steps: int, overlap_steps: int) -> None:
        """Change k and d between two periods."""
        assert self.position == 0
        assert not self.in_flight
        self.delay_steps, self.overlap_steps = delay_steps, overlap_steps

    @property
    def always_synchronous(self) -> bool:
        """Whether the delay stage never begins: a period of one step is synchronous SGD."""
        return self.delay_steps == 1

    @property
    def stage(self) -> Stage:
        """Stage of the next step."""
        if self.always_synchronous or self.warmup_done < self.warmup_steps:
            return Stage.WARMUP
        return Stage.DELAY

    @property
    def in_flight(self) -> bool:
        """Whether a sync point has been issued whose completion is still to come."""
        return self.steps_since_sync is not None

    @property
    def at_sync_event(self) -> bool:
        """Whether the next step hands tensors to allreduce."""
        return self.position == self.delay_steps - 1 or self.stage is Stage.WARMUP

    def plan(self) -> StepPlan:
        """What the next step does. Changes nothing."""
        stage = self.stage
        if stage is Stage.WARMUP:
            return StepPlan(stage, self.events, 0, is_sync_point=True, completes=True)
        is_sync_point = self.position == self.delay_steps - 1
        if self.overlap_steps == 0:
            completes = is_sync_point
        else:
            completes = self.steps_since_sync is not None and self.steps_since_sync + 1 == self.overlap_steps
        return StepPlan(stage, self.events, self.position, is_sync_point, completes)

    def advance(self) -> None:
        """Count one step. A sync point puts its allreduce in flight, whatever the overlap."""
        if self.stage is Stage.WARMUP:
            self.close_warmup_event(contributed=True)
            return
        if self.steps_since_sync is not None:
            self.steps_since_sync += 1
        self.position += 1
        if self.position == self.delay_steps:
            self.close_period()

    def close_warmup_event(self, contributed: bool) -> None:
        """End a warm-up sync event. One to which no rank contributed is no warm-up step."""
        assert self.stage is Stage.WARMUP
        self.events += 1
        if contributed:
            self.warmup_done += 1

    def close_period(self) -> None:
        """End the current period, full or partial, by a sync event."""
        assert self.stage is Stage.DELAY
        assert not self.in_flight, "two sync events in flight"
        self.events += 1
        self.position = 0
        self.steps_since_sync = 0

    def complete(self) -> None:
        """Record that the sync event in flight has been completed."""
        assert self.in_flight, "nothing is in flight"
        self.steps_since_sync = None

    def restart_period(self) -> None:
        """Drop the current period and what is in flight; the next step begins a new period."""
        self.position = 0
        self.steps_since_sync = None

    def state_dict(self) -> dict[str, Any]:
        """The settings and counters, as plain numbers."""
        return asdict(self)

    def load_progress(self, state: dict[str, Any]) -> None:
        """Take over the counters (not the settings) of :meth:`state_dict`."""
        self.events = int(state["events"])
        self.warmup_done = int(state["warmup_done"])
        self.position = int(state["position"])
        since = state["steps_since_sync"]
        self.steps_since_sync = None if since is None else int(since)
