"""Memory bandwidth of the kernel operations, next to a copy and to torch's own operations.

Every operation is bound by memory, so its measure is the bytes that it must move over its time:
each element of each list read and written once, as the operation's formula says. Four things are
timed in turn in every round, on the same tensors, so that what else the machine does meets them
alike:

- ``dst.copy_(src)`` with as many float32 elements, counted as 8 bytes an element;
- the operation;
- the same arithmetic with torch's ``_foreach_*`` operations;
- for what a local step does, ``torch.optim.SGD(fused=True)`` and an accumulating add (for the
  replay, one fused step for each replayed one).

``gbps`` is the median over the rounds; the three ratios are medians of each round's own ratio.
Between calls the inputs rotate through enough sets of tensors that no cache holds the next one.
``copy_gbps`` is the copy's median at the largest size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measured_on import measured_on
from torch import Tensor

from ssd_allreduce import ops

PARAMETER, STATE = "parameter", "state"
# Larger than the last-level cache of any processor that this is likely to meet.
ROTATED_BYTES = 512 * 2**20
# Making more tensors than this takes longer than timing them.
ROTATED_TENSORS = 20_000
SIZES = (10**4, 10**5, 10**6, 10**7, 10**8)
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
LR, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.9, 1e-4
REPLAYED_STEPS = 8
BETA1, BETA2, EPS, ADAM_STEP = 0.9, 0.999, 1e-8, 100

Lists = dict[str, list[Tensor]]


# The operations, and the same with torch's foreach operations.


def local_momentum(x: Lists) -> None:
    ops.local_momentum_(
        x["weights"],
        x["gradients"],
        x["momenta"],
        x["accumulators"],
        lr=LR,
        momentum=MOMENTUM,
        dampening=0.0,
        weight_decay=WEIGHT_DECAY,
        nesterov=False,
        maximize=False,
        gradient_scale=1.0,
        accumulation=1,
    )


def local_momentum_foreach(x: Lists) -> None:
    torch._foreach_add_(x["accumulators"], x["gradients"])
    direction = torch._foreach_add(x["gradients"], x["weights"], alpha=WEIGHT_DECAY)
    torch._foreach_mul_(x["momenta"], MOMENTUM)
    torch._foreach_add_(x["momenta"], direction)
    torch._foreach_add_(x["weights"], x["momenta"], alpha=-LR)


def local_corrected(x: Lists) -> None:
    ops.local_corrected_(
        x["weights"],
        x["gradients"],
        x["corrections"],
        x["accumulators"],
        step_size=LR,
        gradient_weight=1.0,
        correction_weight=0.5,
        weight_decay=WEIGHT_DECAY,
        accumulation=1,
    )


def local_corrected_foreach(x: Lists) -> None:
    torch._foreach_add_(x["accumulators"], x["gradients"])
    direction = torch._foreach_add(x["gradients"], x["corrections"], alpha=0.5)
    torch._foreach_add_(direction, x["weights"], alpha=WEIGHT_DECAY)
    torch._foreach_add_(x["weights"], direction, alpha=-LR)


def local_plain(x: Lists) -> None:
    ops.local_plain_(
        x["weights"],
        x["gradients"],
        x["accumulators"],
        step_size=LR,
        gradient_weight=1.0,
        weight_decay=WEIGHT_DECAY,
        accumulation=1,
    )


def local_plain_foreach(x: Lists) -> None:
    torch._foreach_add_(x["accumulators"], x["gradients"])
    direction = torch._foreach_add(x["gradients"], x["weights"], alpha=WEIGHT_DECAY)
    torch._foreach_add_(x["weights"], direction, alpha=-LR)


def accumulate(x: Lists) -> None:
    ops.accumulate_(x["accumulators"], x["gradients"], overwrite=False)


def accumulate_foreach(x: Lists) -> None:
    torch._foreach_add_(x["accumulators"], x["gradients"])


def accumulate_squares(x: Lists) -> None:
    ops.accumulate_squares_(x["squares"], x["gradients"], overwrite=False)


def accumulate_squares_foreach(x: Lists) -> None:
    torch._foreach_addcmul_(x["squares"], x["gradients"], x["gradients"])


def replay_sgd(x: Lists) -> None:
    ops.replay_sgd_(
        x["weights"],
        x["momenta"],
        x["sums"],
        [],
        divisor=float(REPLAYED_STEPS),
        lrs=[LR] * REPLAYED_STEPS,
        momentum_factors=[MOMENTUM] * REPLAYED_STEPS,
        dampenings=[0.0] * REPLAYED_STEPS,
        weight_decays=[WEIGHT_DECAY] * REPLAYED_STEPS,
        nesterov=False,
        maximize=False,
        momentum_initialised=True,
        correction=0,
    )


def replay_sgd_foreach(x: Lists) -> None:
    mean = torch._foreach_div(x["sums"], float(REPLAYED_STEPS))
    for _ in range(REPLAYED_STEPS):
        direction = torch._foreach_add(mean, x["weights"], alpha=WEIGHT_DECAY)
        torch._foreach_mul_(x["momenta"], MOMENTUM)
        torch._foreach_add_(x["momenta"], direction)
        torch._foreach_add_(x["weights"], x["momenta"], alpha=-LR)


def rebase_momentum(x: Lists) -> None:
    ops.rebase_momentum_(
        x["weights"],
        x["momenta"],
        x["global_weights"],
        x["global_momenta"],
        x["weight_snapshots"],
        x["momentum_snapshots"],
        momentum_decay=1e-3,
        displacement_factor=LR,
    )


def rebase_momentum_foreach(x: Lists) -> None:
    momentum_change = torch._foreach_sub(x["global_momenta"], x["momentum_snapshots"])
    weight_change = torch._foreach_sub(x["global_weights"], x["weight_snapshots"])
    torch._foreach_add_(x["momenta"], momentum_change, alpha=1e-3)
    torch._foreach_add_(weight_change, momentum_change, alpha=-LR)
    torch._foreach_add_(x["weights"], weight_change)


def rebase_shift(x: Lists) -> None:
    ops.rebase_shift_(x["weights"], x["global_weights"], x["weight_snapshots"])


def rebase_shift_foreach(x: Lists) -> None:
    torch._foreach_add_(x["weights"], torch._foreach_sub(x["global_weights"], x["weight_snapshots"]))


def local_adam(x: Lists) -> None:
    ops.local_adam_(
        x["weights"],
        x["gradients"],
        x["firsts"],
        x["seconds"],
        x["accumulators"],
        x["squares"],
        lr=LR,
        beta1=BETA1,
        beta2=BETA2,
        eps=EPS,
        weight_decay=0.0,
        decoupled=False,
        maximize=False,
        gradient_scale=1.0,
        step=ADAM_STEP,
        accumulation=1,
    )


def adam_foreach(x: Lists, gradients: list[Tensor], step: int, noise: list[Tensor] | None = None) -> None:
    torch._foreach_mul_(x["firsts"], BETA1)
    torch._foreach_add_(x["firsts"], gradients, alpha=1 - BETA1)
    torch._foreach_mul_(x["seconds"], BETA2)
    torch._foreach_addcmul_(x["seconds"], gradients, gradients, 1 - BETA2)
    if noise is not None:
        torch._foreach_add_(x["seconds"], noise)
    denominators = torch._foreach_sqrt(x["seconds"])
    torch._foreach_div_(denominators, (1 - BETA2**step) ** 0.5)
    torch._foreach_add_(denominators, EPS)
    torch._foreach_addcdiv_(x["weights"], x["firsts"], denominators, -LR / (1 - BETA1**step))


def local_adam_foreach(x: Lists) -> None:
    torch._foreach_add_(x["accumulators"], x["gradients"])
    torch._foreach_addcmul_(x["squares"], x["gradients"], x["gradients"])
    adam_foreach(x, x["gradients"], ADAM_STEP)


def replay_adam(x: Lists) -> None:
    ops.replay_adam_(
        x["weights"],
        x["firsts"],
        x["seconds"],
        x["sums"],
        x["squares"],
        [],
        count=2 * REPLAYED_STEPS,
        divisor=2.0 * REPLAYED_STEPS,
        steps_before=ADAM_STEP,
        lrs=[LR] * REPLAYED_STEPS,
        beta1s=[BETA1] * REPLAYED_STEPS,
        beta2s=[BETA2] * REPLAYED_STEPS,
        epsilons=[EPS] * REPLAYED_STEPS,
        weight_decays=[0.0] * REPLAYED_STEPS,
        missing_noises=[0.5] * REPLAYED_STEPS,
        decoupled=False,
        maximize=False,
        correction=0,
    )


def replay_adam_foreach(x: Lists) -> None:
    count = 2.0 * REPLAYED_STEPS
    mean = torch._foreach_div(x["sums"], count)
    noise = torch._foreach_div(x["squares"], count)
    torch._foreach_addcmul_(noise, mean, mean, -1.0)
    torch._foreach_clamp_min_(noise, 0.0)
    torch._foreach_mul_(noise, count / (count - 1) * 0.5 * (1 - BETA2))
    for replayed in range(REPLAYED_STEPS):
        adam_foreach(x, mean, ADAM_STEP + replayed + 1, noise)


def rebase_adam(x: Lists) -> None:
    ops.rebase_adam_(
        x["weights"],
        x["firsts"],
        x["seconds"],
        x["global_weights"],
        x["global_firsts"],
        x["global_seconds"],
        x["weight_snapshots"],
        x["first_snapshots"],
        x["second_snapshots"],
        first_decay=1e-3,
        second_decay=1e-3,
        displacement_factor=LR,
        beta2=BETA2,
        eps=EPS,
        step=ADAM_STEP,
    )


def rebase_adam_foreach(x: Lists) -> None:
    first_change = torch._foreach_sub(x["global_firsts"], x["first_snapshots"])
    second_change = torch._foreach_sub(x["global_seconds"], x["second_snapshots"])
    weight_change = torch._foreach_sub(x["global_weights"], x["weight_snapshots"])
    denominators = torch._foreach_sqrt(x["seconds"])
    torch._foreach_div_(denominators, (1 - BETA2**ADAM_STEP) ** 0.5)
    torch._foreach_add_(denominators, EPS)
    torch._foreach_addcdiv_(weight_change, first_change, denominators, -LR)
    torch._foreach_add_(x["weights"], weight_change)
    torch._foreach_add_(x["firsts"], first_change, alpha=1e-3)
    torch._foreach_add_(x["seconds"], second_change, alpha=1e-3)
    torch._foreach_clamp_min_(x["seconds"], 0.0)


@dataclass(frozen=True)
class Operation:
    name: str
    run: Callable[[Lists], None]
    run_foreach: Callable[[Lists], None]
    lists: dict[str, str]
    written: tuple[str, ...]
    fused_steps: int = 0
    fused_gradient: str = "gradients"

    def bytes_per_element(self, dtype: torch.dtype) -> int:
        moved = list(self.lists) + list(self.written)
        return sum(list_dtype(self.lists[name], dtype).itemsize for name in moved)


OPERATIONS = (
    Operation(
        "local_momentum_",
        local_momentum,
        local_momentum_foreach,
        {"weights": PARAMETER, "gradients": PARAMETER, "momenta": STATE, "accumulators": STATE},
        written=("weights", "momenta", "accumulators"),
        fused_steps=1,
    ),
    Operation(
        "local_corrected_",
        local_corrected,
        local_corrected_foreach,
        {"weights": PARAMETER, "gradients": PARAMETER, "corrections": STATE, "accumulators": STATE},
        written=("weights", "accumulators"),
        fused_steps=1,
    ),
    Operation(
        "local_plain_",
        local_plain,
        local_plain_foreach,
        {"weights": PARAMETER, "gradients": PARAMETER, "accumulators": STATE},
        written=("weights", "accumulators"),
        fused_steps=1,
    ),
    Operation(
        "accumulate_",
        accumulate,
        accumulate_foreach,
        {"accumulators": STATE, "gradients": PARAMETER},
        written=("accumulators",),
    ),
    Operation(
        "accumulate_squares_",
        accumulate_squares,
        accumulate_squares_foreach,
        {"squares": STATE, "gradients": PARAMETER},
        written=("squares",),
    ),
    Operation(
        "replay_sgd_",
        replay_sgd,
        replay_sgd_foreach,
        {"weights": PARAMETER, "momenta": PARAMETER, "sums": STATE},
        written=("weights", "momenta"),
        fused_steps=REPLAYED_STEPS,
        fused_gradient="sums",
    ),
    Operation(
        "rebase_momentum_",
        rebase_momentum,
        rebase_momentum_foreach,
        {
            "weights": PARAMETER,
            "momenta": STATE,
            "global_weights": PARAMETER,
            "global_momenta": PARAMETER,
            "weight_snapshots": STATE,
            "momentum_snapshots": STATE,
        },
        written=("weights", "momenta"),
    ),
    Operation(
        "rebase_shift_",
        rebase_shift,
        rebase_shift_foreach,
        {"weights": PARAMETER, "global_weights": PARAMETER, "weight_snapshots": STATE},
        written=("weights",),
    ),
    Operation(
        "local_adam_",
        local_adam,
        local_adam_foreach,
        {
            "weights": PARAMETER,
            "gradients": PARAMETER,
            "firsts": STATE,
            "seconds": STATE,
            "accumulators": STATE,
            "squares": STATE,
        },
        written=("weights", "firsts", "seconds", "accumulators", "squares"),
    ),
    Operation(
        "replay_adam_",
        replay_adam,
        replay_adam_foreach,
        {"weights": PARAMETER, "firsts": PARAMETER, "seconds": PARAMETER, "sums": STATE, "squares": STATE},
        written=("weights", "firsts", "seconds"),
    ),
    Operation(
        "rebase_adam_",
        rebase_adam,
        rebase_adam_foreach,
        {
            "weights": PARAMETER,
            "firsts": STATE,
            "seconds": STATE,
            "global_weights": PARAMETER,
            "global_firsts": PARAMETER,
            "global_seconds": PARAMETER,
            "weight_snapshots": STATE,
            "first_snapshots": STATE,
            "second_snapshots": STATE,
        },
        written=("weights", "firsts", "seconds"),
    ),
)


def list_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    if kind == PARAMETER or dtype == torch.float64:
        return dtype
    return torch.float32


# Sizes of tensors.


def resnet50_sizes() -> list[int]:
    """Elements of ResNet-50's parameters, its last bias left out: 160 tensors."""
    sizes = [64 * 3 * 49, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for weight in (channels * width, width * width * 9, width * width * 4):
                out = width if weight != width * width * 4 else 4 * width
                sizes += [weight, out, out]
            if block == 0:
                sizes += [channels * 4 * width, 4 * width, 4 * width]
            channels = 4 * width
    return [*sizes, 1000 * channels]


def tensor_sizes(layout: str, numel: int) -> list[int]:
    if layout == "single":
        return [numel]
    sizes = resnet50_sizes()
    return [max(1, round(size * numel / sum(sizes))) for size in sizes]


# Timing.


class Clock:
    """Seconds that a call takes on the device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def seconds(self, function: Callable[[], None]) -> float:
        return self._on_gpu(function) if self.device == "cuda" else self._on_cpu(function)

    def _on_cpu(self, function: Callable[[], None]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def _on_gpu(self, function: Callable[[], None]) -> float:
        """Between two events on the stream: the time to start a kernel counts only where the GPU waits."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


@dataclass
class TensorSet:
    """One operation's tensors, with the optimizer and the copy's target on them."""

    lists: Lists
    source: Tensor
    target: Tensor
    fused: torch.optim.Optimizer | None = None
    accumulators: list[Tensor] = field(default_factory=list)

    def copy(self) -> None:
        self.target.copy_(self.source)


def make_set(operation: Operation, sizes: list[int], dtype: torch.dtype, device: str) -> TensorSet:
    lists = {
        name: [
            torch.rand(size, dtype=torch.float32, device=device).to(list_dtype(kind, dtype)) for size in sizes
        ]
        for name, kind in operation.lists.items()
    }
    total = sum(sizes)
    made = TensorSet(
        lists,
        torch.rand(total, dtype=torch.float32, device=device),
        torch.rand(total, dtype=torch.float32, device=device),
    )
    if operation.fused_steps and lists[operation.fused_gradient][0].dtype == dtype:
        add_fused_sgd(operation, made)
    return made


def add_fused_sgd(operation: Operation, made: TensorSet) -> None:
    """torch's fused SGD on the weights that the operation updates."""
    weights = [torch.nn.Parameter(weight) for weight in made.lists["weights"]]
    for weight, gradient in zip(weights, made.lists[operation.fused_gradient], strict=True):
        weight.grad = gradient
    momentum = MOMENTUM if "momenta" in operation.lists else 0.0
    made.fused = torch.optim.SGD(weights, lr=LR, momentum=momentum, weight_decay=WEIGHT_DECAY, fused=True)
    for weight, buffer in zip(weights, made.lists.get("momenta", []), strict=False):
        if buffer.dtype == weight.dtype:
            made.fused.state[weight]["momentum_buffer"] = buffer
    made.accumulators = made.lists.get("accumulators", [])


def run_fused_sgd(operation: Operation, made: TensorSet) -> None:
    assert made.fused is not None
    for _ in range(operation.fused_steps):
        made.fused.step()
    if made.accumulators:
        torch._foreach_add_(made.accumulators, made.lists["gradients"])


@dataclass
class Times:
    copy: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    foreach: list[float] = field(default_factory=list)
    fused: list[float] = field(default_factory=list)


def rotate(sets: list[TensorSet]) -> Iterator[TensorSet]:
    while True:
        yield from sets


def measure(operation: Operation, sets: list[TensorSet], device: str, rounds: int) -> Times:
    clock, rotation, times = Clock(device), rotate(sets), Times()
    calls: list[tuple[list[float], Callable[[TensorSet], None]]] = [
        (times.copy, TensorSet.copy),
        (times.ours, lambda made: operation.run(made.lists)),
        (times.foreach, lambda made: operation.run_foreach(made.lists)),
    ]
    if sets[0].fused is not None:
        calls.append((times.fused, lambda made: run_fused_sgd(operation, made)))
    for round_number in range(rounds + 1):
        for seconds, call in calls:
            made = next(rotation)
            elapsed = clock.seconds(partial(call, made))
            if round_number:  # the first round warms up
                seconds.append(elapsed)
    return times


def median_ratio(numerators: list[float], denominators: list[float]) -> float | None:
    if not numerators:
        return None
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def benchmark(
    operation: Operation, layout: str, numel: int, dtype: str, device: str, rounds: int
) -> tuple[dict[str, Any], float]:
    sizes = tensor_sizes(layout, numel)
    total = sum(sizes)
    per_element = operation.bytes_per_element(DTYPES[dtype])
    set_count = max(1, min(ROTATED_BYTES // (total * per_element), ROTATED_TENSORS // len(sizes)))
    sets = [make_set(operation, sizes, DTYPES[dtype], device) for _ in range(set_count)]
    times = measure(operation, sets, device, rounds)
    time_ratio = median_ratio(times.copy, times.ours)
    assert time_ratio is not None
    result = {
        "op": operation.name,
        "device": device,
        "dtype": dtype,
        "layout": layout,
        "numel": total,
        "gbps": per_element * total / statistics.median(times.ours) / 1e9,
        "share_of_copy": time_ratio * per_element / 8,
        "ratio_to_foreach": median_ratio(times.foreach, times.ours),
        "ratio_to_fused_sgd": median_ratio(times.fused, times.ours),
    }
    return result, 8 * total / statistics.median(times.copy) / 1e9


def rounds_for(numel: int, asked: int | None) -> int:
    return asked or (11 if numel >= 10**7 else 101)


HEADER = (
    f"{'operation':17} {'dtype':9} {'layout':9} {'elements':>10} {'GB/s':>7} {'of copy':>8} "
    f"{'x foreach':>9} {'x fused':>8}"
)


def row(result: dict[str, Any]) -> str:
    fused = result["ratio_to_fused_sgd"]
    return (
        f"{result['op']:17} {result['dtype']:9} {result['layout']:9} {result['numel']:>10} "
        f"{result['gbps']:7.2f} {result['share_of_copy']:8.2f} {result['ratio_to_foreach']:9.2f} "
        f"{'' if fused is None else format(fused, '8.2f'):>8}"
    )


def parse_arguments() -> argparse.Namespace:
    names = [operation.name for operation in OPERATIONS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures")
    parser.add_argument("--ops", nargs="+", choices=names, default=names, metavar="OP")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32"])
    parser.add_argument("--layouts", nargs="+", choices=["single", "resnet50"], default=None)
    parser.add_argument("--sizes", nargs="+", type=lambda text: int(float(text)), default=SIZES)
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own number")
    parser.add_argument("--rounds", type=int, default=None, help="default: 101, from 10^7 on 11")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU and a CUDA build of torch; torch finds none here")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    kernels = ops.implementation(arguments.device)
    print(f"kernels: {kernels}, device: {arguments.device}, torch {torch.__version__}")
    print(
        f"threads: {torch.get_num_threads()}" if arguments.device == "cpu" else torch.cuda.get_device_name()
    )
    print(HEADER)
    results: list[dict[str, Any]] = []
    copy_gbps: dict[int, list[float]] = {}
    for dtype in arguments.dtypes:
        for operation in (op for op in OPERATIONS if op.name in arguments.ops):
            for layout in arguments.layouts or ["single", "resnet50"]:
                for numel in arguments.sizes:
                    rounds = rounds_for(numel, arguments.rounds)
                    result, copied = benchmark(operation, layout, numel, dtype, arguments.device, rounds)
                    results.append(result)
                    copy_gbps.setdefault(numel, []).append(copied)
                    print(row(result), flush=True)
    figures = {
        **measured_on(),
        "device": arguments.device if arguments.device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "copy_gbps": statistics.median(copy_gbps[max(copy_gbps)]),
        "results": results,
    }
    print(f"copy_ at {max(copy_gbps)} elements: {figures['copy_gbps']:.2f} GB/s")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
