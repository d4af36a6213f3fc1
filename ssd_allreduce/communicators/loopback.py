"""One process that stands for several equal ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_allreduce.communicators.protocol import Capabilities, Handle, ReduceOp

_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_numbers = itertools.count()


class Loopback:
    """Run the full machinery in one process as if ``size`` equal ranks took part.

    For tests and for measuring overhead: every allreduce returns what it would if all ranks had
    submitted the same values, at once and without a network.

    Args:
        size: number of ranks to stand for, at least 1.

    Raises:
        ValueError: ``size`` is not a positive integer.
    """

    def __init__(self, size: int) -> None:
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise ValueError(f"size={size!r} must be an integer of at least 1.")
        self._size = size
        # Not id(self), which a later object may be given as well.
        self._key = f"loopback-{next(_numbers)}"

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("name", _FLOATING, frozenset({"cpu", "cuda"}))

    @property
    def key(self) -> str:
        return self._key

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        factor = prescale * postscale
        if op is ReduceOp.SUM:
            factor *= self._size
        elif op is ReduceOp.MAX:
            factor = 1.0
        if factor != 1.0:
            for tensor in tensors:
                tensor.mul_(factor)
        return None

    def poll(self, handle: Handle) -> bool:
        return True

    def wait(self, handle: Handle, timeout: float) -> None:
        return None

    def broadcast(self, tensor: Tensor, root: int, name: str, timeout: float) -> None:
        return None

    def barrier(self, name: str, timeout: float) -> None:
        return None

    def abort(self) -> None:
        return None

    def close(self) -> None:
        return None
