"""Samples a second of SSD-SGD, plain Horovod and their peers, on virtual hosts with limited links.

    python benchmarks/throughput.py --rates 1gbit --models alexnet-like --json docs/throughput_1gbit.json

As root. Two hosts of one core each, or as many as ``--hosts`` says. All methods of one model and rate are
started at once, and only one of them runs at a time, the others being stopped by signal; they take turns,
in several rounds, so that drift hits all alike. benchmarks/README.md defines every number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import models
import plots
from measured_on import measured_on
from methods import METHODS
from probes import METHODS_AND_PROBES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from virtual_cluster import ClusterError, VirtualCluster  # noqa: E402

WORKER = Path(__file__).with_name("throughput_worker.py")
FIRST_PORT = 29600
START_SECONDS = 180.0
# Where ranks share cores with the transfer, waiting must leave them the core. Best for all methods.
MPIRUN_OPTIONS = ("--mca", "mpi_yield_when_idle", "1")
SETTINGS_BY_RATE = {"10gbit": (16, 8), "1gbit": (16, 8), "100mbit": (16, 12)}


@dataclass
class Result:
    """One row of the output; benchmarks/README.md defines the fields."""

    rate: str
    model: str
    method: str
    engine: str
    k: int | None
    d: int | None
    samples_per_second: float
    seconds_per_step: float
    share_of_compute: float = 0.0
    speedup_over_horovod: float = 0.0
    megabytes_on_wire: float = 0.0
    megabytes_computed: float | None = 0.0
    cpu_seconds: float = 0.0
    rounds: list[float] = field(default_factory=list)


class Contestant:
    """One method's ranks, which run when they are told to and are stopped otherwise.

    Attributes:
        step_seconds: how long each step of the last turn took, by rank.
    """

    def __init__(self, name: str, connections: Sequence[Connection], greetings: Sequence[dict[str, Any]]):
        self.name = name
        self._connections = connections
        self._pids = [greeting["pid"] for greeting in greetings]
        self.batch_size = int(greetings[0]["batch_size"])
        self.parameters = int(greetings[0]["parameters"])
        self.units = 1
        self.unit = 1
        self.settings: tuple[int, int] | None = None
        self.step_seconds: list[list[float]] = []
        self._signal(signal.SIGSTOP)

    @property
    def key(self) -> str:
        """The method, without the period that may stand behind it."""
        return self.name.split(":")[0]

    def _signal(self, number: signal.Signals) -> None:
        try:
            for pid in self._pids:
                os.kill(pid, number)
        except ProcessLookupError as error:
            raise ClusterError(
                f"{self.name}: a rank has ended. See what it printed: --log FILE. Every method has a process "
                "on each host: where they do not fit into memory together, name fewer in --methods."
            ) from error

    def ask(self, command: str, units: int = 0) -> dict[str, float]:
        """Let all ranks do something at once; the slowest one's seconds, and the mean of the processor's."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send((command, units))
        reports = [connection.recv() for connection in self._connections]
        self._signal(signal.SIGSTOP)
        self.unit, self.settings = reports[0]["unit"], reports[0]["settings"]
        self.step_seconds = [report["step_seconds"] for report in reports]
        return {
            "seconds": max(report["seconds"] for report in reports),
            "cpu_seconds": statistics.mean(report["cpu_seconds"] for report in reports),
        }

    def prepare(self, turn_seconds: float) -> None:
        """Warm up, and find how many units fill a turn."""
        self.ask("prepare")
        self.units = max(1, round(turn_seconds / self.ask("run", 1)["seconds"]))

    def end(self) -> None:
        """Let the ranks end, as far as they are still there."""
        for pid, connection in zip(self._pids, self._connections, strict=True):
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
                connection.send(("stop", 0))
                connection.close()


@contextmanager
def contestants(
    cluster: VirtualCluster,
    model: str,
    methods: Sequence[str],
    k: int,
    d: int,
    log: Any,
    mpirun_options: Sequence[str] = MPIRUN_OPTIONS,
) -> Iterator[list[Contestant]]:
    """Start all methods, or probes, on the hosts."""
    environment = {"OMP_NUM_THREADS": "1"}
    started: list[Contestant] = []
    launchers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "benchmark")
        with Listener(socket, "AF_UNIX", backlog=64) as listener:
            try:
                for index, name in enumerate(methods):
                    key, *own_period = name.split(":")
                    method = METHODS_AND_PROBES[key]
                    period = own_period or [str(k), str(d)]
                    choice = ["--delay-steps", period[0], "--overlap-steps", period[1]]
                    worker = [str(WORKER), "--socket", socket, "--model", model, "--method", key, *choice]
                    if method.launcher == "mpirun":
                        worker, options = [sys.executable, *worker], list(mpirun_options)
                    else:
                        options = ["--master-port", str(FIRST_PORT + index)]
                    own = cluster.start(worker, method.launcher, environment, options, log)
                    launchers += own
                    started.append(_greet(listener, name, len(cluster.hosts), own))
                yield started
            finally:
                for contestant in started:
                    contestant.end()
                for launcher in launchers:
                    _end(launcher)


def _greet(
    listener: Listener, name: str, ranks: int, launchers: Sequence[subprocess.Popen[bytes]]
) -> Contestant:
    accepted: list[Connection] = []

    def accept() -> None:
        for _ in range(ranks):
            accepted.append(listener.accept())

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while thread.is_alive():
        thread.join(0.2)
        if time.monotonic() > deadline or any(launcher.poll() is not None for launcher in launchers):
            raise ClusterError(
                f"{name}: only {len(accepted)} of {ranks} ranks came up. See what they printed: --log FILE."
            )
    return Contestant(name, accepted, [connection.recv() for connection in accepted])


