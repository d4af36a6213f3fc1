"""``delay_steps="auto"``: when it measures, that ranks choose alike, and what a checkpoint keeps."""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import pytest
from engines import SlowLoopback, ThreadRank, on_ranks, run_ranks
from loops import equal, global_weights, small_model, train, train_step, weights, wrap
from torch import Tensor

from ssd_allreduce import Loopback

AUTO: dict[str, Any] = {"delay_steps": "auto"}


class Device:
    """The clock of a device that does later what it is given, while the host goes on."""

    spares_the_host = True

    def __init__(self) -> None:
        self.free_at = 0.0

    def give(self, seconds: float) -> None:
        self.free_at = self.mark() + seconds

    def mark(self) -> float:
        return max(time.monotonic(), self.free_at)

    def seconds(self, begin: float, end: float) -> float:
        time.sleep(max(0.0, end - time.monotonic()))
        return end - begin

    def settle(self) -> None:
        self.seconds(0.0, self.free_at)


class EngineOfADevice(SlowLoopback):
    """Sends what the device has computed, not before."""

    def __init__(self, device: Device, seconds: float) -> None:
        super().__init__(2, seconds)
        self._device = device

    def allreduce_async(self, *arguments: Any, **options: Any) -> float:
        ready_in = self._device.mark() - time.monotonic()
        return ready_in + super().allreduce_async(*arguments, **options)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [pytest.param(0.0, 2, id="fast network"), pytest.param(5.0, 16, id="slow network")],
)
def test_slower_networks_get_longer_periods(
    seconds: float, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ssd_allreduce")
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, seconds), retune_periods=0, **AUTO)
    assert (optimizer.stats().delay_steps, optimizer.stats().overlap_steps) == (4, 2)
    for step in range(4):
        train_step(model, optimizer, step, edit=lambda: time.sleep(0.2))
    stats = optimizer.stats()
    assert (stats.delay_steps, stats.overlap_steps <= stats.delay_steps // 2) == (expected, True)
    (record,) = caplog.records
    assert f"delay_steps={expected}, overlap_steps={stats.overlap_steps}" in record.getMessage()


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        pytest.param(0.05, (2, 1), id="hidden by one step"),
        pytest.param(0.2, (6, 3), id="hidden by three"),
    ],
)
def test_steps_are_measured_where_they_are_computed(
    transfer: float, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is done with a step long before a GPU is, and would take every transfer for a long one."""
    device = Device()
    monkeypatch.setattr("ssd_allreduce.optimizer.clock_for", lambda tensors: device)
    model = small_model()
    optimizer = wrap(model, EngineOfADevice(device, transfer), retune_periods=2, **AUTO)
    chosen = []
    for step in range(30):
        train_step(model, optimizer, step, edit=lambda: device.give(0.1))
        stats = optimizer.stats()
        chosen.append((stats.delay_steps, stats.overlap_steps))
    assert chosen[4:] == [expected] * len(chosen[4:])


def test_limits_are_kept() -> None:
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.1), max_delay_steps=6, overlap_steps=5, **AUTO)
    train(model, optimizer, 4)
    stats = optimizer.stats()
    assert (stats.delay_steps, stats.overlap_steps) == (6, 5)


def test_it_measures_after_the_first_period_four_later_and_then_every_so_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ssd_allreduce")
    engine, model = SlowLoopback(2, 0.02), small_model()
    optimizer = wrap(model, engine, max_delay_steps=2, retune_periods=3, **AUTO)
    measured = []
    for step in range(40):
        train_step(model, optimizer, step)
        if len(caplog.records) > len(measured):
            measured.append(step + 1)
    # A period of four steps; then, with two steps each, after four periods, three, three, ...
    assert measured[:4] == [4, 12, 18, 24]


def test_what_is_measured_changes_no_weight() -> None:
    """Measuring completes one sync point early and moves nothing else."""
    model, other = small_model(), small_model()
    tuned = wrap(model, SlowLoopback(2, 0.02), max_delay_steps=2, overlap_steps=0, retune_periods=1, **AUTO)
    fixed = wrap(other, Loopback(2), delay_steps=2, overlap_steps=0)
    train(model, tuned, 11)
    train(other, fixed, 11)
    assert equal(weights(model), weights(other))
    assert equal(global_weights(model, tuned), global_weights(other, fixed))


def test_ranks_of_different_speed_choose_alike() -> None:
    def program(engine: ThreadRank) -> tuple[list[tuple[int, int]], list[Tensor]]:
        model = small_model()
        optimizer = wrap(model, engine, retune_periods=2, **AUTO)
        chosen = []
        for step in range(30):
            pause = 0.004 * engine.rank
            train_step(model, optimizer, step, engine.rank, edit=lambda pause=pause: time.sleep(pause))
            stats = optimizer.stats()
            chosen.append((stats.delay_steps, stats.overlap_steps))
        optimizer.flush()
        return chosen, weights(model)

    outcomes = [outcome.value for outcome in run_ranks(3, program)]
    for chosen, final in outcomes:
        assert chosen == outcomes[0][0]
        assert equal(final, outcomes[0][1])
    assert outcomes[0][0][-1] != (0, 0)


@pytest.mark.parametrize("warmup_steps", [0, 3])
@pytest.mark.parametrize("steps", [(3, 17), (8, 9), (0, 25)])
def test_ranks_with_fewer_steps_take_part_in_measuring(steps: tuple[int, int], warmup_steps: int) -> None:
    def program(engine: ThreadRank) -> tuple[tuple[int, int], list[Tensor]]:
        model = small_model()
        optimizer = wrap(model, engine, retune_periods=1, warmup_steps=warmup_steps, **AUTO)
        for first in (0, 40):
            train(model, optimizer, steps[engine.rank], engine.rank, first)
            optimizer.flush()
        stats = optimizer.stats()
        return (stats.delay_steps, stats.overlap_steps), weights(model)

    (period, final), (other_period, other_final) = on_ranks(2, program)
    assert period == other_period
    assert equal(final, other_final)


@pytest.mark.parametrize("steps", [5, 7, 11])
def test_a_checkpoint_keeps_the_choice_and_goes_on_bit_for_bit(steps: int) -> None:
    options: dict[str, Any] = {"max_delay_steps": 5, "overlap_steps": 3, "retune_periods": 2, **AUTO}
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.2), **options)
    train(model, optimizer, steps)
    state = copy.deepcopy(optimizer.state_dict())
    other = small_model()
    resumed = wrap(other, SlowLoopback(2, 0.2), **options)
    resumed.load_state_dict(state)
    chosen = resumed.stats()
    assert (chosen.delay_steps, chosen.overlap_steps) == (5, 3)
    for trained, by in ((model, optimizer), (other, resumed)):
        train(trained, by, 14, first=steps)
    assert equal(weights(model), weights(other))


def test_another_world_size_keeps_the_choice() -> None:
    options: dict[str, Any] = {"max_delay_steps": 5, "overlap_steps": 3, **AUTO}
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.2), **options)
    train(model, optimizer, 6)
    resumed = wrap(small_model(), SlowLoopback(3, 0.2), **options)
    with pytest.warns(UserWarning, match="a new period begins"):
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (resumed.stats().delay_steps, resumed.stats().overlap_steps) == (5, 3)


def test_half_precision_sums_are_scaled_by_the_period_in_force() -> None:
    import horovod.torch as hvd

    model, other = small_model(), small_model()
    half: dict[str, Any] = {"compression": hvd.Compression.fp16}
    tuned = wrap(model, SlowLoopback(2, 0.02), max_delay_steps=2, overlap_steps=0, **half, **AUTO)
    fixed = wrap(other, Loopback(2), delay_steps=2, overlap_steps=0, **half)
    train(model, tuned, 8)
    train(other, fixed, 8)
    assert equal(weights(model), weights(other))


def test_a_checkpoint_of_one_rank_or_of_synchronous_training_leaves_the_choice_open() -> None:
    model = small_model()
    alone = wrap(model, Loopback(1), **AUTO)
    train(model, alone, 3)
    state = copy.deepcopy(alone.state_dict())
    other = small_model()
    resumed = wrap(other, SlowLoopback(2, 0.1), max_delay_steps=8, **AUTO)
    with pytest.warns(UserWarning, match="a new period begins"):
        resumed.load_state_dict(state)
    train(other, resumed, 12)
    stats = resumed.stats()
    assert (stats.delay_steps, stats.delay.steps) == (8, 12)


def test_after_the_second_measurement_there_may_be_no_more_even_after_a_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ssd_allreduce")
    options: dict[str, Any] = {"max_delay_steps": 2, "retune_periods": 0, **AUTO}
    model, other = small_model(), small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.02), **options)
    train(model, optimizer, 12)
    assert len(caplog.records) == 2
    resumed = wrap(other, SlowLoopback(2, 0.02), **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other[0].weight.requires_grad_(False)
    resumed.flush()
    train(other, resumed, 12, first=12)
    assert len(caplog.records) == 2


def test_without_any_step_nothing_is_chosen() -> None:
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.001), **AUTO)
    optimizer.flush()
    optimizer.flush()
    stats = optimizer.stats()
    assert (stats.delay_steps, stats.overlap_steps) == (4, 2)
    for step in range(8):
        train_step(model, optimizer, step, edit=lambda: time.sleep(0.2))
    assert optimizer.stats().delay_steps == 2
