"""Memory layouts: which tensors are one flat run of memory, and how to make such tensors.

An allreduce adds memory order to memory order. Two tensors may only be reduced (or put through one
fused pass) together when shapes and strides agree.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat_view(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as a contiguous one. Contiguous tensors are returned as given."""
    if tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised dense tensor in the layout of ``tensor`` where that is dense."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)


def zeros_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros in the layout of ``tensor``; see :func:`empty_like`."""
    return empty_like(tensor, dtype).zero_()


def matched(tensor: Tensor, layout: Tensor) -> Tensor:
    """``tensor`` itself if it is laid out like ``layout``, else a copy that is."""
    if tensor.stride() == layout.stride() and tensor.dtype == layout.dtype:
        return tensor
    return empty_like(layout).copy_(tensor)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parameters of ``dtype`` are computed on and their state is kept.

    float32 at least: sums of many half-precision gradients overflow or lose their low bits.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
