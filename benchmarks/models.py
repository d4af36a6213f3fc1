"""The models whose training the benchmarks time, each with random data of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Problem:
    """A model and one batch of random data for it.

    Attributes:
        model: the model, the same on all ranks; a method may put a wrapper around it.
        inputs: the batch.
        targets: its labels.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    @property
    def batch_size(self) -> int:
        return len(self.inputs)

    def loss(self) -> Tensor:
        return functional.cross_entropy(self.model(self.inputs).flatten(0, -2), self.targets.flatten())


def images(model: nn.Module, batch_size: int, classes: int = 10) -> Problem:
    return Problem(model, torch.randn(batch_size, 3, 32, 32), torch.randint(classes, (batch_size,)))


def alexnet_like() -> Problem:
    """Most parameters in two dense layers, as AlexNet has them: 5.6 million."""
    model = nn.Sequential(
        nn.Conv2d(3, 48, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 1120),
        nn.ReLU(),
        nn.Linear(1120, 800),
        nn.ReLU(),
        nn.Linear(800, 10),
    )
    return images(model, batch_size=72)


def vgg_like() -> Problem:
    """Three blocks of convolutions and a dense layer: 9.7 million parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(128 * 4 * 4, 4096), nn.ReLU(), nn.Linear(4096, 256), nn.ReLU()]
    return images(nn.Sequential(*layers, nn.Linear(256, 10)), batch_size=32)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet20() -> Problem:
    """Much computation for few parameters: 0.27 million."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    channels = 16
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(3):
            layers.append(Residual(channels, width, stride if block == 0 else 1))
            channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return images(model, batch_size=16)


class CausalTransformer(nn.Module):
    """A small language model over bytes."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))


def transformer() -> Problem:
    """Four layers of width 256: 3.3 million parameters."""
    tokens = torch.randint(256, (4, 65))
    return Problem(CausalTransformer(), tokens[:, :-1], tokens[:, 1:])


MODELS: dict[str, Callable[[], Problem]] = {
    "alexnet-like": alexnet_like,
    "vgg-like": vgg_like,
    "resnet20": resnet20,
    "transformer": transformer,
}


def make(name: str, rank: int) -> Problem:
    """The model, equal on all ranks, with a batch of the rank's own."""
    torch.manual_seed(1)
    model = MODELS[name]().model
    torch.manual_seed(100 + rank)
    with_data = MODELS[name]()
    return Problem(model, with_data.inputs, with_data.targets)
