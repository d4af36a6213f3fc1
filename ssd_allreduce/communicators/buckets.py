"""Operations that leave together: their tensors are copied into one buffer for each type and factor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_allreduce.communicators.protocol import Capabilities, Communicator, Handle, ReduceOp
from ssd_allreduce.errors import UsageError


def only_tensor(tensors: Sequence[Tensor], op: ReduceOp, prescale: float, postscale: float) -> Tensor:
    """The tensor that an engine is given by a bucket.

    Raises:
        UsageError: someone else asks for what buckets do themselves.
    """
    if len(tensors) != 1 or op is ReduceOp.AVERAGE or (prescale, postscale) != (1.0, 1.0):
        raise UsageError(
            "An engine that matches by order reduces one tensor at a time, without factors. Allowed: one "
            "tensor, with ReduceOp.SUM or ReduceOp.MAX."
        )
    return tensors[0]


def divide(sequence: Sequence[tuple[str, int]], limit: int) -> list[list[str]]:
    """Neighbours put together as long as their bytes do not exceed the limit.

    Depends on nothing but its arguments: every rank must divide alike.
    """
    groups: list[list[str]] = []
    filled = 0
    for name, size in sequence:
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


@dataclass
class Operation:
    """One allreduce as it was asked for."""

    tensors: list[Tensor]
    op: ReduceOp
    prescale: float
    postscale: float
    bucket: Bucket = field(init=False)
    stream: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        if any(tensor.is_cuda for tensor in self.tensors):
            self.stream = torch.cuda.current_stream(self.tensors[0].device)

    def factors(self, ranks: int) -> tuple[float, float]:
        """What values are multiplied by before and after their sum."""
        if self.op is ReduceOp.MAX:
            return 1.0, 1.0
        return self.prescale, self.postscale / ranks if self.op is ReduceOp.AVERAGE else self.postscale


@dataclass
class _Part:
    """Tensors of a bucket that travel as one: same type, device, operation and factors."""

    tensors: list[Tensor]
    buffer: Tensor
    postscale: float
    handle: Handle = None
    arrived: bool = False

    @property
    def is_copied(self) -> bool:
        return self.buffer is not self.tensors[0]


class Bucket:
    """Operations that leave together once all of them have been submitted.

    Args:
        names: of the operations, in the agreed order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._operations: dict[str, Operation] = {}
        self._parts: list[_Part] = []
        self.launched = False
        self.finished = False

    @property
    def complete(self) -> bool:
        """Whether all operations have been submitted."""
        return len(self._operations) == len(self._names)

    @property
    def arrived(self) -> bool:
        """Whether all results were seen to have arrived."""
        return self.launched and all(part.arrived for part in self._parts)

    def add(self, name: str, operation: Operation) -> None:
        """Submit one of the operations."""
        operation.bucket = self
        self._operations[name] = operation

    def launch(self, channel: Communicator) -> None:
        """Hand everything to the engine. Collective."""
        self.launched = True
        operations = [self._operations[name] for name in self._names]
        with _on_stream_of(operations):
            for kind, tensors in _by_kind(operations, channel).items():
                buffer = _gather(tensors, kind)
                if buffer.numel() == 0:
                    # Engines differ in whether they take nothing; all ranks leave it out alike.
                    continue
                op = ReduceOp.MAX if kind.largest else ReduceOp.SUM
                handle = channel.allreduce_async([buffer], self._names[0], op)
                self._parts.append(_Part(tensors, buffer, kind.postscale, handle))

    def poll(self, channel: Communicator) -> bool:
        """Whether all results have arrived."""
        for part in self._parts:
            if not part.arrived:
                part.arrived = channel.poll(part.handle)
        return self.arrived

    def finish(self, channel: Communicator, timeout: float) -> None:
        """Write the results, which have arrived, into the operations' tensors."""
        for part in self._parts:
            channel.wait(part.handle, timeout)
            if part.postscale != 1.0:
                part.buffer.mul_(part.postscale)
            if part.is_copied:
                pieces = torch.split(part.buffer, [tensor.numel() for tensor in part.tensors])
                torch._foreach_copy_(part.tensors, list(pieces))
        self._parts = []
        self.finished = True


@dataclass(frozen=True)
class _Kind:
    dtype: torch.dtype
    device: torch.device
    largest: bool
    prescale: float
    postscale: float


def _by_kind(operations: Sequence[Operation], channel: Communicator) -> dict[_Kind, list[Tensor]]:
    """The flat tensors of all operations, by how they travel, in an order that all ranks share."""
    able = channel.capabilities
    kinds: dict[_Kind, list[Tensor]] = {}
    for operation in operations:
        prescale, postscale = operation.factors(channel.size)
        for tensor in operation.tensors:
            kind = _Kind(
                _travelling_dtype(tensor, able),
                tensor.device if tensor.device.type in able.devices else torch.device("cpu"),
                operation.op is ReduceOp.MAX,
                prescale,
                postscale,
            )
            # ``data``: an engine writes memory behind autograd's back.
            kinds.setdefault(kind, []).append(tensor.data.view(-1))
    return kinds


def _travelling_dtype(tensor: Tensor, able: Capabilities) -> torch.dtype:
    """The tensor's own type, or float32, which holds every value of the half-precision types."""
    return tensor.dtype if tensor.dtype in able.dtypes else torch.float32


def _gather(tensors: list[Tensor], kind: _Kind) -> Tensor:
    """One tensor that travels: the only one itself where it can, else a copy of all."""
    first = tensors[0]
    if len(tensors) == 1 and (first.dtype, first.device) == (kind.dtype, kind.device):
        buffer = first
    else:
        buffer = torch.cat([tensor.to(kind.device, kind.dtype) for tensor in tensors])
    if kind.prescale != 1.0:
        buffer.mul_(kind.prescale)
    return buffer


@contextlib.contextmanager
def _on_stream_of(operations: Sequence[Operation]) -> Iterator[None]:
    """Whichever thread launches, it continues the stream on which the tensors were computed."""
    stream = next((operation.stream for operation in operations if operation.stream is not None), None)
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
