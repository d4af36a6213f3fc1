"""Time of a delay step's bookkeeping: ``step()`` over tiny tensors, where no memory traffic counts.

Three optimizers make steps in turn in every round, so that what else the machine does meets them
alike, and the medians over the rounds are reported in microseconds:

- ``torch_us``: ``torch.optim.SGD(foreach=True)``;
- ``horovod_us``: the same under ``hvd.DistributedOptimizer`` (``null`` where Horovod is missing);
- ``ssd_us``: the same under ``ssd_allreduce.DistributedOptimizer``, in a step of the delay stage that
  is neither a sync point nor a completion.

``results`` is measured in one process, with gradients that lie ready, so that ``step()`` alone is
timed; SSD-SGD runs through ``ssd.Loopback(2)``, Horovod has one rank. The bar there: ``ssd_us`` is
at most ``torch_us`` plus 5 microseconds a tensor. ``two_ranks`` is measured on rank 0 of two ranks
under mpirun, and each time holds ``backward()`` too, whose hooks hand the gradients to allreduce in
plain Horovod; it is ``null`` with ``--one-process`` and where ranks cannot be started.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measured_on import measured_on
from torch import Tensor

import ssd_allreduce as ssd

ROOT = Path(__file__).resolve().parents[1]
TENSORS = (1, 160, 2000)
ELEMENTS = 4
BAR_US_PER_TENSOR = 5.0
# No step that is timed may be a sync point.
DELAY_STEPS = 1_000_000
LR, MOMENTUM = 1e-3, 0.9
LAUNCH_SECONDS = 600

Result = dict[str, Any]


def new_parameters(count: int) -> dict[str, Tensor]:
    return {f"weight{i}": torch.nn.Parameter(torch.ones(ELEMENTS)) for i in range(count)}


def new_sgd(parameters: dict[str, Tensor]) -> torch.optim.SGD:
    return torch.optim.SGD(list(parameters.values()), lr=LR, momentum=MOMENTUM, foreach=True)


def fill_gradients(parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)


def backward(parameters: dict[str, Tensor]) -> None:
    torch.cat(list(parameters.values())).sum().backward()  # type: ignore[no-untyped-call]


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Contestant:
    """One optimizer under one of the three names, and what is timed of it."""

    name: str
    step: Callable[[], object]


def median_times(contestants: list[Contestant], rounds: int) -> dict[str, float]:
    """Median microseconds of each; whoever begins a round ends the next one."""
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for round_number in range(rounds + rounds // 4):
        order = contestants if round_number % 2 else contestants[::-1]
        for contestant in order:
            elapsed = seconds(contestant.step)
            if round_number >= rounds // 4:  # the first quarter warms up
                times[contestant.name].append(elapsed)
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def rounds_for(tensors: int, asked: int | None) -> int:
    return asked or (2001 if tensors == 1 else 401 if tensors <= 160 else 101)


def as_result(tensors: int, times: dict[str, float]) -> Result:
    names = ("torch", "horovod", "ssd")
    return {"tensors": tensors} | {f"{name}_us": times.get(name) for name in names}


def bar_us(result: Result) -> float:
    """The most that ``ssd_us`` may be."""
    allowed: float = result["torch_us"] + BAR_US_PER_TENSOR * result["tensors"]
    return allowed


# One process.


def initialised_horovod() -> Any:
    try:
        import horovod.torch as hvd

        hvd.init()
    except Exception as error:  # noqa: BLE001
        print(f"plain Horovod is left out: {error}", file=sys.stderr)
        return None
    return hvd


def measure_one_process(tensors: int, rounds: int, hvd: Any) -> Result:
    def step_of(wrap: Callable[[torch.optim.SGD, dict[str, Tensor]], Any]) -> Callable[[], object]:
        parameters = new_parameters(tensors)
        optimizer = wrap(new_sgd(parameters), parameters)
        fill_gradients(parameters)
        step: Callable[[], object] = optimizer.step
        return step

    contestants = [
        Contestant("torch", step_of(lambda sgd, _: sgd)),
        Contestant("ssd", step_of(through_loopback)),
    ]
    if hvd is not None:
        contestants.append(Contestant("horovod", step_of(lambda sgd, named: under_horovod(hvd, sgd, named))))
    return as_result(tensors, median_times(contestants, rounds))


def through_loopback(sgd: torch.optim.SGD, parameters: dict[str, Tensor]) -> ssd.DistributedOptimizer:
    return ssd.DistributedOptimizer(
        sgd,
        delay_steps=DELAY_STEPS,
        named_parameters=parameters.items(),
        communicator=ssd.Loopback(2),
    )


def under_horovod(hvd: Any, sgd: torch.optim.SGD, parameters: dict[str, Tensor]) -> Any:
    return hvd.DistributedOptimizer(sgd, named_parameters=list(parameters.items()))


# Two ranks.


def measure_on_this_rank(tensors: int, rounds: int, hvd: Any) -> Result:
    def training_step(wrap: Callable[[torch.optim.SGD, dict[str, Tensor]], Any]) -> Callable[[], object]:
        parameters = new_parameters(tensors)
        optimizer = wrap(new_sgd(parameters), parameters)

        def step() -> None:
            optimizer.zero_grad()
            backward(parameters)
            optimizer.step()

        return step

    def under_ssd(sgd: torch.optim.SGD, parameters: dict[str, Tensor]) -> ssd.DistributedOptimizer:
        return ssd.DistributedOptimizer(under_horovod(hvd, sgd, parameters), delay_steps=DELAY_STEPS)

    contestants = [
        Contestant("torch", training_step(lambda sgd, _: sgd)),
        Contestant("horovod", training_step(lambda sgd, named: under_horovod(hvd, sgd, named))),
        Contestant("ssd", training_step(under_ssd)),
    ]
    return as_result(tensors, median_times(contestants, rounds))


def run_as_rank(arguments: argparse.Namespace) -> None:
    import horovod.torch as hvd

    hvd.init()
    results = [
        measure_on_this_rank(tensors, arguments.rounds or min(rounds_for(tensors, None), 201), hvd)
        for tensors in arguments.tensors
    ]
    if hvd.rank() == 0:
        arguments.rank_results.write_text(json.dumps(results))
    hvd.shutdown()


def measure_two_ranks(arguments: argparse.Namespace) -> list[Result] | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = ["bash", str(ROOT / "scripts/launch.sh"), "--launcher", "mpirun", "-n", "2", "--"]
        command += [sys.executable, __file__, "--rank-results", str(path), "--tensors"]
        command += [str(tensors) for tensors in arguments.tensors]
        if arguments.rounds:
            command += ["--rounds", str(arguments.rounds)]
        try:
            done = subprocess.run(command, timeout=LAUNCH_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"the two ranks are left out: {error}", file=sys.stderr)
            return None
        if done.returncode != 0 or not path.exists():
            print(f"the two ranks are left out: mpirun ended with {done.returncode}", file=sys.stderr)
            return None
        results: list[Result] = json.loads(path.read_text())
        return results


# Report.


def print_table(title: str, results: list[Result], with_bar: bool) -> None:
    print(f"\n{title}\n{'tensors':>8} {'torch us':>10} {'horovod us':>11} {'ssd us':>10}", end="")
    print(f" {'bar us':>10}" if with_bar else "")
    for result in results:
        horovod = result["horovod_us"]
        print(
            f"{result['tensors']:>8} {result['torch_us']:>10.1f} "
            f"{'' if horovod is None else format(horovod, '.1f'):>11} {result['ssd_us']:>10.1f}",
            end="",
        )
        print(f" {bar_us(result):>10.1f} {verdict(result)}" if with_bar else "")


def verdict(result: Result) -> str:
    return "met" if result["ssd_us"] <= bar_us(result) else "missed"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures")
    parser.add_argument("--tensors", nargs="+", type=int, default=list(TENSORS), metavar="COUNT")
    parser.add_argument("--rounds", type=int, default=None, help="default: from 2001 down to 101")
    parser.add_argument("--one-process", action="store_true", help="leave the two ranks out")
    # What the ranks are started with.
    parser.add_argument("--rank-results", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    if arguments.rank_results:
        run_as_rank(arguments)
        return
    hvd = initialised_horovod()
    results = [measure_one_process(n, rounds_for(n, arguments.rounds), hvd) for n in arguments.tensors]
    if hvd is not None:
        hvd.shutdown()
    print_table("one process, step() alone", results, with_bar=True)
    two_ranks = None if arguments.one_process else measure_two_ranks(arguments)
    if two_ranks is not None:
        print_table("two ranks, backward() and step()", two_ranks, with_bar=False)
    if arguments.json:
        figures = {**measured_on(), "results": results, "two_ranks": two_ranks}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
