"""What the tests inside the ranks share: small problems, a counting engine, comparisons over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from ranks import ENGINE, hvd
from torch import Tensor

import ssd_allreduce as ssd
from ssd_allreduce.communicators import Handle, HorovodCommunicator, ReduceOp
from ssd_allreduce.communicators.ordered import Ordered

BUCKET_BYTES = 64
"""So small that the tensors of one sync event fill several buckets."""
TIMEOUT = 30.0
"""Seconds that one wait may last: far more than needed, and less than a test may take."""


class HorovodUnderTest(HorovodCommunicator):
    """The engine, where that is Horovod."""


class OrderedUnderTest(Ordered):
    """The engine, where it is one that matches by order."""

    def __init__(self) -> None:
        super().__init__(hvd.communicator, BUCKET_BYTES, TIMEOUT)


EngineUnderTest: Any = HorovodUnderTest if ENGINE == "horovod" else OrderedUnderTest


class RecordingCommunicator(EngineUnderTest):  # type: ignore[misc]
    """The engine under test, and a list of the names of everything handed to it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.names: list[str] = []

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        self.names.append(name)
        return super().allreduce_async(tensors, name, op, prescale, postscale)

    def take_names(self) -> list[str]:
        """The names since the last call, without the optimizer's prefix."""
        taken, self.names = self.names, []
        return [name.split(".", 2)[2] for name in taken]


def is_gradient(name: str) -> bool:
    """Whether an operation carries gradients, and not what ranks tell each other beside them."""
    return name.endswith((".gradient", ".accumulated"))


def on_every_rank(value: Any) -> list[Any]:
    """What each rank passed, in the order of ranks. Collective."""
    # By default Horovod names the operation after the type, which may differ between ranks.
    gathered: list[Any] = hvd.allgather_object(value, name="on_every_rank")
    return gathered


def bits(tensors: Iterable[Tensor]) -> list[bytes]:
    """The tensors' exact contents."""
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def assert_equal_on_all_ranks(tensors: Iterable[Tensor]) -> None:
    """Bit for bit. Collective."""
    mine = bits(tensors)
    for rank, theirs in enumerate(on_every_rank(mine)):
        assert theirs == mine, f"rank {hvd.rank()} and rank {rank} differ"


def wrap(optimizer: torch.optim.Optimizer, **options: Any) -> ssd.DistributedOptimizer:
    """The optimizer under test, with waits that end before the test's time limit."""
    return ssd.DistributedOptimizer(optimizer, **{"timeout": TIMEOUT, **options})
