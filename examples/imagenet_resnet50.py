"""ResNet-50 on a folder of pictures with Horovod, plainly or with SSD-SGD, in mixed precision.

    horovodrun --gloo -np 8 python examples/imagenet_resnet50.py --data-dir imagenet --checkpoints run

The folder holds ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg`` (or .jpeg, .png), one subfolder per class.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import common
import horovod.torch as hvd
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

SUFFIXES = {".jpg", ".jpeg", ".png"}
LAYOUT = (
    "--data-dir must hold train/CLASS/ and val/CLASS/ with .jpg, .jpeg or .png files, the same classes in "
    "both. ImageNet's archives come from https://image-net.org/download-images after a registration."
)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse_arguments() -> argparse.Namespace:
    parser = common.parser_for("ResNet-50 on a folder of pictures.", epochs=90, batch_size=32, lr=0.0125)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with train/ and val/")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=4, help="processes per rank that load pictures")
    parser.add_argument("--precision", choices=sorted(PRECISIONS), help="default: fp16 on CUDA, else bf16")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-5)
    parser.add_argument(
        "--milestones", type=int, nargs="*", default=[30, 60, 80], help="epochs; lr / 10 at each"
    )
    return parser.parse_args()


# -- data ----------------------------------------------------------------------------------------


class Pictures(Dataset[tuple[Tensor, int]]):
    """A folder with one subfolder per class. Loaded in the workers."""

    def __init__(self, root: Path, size: int, training: bool) -> None:
        self.size = size
        self.training = training
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        self.items = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.items:
            raise common.Refusal(f"{root} is missing or holds no pictures in a subfolder per class. {LAYOUT}")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.items[index]
        try:
            with Image.open(path) as file:
                picture = file.convert("RGB")
        except OSError as error:
            raise RuntimeError(f"{path} cannot be read as a picture: remove or replace it") from error
        box = random_box(*picture.size) if self.training else centre_box(*picture.size)
        picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if self.training and torch.rand(()) < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1), label


def centre_box(width: int, height: int) -> tuple[float, float, float, float]:
    """A square around the centre, 7/8 of the shorter side."""
    half = min(width, height) * 7 / 16
    return width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """8% to 100% of the picture, with sides in a relation of 3:4 to 4:3."""
    for _ in range(10):
        area, ratio, x, y = torch.rand(4).tolist()
        area = width * height * (0.08 + 0.92 * area)
        ratio = math.exp((2 * ratio - 1) * math.log(4 / 3))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = x * (width - w), y * (height - h)
            return left, top, left + w, top + h
    return centre_box(width, height)


def normalised(pixels: Tensor) -> Tensor:
    mean = torch.tensor([0.485, 0.456, 0.406], device=pixels.device).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225], device=pixels.device).view(3, 1, 1)
    return (pixels / 255 - mean) / deviation


def loader(
    arguments: argparse.Namespace, pictures: Dataset[tuple[Tensor, int]], **options: object
) -> DataLoader:
    """Workers under MPI must not be forked: a fork copies the process with MPI's and Horovod's locks and
    connections, but without the threads that serve them, so that it may hang, or corrupt what the network
    card still reads. A fork server is a fresh process that knows nothing of MPI, and so are its forks;
    "spawn" is as safe and starts more slowly. Both import this file anew: hvd.init() stands in main().
    """
    context = "forkserver" if arguments.workers else None
    return DataLoader(
        pictures,
        arguments.batch_size,
        num_workers=arguments.workers,
        multiprocessing_context=context,
        pin_memory=torch.cuda.is_available(),
        **options,  # type: ignore[arg-type]
    )


# -- model ---------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.narrow = convolution(inputs, width, 1)
        self.middle = convolution(width, width, 3, stride)
        self.widen = convolution(width, outputs, 1)
        nn.init.zeros_(self.widen[1].weight)  # each block begins as its shortcut
        same = inputs == outputs and stride == 1
        self.shortcut: Callable[[Tensor], Tensor] = (
            nn.Identity() if same else convolution(inputs, outputs, 1, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.middle(functional.relu(self.narrow(x))))
        return functional.relu(self.widen(y) + self.shortcut(x))


def resnet50(classes: int) -> nn.Sequential:
    blocks: list[nn.Module] = []
    inputs = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            blocks.append(Bottleneck(inputs, width, stride=2 if number == 0 and width > 64 else 1))
            inputs = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    model = nn.Sequential(convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), *blocks, *head)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


# -- training ------------------------------------------------------------------------------------


def main() -> None:
    arguments = parse_arguments()
    train = Pictures(arguments.data_dir / "train", arguments.image_size, training=True)
    val = Pictures(arguments.data_dir / "val", arguments.image_size, training=False)
    if train.classes != val.classes:
        raise common.Refusal(f"train/ and val/ hold different classes. {LAYOUT}")
    device = common.start(arguments.seed)
    sampler = common.sampler_for(train, arguments.seed)
    generator = torch.Generator()
    batches = loader(arguments, train, sampler=sampler, drop_last=True, generator=generator)
    val_batches = loader(arguments, common.share_of(val))
    steps = common.steps_per_epoch(arguments, len(batches))

    precision = PRECISIONS[arguments.precision or ("fp16" if device.type == "cuda" else "bf16")]
    autocast = torch.amp.autocast(device.type, precision, enabled=precision != torch.float32)
    # Only fp16 needs its losses scaled. Disabled, the scaler hands everything through.
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)

    model = resnet50(len(train.classes)).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(),
        lr=arguments.lr * hvd.size(),
        momentum=arguments.momentum,
        weight_decay=arguments.weight_decay,
    )
    # With a scaler gradients are final only in step(), which unscales them.
    optimizer = common.distributed(
        optimizer,
        model,
        arguments,
        steps,
        issue="step" if scaler.is_enabled() else "backward",
        average_buffers="flush",
        model=model,
    )
    scheduler = common.schedule(
        optimizer,
        common.warmup_steps(arguments, steps),
        scale=hvd.size(),
        decay=lambda step: 0.1 ** sum(step >= epoch * steps for epoch in arguments.milestones),
    )

    def optimizer_step() -> None:
        if arguments.optimizer == "horovod":
            # Horovod's allreduce must have ended before the scaler looks at the gradients.
            optimizer.synchronize()  # type: ignore[attr-defined]
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()

    def train_epoch(epoch: int) -> float:
        model.train()
        sampler.set_epoch(epoch)
        # Seeds the workers, which draw boxes and flips: differently on each rank and in each epoch.
        generator.manual_seed(arguments.seed + 1_000_003 * epoch + hvd.rank())
        losses = torch.zeros((), device=device)
        for pixels, labels in common.progress(arguments, batches, epoch, steps):
            pixels, labels = pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with autocast:
                loss = functional.cross_entropy(model(normalised(pixels)), labels, label_smoothing=0.1)
            scaler.scale(loss).backward()
            optimizer_step()
            scheduler.step()
            losses += loss.detach()
        return losses.item() / steps

    def evaluate() -> dict[str, float]:
        model.eval()
        sums = torch.zeros(2)
        for pixels, labels in val_batches:
            with autocast:
                scores = model(normalised(pixels.to(device))).float().cpu()
            sums[0] += functional.cross_entropy(scores, labels, reduction="sum")
            sums[1] += (scores.argmax(dim=1) == labels).sum()
        loss, accuracy = common.means_over_ranks(sums, len(val))
        return {"val_loss": loss, "val_accuracy": accuracy}

    checkpoint = common.Checkpoint(arguments, model, optimizer, scheduler=scheduler, scaler=scaler)
    common.fit(arguments, checkpoint, train_epoch, evaluate)


if __name__ == "__main__":
    main()
