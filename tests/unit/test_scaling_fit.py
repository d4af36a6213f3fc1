"""Calibration finds the parameters that made the data, and comparison tells how far a prediction is off."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from scaling_fit import (  # noqa: E402
    Comparison,
    Measurement,
    Step,
    Transfer,
    calibrate,
    compare,
    extrapolate,
    fit_engine,
    hold_out,
    nonnegative_least_squares,
)
from scaling_model import Hosts, Period  # noqa: E402

MEGABYTE = 1e6
PAYLOAD = 24 * MEGABYTE
LONG, SHORT, OTHER = Period(16, 8), Period(4, 3), Period(8, 4)
# Seconds to start, seconds of a message, bytes a second.
HOROVOD = (0.004, 0.0005, 80 * MEGABYTE)
GLOO = (0.002, 0.0002, 120 * MEGABYTE)
SHARE, STEP, SYNC_POINT = 0.125, -0.005, 0.06


def allreduce(parameters: tuple[float, float, float], ranks: int, payload: float, stretch: float) -> float:
    start, latency, bandwidth = parameters
    return stretch * (start + 2 * (ranks - 1) * latency) + 2 * (ranks - 1) / ranks * payload / bandwidth


def measured(ranks: int, noise: Sequence[float] = (1.0,) * 4) -> Measurement:
    """Made by hand from the parameters above, with transfers short enough to be hidden."""
    stretch = ranks / 2
    compute = 0.1 * stretch
    hidden = SHARE * allreduce(GLOO, ranks, PAYLOAD, stretch)

    def delayed(k: int) -> float:
        return compute + stretch * STEP + (stretch * SYNC_POINT + hidden) / k

    transfers = [
        Transfer(engine, payload, allreduce(parameters, ranks, payload, stretch) * factor, share)
        for (engine, parameters, payload, share), factor in zip(
            [
                ("horovod", HOROVOD, PAYLOAD, 1.0),
                ("horovod", HOROVOD, 4000.0, None),
                ("torch", GLOO, PAYLOAD, SHARE),
                ("torch", GLOO, 4000.0, None),
            ],
            noise,
            strict=True,
        )
    ]
    return Measurement(
        ranks=ranks,
        hosts=Hosts(compute=compute, jitter=0.0, stretch=stretch),
        payload=PAYLOAD,
        transfers=transfers,
        steps=[
            Step("horovod", None, compute + allreduce(HOROVOD, ranks, PAYLOAD, stretch)),
            *[Step("ssd", period, delayed(period.delay_steps)) for period in (LONG, SHORT, OTHER)],
        ],
    )


MEASUREMENTS = [measured(ranks) for ranks in (2, 3, 4)]
FITTED = [LONG, SHORT]


def compared(measurements: Sequence[Measurement]) -> list[Comparison]:
    return list(
        compare(measurements, calibrate(measurements, FITTED), hold_out(measurements, FITTED), FITTED)
    )


def test_parameters_that_made_the_data_are_found() -> None:
    calibration = calibrate(MEASUREMENTS, FITTED)
    for name, expected in (("horovod", HOROVOD), ("torch", GLOO)):
        engine = calibration.engines[name]
        assert (engine.start, engine.latency, engine.bandwidth) == pytest.approx(expected, rel=1e-6)
    assert calibration.engines["torch"].processor_share == SHARE
    assert calibration.delay_cost.step == pytest.approx(STEP, rel=1e-6)
    assert calibration.delay_cost.sync_point == pytest.approx(SYNC_POINT, rel=1e-6)


def test_costs_are_found_where_transfers_are_not_hidden_too() -> None:
    exposed = Period(4, 0)

    def with_waiting(m: Measurement) -> Measurement:
        transfer = allreduce(GLOO, m.ranks, PAYLOAD, m.hosts.stretch)
        seconds = m.hosts.compute + m.hosts.stretch * (STEP + SYNC_POINT / 4) + transfer / 4
        return replace(m, steps=[*m.steps[:2], Step("ssd", exposed, seconds)])

    cost = calibrate([with_waiting(m) for m in MEASUREMENTS], [LONG, exposed]).delay_cost
    assert (cost.step, cost.sync_point) == pytest.approx((STEP, SYNC_POINT), rel=1e-6)


def test_noise_of_a_percent_moves_bandwidth_by_about_as_much() -> None:
    random = np.random.default_rng(7)
    noisy = [measured(ranks, random.normal(1.0, 0.01, 4).tolist()) for ranks in (2, 3, 4)]
    assert fit_engine(noisy, "horovod").bandwidth == pytest.approx(HOROVOD[2], rel=0.03)


def test_no_parameter_is_negative_where_the_data_would_have_it_so() -> None:
    # Small allreduces that get faster with more ranks.
    transfers = [Transfer("torch", 4000.0, 0.01 / ranks) for ranks in (2, 3, 4)]
    odd = [
        replace(m, transfers=[m.transfers[2], transfer])
        for m, transfer in zip(MEASUREMENTS, transfers, strict=True)
    ]
    engine = fit_engine(odd, "torch")
    assert engine.latency == 0.0
    assert engine.start > 0.0
    assert engine.bandwidth > 0.0


def test_least_squares_without_negative_unknowns() -> None:
    matrix = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert nonnegative_least_squares(matrix, np.array([3.0, 2.0])).tolist() == pytest.approx([3.0, 2.0])
    assert nonnegative_least_squares(matrix, np.array([3.0, -2.0])).tolist() == pytest.approx([3.0, 0.0])


def test_what_was_left_out_is_predicted_where_the_model_is_right() -> None:
    rows = compared(MEASUREMENTS)
    assert [(row.method, row.k, row.calibrated) for row in rows if row.ranks == 3] == [
        ("horovod", None, False),
        ("ssd", 16, True),
        ("ssd", 4, True),
        ("ssd", 8, False),
    ]
    for row in rows:
        assert row.error == pytest.approx(0.0, abs=1e-6)
        assert row.held_out_error == pytest.approx(0.0, abs=1e-6)


def test_held_out_numbers_of_hosts_do_not_know_their_own_runs() -> None:
    # With four hosts everything that travels takes twice as long, which the others cannot tell.
    slow = MEASUREMENTS[2]
    slow = replace(
        slow,
        transfers=[replace(each, seconds=2 * each.seconds) for each in slow.transfers],
        steps=[replace(slow.steps[0], seconds=0.2 + 2 * (slow.steps[0].seconds - 0.2))],
    )
    (row,) = [row for row in compared([*MEASUREMENTS[:2], slow]) if row.ranks == 4]
    transfer = allreduce(HOROVOD, 4, PAYLOAD, 2.0)
    assert row.measured_seconds == pytest.approx(0.2 + 2 * transfer)
    assert row.held_out_seconds == pytest.approx(0.2 + transfer)
    assert row.held_out_error == pytest.approx((0.2 + transfer) / (0.2 + 2 * transfer) - 1)
    assert abs(row.error) < abs(row.held_out_error)


def test_nothing_is_held_out_of_too_few_numbers_of_hosts() -> None:
    assert {row.held_out_error for row in compared(MEASUREMENTS[:2])} == {None}


def test_predictions_are_for_the_hosts_of_the_measurement() -> None:
    calibration = calibrate(MEASUREMENTS, FITTED)
    predicted = extrapolate(calibration, {}, MEASUREMENTS[0], [1, 64])
    rows = {(row.method, row.k, row.ranks): row for row in predicted}
    plain = rows["horovod", None, 64]
    assert plain.seconds == pytest.approx(0.1 + allreduce(HOROVOD, 64, PAYLOAD, 1.0))
    assert plain.share_of_compute == pytest.approx(0.1 / plain.seconds)
    assert rows["ssd", 16, 1].share_of_compute == 1.0


def test_range_of_a_prediction_spans_the_calibrations() -> None:
    calibration = calibrate(MEASUREMENTS, FITTED)
    horovod = calibration.engines["horovod"]
    # Two milliseconds more to start, and a tenth of a millisecond less for each of 126 messages.
    slow = replace(horovod, start=horovod.start + 0.002)
    fast = replace(horovod, latency=horovod.latency - 0.0001)
    others = {
        ranks: replace(calibration, engines={**calibration.engines, "horovod": engine})
        for ranks, engine in ((2, slow), (3, fast))
    }
    (row, *_) = extrapolate(calibration, others, MEASUREMENTS[0], [64])
    assert row.most_seconds - row.seconds == pytest.approx(0.002)
    assert row.seconds - row.least_seconds == pytest.approx(0.0126)


def test_plain_horovod_computes_beside_its_own_threads() -> None:
    slowed = [replace(m, hosts_beside_horovod=replace(m.hosts, compute=0.3)) for m in MEASUREMENTS]
    before, after = compared(MEASUREMENTS), compared(slowed)
    computing = [m.hosts.compute for m in MEASUREMENTS for _ in m.steps]
    for plain, beside, compute in zip(before, after, computing, strict=True):
        expected = 0.3 - compute if plain.method == "horovod" else 0.0
        assert beside.predicted_seconds - plain.predicted_seconds == pytest.approx(expected)
    calibration = calibrate(slowed, FITTED)
    row = next(extrapolate(calibration, {}, slowed[0], [1]))
    assert (row.seconds, row.share_of_compute) == pytest.approx((0.3, 1 / 3))
