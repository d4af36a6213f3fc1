"""Small models and data for the tests, the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
import torch
from simulation import Gradient, Vector
from torch import Tensor, nn
from torch.nn import functional

Loss: TypeAlias = Callable[[nn.Module, int, int], Tensor]
"""``loss(model, rank, step)``"""

INPUTS, OUTPUTS, BATCH = 5, 3, 4
IMAGE = 10
CLASSES = 4


def perceptron(dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Module:
    """Two layers, four tensors."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, OUTPUTS))
    return model.to(dtype)


def cnn(dtype: torch.dtype = torch.float32, seed: int = 1) -> nn.Module:
    """Two convolutions and a classifier, six tensors."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 2 * 2, CLASSES),
    )
    return model.to(dtype)


def generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * rank + step + 1)


def regression_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Mean squared error on a batch of the rank's own, for :func:`perceptron`."""
    random = generator(rank, step)
    first = next(model.parameters())
    x = torch.randn(BATCH, INPUTS, generator=random, dtype=torch.float64)
    y = torch.randn(BATCH, OUTPUTS, generator=random, dtype=torch.float64)
    return functional.mse_loss(model(x.to(first.dtype)), y.to(first.dtype))


def image_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Cross entropy on a batch of the rank's own, for :func:`cnn`."""
    random = generator(rank, step)
    first = next(model.parameters())
    x = torch.randn(BATCH, 1, IMAGE, IMAGE, generator=random, dtype=torch.float64)
    y = torch.randint(CLASSES, (BATCH,), generator=random)
    return functional.cross_entropy(model(x.to(first.dtype)), y)


def flat(tensors: Iterable[Tensor | None], like: Iterable[Tensor] | None = None) -> Vector:
    """The tensors' values one after another; zeros in the shape of ``like`` for those that are None."""
    tensors = list(tensors)
    shapes = list(like) if like is not None else tensors
    filled = [torch.zeros_like(s) if t is None else t for t, s in zip(tensors, shapes, strict=True)]  # type: ignore[arg-type]
    result: Vector = torch.cat([t.detach().double().reshape(-1) for t in filled]).numpy()
    return result


def weights_of(model: nn.Module) -> Vector:
    return flat(model.parameters())


def set_weights(model: nn.Module, weights: Vector) -> None:
    position = 0
    with torch.no_grad():
        for parameter in model.parameters():
            values = weights[position : position + parameter.numel()]
            parameter.copy_(torch.from_numpy(np.asarray(values)).reshape(parameter.shape))
            position += parameter.numel()


def gradient_of(
    model: nn.Module, loss: Loss, edit: Callable[[nn.Module], object] = lambda model: None
) -> Gradient:
    """The gradient by torch's autograd, for the simulation. ``edit`` may change it, as by clipping."""

    def gradient(rank: int, step: int, weights: Vector) -> Vector:
        set_weights(model, weights)
        model.zero_grad()
        loss(model, rank, step).backward()
        edit(model)
        return flat((p.grad for p in model.parameters()), model.parameters())

    return gradient
