"""Test accuracy of SSD-SGD under all its rules and periods, of plain Horovod, and of their peers.

    python benchmarks/convergence.py --json docs/convergence.json
    python benchmarks/convergence.py --only horovod,ssd --rules momentum --periods 8:4 --seeds 2
    python benchmarks/convergence.py --only-seconds --json a.json --throughput docs/throughput_1gbit.json

Trains on MNIST digits, or on CIFAR-10 with ``--data-dir``. Starts its ranks itself. Runs with the same seed
start from the same weights and see the same batches in the same order, so that methods are compared in pairs.
benchmarks/README.md defines every number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import SHARDS, Dataset, Shard, cifar10, digits
from measured_on import measured_on
from methods import METHODS, Choice, Trainer
from models import Problem
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
ROWS_OF_A_TEST = 5000
RULES = ("momentum", "gradient", "displacement", "none")
PERIODS = (
    "1:0",
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
SETTINGS = (
    *("ranks", "optimizer", "lr", "batch_size", "steps", "warmup_steps"),
    *("target_accuracy", "steps_between_tests", "dataset"),
)
OF_HOROVOD = ("horovod", "horovod-accumulate", "horovod-fp16")
ALL = (*OF_HOROVOD, "ssd", "ssd-fp16", "ddp", "ddp-powersgd", "post-local-sgd")


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

    @property
    def run(self) -> Run:
        return Run(**{field.name: getattr(self, field.name) for field in fields(Run)})


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
    parser.add_argument("--data-dir", type=Path, help="train on the CIFAR-10 in this folder")
    parser.add_argument(
        "--target-accuracy", type=float, help="0.9 for the digits and 0.5 for CIFAR-10 if not given"
    )
    parser.add_argument("--steps-between-tests", type=int, default=20, help="how finely that is looked for")
    parser.add_argument("--throughput", type=Path, help="throughput.py's JSON, for seconds")
    parser.add_argument("--rate", default="1gbit", help="which of its rates")
    parser.add_argument(
        "--only-seconds",
        action="store_true",
        help="train nothing: add the seconds from --throughput to the results in --json",
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument(
        "--resume", action="store_true", help="keep what --json holds, and train only what it lacks"
    )
    # Of the ranks that this program starts.
    parser.add_argument("--launcher", help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--outcomes", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name, allowed in (("only", ALL), ("rules", RULES), ("shards", SHARDS)):
        chosen = getattr(arguments, name).split(",")
        unknown = [each for each in chosen if each not in allowed]
        if unknown:
            parser.error(f"--{name} {','.join(unknown)} unknown. Allowed: {', '.join(allowed)}.")
        setattr(arguments, name, chosen)
    if arguments.only_seconds and None in (arguments.json, arguments.throughput):
        parser.error("--only-seconds needs --json, the results, and --throughput, the seconds of a step.")
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


def make_base(arguments: argparse.Namespace, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if arguments.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=arguments.lr or 0.1, momentum=0.9)
    kind = torch.optim.Adam if arguments.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=arguments.lr or 0.001)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Dataset) -> float:
    x, y = dataset.test
    return float((model(x).argmax(1) == y).float().mean())


@torch.no_grad()
def train_loss(model: nn.Module, dataset: Dataset) -> float:
    batches = zip(*(part.split(ROWS_OF_A_TEST) for part in dataset.train), strict=True)
    losses = [functional.cross_entropy(model(x), y, reduction="sum") for x, y in batches]
    return float(torch.stack(losses).sum()) / len(dataset.train[1])


def train(
    arguments: argparse.Namespace, run: Run, dataset: Dataset, shard: Shard, tests: bool
) -> Outcome | None:
    """One training; returns what came of it on the rank that tests the weights, which all ranks share."""
    torch.manual_seed(run.seed)
    plain = dataset.make_model()
    problem = Problem(plain, torch.empty(0), torch.empty(0))
    make = partial(make_base, arguments)
    choice = Choice(run.k, run.d, run.rule or "momentum", arguments.warmup_steps, make)
    trainer: Trainer = METHODS[run.method].build(problem, choice)
    reached: int | None = None
    due = arguments.steps_between_tests
    batches = shard.batches(run.seed, arguments.batch_size, arguments.steps)
    for step, (problem.inputs, problem.targets) in enumerate(batches, start=1):
        trainer.step()
        if tests and reached is None and step >= due and trainer.ranks_are_equal:
            due = step - step % arguments.steps_between_tests + arguments.steps_between_tests
            with trainer.evaluating():
                reached = step if accuracy(plain, dataset) >= arguments.target_accuracy else None
    trainer.finish()
    if not tests:
        return None
    return Outcome(
        **asdict(run),
        test_accuracy=accuracy(plain, dataset),
        train_loss=train_loss(plain, dataset),
        steps_to_target=reached,
        seconds_to_target=None,
    )


def with_seconds(outcome: Outcome, timed: Sequence[dict[str, Any]], rate: str, warmup_steps: int) -> Outcome:
    """The outcome with its seconds to the target, where steps of its method, k and d were timed.

    Methods that delay begin with synchronous steps, which take as long as those of ``ddp``.
    """
    steps = outcome.steps_to_target
    rows = [row for row in timed if (row["rate"], row["model"]) == (rate, "alexnet-like")]
    own = [row["seconds_per_step"] for row in rows if _is_of(row, outcome.method, outcome.k, outcome.d)]
    synchronous = own if outcome.k == 1 else [r["seconds_per_step"] for r in rows if _is_of(r, "ddp", 1, 0)]
    if outcome.method == "horovod-accumulate":
        synchronous = own
    if steps is None or not own or not synchronous:
        return outcome
    first = min(steps, warmup_steps)
    return replace(outcome, seconds_to_target=first * synchronous[0] + (steps - first) * own[0])


def _is_of(row: dict[str, Any], method: str, k: int, d: int) -> bool:
    return (row["method"], row["k"] or 1, row["d"] or 0) == (method, k, d)


def train_all(arguments: argparse.Namespace) -> None:
    """Runs in every rank: the trainings of one launcher, whose outcomes rank 0 hands to the parent."""
    rank, size, end_engine = start_engine(arguments.launcher)
    torch.set_num_threads(1)
    dataset = chosen_dataset(arguments)
    shards = {kind: Shard(dataset, kind, rank, size) for kind in arguments.shards}
    for run in [Run(**row) for row in json.loads(arguments.runs.read_text())]:
        outcome = train(arguments, run, dataset, shards[run.shards], tests=rank == 0)
        if outcome is not None:
            line = json.dumps(asdict(outcome))
            print(line, flush=True)
            with arguments.outcomes.open("a") as file:
                print(line, file=file)
    end_engine()


def start_engine(launcher: str) -> tuple[int, int, Callable[[], None]]:
    """Bring up what the launcher's methods communicate with; returns rank, world size, and its end."""
    if launcher == "torchrun":
        torch.distributed.init_process_group("gloo")
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return rank, size, torch.distributed.destroy_process_group
    import horovod.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.size(), hvd.barrier


