"""The model of a step's time: what it must say where the answer is known without it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from scaling_model import (  # noqa: E402
    DelayCost,
    Engine,
    Hosts,
    Period,
    delayed_step,
    doubling,
    expected_maximum,
    ring_seconds,
    synchronous_step,
)

MEGABYTE = 1e6
STEADY = Hosts(compute=0.1)
LINE = Engine(start=0.0, latency=0.0, bandwidth=100 * MEGABYTE)
NOTHING = DelayCost()


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    # 20 MB at 100 MB/s take 0.2 s; of them travel 2 (N - 1) / N, and 2 (N - 1) messages take 1 ms each.
    [(2, 0.2 + 0.002), (4, 0.3 + 0.006), (5, 0.32 + 0.008)],
)
def test_a_ring_sends_nearly_everything_twice_in_as_many_messages_as_it_has_neighbours(
    ranks: int, seconds: float
) -> None:
    engine = replace(LINE, latency=0.001)
    assert ring_seconds(engine, ranks, 20 * MEGABYTE) == pytest.approx(seconds)


def test_starting_is_paid_once() -> None:
    assert ring_seconds(replace(LINE, start=0.03), 2, 20 * MEGABYTE) == pytest.approx(0.23)


def test_shared_cores_stretch_what_the_processor_does_and_not_the_line() -> None:
    engine = Engine(start=0.03, latency=0.001, bandwidth=100 * MEGABYTE)
    assert ring_seconds(engine, 2, 20 * MEGABYTE, stretch=2.0) == pytest.approx(0.2 + 2 * 0.032)


def test_a_single_rank_only_computes() -> None:
    hosts = Hosts(compute=0.1, jitter=0.01)
    engine = Engine(start=0.5, latency=0.5, bandwidth=1.0)
    assert ring_seconds(engine, 1, MEGABYTE) == 0.0
    assert synchronous_step(hosts, engine, 1, MEGABYTE) == pytest.approx(0.1)
    assert delayed_step(hosts, engine, DelayCost(1.0, 1.0), Period(4, 2), 1, MEGABYTE) == 0.1


@pytest.mark.parametrize(
    ("ranks", "expected"),
    # Known in closed form: 1/sqrt(pi), 3/(2 sqrt(pi)), 6/(pi sqrt(pi)) arctan(sqrt 2), and for 5.
    [
        (1, 0.0),
        (2, 1 / math.sqrt(math.pi)),
        (3, 1.5 / math.sqrt(math.pi)),
        (4, 6 / math.pi**1.5 * math.atan(math.sqrt(2))),
        (5, 5 / (4 * math.sqrt(math.pi)) + 15 / (2 * math.pi**1.5) * math.asin(1 / 3)),
    ],
)
def test_expected_maximum_of_few_normal_values_is_the_known_one(ranks: int, expected: float) -> None:
    assert expected_maximum(ranks) == pytest.approx(expected, abs=1e-6)


def test_expected_maximum_of_many_lies_between_the_bounds() -> None:
    # At most sqrt(2 ln N); at least the quantile at 1 - 1/N, as the mean excess over it is positive.
    for ranks, quantile in ((100, 2.3263), (1000, 3.0902)):
        assert quantile < expected_maximum(ranks) < math.sqrt(2 * math.log(ranks))


def test_a_synchronous_step_waits_for_the_transfer_and_the_slowest_of_all() -> None:
    hosts = Hosts(compute=0.1, jitter=0.01)
    expected = 0.1 + 0.01 / math.sqrt(math.pi) + 0.2
    assert synchronous_step(hosts, LINE, 2, 20 * MEGABYTE) == pytest.approx(expected)


def test_twice_the_bandwidth_halves_the_transfer() -> None:
    fast = replace(LINE, bandwidth=2 * LINE.bandwidth)
    slow_wait = synchronous_step(STEADY, LINE, 8, 20 * MEGABYTE) - 0.1
    fast_wait = synchronous_step(STEADY, fast, 8, 20 * MEGABYTE) - 0.1
    assert fast_wait == pytest.approx(slow_wait / 2)


@pytest.mark.parametrize(
    ("period", "seconds"),
    [
        # The transfer takes 0.2 s, which is two steps: one step leaves 0.1 s, to be shared by k steps.
        (Period(4, 2), 0.1),
        (Period(4, 3), 0.1),
        (Period(4, 1), 0.1 + 0.1 / 4),
        (Period(4, 0), 0.1 + 0.2 / 4),
        (Period(1, 0), 0.1 + 0.2),
    ],
)
def test_a_transfer_is_hidden_as_far_as_the_overlapping_steps_take_as_long(
    period: Period, seconds: float
) -> None:
    assert delayed_step(STEADY, LINE, NOTHING, period, 2, 20 * MEGABYTE) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("overlap", "seconds"),
    [
        # Hidden: a quarter of 0.2 s is the processor's. With d = 1, 0.1 s of the other 0.15 s are hidden.
        (3, 0.1 + 0.05 / 4),
        (1, 0.1 + (0.05 + 0.05) / 4),
        # Nothing to take the processor from while waiting.
        (0, 0.1 + 0.2 / 4),
    ],
)
def test_a_hidden_transfer_costs_the_processor_time_that_it_takes(overlap: int, seconds: float) -> None:
    engine = replace(LINE, processor_share=0.25)
    step = delayed_step(STEADY, engine, NOTHING, Period(4, overlap), 2, 20 * MEGABYTE)
    assert step == pytest.approx(seconds)


def test_costs_of_steps_and_sync_points_are_stretched_with_the_processor() -> None:
    hosts = Hosts(compute=0.1, stretch=2.0)
    cost = DelayCost(step=-0.01, sync_point=0.04)
    step = delayed_step(hosts, LINE, cost, Period(4, 3), 2, 20 * MEGABYTE)
    assert step == pytest.approx(0.1 - 0.02 + 0.08 / 4)


def test_period_of_one_step_is_synchronous() -> None:
    hosts = Hosts(compute=0.1, jitter=0.01)
    for ranks in (2, 64):
        expected = synchronous_step(hosts, LINE, ranks, 20 * MEGABYTE)
        simulated = delayed_step(hosts, LINE, NOTHING, Period(1, 0), ranks, 20 * MEGABYTE)
        # 800 maxima, each with a standard deviation of less than 0.01 s: 0.001 is almost three of the mean's.
        assert simulated == pytest.approx(expected, abs=0.001)


def test_waiting_without_slack_is_for_the_slowest_sum_of_a_period() -> None:
    hosts = Hosts(compute=0.1, jitter=0.004)
    free = Engine(start=0.0, latency=0.0, bandwidth=math.inf)
    step = delayed_step(hosts, free, NOTHING, Period(16, 0), 16, MEGABYTE)
    # Sixteen steps vary four times as much as one.
    assert step == pytest.approx(0.1 + 4 * 0.004 * expected_maximum(16) / 16, abs=0.0001)


def test_slack_lets_ranks_be_late_in_turns() -> None:
    hosts = Hosts(compute=0.1, jitter=0.004)
    free = Engine(start=0.0, latency=0.0, bandwidth=math.inf)
    tight, loose = (delayed_step(hosts, free, NOTHING, Period(16, d), 64, MEGABYTE) for d in (0, 8))
    synchronous = synchronous_step(hosts, free, 64, MEGABYTE)
    assert 0.1 < loose < tight < synchronous
    assert loose - 0.1 < (tight - 0.1) / 2


def test_nothing_gets_faster_with_more_ranks_or_jitter_or_latency() -> None:
    engine = Engine(start=0.001, latency=0.0001, bandwidth=100 * MEGABYTE, processor_share=0.2)
    ranks = doubling(1024)
    hosts = Hosts(compute=0.1, jitter=0.01)
    synchronous = [synchronous_step(hosts, engine, count, 20 * MEGABYTE) for count in ranks]
    delayed = [delayed_step(hosts, engine, NOTHING, Period(8, 2), count, 20 * MEGABYTE) for count in ranks]
    assert synchronous == sorted(synchronous)
    assert delayed == sorted(delayed)
    for worse in (replace(engine, latency=0.001), replace(engine, bandwidth=50 * MEGABYTE)):
        assert synchronous_step(hosts, worse, 64, MEGABYTE) > synchronous_step(hosts, engine, 64, MEGABYTE)
    late = replace(hosts, jitter=0.02)
    assert synchronous_step(late, engine, 64, MEGABYTE) > synchronous_step(hosts, engine, 64, MEGABYTE)


def test_long_periods_with_room_hide_everything() -> None:
    step = delayed_step(STEADY, LINE, NOTHING, Period(1000, 999), 1024, 20 * MEGABYTE)
    assert step == pytest.approx(0.1)


def test_doubling_goes_as_far_as_the_largest() -> None:
    assert doubling(8) == [1, 2, 4, 8]
    assert doubling(9) == [1, 2, 4, 8]