def _end(launcher: subprocess.Popen[bytes]) -> None:
    try:
        launcher.wait(10)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def measure(
    cluster: VirtualCluster, model: str, methods: Sequence[str], rounds: int, turn_seconds: float, log: Any
) -> list[Result]:
    """All methods with one model at one rate."""
    k, d = SETTINGS_BY_RATE.get(cluster.rate, (16, 8))
    with contestants(cluster, model, methods, k, d, log) as field_:
        turns: dict[str, list[dict[str, float]]] = {contestant.name: [] for contestant in field_}
        for contestant, turn in take_turns(cluster, field_, rounds, turn_seconds):
            turns[contestant.name].append(turn)
        results = [_summarise(cluster, model, contestant, turns[contestant.name]) for contestant in field_]
    _compare(results)
    return results


def take_turns(
    cluster: VirtualCluster, field_: Sequence[Contestant], rounds: int, turn_seconds: float
) -> Iterator[tuple[Contestant, dict[str, float]]]:
    """Prepare all; then, in every round and from another one on each time, what each did in its turn."""
    for contestant in field_:
        contestant.prepare(turn_seconds)
    for round_ in range(rounds):
        shift = round_ % len(field_)
        for contestant in [*field_[shift:], *field_[:shift]]:
            yield contestant, _take_turn(cluster, contestant)


def _take_turn(cluster: VirtualCluster, contestant: Contestant) -> dict[str, float]:
    before = cluster.bytes_sent()
    report = contestant.ask("run", contestant.units)
    sent = statistics.mean(now - then for now, then in zip(cluster.bytes_sent(), before, strict=True))
    steps = contestant.units * contestant.unit
    return {
        "seconds_per_step": report["seconds"] / steps,
        "samples_per_second": steps * contestant.batch_size * len(cluster.hosts) / report["seconds"],
        "megabytes_on_wire": sent / 1e6 / steps,
        "cpu_seconds": report["cpu_seconds"] / steps,
    }


def _summarise(
    cluster: VirtualCluster, model: str, contestant: Contestant, turns: Sequence[dict[str, float]]
) -> Result:
    method = METHODS[contestant.key]
    settings = contestant.settings or ((contestant.unit, None) if method.periodic else (None, None))
    medians = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    return Result(
        rate=cluster.rate,
        model=model,
        method=contestant.key.split("@")[0],
        engine=method.engine,
        k=settings[0],
        d=settings[1],
        megabytes_computed=_megabytes(contestant, len(cluster.hosts)),
        rounds=[turn["samples_per_second"] for turn in turns],
        **medians,
    )


def _megabytes(contestant: Contestant, ranks: int) -> float | None:
    """What a ring allreduce of all gradients sends from each rank, by step."""
    if contestant.key == "compute":
        return 0.0
    if contestant.key == "ddp-powersgd":
        return None
    width = 2 if "fp16" in contestant.key else 4
    whole = 2 * (ranks - 1) / ranks * contestant.parameters * width / 1e6
    return whole / contestant.unit


def _compare(results: Sequence[Result]) -> None:
    speeds = {r.method: r.samples_per_second for r in reversed(results)}
    for result in results:
        result.share_of_compute = result.samples_per_second / speeds.get("compute", float("nan"))
        result.speedup_over_horovod = result.samples_per_second / speeds.get("horovod", float("nan"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rates", default="10gbit,1gbit,100mbit")
    parser.add_argument("--models", default=",".join(models.MODELS))
    parser.add_argument("--methods", default=",".join(METHODS), help="one may name its own k and d: ssd:8:4")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=4.0, help="how long a method runs in a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--log", type=Path, help="what the ranks print")
    arguments = parser.parse_args()
    for name, known in (("models", models.MODELS), ("methods", METHODS)):
        chosen = getattr(arguments, name).split(",")
        unknown = [each for each in chosen if each.split(":")[0] not in known]
        if unknown:
            parser.error(f"--{name} {','.join(unknown)} unknown. Allowed: {', '.join(known)}.")
        setattr(arguments, name, chosen)
    return arguments


def report(result: Result) -> None:
    print(
        f"{result.rate:>8} {result.model:>13} {result.method:>19} {result.engine:>8} "
        f"{result.samples_per_second:10.1f}/s {result.share_of_compute:6.3f} of compute "
        f"{result.speedup_over_horovod:6.2f} x Horovod {result.megabytes_on_wire:8.3f} MB a step "
        f"{result.cpu_seconds:7.4f} s of processor a step",
        flush=True,
    )


def main() -> int:
    arguments = parse_arguments()
    results: list[Result] = []
    log_path = arguments.log or Path(os.devnull)
    try:
        with log_path.open("w") as log:
            for rate in arguments.rates.split(","):
                for model in arguments.models:
                    with VirtualCluster(arguments.hosts, rate) as cluster:
                        new = measure(
                            cluster, model, arguments.methods, arguments.rounds, arguments.turn_seconds, log
                        )
                    results += new
                    for result in new:
                        report(result)
                    # Here, so that an interruption loses only what was being measured.
                    write(arguments, results)
    except ClusterError as error:
        print(f"throughput: {error}", file=sys.stderr)
        return 2
    return 0


def write(arguments: argparse.Namespace, results: Sequence[Result]) -> None:
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(describe(arguments, results), indent=1) + "\n")
    if arguments.plot is not None:
        plots.throughput([asdict(result) for result in results], arguments.plot)


def describe(arguments: argparse.Namespace, results: Sequence[Result]) -> dict[str, Any]:
    return {
        **measured_on(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "hosts": arguments.hosts,
        "rounds": arguments.rounds,
        "turn_seconds": arguments.turn_seconds,
        "results": [asdict(result) for result in results],
    }


if __name__ == "__main__":
    sys.exit(main())
