"""Step time of plain Horovod and SSD-SGD up to 1,024 ranks: predicted, and measured as far as possible.

    python benchmarks/scaling.py --json docs/scaling.json --plot docs/images/scaling.png

As root. With 2, 3 and 4 virtual hosts it measures the computation of a step and how it varies, allreduces
alone, and training; calibrates the model of scaling_model.py; and compares. benchmarks/README.md defines
every number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import probes
import throughput
from measured_on import measured_on
from scaling_fit import Measurement, Step, Transfer, calibrate, compare, extrapolate, hold_out
from scaling_model import Hosts, Period, doubling
from scaling_plot import RateReport, label, plot
from throughput import ClusterError, Contestant, VirtualCluster

MODEL = "alexnet-like"
BYTES_PER_ELEMENT = 4
CALIBRATING = (Period(16, 8), Period(4, 2))
"""SSD-SGD's periods that parameters are fitted to."""
PREDICTED_ONLY = (Period(8, 4),)
LARGEST = 1024
NO_PERIOD = 0
"""Each SSD-SGD names its own."""
# What the model describes. Left to itself, Open MPI's choice depends on the number of ranks.
RING = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4")


class Record:
    """What a contestant's turns told."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.turns: list[dict[str, float]] = []
        self.step_seconds: list[list[list[float]]] = []

    def add(self, turn: dict[str, float]) -> None:
        self.turns.append(turn)
        self.step_seconds.append(self.contestant.step_seconds)

    def median(self, key: str) -> float:
        return statistics.median(turn[key] for turn in self.turns)

    def busy_share(self) -> float:
        """Processor seconds over seconds, of a rank's process."""
        return statistics.median(turn["cpu_seconds"] / turn["seconds_per_step"] for turn in self.turns)


def jitter(step_seconds: Sequence[Sequence[Sequence[float]]]) -> float:
    """Standard deviation from step to step, of one rank within one turn; all turns and ranks pooled.

    Args:
        step_seconds: by turn, rank and step.
    """
    ranks = [rank for turn in step_seconds for rank in turn if len(rank) > 1]
    if not ranks:
        return 0.0
    degrees = sum(len(rank) - 1 for rank in ranks)
    return (sum(statistics.variance(rank) * (len(rank) - 1) for rank in ranks) / degrees) ** 0.5


def straggling(step_seconds: Sequence[Sequence[Sequence[float]]]) -> float:
    """Mean over steps of the slowest rank's seconds less the mean rank's, each rank's own speed left out."""
    late: list[float] = []
    for turn in step_seconds:
        deviations = [[seconds - statistics.mean(rank) for seconds in rank] for rank in turn]
        late += [max(step) for step in zip(*deviations, strict=True)]
    return statistics.mean(late)


def transfers(record: Record, stretch: float) -> list[Transfer]:
    """The allreduces of a probe, by size."""
    sizes = probes.elements(record.contestant.parameters)
    by_size: dict[int, list[float]] = {}
    for turn in record.step_seconds:
        for index, step in enumerate(zip(*turn, strict=True)):
            by_size.setdefault(sizes[index % len(sizes)], []).append(statistics.mean(step))
    # All gradients together take nearly all of a turn.
    share = min(1.0, record.busy_share() * stretch)
    engine = record.contestant.name.partition("@")[2]
    return [
        Transfer(
            engine, BYTES_PER_ELEMENT * size, statistics.median(times), share if size == sizes[0] else None
        )
        for size, times in by_size.items()
    ]


def methods() -> list[str]:
    periods = [*CALIBRATING, *PREDICTED_ONLY]
    delayed = [f"ssd:{period.delay_steps}:{period.overlap_steps}" for period in periods]
    return ["compute", "horovod", *delayed, *probes.PROBES]


def step_of(record: Record) -> Step:
    settings = record.contestant.settings
    return Step(
        method=record.contestant.key,
        period=None if settings is None else Period(*settings),
        seconds=record.median("seconds_per_step"),
        rounds=[turn["seconds_per_step"] for turn in record.turns],
    )


def hosts_of(record: Record, stretch: float) -> Hosts:
    return Hosts(record.median("seconds_per_step"), jitter(record.step_seconds), stretch)


