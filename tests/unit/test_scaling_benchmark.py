"""The benchmark of scaling: what it makes of the seconds that ranks report."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import probes  # noqa: E402
import scaling  # noqa: E402
from scaling_model import Period  # noqa: E402


def record(name: str, step_seconds: list[list[list[float]]], **turn: float) -> scaling.Record:
    """What a contestant would have reported, the same in every turn but for its steps."""
    contestant = SimpleNamespace(name=name, key=name, parameters=40960, settings=None, step_seconds=[])
    told = scaling.Record(contestant)
    for ranks in step_seconds:
        contestant.step_seconds = ranks
        told.add({"seconds_per_step": 0.2, "cpu_seconds": 0.05, **turn})
    return told


def test_jitter_is_of_steps_and_not_of_ranks_or_turns() -> None:
    # Every rank in every turn has a mean of its own, and steps 1 above and below it.
    turns = [[[9.0, 11.0], [29.0, 31.0]], [[99.0, 101.0], [199.0, 201.0]]]
    # Sums of squares: 2 for each of four ranks, with one degree of freedom each.
    assert scaling.jitter(turns) == pytest.approx(math.sqrt(2))


def test_jitter_needs_two_steps() -> None:
    assert scaling.jitter([[[1.0], [2.0]]]) == 0.0


def test_straggling_is_the_lateness_of_whoever_is_latest_in_each_step() -> None:
    # Deviations: -1, 1, 0 and 3, -3, 0; the latest of each step is 3, 1 and 0 late.
    assert scaling.straggling([[[9.0, 11.0, 10.0], [23.0, 17.0, 20.0]]]) == pytest.approx(4 / 3)


def test_probes_tell_large_and_small_allreduces_apart() -> None:
    unit = [0.4, *[0.01] * probes.SMALL_COUNT]
    ranks = [[*unit, *unit], [*(2 * seconds for seconds in unit), *unit]]
    large, small = scaling.transfers(record("allreduce@torch", [ranks]), stretch=2.0)
    assert (large.engine, large.payload, small.payload) == ("torch", 4 * 40960, 4 * 10)
    # Means over ranks: 0.6 and 0.4; 0.015 and 0.01, as many of each.
    assert large.seconds == pytest.approx(0.5)
    assert small.seconds == pytest.approx(0.0125)
    # A quarter of the time its process was busy, on half a core.
    assert large.processor_share == pytest.approx(0.5)
    assert small.processor_share is None


def test_measurement_puts_the_records_where_they_belong() -> None:
    delayed = record("ssd", [[[0.1]]], seconds_per_step=0.12)
    delayed.contestant.settings = (16, 8)
    unit = [[0.4, *[0.01] * probes.SMALL_COUNT]] * 2
    measurement = scaling.summarise(
        [
            record("compute", [[[0.09, 0.11], [0.1, 0.1]]], seconds_per_step=0.1, cpu_seconds=0.05),
            record("compute@horovod", [[[0.1, 0.14]]], seconds_per_step=0.12, cpu_seconds=0.12),
            record("horovod", [[[0.3]]], seconds_per_step=0.3),
            delayed,
            record("allreduce@horovod", [unit]),
            record("allreduce@torch", [unit]),
        ],
        ranks=2,
    )
    assert (measurement.hosts.compute, measurement.hosts.stretch) == pytest.approx((0.1, 2.0))
    # The share of a core is the one of plain computation.
    beside = measurement.hosts_beside_horovod
    assert (beside.compute, beside.stretch) == pytest.approx((0.12, 2.0))
    assert measurement.payload == 4 * 40960
    steps = [(step.method, step.period, step.seconds) for step in measurement.steps]
    assert steps == [("horovod", None, 0.3), ("ssd", Period(16, 8), 0.12)]
    engines = [transfer.engine for transfer in measurement.transfers]
    assert engines == ["horovod", "horovod", "torch", "torch"]
