"""What recording a trace costs: training with ``trace=`` and without, in turns in one run.

    python benchmarks/trace_cost.py --json docs/trace_cost.json

Two ranks on this machine, SSD-SGD over gloo. Each rank trains two equal models, one with a trace and one
without, a period at a time; whoever begins a round ends the next one. benchmarks/README.md defines every
number.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import models
import torch
from measured_on import measured_on
from methods import Choice, Delaying, delayed

ROOT = Path(__file__).resolve().parents[1]
MODEL = "alexnet-like"
RANKS = 2
PERIOD = Choice(delay_steps=8, overlap_steps=4)
CONFIDENCE = 0.95
BAR = 0.01
"""The most that recording may cost, as a share of the step's time."""
UNTRACED, TRACED = "untraced", "traced"


def trainer(rank: int, trace: Path | None) -> Delaying:
    problem = models.make(MODEL, rank)
    k, d = PERIOD.delay_steps, PERIOD.overlap_steps
    optimizer = delayed(problem, PERIOD, "torch", fp16=False, delay_steps=k, overlap_steps=d, trace=trace)
    return Delaying(problem, optimizer, before=PERIOD.warmup_steps + k + d)


def seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def measure_on_this_rank(rounds: int, trace: Path) -> dict[str, Any]:
    """Seconds of every period and of the last flush, with a trace and without; runs in a rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    trainers = {UNTRACED: trainer(rank, None), TRACED: trainer(rank, trace)}
    for each in trainers.values():
        each.prepare()
    periods: dict[str, list[float]] = {name: [] for name in trainers}
    for round_number in range(rounds):
        for name in (UNTRACED, TRACED) if round_number % 2 else (TRACED, UNTRACED):
            periods[name].append(seconds(partial(trainers[name].run, 1)))
    flush = {name: seconds(each.optimizer.flush) for name, each in trainers.items()}
    return {"rank": rank, "periods": periods, "flush": flush}


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two of the values, as far from the smallest as from the largest, with the median between them.

    The narrowest such pair that has the confidence, whatever the distribution; the outermost values where
    there are too few for it.
    """
    count, ordered = len(values), sorted(values)
    # Each value lies below the median with probability one half.
    place, probability = 0, 1 / 2**count
    while probability <= (1.0 - confidence) / 2.0:
        place += 1
        probability += math.comb(count, place) / 2**count
    place = max(place, 1)
    return ordered[place - 1], ordered[-place]


def summarise(reports: Sequence[dict[str, Any]], trace_bytes: float) -> dict[str, Any]:
    """One row of the output, from what each rank measured; the slowest rank's time counts."""

    def slowest(name: str) -> list[float]:
        return [max(period) for period in zip(*(r["periods"][name] for r in reports), strict=True)]

    periods = {name: slowest(name) for name in (UNTRACED, TRACED)}
    costs = [traced / plain - 1.0 for plain, traced in zip(periods[UNTRACED], periods[TRACED], strict=True)]
    low, high = median_interval(costs)
    steps = PERIOD.delay_steps
    return {
        **{f"{name}_seconds_per_step": statistics.median(each) / steps for name, each in periods.items()},
        "cost": statistics.median(costs),
        "cost_low": low,
        "cost_high": high,
        "cost_deviation": statistics.stdev(costs),
        **{f"{name}_flush_seconds": max(r["flush"][name] for r in reports) for name in periods},
        "trace_bytes_per_step": trace_bytes / (steps * len(costs)),
        "rounds": costs,
    }


def launch(rounds: int) -> dict[str, Any]:
    """Start the ranks and sum up what they report.

    Raises:
        RuntimeError: they failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        own = [sys.executable, str(Path(__file__)), "--rounds", str(rounds), "--trace", str(trace)]
        script = str(ROOT / "scripts" / "launch.sh")
        command = ["bash", script, "--launcher", "torchrun", "-n", str(RANKS), "--", *own]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the ranks failed:\n{done.stdout}\n{done.stderr}")
        reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        trace_bytes = statistics.mean(path.stat().st_size for path in Path(folder).iterdir())
    return summarise(reports, trace_bytes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=200, help="periods with a trace, and as many without")
    # What the ranks are started with.
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds takes numbers from 2 on: the spread is reported.")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.trace is not None:
        # In one write, or the ranks' lines mingle.
        sys.stdout.write(json.dumps(measure_on_this_rank(arguments.rounds, arguments.trace)) + "\n")
        sys.stdout.flush()
        return
    result = launch(arguments.rounds)
    verdict = "met" if result["cost_high"] < BAR else "not shown to be met"
    print(
        f"a trace costs {result['cost']:+.2%} of a step, {CONFIDENCE:.0%} interval {result['cost_low']:+.2%} "
        f"to {result['cost_high']:+.2%}: under {BAR:.0%} is {verdict}"
    )
    if arguments.json is not None:
        report = {
            **measured_on(),
            "model": MODEL,
            "ranks": RANKS,
            "k": PERIOD.delay_steps,
            "d": PERIOD.overlap_steps,
            "results": [result],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
