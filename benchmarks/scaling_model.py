"""How long a data-parallel step takes with any number of ranks: plain Horovod's, and SSD-SGD's.

Every rank computes for ``compute`` seconds a step, give or take a normally distributed ``jitter``,
independent from step to step and from rank to rank. An allreduce goes round a ring. With N ranks and B bytes
it takes

    T = start + 2 (N - 1) / N * B / bandwidth + 2 (N - 1) * latency

*Synchronous* steps wait for the slowest rank and for the transfer, none of which overlaps: on a host of one
core an engine that polls takes the core from backward. With m(N) the expected maximum of N standard normal
values:

    compute + jitter * m(N) + T

*Delayed* steps wait only where a transfer outlasts the d steps that it may take. Rank i, at its sync point at
S_i, goes on after its d steps, which the transfer slows by taking the processor for a share of T, or when the
transfer that began with the last rank's sync point is there, whichever is later:

    completion_i = max(S_i + d steps + share * T, max_j(S_j) + T)

Without jitter, a period of k steps takes k steps + share * T + max(0, T - d steps - share * T). With jitter,
periods are simulated, from ranks in step to a flush.

All times are seconds. Where ranks share cores, ``stretch`` is how many seconds pass for one of the processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

SIMULATED_PERIODS = 100
SIMULATED_RUNS = 8
SEED = 1


@dataclass(frozen=True)
class Hosts:
    """What a rank has to compute with.

    Attributes:
        compute: mean seconds of a step without communication.
        jitter: standard deviation of that from step to step, seconds.
        stretch: seconds that pass for one second of a rank's processor time; 1 with a core of its own.
    """

    compute: float
    jitter: float = 0.0
    stretch: float = 1.0


@dataclass(frozen=True)
class Engine:
    """What an allreduce costs.

    Attributes:
        start: seconds of every allreduce, whatever its size and the number of ranks.
        latency: seconds of each message between neighbours in the ring, whatever its size.
        bandwidth: bytes a second that a rank sends.
        processor_share: share of a transfer's time during which it takes the processor from the computation.
    """

    start: float
    latency: float
    bandwidth: float
    processor_share: float = 0.0


@dataclass(frozen=True)
class DelayCost:
    """What SSD-SGD computes beyond a step without communication, in seconds of processor time.

    Attributes:
        step: of each step. Negative where the fused local step takes less time than torch's optimizer.
        sync_point: of each period, without the transfer.
    """

    step: float = 0.0
    sync_point: float = 0.0


@dataclass(frozen=True)
class Period:
    """k and d of SSD-SGD.

    Attributes:
        delay_steps: steps in a period, k.
        overlap_steps: steps that a transfer may take, d.
    """

    delay_steps: int
    overlap_steps: int


def ring_terms(ranks: int, payload: float, stretch: float = 1.0) -> tuple[float, float, float]:
    """How often start, seconds a byte and latency count in one allreduce of ``payload`` bytes.

    Starting and passing on are the processor's work, and stretched where cores are shared; the line is not.
    """
    messages = 2 * (ranks - 1)
    return stretch, messages / ranks * payload, stretch * messages


def ring_seconds(engine: Engine, ranks: int, payload: float, stretch: float = 1.0) -> float:
    """Seconds of a ring allreduce of ``payload`` bytes; none with a single rank."""
    if ranks == 1:
        return 0.0
    starts, sent, messages = ring_terms(ranks, payload, stretch)
    return starts * engine.start + sent / engine.bandwidth + messages * engine.latency


@cache
def expected_maximum(ranks: int) -> float:
    """Expected largest of ``ranks`` independent standard normal values."""
    values = np.linspace(-10.0, 10.0, 20_001)
    cumulative = np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in values])
    # E[M] is the integral of P(M > x) over x > 0, less that of P(M < x) over x < 0.
    below = cumulative**ranks
    integrand = np.where(values < 0.0, -below, 1.0 - below)
    # The step of the integrand at 0 lies on a grid point, which counts for both sides by half.
    integrand[values == 0.0] = 0.5 - below[values == 0.0]
    return float(np.sum((integrand[1:] + integrand[:-1]) / 2.0) * (values[1] - values[0]))


def synchronous_step(hosts: Hosts, engine: Engine, ranks: int, payload: float) -> float:
    """Seconds of plain Horovod's step with gradients of ``payload`` bytes."""
    waiting = hosts.jitter * expected_maximum(ranks)
    return hosts.compute + waiting + ring_seconds(engine, ranks, payload, hosts.stretch)


def delayed_step(
    hosts: Hosts, engine: Engine, cost: DelayCost, period: Period, ranks: int, payload: float
) -> float:
    """Seconds of SSD-SGD's step, mean over a period, with gradients of ``payload`` bytes.

    With a single rank a step is the optimizer's own.
    """
    if ranks == 1:
        return hosts.compute
    k, d = period.delay_steps, period.overlap_steps
    transfer = ring_seconds(engine, ranks, payload, hosts.stretch)
    taken = engine.processor_share * transfer
    step = hosts.compute + hosts.stretch * cost.step
    random = np.random.default_rng(SEED)
    moment = np.zeros((SIMULATED_RUNS, ranks))

    def steps(count: int) -> np.ndarray:
        return count * step + math.sqrt(count) * hosts.jitter * random.standard_normal(moment.shape)

    for _ in range(SIMULATED_PERIODS):
        sync_point = moment + steps(k - d) + hosts.stretch * cost.sync_point
        arrival = sync_point.max(axis=1, keepdims=True) + transfer
        moment = np.maximum(sync_point + steps(d) + taken, arrival)
    return float(moment.max(axis=1).mean()) / (SIMULATED_PERIODS * k)


def doubling(largest: int) -> Sequence[int]:
    """1, 2, 4 and so on, as far as ``largest``."""
    return [2**power for power in range(largest.bit_length())]
