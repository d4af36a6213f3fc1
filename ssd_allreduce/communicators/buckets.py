"""Operations that leave together: their tensors are copied into one buffer for each type and factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_allreduce.communicators.protocol import Capabilities, Communicator, Handle, ReduceOp
from ssd_allreduce.communicators.staging import Device, Event, HostStage, StagedRow, join, write_back
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
    """One allreduce as it was asked for.

    Attributes:
        moments: for each device, when its tensors hold what is to be reduced.
    """

    tensors: list[Tensor]
    op: ReduceOp
    prescale: float
    postscale: float
    moments: dict[torch.device, Event]
    bucket: Bucket = field(init=False)

    def factors(self, ranks: int) -> tuple[float, float]:
        """What values are multiplied by before and after their sum."""
        if self.op is ReduceOp.MAX:
            return 1.0, 1.0
        return self.prescale, self.postscale / ranks if self.op is ReduceOp.AVERAGE else self.postscale


@dataclass
class _Part:
    """Tensors of a bucket that travel as one: same type, device, operation and factors.

    Attributes:
        tensors: where the results go.
        buffer: what the engine reduces.
        kind: what they have in common.
        device: where the buffer is.
        prepared: when the buffer holds their values.
        staged: the copy in host memory that the buffer is, for tensors on other devices.
    """

    tensors: list[Tensor]
    buffer: Tensor
    kind: _Kind
    device: Device
    prepared: Event
    staged: StagedRow | None = None
    handle: Handle = None
    arrived: bool = False

    def may_leave(self, waits_for_devices: bool) -> bool:
        if self.staged is not None:
            return self.staged.ready
        return waits_for_devices or self.prepared.query()

    def write_results(self) -> None:
        if self.staged is not None:
            self.staged.bring_back(self.kind.postscale)
            return
        self.device.take_over(self.buffer)
        if self.kind.postscale != 1.0:
            self.buffer.mul_(self.kind.postscale)
        if self.buffer is not self.tensors[0]:
            write_back(self.buffer, self.tensors)


class Bucket:
    """Operations that leave together once all of them have been submitted.

    Args:
        names: of the operations, in the agreed order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._operations: dict[str, Operation] = {}
        self._parts: list[_Part] = []
        self._prepared = False
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

    def prepare(self, able: Capabilities, ranks: int, stage: HostStage) -> None:
        """Bring together what travels. All operations must have been submitted."""
        if self._prepared:
            return
        self._prepared = True
        operations = [self._operations[name] for name in self._names]
        after: dict[torch.device, list[Event]] = {}
        for operation in operations:
            for device, moment in operation.moments.items():
                after.setdefault(device, []).append(moment)
        for kind, tensors in _by_kind(operations, able, ranks).items():
            # Engines differ in whether they take nothing; all ranks leave it out alike.
            if any(tensor.numel() for tensor in tensors):
                self._parts.append(_make_part(tensors, kind, able, after, stage))

    def may_leave(self, able: Capabilities) -> bool:
        """Whether what was prepared holds its values, as far as the engine does not see to that."""
        return all(part.may_leave(able.waits_for_devices) for part in self._parts)

    def launch(self, channel: Communicator) -> None:
        """Hand everything to the engine. Collective."""
        self.launched = True
        for part in self._parts:
            op = ReduceOp.MAX if part.kind.largest else ReduceOp.SUM
            with part.device.beside():
                part.handle = channel.allreduce_async([part.buffer], self._names[0], op)

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
            part.write_results()
        self._parts = []
        self.finished = True


@dataclass(frozen=True)
class _Kind:
    dtype: torch.dtype
    device: torch.device
    largest: bool
    prescale: float
    postscale: float


def _by_kind(operations: Sequence[Operation], able: Capabilities, ranks: int) -> dict[_Kind, list[Tensor]]:
    """The flat tensors of all operations, by how they travel, in an order that all ranks share."""
    kinds: dict[_Kind, list[Tensor]] = {}
    for operation in operations:
        prescale, postscale = operation.factors(ranks)
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


def _make_part(
    tensors: list[Tensor],
    kind: _Kind,
    able: Capabilities,
    after: dict[torch.device, list[Event]],
    stage: HostStage,
) -> _Part:
    device = stage.device(kind.device)
    if any(tensor.device.type not in able.devices for tensor in tensors):
        staged = stage.take(tensors, kind.dtype, after, kind.prescale)
        return _Part(tensors, staged.row, kind, device, device.moment(), staged)
    with device.beside(after[kind.device]):
        in_place = len(tensors) == 1 and tensors[0].dtype == kind.dtype
        buffer = tensors[0] if in_place else join(tensors, kind.dtype)
        if kind.prescale != 1.0:
            buffer.mul_(kind.prescale)
        return _Part(tensors, buffer, kind, device, device.moment())