def summarise(records: Iterable[Record], ranks: int) -> Measurement:
    by_key: dict[str, list[Record]] = {}
    for record in records:
        by_key.setdefault(record.contestant.key, []).append(record)
    (computing,), (beside_horovod,) = by_key["compute"], by_key[probes.COMPUTE_BESIDE_HOROVOD]
    # Beside Horovod a process is busy with polling, and does not tell how far its core is shared.
    stretch = max(1.0, 1.0 / computing.busy_share())
    hosts = hosts_of(computing, stretch)
    return Measurement(
        ranks=ranks,
        hosts=hosts,
        payload=BYTES_PER_ELEMENT * computing.contestant.parameters,
        transfers=[each for probe in probes.ALLREDUCES for each in transfers(by_key[probe][0], stretch)],
        steps=[step_of(record) for key in ("horovod", "ssd") for record in by_key[key]],
        straggling=straggling(computing.step_seconds),
        hosts_beside_horovod=hosts_of(beside_horovod, stretch),
    )


def measure(cluster: VirtualCluster, rounds: int, turn_seconds: float, log: Any) -> Measurement:
    """Everything with one number of hosts at one rate."""
    options = [*throughput.MPIRUN_OPTIONS, *RING]
    with throughput.contestants(cluster, MODEL, methods(), NO_PERIOD, NO_PERIOD, log, options) as field:
        records = {contestant.name: Record(contestant) for contestant in field}
        for contestant, turn in throughput.take_turns(cluster, field, rounds, turn_seconds):
            records[contestant.name].add(turn)
    return summarise(records.values(), len(cluster.hosts))


def evaluate(rate: str, measurements: Sequence[Measurement]) -> RateReport:
    """Calibrate, compare, and predict for hosts like those of the smallest number."""
    calibration, held_out = calibrate(measurements, CALIBRATING), hold_out(measurements, CALIBRATING)
    fewest = min(measurements, key=lambda measurement: measurement.ranks)
    return RateReport(
        rate=rate,
        measurements=measurements,
        calibration=calibration,
        comparisons=list(compare(measurements, calibration, held_out, CALIBRATING)),
        predictions=list(extrapolate(calibration, held_out, fewest, doubling(LARGEST))),
    )


def describe(arguments: argparse.Namespace, reports: Sequence[RateReport]) -> dict[str, Any]:
    def rows(name: str) -> list[dict[str, Any]]:
        return [{"rate": r.rate, **asdict(each)} for r in reports for each in getattr(r, name)]

    return {
        **measured_on(),
        "model": MODEL,
        "hosts": arguments.hosts,
        "rounds": arguments.rounds,
        "turn_seconds": arguments.turn_seconds,
        "plot": None if arguments.plot is None else arguments.plot.name,
        "parameters": [{"rate": report.rate, **asdict(report.calibration)} for report in reports],
        "results": rows("comparisons"),
        "predictions": rows("predictions"),
        "measurements": rows("measurements"),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rates", default="1gbit")
    parser.add_argument("--hosts", default="2,3,4", help="numbers of hosts to measure with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=4.0, help="how long each runs in a round")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the ranks print")
    arguments = parser.parse_args()
    arguments.hosts = sorted({int(count) for count in arguments.hosts.split(",")})
    if arguments.hosts[0] < 2:
        parser.error("--hosts takes numbers from 2 on: with one, nothing travels.")
    return arguments


def print_comparisons(report: RateReport) -> None:
    for row in report.comparisons:
        held_out = "" if row.held_out_error is None else f", held out {100 * row.held_out_error:+.1f} %"
        print(
            f"{report.rate:>8} {row.ranks} ranks, {label(row.method, row.k, row.d):<24} "
            f"measured {1e3 * row.measured_seconds:8.1f} ms, predicted {1e3 * row.predicted_seconds:8.1f} ms "
            f"({100 * row.error:+.1f} %{held_out})",
            flush=True,
        )


def main() -> int:
    arguments = parse_arguments()
    reports: list[RateReport] = []
    try:
        with arguments.log.open("w") as log:
            for rate in arguments.rates.split(","):
                measurements = []
                for count in arguments.hosts:
                    with VirtualCluster(count, rate) as cluster:
                        measurements.append(measure(cluster, arguments.rounds, arguments.turn_seconds, log))
                    print(f"{rate:>8} {count} hosts measured", flush=True)
                reports.append(evaluate(rate, measurements))
                print_comparisons(reports[-1])
    except ClusterError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(describe(arguments, reports), indent=1) + "\n")
    if arguments.plot is not None:
        plot(reports, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
