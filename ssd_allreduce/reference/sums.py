"""Sums of gradients and of their squares, and sums over bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_allreduce.reference.lists import Accumulation, Lists, Tensors, accumulate, dtype_name, to_compute

_INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def accumulate_(
    accumulators: Tensors, gradients: Tensors, overwrite: bool, found_inf: Tensor | None = None
) -> None:
    lists = Lists("accumulate_", "gradients", gradients)
    lists.state("accumulators", accumulators)
    if gradients and not lists.is_closed(found_inf):
        accumulation = Accumulation.OVERWRITE if overwrite else Accumulation.ADD
        accumulate(accumulators, to_compute(gradients), accumulation)


@torch.no_grad()
def accumulate_squares_(
    squares: Tensors, gradients: Tensors, overwrite: bool, found_inf: Tensor | None = None
) -> None:
    lists = Lists("accumulate_squares_", "gradients", gradients)
    lists.state("squares", squares)
    if gradients and not lists.is_closed(found_inf):
        accumulation = Accumulation.OVERWRITE if overwrite else Accumulation.ADD
        g = to_compute(gradients)
        accumulate(squares, torch._foreach_mul(g, g), accumulation)


@torch.no_grad()
def checksum(tensors: Tensors) -> Tensor:
    for index, tensor in enumerate(tensors):
        if tensor.element_size() not in _INTEGER_OF_WIDTH:
            raise ValueError(
                f"ssd_allreduce::checksum: tensors[{index}] has dtype {dtype_name(tensor.dtype)} "
                f"with elements of {tensor.element_size()} bytes; 1, 2, 4 and 8 are allowed"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"ssd_allreduce::checksum: tensors[{index}] is on {tensor.device}, tensors[0] is on "
                f"{tensors[0].device}; all tensors of one call must be on the same device"
            )
    sums = [_sum_of_mixed_words(t.view(_INTEGER_OF_WIDTH[t.element_size()])) for t in tensors]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


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
