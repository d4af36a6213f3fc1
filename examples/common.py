"""What the larger examples share: start, wrapping, schedule, evaluation, checkpoints, logs.

``fit()`` is the outer loop, and shows the order of things with SSD-SGD: train an epoch, ``flush()``,
evaluate on the global weights, save from rank 0, log.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler, Subset
from tqdm import tqdm

import ssd_allreduce as ssd


def parser_for(description: str, *, epochs: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """The options that every example has, with its own defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--optimizer", choices=("horovod", "ssd"), default="ssd")
    parser.add_argument("--delay-steps", type=int, default=4, help="k: steps per allreduce")
    parser.add_argument(
        "--overlap-steps", type=int, help="d: steps for an allreduce to travel; default k // 2"
    )
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--max-steps", type=int, help="end each epoch after so many steps; for a trial")
    parser.add_argument("--warmup-epochs", type=float, default=5, help="lr rises and ssd is synchronous")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="per rank")
    parser.add_argument("--lr", type=float, default=lr, help="of one rank; scaled with their number")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoint.pt, written after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--csv", type=Path, help="CSV file with one line per epoch")
    parser.add_argument("--tensorboard", type=Path, help="TensorBoard folder, if that is installed")
    return parser


class Refusal(SystemExit):
    """Ends with a message and no traceback. For what all ranks find alike, such as missing files."""

    def __init__(self, message: str) -> None:
        super().__init__(f"error: {message}")


def start(seed: int) -> torch.device:
    """Initialise Horovod, seed all ranks alike (the model's first weights), and choose the device."""
    hvd.init()
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        return torch.device("cuda", hvd.local_rank())
    return torch.device("cpu")


def sampler_for(dataset: Dataset[Any], seed: int) -> DistributedSampler[Any]:
    """Gives each rank its own share of a permutation that all ranks draw alike."""
    return DistributedSampler(dataset, hvd.size(), hvd.rank(), shuffle=True, seed=seed)


def share_of(dataset: Dataset[Any]) -> Subset[Any]:
    """This rank's part of a test set, each item on exactly one rank."""
    return Subset(dataset, range(hvd.rank(), len(dataset), hvd.size()))  # type: ignore[arg-type]


def steps_per_epoch(arguments: argparse.Namespace, batches: int) -> int:
    """Number of batches that one rank makes of an epoch."""
    steps = batches if arguments.max_steps is None else min(batches, arguments.max_steps)
    if steps < 1:
        raise Refusal("there is less than one batch per rank. Lower --batch-size, or use more data.")
    return steps


def warmup_steps(arguments: argparse.Namespace, steps: int) -> int:
    """At least one, which optimizers with a second moment (Adam) need."""
    return max(1, round(arguments.warmup_epochs * steps))


def distributed(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    arguments: argparse.Namespace,
    steps: int,
    /,
    **options: Any,
) -> torch.optim.Optimizer:
    """Wrap for Horovod, and for SSD-SGD if so chosen. ``options`` are SSD-SGD's, ``model=`` among them."""
    # With the same seed ranks begin alike; this holds where the model came from elsewhere too.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    if arguments.optimizer == "ssd":
        optimizer = ssd.DistributedOptimizer(
            optimizer,
            delay_steps=arguments.delay_steps,
            overlap_steps=arguments.overlap_steps,
            warmup_steps=warmup_steps(arguments, steps),
            **options,
        )
    return optimizer


def schedule(
    optimizer: torch.optim.Optimizer, warmup: int, scale: float, decay: Callable[[int], float]
) -> torch.optim.lr_scheduler.LambdaLR:
    """For ``step()`` after each batch: up from ``lr / scale`` to ``lr`` in ``warmup`` steps, times decay."""

    def factor(step: int) -> float:
        risen = min(1.0, (step + 1) / warmup)
        return decay(step) * (1 / scale + (1 - 1 / scale) * risen)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def flush(optimizer: torch.optim.Optimizer) -> None:
    """Collective: all ranks hold the global weights afterwards."""
    if isinstance(optimizer, ssd.DistributedOptimizer):
        optimizer.flush()


