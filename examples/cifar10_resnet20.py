"""ResNet-20 on CIFAR-10 with Horovod, plainly or with SSD-SGD.

    horovodrun --gloo -np 4 python examples/cifar10_resnet20.py --data-dir cifar-10-batches-bin --csv log.csv

SGD with momentum 0.9 and weight decay 1e-4; the learning rate follows the number of ranks, rises during
the first epochs and is divided by 10 twice. Data are CIFAR-10's published files, in either form.
"""

from __future__ import annotations

import argparse
import io
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue pixels
TRAIN_FILES = [f"data_batch_{number}" for number in range(1, 6)]
TEST_FILES = ["test_batch"]
FOLDERS = (".", "cifar-10-batches-bin", "cifar-10-batches-py")
WHERE_TO_GET = (
    "Download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz (or cifar-10-python.tar.gz), "
    "unpack it with tar -xzf, and pass the unpacked folder as --data-dir."
)


def parse_arguments() -> argparse.Namespace:
    parser = common.parser_for("ResNet-20 on CIFAR-10.", epochs=160, batch_size=32, lr=0.025)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with CIFAR-10's files")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument(
        "--milestones", type=int, nargs="*", default=[80, 120], help="epochs; lr / 10 at each"
    )
    return parser.parse_args()


# -- data ----------------------------------------------------------------------------------------


class PlainUnpickler(pickle.Unpickler):
    """Takes numpy arrays and bytes, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        parts = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
        parts |= {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
        if (module, name) not in parts:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return super().find_class(module, name)


def read_binary(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    if not content or len(content) % RECORD_BYTES:
        raise ValueError(f"has {len(content)} bytes, not a multiple of {RECORD_BYTES}")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    return records[:, 1:], records[:, 0]


def read_pickle(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
        return np.asarray(batch[b"data"], dtype=np.uint8), np.asarray(batch[b"labels"])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is not a batch in pickle form ({error})") from error


def load_file(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        pixels, labels = (read_binary if path.suffix else read_pickle)(path.read_bytes())
        if pixels.ndim != 2 or pixels.shape[1] != RECORD_BYTES - 1 or len(pixels) != len(labels):
            raise ValueError(f"holds pixels of shape {pixels.shape} and {len(labels)} labels")
        if len(labels) == 0 or labels.min() < 0 or labels.max() > 9:
            raise ValueError("has labels outside 0 to 9, or none")
    except ValueError as error:
        raise common.Refusal(f"{path} {error}: it is damaged or not CIFAR-10's. {WHERE_TO_GET}") from error
    return pixels, labels


def load_cifar10(data_dir: Path) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set, with pixels as uint8."""
    for folder in (data_dir / name for name in FOLDERS):
        for suffix in (".bin", ""):
            train, test = (
                [folder / (name + suffix) for name in names] for names in (TRAIN_FILES, TEST_FILES)
            )
            if all(path.is_file() for path in train + test):
                return dataset_of(train), dataset_of(test)
    raise common.Refusal(
        f"{data_dir} does not hold {TRAIN_FILES[0]} to {TRAIN_FILES[-1]} and {TEST_FILES[0]}, all with .bin "
        f"or all without a suffix. {WHERE_TO_GET}"
    )


def dataset_of(paths: list[Path]) -> TensorDataset:
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*map(load_file, paths), strict=True))
    return TensorDataset(torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels).long())


def normalised(pixels: Tensor) -> Tensor:
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=pixels.device).view(3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616], device=pixels.device).view(3, 1, 1)
    return (pixels / 255 - mean) / deviation


def cropped_and_flipped(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture moved by up to 4 pixels either way, and mirrored or not."""
    count = len(pictures)
    padded = functional.pad(pictures, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, count, 1), generator=generator)
    columns = left + torch.arange(32)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    rows = top + torch.arange(32)
    index = torch.arange(count).view(-1, 1, 1)
    return padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


# -- model ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters (padded with zero channels)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.extra = outputs - inputs
        self.first = nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        x = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(x)) + shortcut)


def resnet20() -> nn.Sequential:
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(Block(inputs, outputs) for inputs, outputs in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return model


# -- training ------------------------------------------------------------------------------------


def main() -> None:
    arguments = parse_arguments()
    train, test = load_cifar10(arguments.data_dir)
    device = common.start(arguments.seed)
    common.say(f"{len(train)} pictures to train and {len(test)} to test (CIFAR-10 has 50000 and 10000)")
    sampler = common.sampler_for(train, arguments.seed)
    batches = DataLoader(train, arguments.batch_size, sampler=sampler, drop_last=True)
    test_batches = DataLoader(common.share_of(test), batch_size=250)
    steps = common.steps_per_epoch(arguments, len(batches))
    generator = torch.Generator()

    model = resnet20().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(),
        lr=arguments.lr * hvd.size(),
        momentum=arguments.momentum,
        weight_decay=arguments.weight_decay,
    )
    # BatchNorm's statistics are each rank's own; averaged, all ranks test the model that is saved.
    optimizer = common.distributed(optimizer, model, arguments, steps, average_buffers="flush", model=model)
    scheduler = common.schedule(
        optimizer,
        common.warmup_steps(arguments, steps),
        scale=hvd.size(),
        decay=lambda step: 0.1 ** sum(step >= epoch * steps for epoch in arguments.milestones),
    )

    def train_epoch(epoch: int) -> float:
        model.train()
        sampler.set_epoch(epoch)
        # Other pictures on each rank, and after a resume those of a run that never stopped.
        generator.manual_seed(arguments.seed + 1_000_003 * epoch + hvd.rank())
        losses = 0.0
        for pixels, labels in common.progress(arguments, batches, epoch, steps):
            pictures = cropped_and_flipped(normalised(pixels), generator).to(device)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(pictures), labels.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses += loss.item()
        return losses / steps

    def evaluate() -> dict[str, float]:
        model.eval()
        sums = torch.zeros(2)
        for pixels, labels in test_batches:
            scores = model(normalised(pixels).to(device)).cpu()
            sums[0] += functional.cross_entropy(scores, labels, reduction="sum")
            sums[1] += (scores.argmax(dim=1) == labels).sum()
        loss, accuracy = common.means_over_ranks(sums, len(test))
        return {"test_loss": loss, "test_accuracy": accuracy}

    checkpoint = common.Checkpoint(arguments, model, optimizer, scheduler=scheduler)
    common.fit(arguments, checkpoint, train_epoch, evaluate)


if __name__ == "__main__":
    main()
