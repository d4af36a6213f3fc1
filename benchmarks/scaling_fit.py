"""Fits the parameters of scaling_model.py to measured runs, and holds its predictions against them.

The allreduces that were measured alone give each engine's parameters, and some of SSD-SGD's periods give what
its steps cost beside. Plain Horovod's steps and the other periods are predicted without having been fitted.
Computation is an input of every number of hosts: where hosts share cores, no model says what that does to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scaling_model import (
    DelayCost,
    Engine,
    Hosts,
    Period,
    delayed_step,
    ring_terms,
    synchronous_step,
)

ENGINES = {"horovod": "horovod", "ssd": "torch"}
"""The engine under each method that is predicted."""
ITERATIONS = 100
PRECISE = 1e-9
"""Seconds by which costs need not be known better."""


@dataclass(frozen=True)
class Transfer:
    """One size of allreduce, measured with nothing else running.

    Attributes:
        engine: what carried it.
        payload: bytes reduced.
        seconds: median of one allreduce.
        processor_share: share of the time during which a rank's process kept its share of a core busy; None
            where it was not measured.
    """

    engine: str
    payload: float
    seconds: float
    processor_share: float | None = None


@dataclass(frozen=True)
class Step:
    """Measured seconds of one step of a method; ``period`` is None for plain Horovod.

    Attributes:
        rounds: seconds of a step in each round, whose median ``seconds`` is.
    """

    method: str
    period: Period | None
    seconds: float
    rounds: Sequence[float] = ()


@dataclass(frozen=True)
class Measurement:
    """What was measured with one number of hosts.

    Attributes:
        ranks: one for each host.
        hosts: what each rank had to compute with.
        payload: bytes of all gradients.
        straggling: mean over steps of the slowest rank's seconds of computation less the mean rank's.
        hosts_beside_horovod: ``hosts`` with Horovod idle beside the computation; None where it costs nothing.
    """

    ranks: int
    hosts: Hosts
    payload: float
    transfers: Sequence[Transfer]
    steps: Sequence[Step]
    straggling: float = 0.0
    hosts_beside_horovod: Hosts | None = None

    def hosts_of(self, method: str) -> Hosts:
        """What a rank has to compute with under this method."""
        return (self.hosts_beside_horovod if method == "horovod" else None) or self.hosts


@dataclass(frozen=True)
class Calibration:
    """All that a prediction needs beside the hosts.

    Attributes:
        engines: by name.
        delay_cost: what SSD-SGD computes beside.
    """

    engines: dict[str, Engine]
    delay_cost: DelayCost


@dataclass(frozen=True)
class Comparison:
    """A prediction beside its measurement.

    Attributes:
        calibrated: whether this step was among those that parameters were fitted to.
        error: predicted over measured, less one.
        held_out_seconds: predicted from parameters fitted without any run of this number of hosts; None with
            fewer than two other numbers.
        held_out_error: its error.
    """

    method: str
    k: int | None
    d: int | None
    ranks: int
    calibrated: bool
    measured_seconds: float
    predicted_seconds: float
    error: float
    held_out_seconds: float | None
    held_out_error: float | None


@dataclass(frozen=True)
class Prediction:
    """A step with more ranks than were measured, each with a core of its own.

    Attributes:
        share_of_compute: seconds of a step without communication over those of this one.
        least_seconds: the smallest of ``seconds`` and the same from each calibration with a number of hosts
            held out.
        most_seconds: the largest of them.
    """

    method: str
    k: int | None
    d: int | None
    ranks: int
    seconds: float
    share_of_compute: float
    least_seconds: float
    most_seconds: float


def nonnegative_least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least ``|matrix x - values|``; for few unknowns, as all sets of them are tried."""
    unknowns = matrix.shape[1]
    best, least = np.zeros(unknowns), float(values @ values)
    for count in range(1, unknowns + 1):
        for columns in combinations(range(unknowns), count):
            found = np.linalg.lstsq(matrix[:, columns], values, rcond=None)[0]
            residual = float(np.sum((matrix[:, columns] @ found - values) ** 2))
            if (found >= 0.0).all() and residual < least:
                best, least = np.zeros(unknowns), residual
                best[list(columns)] = found
    return best


