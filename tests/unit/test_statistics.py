"""Where the time goes: what ``stats()`` says of computation, waiting and transfers."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from engines import SlowLoopback
from loops import small_model, train_step, wrap

from ssd_allreduce.schedule import Stage
from ssd_allreduce.statistics import StageStats, Stats, StatsRecorder

TRANSFER = 0.1
PAUSE = 0.06


def train(steps: int, **settings: Any) -> tuple[Stats, float]:
    """Statistics, and the seconds from the first step's end to the last one's."""
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, TRANSFER), **settings)
    train_step(model, optimizer)
    began = time.monotonic()
    for step in range(1, steps):
        train_step(model, optimizer, step, edit=lambda: time.sleep(PAUSE))
    return optimizer.stats(), time.monotonic() - began


def test_time_is_computation_waiting_or_updating() -> None:
    stats, seconds = train(9, delay_steps=4, overlap_steps=0, issue="step")
    accounted = stats.compute_seconds + stats.wait_seconds + stats.update_seconds
    assert stats.compute_seconds >= 8 * PAUSE
    assert stats.wait_seconds >= 2 * 0.9 * TRANSFER
    assert accounted == pytest.approx(seconds, abs=0.05)
    assert stats.update_seconds > 0.0


def test_hidden_transfers_are_not_waited_for() -> None:
    hidden, _ = train(11, delay_steps=4, overlap_steps=3)
    assert hidden.delay.in_flight_seconds >= 2 * TRANSFER
    assert hidden.delay.overlap > 0.8
    exposed, _ = train(11, delay_steps=4, overlap_steps=0, issue="step")
    assert exposed.delay.overlap < 0.3


def test_stages_are_counted_apart_and_the_period_is_told() -> None:
    stats, _ = train(5, delay_steps=3, overlap_steps=1, warmup_steps=2)
    assert (stats.warmup.steps, stats.delay.steps, stats.steps) == (2, 3, 5)
    assert (stats.delay_steps, stats.overlap_steps) == (3, 1)
    assert stats.warmup.in_flight_seconds == 0.0
    assert stats.warmup.compute_seconds + stats.delay.compute_seconds == pytest.approx(stats.compute_seconds)


def test_overlap_without_any_transfer_is_zero() -> None:
    assert StageStats().overlap == 0.0


IN_FLIGHT = {"delay_steps": 4, "overlap_steps": 2}


def test_what_was_in_flight_in_a_checkpoint_counts_no_time_in_flight() -> None:
    """Nobody knows here how long it travelled, and the clock does not begin with the process."""
    model, heir = small_model(), small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.0), **IN_FLIGHT)
    for step in range(5):
        train_step(model, optimizer, step)
    resumed = wrap(heir, SlowLoopback(2, 0.0), **IN_FLIGHT)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_step(heir, resumed, 5)
    assert resumed.stats().delay.in_flight_seconds == 0.0
    for step in range(6, 10):
        train_step(heir, resumed, step)
    assert 0.0 < resumed.stats().delay.in_flight_seconds < 5.0


def test_a_sync_point_that_a_load_has_dropped_counts_no_time_in_flight() -> None:
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.0), **IN_FLIGHT)
    for step in range(5):
        train_step(model, optimizer, step)
    saved = copy.deepcopy(optimizer.state_dict())
    for step in range(5, 8):
        train_step(model, optimizer, step)
    before = optimizer.stats().delay.in_flight_seconds
    time.sleep(PAUSE)
    optimizer.load_state_dict(saved)
    train_step(model, optimizer, 5)
    assert optimizer.stats().delay.in_flight_seconds == before


def test_a_transfer_that_was_waited_for_tells_how_long_it_takes() -> None:
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, TRANSFER), delay_steps=4, overlap_steps=1, issue="step")
    recorder = optimizer._engine.training.stats
    for step in range(10):
        train_step(model, optimizer, step, edit=lambda: time.sleep(0.3 * TRANSFER))
    assert 0.9 * TRANSFER <= recorder.recent_transfer_seconds() < 2 * TRANSFER
    assert 0.0 < recorder.recent_update_seconds() < TRANSFER


def test_a_hidden_transfer_tells_nothing_of_its_length() -> None:
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.01), delay_steps=4, overlap_steps=3)
    for step in range(12):
        train_step(model, optimizer, step, edit=lambda: time.sleep(0.1))
    assert optimizer._engine.training.stats.recent_transfer_seconds() == 0.0


def test_recent_computation_is_that_of_undisturbed_steps_where_there_are_any() -> None:
    recorder = StatsRecorder()
    recorder.stage = Stage.DELAY
    assert recorder.recent_compute_seconds() == 0.0
    recorder.step()
    for pause, undisturbed in ((0.05, False), (0.01, True), (0.05, False)):
        time.sleep(pause)
        recorder.step(undisturbed)
    assert 0.01 <= recorder.recent_compute_seconds() < 0.05
