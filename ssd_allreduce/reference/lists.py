"""What every operation does with its lists of tensors before and after it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]

_PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Accumulation(IntEnum):
    """What a local update does with the accumulators."""

    NONE = 0
    ADD = 1
    OVERWRITE = 2


class Correction(IntEnum):
    """What a replay stores as the correction that the next local updates use."""

    NONE = 0
    MEAN_GRADIENT = 1
    DISPLACEMENT = 2


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parameters of ``dtype`` are computed on and their state is kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_compute(tensors: Tensors) -> list[Tensor]:
    """The tensors in their compute dtype: themselves where they have it, else copies."""
    return [t if t.dtype == compute_dtype(t.dtype) else t.float() for t in tensors]


def store(destinations: Tensors, computed: Tensors) -> None:
    """Round ``computed`` into ``destinations`` where ``to_compute`` had to copy."""
    for destination, value in zip(destinations, computed, strict=True):
        if value is not destination:
            destination.copy_(value)


def accumulate(accumulators: Tensors, gradients: Tensors, accumulation: int) -> None:
    if accumulation == Accumulation.ADD:
        torch._foreach_add_(accumulators, gradients)
    elif accumulation == Accumulation.OVERWRITE:
        torch._foreach_copy_(accumulators, gradients)


def store_corrections(
    corrections: Tensors,
    correction: int,
    mean: Tensors,
    before: list[Tensor],
    after: Tensors,
    lr_sum: float,
) -> None:
    """Store what a replay leaves for the next local updates; ``before`` is used up."""
    if correction == Correction.MEAN_GRADIENT:
        torch._foreach_copy_(corrections, mean)
    elif correction == Correction.DISPLACEMENT and lr_sum != 0:
        torch._foreach_sub_(before, after)
        torch._foreach_div_(before, lr_sum)
        torch._foreach_copy_(corrections, before)


class Lists:
    """Compares an operation's lists of tensors with its first one; the tensors there lead."""

    def __init__(self, op: str, name: str, leading: Tensors) -> None:
        self._op = f"ssd_allreduce::{op}"
        self._name = name
        self._leading = leading
        for index, tensor in enumerate(leading):
            if tensor.dtype not in _PARAMETER_DTYPES:
                raise ValueError(
                    f"{self._op}: {name}[{index}] has dtype {dtype_name(tensor.dtype)}; allowed "
                    "are float16, bfloat16, float32 and float64"
                )

    def parameters(self, name: str, tensors: Tensors, optional: bool = False) -> None:
        self._compare(name, tensors, [t.dtype for t in self._leading], optional)

    def state(self, name: str, tensors: Tensors, optional: bool = False) -> None:
        self._compare(name, tensors, [compute_dtype(t.dtype) for t in self._leading], optional)

    def is_closed(self, found_inf: Tensor | None) -> bool:
        """Whether the operation must not change anything. Waits for the device."""
        if found_inf is None:
            return False
        if found_inf.dtype != torch.float32 or found_inf.numel() != 1:
            raise ValueError(
                f"{self._op}: found_inf has dtype {dtype_name(found_inf.dtype)} and {found_inf.numel()} "
                "elements; it must be one float32"
            )
        for index, leader in enumerate(self._leading):
            if found_inf.device != leader.device:
                raise ValueError(
                    f"{self._op}: found_inf is on {found_inf.device}, {self._name}[{index}] is on "
                    f"{leader.device}; they must be on the same device"
                )
        return float(found_inf) != 0.0

    def _compare(self, name: str, tensors: Tensors, dtypes: list[torch.dtype], optional: bool) -> None:
        if optional and not tensors:
            return
        if len(tensors) != len(self._leading):
            raise ValueError(
                f"{self._op}: {name} has {len(tensors)} tensors, {self._name} has "
                f"{len(self._leading)}; give one for each"
            )
        for index, (tensor, leader, dtype) in enumerate(zip(tensors, self._leading, dtypes, strict=True)):
            here, there = f"{name}[{index}]", f"{self._name}[{index}]"
            if tensor.shape != leader.shape:
                raise ValueError(
                    f"{self._op}: {here} has shape {list(tensor.shape)}, {there} has "
                    f"{list(leader.shape)}; they must be equal"
                )
            if tensor.dtype != dtype:
                raise ValueError(
                    f"{self._op}: {here} has dtype {dtype_name(tensor.dtype)}; with {there} of "
                    f"{dtype_name(leader.dtype)} it must be {dtype_name(dtype)}"
                )
            if tensor.device != leader.device:
                raise ValueError(
                    f"{self._op}: {here} is on {tensor.device}, {there} is on {leader.device}; "
                    "they must be on the same device"
                )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choice(op: str, name: str, value: int, choices: type[IntEnum]) -> int:
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(f"{choice.value} ({choice.name.lower()})" for choice in choices)
        raise ValueError(f"ssd_allreduce::{op}: {name} is {value}; allowed are {allowed}") from None


def check_step_options(op: str, options: Mapping[str, Sequence[float]]) -> None:
    lengths = [len(values) for values in options.values()]
    if len(set(lengths)) > 1:
        *names, last = options
        raise ValueError(
            f"ssd_allreduce::{op}: {', '.join(names)} and {last} have {lengths} entries; give one of each "
            "for every replayed step"
        )