def fit_engine(measurements: Iterable[Measurement], name: str) -> Engine:
    """The engine's parameters with the least sum of squared relative errors of its allreduces."""
    measured = [(m, each) for m in measurements for each in m.transfers if each.engine == name]
    rows = [
        np.array(ring_terms(m.ranks, each.payload, m.hosts.stretch)) / each.seconds for m, each in measured
    ]
    # Columns of like size, or the smallest would be taken for none.
    matrix = np.array(rows)
    scale = np.abs(matrix).max(axis=0)
    start, seconds_a_byte, latency = (
        nonnegative_least_squares(matrix / scale, np.ones(len(rows))) / scale
    ).tolist()
    shares = [each.processor_share for _, each in measured if each.processor_share is not None]
    return Engine(
        start=start,
        latency=latency,
        bandwidth=1.0 / seconds_a_byte if seconds_a_byte > 0.0 else float("inf"),
        processor_share=statistics.mean(shares) if shares else 0.0,
    )


def fit_delay_cost(
    measurements: Sequence[Measurement], engine: Engine, periods: Sequence[Period]
) -> DelayCost:
    """What fits the steps of these periods best, in relative error."""
    steps = [
        (m, s.period, s.seconds)
        for m in measurements
        for s in m.steps
        if s.period is not None and s.period in periods
    ]
    seconds = np.array([each for _, _, each in steps])
    rows = np.array([(m.hosts.stretch, m.hosts.stretch / period.delay_steps) for m, period, _ in steps])
    found = np.zeros(2)
    # Where transfers are hidden a step is linear in both; elsewhere this comes closer each time.
    for _ in range(ITERATIONS):
        cost = DelayCost(*found.tolist())
        predicted = np.array(
            [delayed_step(m.hosts, engine, cost, period, m.ranks, m.payload) for m, period, _ in steps]
        )
        missing = (seconds - predicted) / seconds
        change = np.linalg.lstsq(rows / seconds[:, None], missing, rcond=None)[0]
        found += change
        if np.abs(change).max() < PRECISE:
            break
    return DelayCost(*found.tolist())


def calibrate(measurements: Sequence[Measurement], periods: Sequence[Period]) -> Calibration:
    """Fit everything; of SSD-SGD's steps, those of ``periods`` are used."""
    engines = {name: fit_engine(measurements, name) for name in ENGINES.values()}
    return Calibration(engines, fit_delay_cost(measurements, engines[ENGINES["ssd"]], periods))


def predict(
    calibration: Calibration, hosts: Hosts, ranks: int, payload: float, method: str, period: Period | None
) -> float:
    """Seconds of a step."""
    engine = calibration.engines[ENGINES[method]]
    if period is None:
        return synchronous_step(hosts, engine, ranks, payload)
    return delayed_step(hosts, engine, calibration.delay_cost, period, ranks, payload)


def hold_out(measurements: Sequence[Measurement], periods: Sequence[Period]) -> dict[int, Calibration]:
    """Calibrations without the runs of one number of hosts, by that number; none if there are only two."""
    if len(measurements) < 3:
        return {}
    return {
        left_out.ranks: calibrate([m for m in measurements if m is not left_out], periods)
        for left_out in measurements
    }


def compare(
    measurements: Sequence[Measurement],
    calibration: Calibration,
    held_out: Mapping[int, Calibration],
    periods: Sequence[Period],
) -> Iterator[Comparison]:
    """Every measured step beside its predictions; ``periods`` are those calibrated to."""
    for measurement in measurements:
        without = held_out.get(measurement.ranks)
        for step in measurement.steps:
            hosts = measurement.hosts_of(step.method)
            place = (hosts, measurement.ranks, measurement.payload, step.method, step.period)
            expected = predict(calibration, *place)
            blind = None if without is None else predict(without, *place)
            yield Comparison(
                method=step.method,
                k=step.period.delay_steps if step.period else None,
                d=step.period.overlap_steps if step.period else None,
                ranks=measurement.ranks,
                calibrated=step.period in periods,
                measured_seconds=step.seconds,
                predicted_seconds=expected,
                error=expected / step.seconds - 1.0,
                held_out_seconds=blind,
                held_out_error=None if blind is None else blind / step.seconds - 1.0,
            )


def extrapolate(
    calibration: Calibration,
    held_out: Mapping[int, Calibration],
    measurement: Measurement,
    counts: Sequence[int],
) -> Iterator[Prediction]:
    """The methods of a measurement with other numbers of ranks on such hosts."""
    for step in measurement.steps:
        place = (step.method, step.period)
        hosts = measurement.hosts_of(step.method)
        for ranks in counts:
            seconds, *others = (
                predict(each, hosts, ranks, measurement.payload, *place)
                for each in (calibration, *held_out.values())
            )
            yield Prediction(
                method=step.method,
                k=step.period.delay_steps if step.period else None,
                d=step.period.overlap_steps if step.period else None,
                ranks=ranks,
                seconds=seconds,
                share_of_compute=measurement.hosts.compute / seconds,
                least_seconds=min([seconds, *others]),
                most_seconds=max([seconds, *others]),
            )
