"""What the optimizer needs of a communication engine.

An engine is an object with the methods of :class:`Communicator`. It never decides *when* something is
sent; it only sends.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor


class ReduceOp(enum.Enum):
    """How an allreduce combines the ranks' values."""

    SUM = "sum"
    AVERAGE = "average"
    MAX = "max"


Handle: TypeAlias = Any
"""Whatever an engine returns for an operation in flight; opaque to everyone else."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do.

    Attributes:
        matches_by: ``"name"`` when ranks may submit tensors in any order, ``"order"`` when the n-th
            operation of each rank belongs together.
        dtypes: element types that it reduces as they are.
        devices: types of the devices whose memory it reads and writes.
        polled_every: seconds after which operations in flight must be polled again to make progress;
            None where they progress by themselves.
        threads: whether any thread may call it, while the user's thread calls the same library.
        waits_for_devices: whether an operation on device memory waits by itself for what the current
            stream has been given. If not, it is submitted only once the memory holds its values.
    """

    matches_by: Literal["name", "order"]
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str]
    polled_every: float | None = None
    threads: bool = False
    waits_for_devices: bool = True


@runtime_checkable
class Communicator(Protocol):
    """A communication engine. All collective methods need every rank of :attr:`size`."""

    @property
    def rank(self) -> int:
        """Rank of this process, ``0 <= rank < size``."""

    @property
    def size(self) -> int:
        """World size: number of ranks that take part."""

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""

    @property
    def key(self) -> str:
        """Equal for engines whose operation names could collide (the same set of processes)."""

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        """Start reducing contiguous tensors in place, together as one operation.

        Collective. The tensors must stay alive and untouched until the handle is done.
        """

    def poll(self, handle: Handle) -> bool:
        """Whether the operation is done, without waiting. Rank-local."""

    def wait(self, handle: Handle, timeout: float) -> None:
        """Return when the operation is done.

        Raises:
            TimeoutError: it was not done within ``timeout`` seconds.
            CommunicationError: the engine failed.
        """

    def broadcast(self, tensor: Tensor, root: int, name: str, timeout: float) -> None:
        """Overwrite the tensor with root's. Collective."""

    def barrier(self, name: str, timeout: float) -> None:
        """Return when every rank has called it. Collective."""

    def abort(self) -> None:
        """End the engine on a failure so that ranks that wait for this one fail too. Never hangs."""

    def close(self) -> None:
        """Release what this object holds; the engine itself stays up for its other users."""


@runtime_checkable
class OrderMatching(Communicator, Protocol):
    """An engine whose ranks must submit their operations in one order (``matches_by="order"``).

    It need not see to that order itself, nor to scaling, averages, or types and devices that it lacks:
    it is only ever given one tensor at a time, of a type and on a device that it names, to be summed
    or for the maximum.
    """

    def open_channel(self, timeout: float) -> Communicator:
        """An engine of the same ranks whose operations match among themselves alone. Collective.

        Each optimizer opens one at its first step, so that optimizers and the user's own collectives
        never mix.

        Raises:
            TimeoutError: not all ranks called it within ``timeout`` seconds.
            CommunicationError: the engine failed.
        """


_FIRST_SLEEP = 50e-6
_LONGEST_SLEEP = 1e-3


def wait_until(done: Callable[[], bool], timeout: float) -> None:
    """Poll with short sleeps, which leave the processor to the computation, until done.

    Raises:
        TimeoutError: not done within ``timeout`` seconds.
    """
    if done():
        return
    deadline = time.monotonic() + timeout
    sleep = _FIRST_SLEEP
    while not done():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not done within {timeout} seconds")
        time.sleep(sleep)
        sleep = min(2 * sleep, _LONGEST_SLEEP)