def global_weights(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Between two sync points ranks differ; what is tested or saved are the weights they share."""
    if isinstance(optimizer, ssd.DistributedOptimizer):
        return optimizer.global_weights()
    return contextlib.nullcontext()


def progress(arguments: argparse.Namespace, batches: Iterable[Any], epoch: int, steps: int) -> Iterator[Any]:
    """At most ``steps`` batches, with a bar on rank 0."""
    name = f"{arguments.optimizer}, epoch {epoch + 1}/{arguments.epochs}"
    bar = tqdm(total=steps, desc=name, disable=hvd.rank() != 0, mininterval=0.5, ncols=80)
    with bar:
        # In this order zip() takes no batch beyond the last.
        for _, batch in zip(range(steps), batches, strict=False):
            yield batch
            bar.update()


def means_over_ranks(sums: Tensor, count: int) -> list[float]:
    """Collective: put the ranks' sums over their shares together, and divide by the number of all."""
    total = hvd.allreduce(sums.double().cpu(), op=hvd.Sum, name="evaluation")
    return (total / count).tolist()


class Checkpoint:
    """One file for all ranks, which rank 0 writes after ``flush()`` and which serves any number of ranks."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **others: Any,
    ) -> None:
        folder: Path | None = arguments.checkpoints
        if arguments.resume and folder is None:
            raise Refusal("--resume needs --checkpoints, the folder to resume from.")
        self.path = None if folder is None else folder / "checkpoint.pt"
        self.resumes: bool = arguments.resume
        self.optimizer = optimizer
        # The optimizer after the model: with SSD-SGD its state sets the weights too.
        self.parts: Mapping[str, Any] = {"model": model, "optimizer": optimizer, **others}

    def save(self, epochs_done: int) -> None:
        """Rank-local; nothing is communicated."""
        if self.path is None or hvd.rank() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        with global_weights(self.optimizer):
            state = {name: part.state_dict() for name, part in self.parts.items()}
            torch.save({**state, "epochs_done": epochs_done}, unfinished)
        # A run that is killed while it writes keeps the checkpoint before.
        unfinished.replace(self.path)

    def resume(self) -> int:
        """Collective: all ranks load rank 0's file. Returns the number of epochs already done."""
        if not self.resumes or self.path is None:
            return 0
        # Rank 0 decides for all. The contents are read by each rank: as one object they would be too large.
        if not hvd.broadcast_object(self.path.exists(), root_rank=0, name="checkpoint"):
            say(f"no checkpoint in {self.path.parent}: starting at the beginning")
            return 0
        if not self.path.exists():
            raise Refusal(
                f"rank {hvd.rank()} does not see {self.path}: the folder must be shared by all ranks"
            )
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        say(f"resumed from {self.path} after epoch {saved['epochs_done']}")
        return int(saved["epochs_done"])


class Log:
    """Writes each epoch's figures on rank 0: to the terminal, a CSV file, and TensorBoard."""

    def __init__(self, arguments: argparse.Namespace, first_epoch: int) -> None:
        self.csv: Path | None = arguments.csv
        self.board: Any = None
        if hvd.rank() != 0:
            return
        if self.csv is not None:
            self.csv.parent.mkdir(parents=True, exist_ok=True)
            if first_epoch == 0:
                self.csv.unlink(missing_ok=True)
        if arguments.tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                say("TensorBoard is not installed (pip install tensorboard): --tensorboard has no effect")
            else:
                self.board = SummaryWriter(str(arguments.tensorboard))

    def write(self, epoch: int, figures: Mapping[str, float]) -> None:
        if hvd.rank() != 0:
            return
        say("  " + ", ".join(f"{name} {value:.4g}" for name, value in {"epoch": epoch, **figures}.items()))
        if self.csv is not None:
            is_new = not self.csv.exists()
            with self.csv.open("a", newline="") as file:
                writer = csv.DictWriter(file, ["epoch", *figures])
                if is_new:
                    writer.writeheader()
                writer.writerow({"epoch": epoch, **figures})
        if self.board is not None:
            for name, value in figures.items():
                self.board.add_scalar(name, value, epoch)
            self.board.flush()


def say(message: str) -> None:
    if hvd.rank() == 0:
        print(message, flush=True)


def fit(
    arguments: argparse.Namespace,
    checkpoint: Checkpoint,
    train_epoch: Callable[[int], float],
    evaluate: Callable[[], Mapping[str, float]],
) -> None:
    """Train from the checkpoint's epoch, if there is one, to the last."""
    first_epoch = checkpoint.resume()
    log = Log(arguments, first_epoch)
    started = time.perf_counter()
    for epoch in range(first_epoch, arguments.epochs):
        train_loss = train_epoch(epoch)
        flush(checkpoint.optimizer)
        with global_weights(checkpoint.optimizer), torch.no_grad():
            figures = evaluate()
        checkpoint.save(epochs_done=epoch + 1)
        log.write(
            epoch + 1,
            {"train_loss": train_loss, **figures, "seconds": time.perf_counter() - started},
        )
