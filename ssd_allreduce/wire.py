"""How gradients travel: which reduction, scaled and compressed how, which tensors together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce.communicators.protocol import ReduceOp


class NoCompression:
    """Tensors travel as they are. The interface is that of Horovod's compressors."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        """The tensor itself."""
        return tensor


@dataclass(frozen=True)
class WireFormat:
    """How gradients travel.

    Attributes:
        op: ``AVERAGE`` or ``SUM``, what the user wants gradients to be over the ranks.
        predivide: part of the averaging that is done before the sum.
        compression: object with ``compress`` and ``decompress``.
        grouped: whether tensors are reduced in groups chosen by the user.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    predivide: float = 1.0
    compression: Any = NoCompression
    grouped: bool = False

    @property
    def factors(self) -> tuple[float, float]:
        """Pre- and postscale factors, as plain Horovod passes them."""
        # Horovod leaves the predivide factor out where tensors are grouped.
        if self.op is not ReduceOp.AVERAGE or self.grouped:
            return 1.0, 1.0
        return 1.0 / self.predivide, self.predivide

    @property
    def compresses(self) -> bool:
        """Whether what travels differs from what was given."""
        probe = torch.zeros(1)
        return self.compression.compress(probe)[0] is not probe

    def describe(self) -> list[tuple[str, str]]:
        """Name and value of every option on which ranks must agree."""
        name = getattr(self.compression, "__name__", type(self.compression).__name__)
        return [
            ("op", self.op.value),
            ("gradient_predivide_factor", repr(self.predivide)),
            ("compression", "NoneCompressor" if name == "NoCompression" else name),
        ]