def chosen_dataset(arguments: argparse.Namespace) -> Dataset:
    dataset = digits() if arguments.data_dir is None else cifar10(arguments.data_dir)
    if arguments.target_accuracy is None:
        arguments.target_accuracy = dataset.target_accuracy
    return dataset


def write(arguments: argparse.Namespace, described: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Print the summary, and write it with all results where ``--json`` says."""
    if arguments.throughput is not None:
        timed = json.loads(arguments.throughput.read_text())["results"]
        warmup_steps = described["warmup_steps"]
        outcomes = [with_seconds(outcome, timed, arguments.rate, warmup_steps) for outcome in outcomes]
        described = {**described, "seconds_at": arguments.rate}
    summary = summarise(outcomes)
    for line in summary:
        print(json.dumps(line))
    if arguments.json is not None:
        report = {**described, "summary": summary, "results": [asdict(outcome) for outcome in outcomes]}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def write_seconds(arguments: argparse.Namespace) -> None:
    """Take the seconds of the results in ``--json`` from ``--throughput``."""
    described = json.loads(arguments.json.read_text())
    outcomes = without_seconds(described.pop("results"))
    described.pop("summary")
    write(arguments, described, outcomes)


def without_seconds(rows: Iterable[dict[str, Any]]) -> list[Outcome]:
    """Results of a file, whose seconds are to be taken from other steps, or from none."""
    return [Outcome(**{**row, "seconds_to_target": None}) for row in rows]


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
        steps = [o.steps_to_target for o in chosen if o.steps_to_target is not None]
        seconds = [o.seconds_to_target for o in chosen if o.seconds_to_target is not None]
        lines.append(
            {
                **dict(zip(("shards", "method", "rule", "k", "d"), key, strict=True)),
                "seeds": len(chosen),
                "test_accuracy": statistics.mean(accuracies),
                "deviation": deviation(accuracies),
                "paired_difference": statistics.mean(differences) if differences else None,
                "deviation_of_difference": deviation(differences),
                "train_loss": statistics.mean(o.train_loss for o in chosen),
                "seeds_at_target": len(steps),
                # A mean over those that arrived would flatter a method whose other seeds never did.
                "steps_to_target": statistics.mean(steps) if len(steps) == len(chosen) else None,
                "seconds_to_target": statistics.mean(seconds) if len(seconds) == len(chosen) else None,
            }
        )
    return lines


def deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def describe(arguments: argparse.Namespace, dataset: Dataset) -> dict[str, Any]:
    return {
        **measured_on(),
        "ranks": arguments.ranks,
        "optimizer": arguments.optimizer,
        "lr": arguments.lr or (0.1 if arguments.optimizer == "sgd" else 0.001),
        "batch_size": arguments.batch_size,
        "steps": arguments.steps,
        "warmup_steps": arguments.warmup_steps,
        "target_accuracy": arguments.target_accuracy,
        "steps_between_tests": arguments.steps_between_tests,
        "dataset": dataset.name,
    }


def launch_all(arguments: argparse.Namespace, known: dict[Run, Outcome]) -> list[Outcome]:
    """Train what is not known under the launcher that it needs; returns all outcomes in one order."""
    chosen = list(runs(arguments))
    outcomes = dict(known)
    with tempfile.TemporaryDirectory() as folder:
        file = partial_file(arguments) or Path(folder) / "outcomes"
        missing = [run for run in chosen if run not in known]
        for launcher in dict.fromkeys(METHODS[run.method].launcher for run in missing):
            todo = Path(folder) / launcher
            own = [asdict(run) for run in missing if METHODS[run.method].launcher == launcher]
            todo.write_text(json.dumps(own))
            program = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--launcher", launcher]
            program += ["--runs", str(todo), "--outcomes", str(file)]
            launch = [str(ROOT / "scripts" / "launch.sh"), "--launcher", launcher, "-n", str(arguments.ranks)]
            subprocess.run(["bash", *launch, "--", *program], check=True)
        outcomes.update(read_lines(file))
    return sorted(outcomes.values(), key=_place)


def _place(outcome: Outcome) -> tuple[int, int, int, int, int, int]:
    rule = -1 if outcome.rule is None else RULES.index(outcome.rule)
    where = (SHARDS.index(outcome.shards), ALL.index(outcome.method), rule)
    return (*where, outcome.k, outcome.d, outcome.seed)


def partial_file(arguments: argparse.Namespace) -> Path | None:
    """Where outcomes are kept until all are there, so that an interruption loses none."""
    return None if arguments.json is None else arguments.json.with_suffix(".partial")


def read_lines(path: Path) -> dict[Run, Outcome]:
    lines = path.read_text().splitlines() if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return {outcome.run: outcome for outcome in outcomes}


def known_outcomes(arguments: argparse.Namespace, described: dict[str, Any]) -> dict[Run, Outcome]:
    """What ``--resume`` need not train again: outcomes of the same settings in ``--json``.

    Raises:
        ValueError: the file holds outcomes of other settings.
    """
    partial_results = partial_file(arguments)
    if not arguments.resume or partial_results is None:
        if partial_results is not None:
            partial_results.unlink(missing_ok=True)
        return {}
    known = read_lines(partial_results)
    if arguments.json.exists():
        report = json.loads(arguments.json.read_text())
        for key in SETTINGS:
            if report.get(key) != described[key]:
                raise ValueError(
                    f"{arguments.json} holds results with {key} {report.get(key)!r}, and now it is "
                    f"{described[key]!r}. Resume with the same settings, or write to another file."
                )
        outcomes = without_seconds(report["results"])
        known.update({outcome.run: outcome for outcome in outcomes})
    return known


def main() -> int:
    arguments = parse_arguments()
    if arguments.launcher is not None:
        train_all(arguments)
    elif arguments.only_seconds:
        write_seconds(arguments)
    else:
        try:
            described = describe(arguments, chosen_dataset(arguments))
            outcomes = launch_all(arguments, known_outcomes(arguments, described))
        except (FileNotFoundError, ValueError) as error:
            print(f"convergence: {error}", file=sys.stderr)
            return 2
        except subprocess.CalledProcessError as error:
            print("convergence: ranks failed; they say why above", file=sys.stderr)
            return error.returncode
        write(arguments, described, outcomes)
        finished = partial_file(arguments)
        if finished is not None:
            finished.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
