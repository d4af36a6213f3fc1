"""The kernel operations of ``torch.ops.ssd_allreduce`` in plain torch.

They define what the compiled kernels must compute, and stand in for them where those are not
built or do not serve a device. Every function works in place on lists of tensors of equal length;
the tensors at one index belong to one parameter and have its shape, in any memory layout.

Two kinds of tensors occur. *Parameter* tensors (weights, gradients, global weights and the base
optimizer's own state) have the parameter's dtype: float16, bfloat16, float32 or float64. *State*
tensors (local momenta, accumulators, sums, corrections, snapshots) have the compute dtype: float64
for float64 parameters, else float32. All arithmetic is done in the compute dtype.

The arguments and formulas are documented at the public functions in :mod:`ssd_allreduce.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]

_PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


@torch.no_grad()
def local_momentum_(
    weights: Tensors,
    gradients: Tensors,
    momenta: Tensors,
    accumulators: Tensors,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    gradient_scale: float,
    accumulation: int,
) -> None:
    accumulation = _choice("local_momentum_", "accumulation", accumulation, Accumulation)
    lists = _Lists("local_momentum_", "weights", weights)
    lists.parameters("gradients", gradients)
    lists.state("momenta", momenta)
    lists.state("accumulators", accumulators, optional=accumulation == Accumulation.NONE)
    if not weights:
        return
    w, g = _to_compute(weights), _to_compute(gradients)
    direction = torch._foreach_mul(g, -gradient_scale if maximize else gradient_scale)
    torch._foreach_add_(direction, w, alpha=weight_decay)
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, direction, alpha=1 - dampening)
    if nesterov:
        torch._foreach_add_(direction, momenta, alpha=momentum)
    _accumulate(accumulators, g, accumulation)
    torch._foreach_add_(w, direction if nesterov else momenta, alpha=-lr)
    _store(weights, w)


@torch.no_grad()
def local_corrected_(
    weights: Tensors,
    gradients: Tensors,
    corrections: Tensors,
    accumulators: Tensors,
    step_size: float,
    gradient_weight: float,
    correction_weight: float,
    weight_decay: float,
    accumulation: int,
) -> None:
    accumulation = _choice("local_corrected_", "accumulation", accumulation, Accumulation)
    lists = _Lists("local_corrected_", "weights", weights)
    lists.parameters("gradients", gradients)
    lists.state("corrections", corrections)
    lists.state("accumulators", accumulators, optional=accumulation == Accumulation.NONE)
    if not weights:
        return
    w, g = _to_compute(weights), _to_compute(gradients)
    direction = torch._foreach_mul(g, gradient_weight)
    torch._foreach_add_(direction, corrections, alpha=correction_weight)
    torch._foreach_add_(direction, w, alpha=weight_decay)
    _accumulate(accumulators, g, accumulation)
    torch._foreach_add_(w, direction, alpha=-step_size)
    _store(weights, w)


@torch.no_grad()
def local_plain_(
    weights: Tensors,
    gradients: Tensors,
    accumulators: Tensors,
    step_size: float,
    gradient_weight: float,
    weight_decay: float,
    accumulation: int,
) -> None:
    accumulation = _choice("local_plain_", "accumulation", accumulation, Accumulation)
    lists = _Lists("local_plain_", "weights", weights)
    lists.parameters("gradients", gradients)
    lists.state("accumulators", accumulators, optional=accumulation == Accumulation.NONE)
    if not weights:
        return
    w, g = _to_compute(weights), _to_compute(gradients)
    direction = torch._foreach_mul(g, gradient_weight)
    torch._foreach_add_(direction, w, alpha=weight_decay)
    _accumulate(accumulators, g, accumulation)
    torch._foreach_add_(w, direction, alpha=-step_size)
    _store(weights, w)


@torch.no_grad()
def accumulate_(accumulators: Tensors, gradients: Tensors, overwrite: bool) -> None:
    lists = _Lists("accumulate_", "gradients", gradients)
    lists.state("accumulators", accumulators)
    if gradients:
        accumulation = Accumulation.OVERWRITE if overwrite else Accumulation.ADD
        _accumulate(accumulators, _to_compute(gradients), accumulation)


@torch.no_grad()
def replay_sgd_(
    weights: Tensors,
    momenta: Tensors,
    sums: Tensors,
    corrections: Tensors,
    divisor: float,
    lrs: Sequence[float],
    momentum_factors: Sequence[float],
    dampenings: Sequence[float],
    weight_decays: Sequence[float],
    nesterov: bool,
    maximize: bool,
    momentum_initialised: bool,
    correction: int,
) -> None:
    correction = _choice("replay_sgd_", "correction", correction, Correction)
    _check_step_options("replay_sgd_", lrs, momentum_factors, dampenings, weight_decays)
    if divisor == 0:
        raise ValueError("ssd_allreduce::replay_sgd_: divisor is 0; give the number of gradients")
    lists = _Lists("replay_sgd_", "weights", weights)
    lists.parameters("momenta", momenta, optional=not any(momentum_factors))
    lists.state("sums", sums)
    lists.state("corrections", corrections, optional=correction == Correction.NONE)
    if not weights:
        return
    w, v = _to_compute(weights), _to_compute(momenta)
    mean = torch._foreach_div(sums, divisor)
    ascent = torch._foreach_neg(mean) if maximize else mean
    before = [t.clone() for t in w] if correction == Correction.DISPLACEMENT else []
    for lr, momentum, dampening, weight_decay in zip(
        lrs, momentum_factors, dampenings, weight_decays, strict=True
    ):
        direction = torch._foreach_add(ascent, w, alpha=weight_decay)
        update = direction
        if momentum != 0:
            if momentum_initialised:
                torch._foreach_mul_(v, momentum)
                torch._foreach_add_(v, direction, alpha=1 - dampening)
            else:
                torch._foreach_copy_(v, direction)
                momentum_initialised = True
            update = torch._foreach_add(direction, v, alpha=momentum) if nesterov else tuple(v)
        torch._foreach_add_(w, update, alpha=-lr)
    if correction == Correction.MEAN_GRADIENT:
        torch._foreach_copy_(corrections, mean)
    elif correction == Correction.DISPLACEMENT and sum(lrs) != 0:
        torch._foreach_sub_(before, w)
        torch._foreach_div_(before, sum(lrs))
        torch._foreach_copy_(corrections, before)
    _store(weights, w)
    _store(momenta, v)


@torch.no_grad()
def rebase_momentum_(
    weights: Tensors,
    momenta: Tensors,
    global_weights: Tensors,
    global_momenta: Tensors,
    weight_snapshots: Tensors,
    momentum_snapshots: Tensors,
    momentum_decay: float,
    displacement_factor: float,
) -> None:
    lists = _Lists("rebase_momentum_", "weights", weights)
    lists.state("momenta", momenta)
    lists.parameters("global_weights", global_weights)
    lists.parameters("global_momenta", global_momenta)
    lists.state("weight_snapshots", weight_snapshots)
    lists.state("momentum_snapshots", momentum_snapshots)
    if not weights:
        return
    w = _to_compute(weights)
    momentum_change = torch._foreach_sub(_to_compute(global_momenta), momentum_snapshots)
    weight_change = torch._foreach_sub(_to_compute(global_weights), weight_snapshots)
    torch._foreach_add_(weight_change, momentum_change, alpha=-displacement_factor)
    torch._foreach_add_(momenta, momentum_change, alpha=momentum_decay)
    torch._foreach_add_(w, weight_change)
    _store(weights, w)


@torch.no_grad()
def rebase_shift_(weights: Tensors, global_weights: Tensors, weight_snapshots: Tensors) -> None:
    lists = _Lists("rebase_shift_", "weights", weights)
    lists.parameters("global_weights", global_weights)
    lists.state("weight_snapshots", weight_snapshots)
    if not weights:
        return
    w = _to_compute(weights)
    torch._foreach_add_(w, torch._foreach_sub(_to_compute(global_weights), weight_snapshots))
    _store(weights, w)


@torch.no_grad()
def checksum(tensors: Tensors) -> Tensor:
    for index, tensor in enumerate(tensors):
        if tensor.element_size() not in _INTEGER_OF_WIDTH:
            raise ValueError(
                f"ssd_allreduce::checksum: tensors[{index}] has dtype {_dtype_name(tensor.dtype)} "
                f"with elements of {tensor.element_size()} bytes; 1, 2, 4 and 8 are allowed"
            )
    sums = [_sum_of_mixed_words(t.view(_INTEGER_OF_WIDTH[t.element_size()])) for t in tensors]
    return torch.stack([s.cpu() for s in sums]) if sums else torch.empty(0, dtype=torch.int64)


def _sum_of_mixed_words(bits: Tensor) -> Tensor:
    """The sum of ``w * (w ^ 0x9E3779B9)`` over unsigned words ``w`` of at most 32 bits.

    A plain sum of words misses too much: scaling 256 doubles by 2^-16, as a gradient scaler does,
    leaves it as it was.
    """
    size = bits.element_size()
    words = (bits, bits >> 32) if size == 8 else (bits.long(),)
    mask = 2 ** (8 * min(size, 4)) - 1
    unsigned = [word & mask for word in words]
    return torch.stack([(word * (word ^ 0x9E3779B9)).sum() for word in unsigned]).sum()


def _to_compute(tensors: Tensors) -> list[Tensor]:
    """The tensors in their compute dtype: themselves where they have it, else copies."""
    return [t if t.dtype == compute_dtype(t.dtype) else t.float() for t in tensors]


def _store(destinations: Tensors, computed: Tensors) -> None:
    """Round ``computed`` into ``destinations`` where ``_to_compute`` had to copy."""
    for destination, value in zip(destinations, computed, strict=True):
        if value is not destination:
            destination.copy_(value)


def _accumulate(accumulators: Tensors, gradients: Tensors, accumulation: int) -> None:
    if accumulation == Accumulation.ADD:
        torch._foreach_add_(accumulators, gradients)
    elif accumulation == Accumulation.OVERWRITE:
        torch._foreach_copy_(accumulators, gradients)


class _Lists:
    """Compares an operation's lists of tensors with its first one; the tensors there lead."""

    def __init__(self, op: str, name: str, leading: Tensors) -> None:
        self._op = f"ssd_allreduce::{op}"
        self._name = name
        self._leading = leading
        for index, tensor in enumerate(leading):
            if tensor.dtype not in _PARAMETER_DTYPES:
                raise ValueError(
                    f"{self._op}: {name}[{index}] has dtype {_dtype_name(tensor.dtype)}; allowed "
                    "are float16, bfloat16, float32 and float64"
                )

    def parameters(self, name: str, tensors: Tensors, optional: bool = False) -> None:
        self._compare(name, tensors, [t.dtype for t in self._leading], optional)

    def state(self, name: str, tensors: Tensors, optional: bool = False) -> None:
        self._compare(name, tensors, [compute_dtype(t.dtype) for t in self._leading], optional)

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
                    f"{self._op}: {here} has dtype {_dtype_name(tensor.dtype)}; with {there} of "
                    f"{_dtype_name(leader.dtype)} it must be {_dtype_name(dtype)}"
                )
            if tensor.device != leader.device:
                raise ValueError(
                    f"{self._op}: {here} is on {tensor.device}, {there} is on {leader.device}; "
                    "they must be on the same device"
                )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _choice(op: str, name: str, value: int, choices: type[IntEnum]) -> int:
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(f"{choice.value} ({choice.name.lower()})" for choice in choices)
        raise ValueError(f"ssd_allreduce::{op}: {name} is {value}; allowed are {allowed}") from None


def _check_step_options(op: str, lrs: Sequence[float], *others: Sequence[float]) -> None:
    lengths = [len(lrs), *(len(other) for other in others)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"ssd_allreduce::{op}: lrs, momentum_factors, dampenings and weight_decays have "
            f"{lengths} entries; give one of each for every replayed step"
        )
