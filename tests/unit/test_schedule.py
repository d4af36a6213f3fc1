"""The stages and sync points: every transition, written out, and random walks through them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ssd_allreduce.schedule import Schedule, Stage, StepPlan


def make_step(schedule: Schedule) -> StepPlan:
    """One step as the algorithm makes it."""
    plan = schedule.plan()
    schedule.advance()
    if plan.completes and plan.stage is Stage.DELAY:
        schedule.complete()
    return plan


def letter(plan: StepPlan) -> str:
    """W: warm-up. Delay stage: S sync point, C completion, B both in one step, a dot for neither."""
    if plan.stage is Stage.WARMUP:
        assert plan.is_sync_point
        assert plan.completes
        return "W"
    return {(False, False): ".", (True, False): "S", (False, True): "C", (True, True): "B"}[
        plan.is_sync_point, plan.completes
    ]


@pytest.mark.parametrize(
    ("warmup", "k", "d", "expected"),
    [
        (0, 1, 0, "WWWWWWWW"),
        (3, 1, 0, "WWWWWWWW"),
        (0, 2, 0, ".B.B.B.B"),
        (0, 2, 1, ".SCSCSCS"),
        (0, 3, 0, "..B..B..B"),
        (0, 3, 1, "..SC.SC.SC"),
        (0, 3, 2, "..S.CS.CS.C"),
        (0, 4, 2, "...S.C.S.C.S"),
        (0, 5, 4, "....S...CS...CS"),
        (1, 2, 1, "W.SCSCS"),
        (2, 3, 0, "WW..B..B"),
        (2, 4, 1, "WW...SC..SC"),
        (3, 4, 3, "WWW...S..CS..CS"),
    ],
)
def test_what_each_step_does(warmup: int, k: int, d: int, expected: str) -> None:
    schedule = Schedule(warmup, k, d)
    assert "".join(letter(make_step(schedule)) for _ in expected) == expected


@pytest.mark.parametrize(
    ("warmup", "k", "d", "expected"),
    [
        (0, 1, 0, [0, 1, 2, 3]),
        (2, 3, 1, [0, 1, 2, 2, 2, 3, 3, 3, 4]),
        (0, 2, 0, [0, 0, 1, 1, 2]),
    ],
)
def test_the_event_that_each_step_works_towards(warmup: int, k: int, d: int, expected: list[int]) -> None:
    schedule = Schedule(warmup, k, d)
    assert [make_step(schedule).event for _ in expected] == expected


def test_the_position_counts_the_steps_of_the_period() -> None:
    schedule = Schedule(1, 3, 1)
    assert [make_step(schedule).position for _ in range(7)] == [0, 0, 1, 2, 0, 1, 2]


def test_planning_changes_nothing() -> None:
    schedule = Schedule(1, 3, 2)
    for _ in range(9):
        before = replace(schedule)
        assert schedule.plan() == schedule.plan()
        assert schedule == before
        make_step(schedule)


def delay(position: int = 0, since: int | None = None, events: int = 0, k: int = 4, d: int = 2) -> Schedule:
    return Schedule(0, k, d, events, 0, position, since)


def warm(done: int = 0, events: int = 0, steps: int = 2, k: int = 4, d: int = 2) -> Schedule:
    return Schedule(steps, k, d, events, done)


@pytest.mark.parametrize(
    ("before", "call", "after"),
    [
        pytest.param(warm(0, 0), "advance", warm(1, 1), id="a warm-up step is one event"),
        pytest.param(warm(1, 1), "advance", warm(2, 2), id="the last warm-up step ends the stage"),
        pytest.param(warm(2, 2), "advance", replace(warm(2, 2), position=1), id="the first local step"),
        pytest.param(
            warm(7, 7, k=1, d=0, steps=0),
            "advance",
            warm(8, 8, k=1, d=0, steps=0),
            id="k = 1 stays synchronous",
        ),
        pytest.param(delay(0), "advance", delay(1), id="a local step"),
        pytest.param(delay(3), "advance", delay(0, 0, 1), id="a sync point puts its allreduce in flight"),
        pytest.param(
            delay(3, d=0),
            "advance",
            delay(0, 0, 1, d=0),
            id="without overlap it is in flight until completed",
        ),
        pytest.param(delay(0, 0, 1), "advance", delay(1, 1, 1), id="the first step of the overlap"),
        pytest.param(delay(1, 1, 1), "advance", delay(2, 2, 1), id="the last step of the overlap"),
        pytest.param(
            delay(2, 2, 1, k=3), "advance", "two sync events in flight", id="never two in flight by a step"
        ),
        pytest.param(delay(2, 2, 1), "complete", delay(2, None, 1), id="completion"),
        pytest.param(
            delay(0, 0, 1, d=0), "complete", delay(0, None, 1, d=0), id="completion without overlap"
        ),
        pytest.param(delay(1), "complete", "nothing is in flight", id="nothing to complete"),
        pytest.param(delay(0), "close_period", delay(0, 0, 1), id="flush of an empty period"),
        pytest.param(delay(2, events=5), "close_period", delay(0, 0, 6), id="flush of a partial period"),
        pytest.param(
            delay(1, 1), "close_period", "two sync events in flight", id="never two in flight by a flush"
        ),
        pytest.param(warm(0), "close_period", None, id="warm-up has no periods"),
        pytest.param(delay(0), "close_warmup_event", None, id="the delay stage has no warm-up events"),
        pytest.param(delay(3, 3, 9, k=5, d=4), "restart_period", delay(0, None, 9, k=5, d=4), id="restart"),
        pytest.param(warm(1, 1), "restart_period", warm(1, 1), id="restart in warm-up changes nothing"),
    ],
)
def test_transition(before: Schedule, call: str, after: Schedule | str | None) -> None:
    schedule = replace(before)
    arguments = {"contributed": True} if call == "close_warmup_event" else {}
    if not isinstance(after, Schedule):
        with pytest.raises(AssertionError, match=after):
            getattr(schedule, call)(**arguments)
    else:
        getattr(schedule, call)(**arguments)
        assert schedule == after


def test_a_warmup_event_without_contribution_is_no_warmup_step() -> None:
    schedule = warm(1, 1)
    schedule.close_warmup_event(contributed=False)
    assert schedule == warm(1, 2)
    schedule.close_warmup_event(contributed=True)
    assert schedule == warm(2, 3)
    assert schedule.stage is Stage.DELAY


def test_a_flush_begins_a_new_full_period() -> None:
    schedule = Schedule(0, 3, 1)
    for _ in range(4):
        make_step(schedule)
    schedule.close_period()
    schedule.complete()
    assert "".join(letter(make_step(schedule)) for _ in range(7)) == "..SC.SC"


def test_the_state_is_plain_numbers() -> None:
    schedule = Schedule(2, 4, 1)
    for _ in range(6):
        make_step(schedule)
    assert schedule.state_dict() == {
        "warmup_steps": 2,
        "delay_steps": 4,
        "overlap_steps": 1,
        "events": 3,
        "warmup_done": 2,
        "position": 0,
        "steps_since_sync": 0,
    }


@pytest.mark.parametrize("steps", range(12))
def test_loaded_progress_goes_on_where_it_stopped(steps: int) -> None:
    original = Schedule(2, 4, 3)
    for _ in range(steps):
        make_step(original)
    loaded = Schedule(2, 4, 3)
    loaded.load_progress(original.state_dict())
    assert [make_step(loaded) for _ in range(9)] == [make_step(original) for _ in range(9)]


def test_loading_keeps_the_own_settings() -> None:
    loaded = Schedule(5, 8, 3)
    loaded.load_progress(Schedule(2, 4, 1, events=9, warmup_done=2, position=1).state_dict())
    assert loaded == Schedule(5, 8, 3, events=9, warmup_done=2, position=1)
    assert loaded.stage is Stage.WARMUP


class AnySequenceOfCalls(RuleBasedStateMachine):
    """Steps, flushes, saves and loads in any order.

    The model beside it knows no positions: it keeps the list of sync points and of completions in
    steps, and says of each what must have happened.
    """

    @initialize(data=st.data())
    def create(self, data: Any) -> None:
        k = data.draw(st.integers(1, 6), label="delay_steps")
        d = data.draw(st.integers(0, k - 1), label="overlap_steps")
        self.schedule = Schedule(data.draw(st.integers(0, 3), label="warmup_steps"), k, d)
        self.saved: list[dict[str, Any]] = []
        self.forget()

    def forget(self) -> None:
        self.since_period_began = 0
        self.in_flight_for: int | None = None
        self.events_before = self.schedule.events

    @rule()
    def step(self) -> None:
        schedule, k, d = self.schedule, self.schedule.delay_steps, self.schedule.overlap_steps
        plan = make_step(schedule)
        if plan.stage is Stage.WARMUP:
            assert plan.is_sync_point
            assert plan.completes
            return
        if self.in_flight_for is not None:
            self.in_flight_for += 1
        self.since_period_began += 1
        assert plan.is_sync_point == (self.since_period_began == k)
        if plan.is_sync_point:
            self.since_period_began = 0
            assert self.in_flight_for is None, "two in flight"
            self.in_flight_for = 0
        # Exactly d steps after the sync point, neither earlier nor later.
        assert plan.completes == (self.in_flight_for is not None and self.in_flight_for == d)
        if plan.completes:
            self.in_flight_for = None

    @rule()
    def flush(self) -> None:
        if self.schedule.stage is Stage.WARMUP:
            before = self.schedule.warmup_done
            self.schedule.close_warmup_event(contributed=False)
            assert self.schedule.warmup_done == before
            return
        if self.schedule.in_flight:
            self.schedule.complete()
        self.schedule.close_period()
        self.schedule.complete()
        self.since_period_began, self.in_flight_for = 0, None

    @rule()
    def restart(self) -> None:
        self.schedule.restart_period()
        self.since_period_began, self.in_flight_for = 0, None

    @rule()
    def save(self) -> None:
        self.saved.append(self.schedule.state_dict())

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: Any) -> None:
        state = data.draw(st.sampled_from(self.saved))
        self.schedule.load_progress(state)
        assert self.schedule.state_dict() == state
        self.forget()
        self.in_flight_for = state["steps_since_sync"]
        self.since_period_began = state["position"]

    @invariant()
    def events_never_go_back(self) -> None:
        assert self.schedule.events >= self.events_before
        self.events_before = self.schedule.events

    @invariant()
    def what_is_in_flight_is_what_the_model_says(self) -> None:
        assert self.schedule.in_flight == (self.in_flight_for is not None)
        if self.in_flight_for is not None:
            assert self.in_flight_for < max(1, self.schedule.overlap_steps)

    @invariant()
    def a_period_has_at_most_k_steps(self) -> None:
        assert 0 <= self.schedule.position < self.schedule.delay_steps


TestAnySequenceOfCalls = AnySequenceOfCalls.TestCase
TestAnySequenceOfCalls.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
