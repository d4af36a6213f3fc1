"""Tensors in device memory on their way to an engine, beside the stream that computes.

What is prepared or copied for an engine is done on a stream of its own, once the device has come to the
moment at which the tensors were handed over, and not to whatever it has been given since. The stream that
computes waits for none of it before the results are brought back. Engines that cannot read the device's
memory get a copy in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A moment in the work that a device has been given."""

    def query(self) -> bool:
        """Whether the device has come to it. Does not wait."""


class Device(Protocol):
    """What staging needs of one device."""

    def moment(self) -> Event:
        """The moment up to which the current stream has been given work."""

    def beside(self, after: Iterable[Event] = ()) -> AbstractContextManager[object]:
        """Work inside is done beside the streams that compute, once these moments have passed."""

    def take_over(self, tensor: Tensor) -> None:
        """The current stream goes on with a tensor that was made beside it."""


class Host:
    """Host memory, which has no streams: everything is done at once."""

    class Past:
        """A moment that has passed."""

        def query(self) -> bool:
            return True

    def moment(self) -> Event:
        return self.Past()

    def beside(self, after: Iterable[Event] = ()) -> AbstractContextManager[object]:
        return nullcontext()

    def take_over(self, tensor: Tensor) -> None:
        return None


class Cuda:
    """A CUDA device, with a stream beside those that compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def moment(self) -> Event:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def beside(self, after: Iterable[Event] = ()) -> Iterator[None]:
        for event in after:
            assert isinstance(event, torch.cuda.Event)
            self._stream.wait_event(event)
        # The device as well: leaving a stream in a thread that has used no other device would make that
        # thread start the first one, and take some of its memory.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def take_over(self, tensor: Tensor) -> None:
        # Its memory belongs to the other stream, which would give it away again without waiting.
        tensor.record_stream(torch.cuda.current_stream(self._device))


def device_of(device: torch.device) -> Device:
    """How work is given to a device."""
    return Cuda(device) if device.type == "cuda" else Host()


def join(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The elements of flat tensors in a row, in another type."""
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    return torch.cat([tensor.to(dtype) for tensor in tensors])


def write_back(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the pieces of a row into flat tensors."""
    torch._foreach_copy_(list(tensors), list(torch.split(row, [tensor.numel() for tensor in tensors])))


@dataclass
class _HostBuffer:
    memory: Tensor
    last_reads: list[Event] = field(default_factory=list)

    @property
    def free(self) -> bool:
        return all(event.query() for event in self.last_reads)


@dataclass(frozen=True)
class _Run:
    """Neighbours on one device, and the part of the row that is theirs."""

    device: Device
    tensors: list[Tensor]
    row: Tensor


class StagedRow:
    """Tensors in a row in host memory, for an engine to reduce."""

    def __init__(self, stage: HostStage, buffer: _HostBuffer, runs: list[_Run], copies: list[Event]) -> None:
        self._stage = stage
        self._buffer = buffer
        self._runs = runs
        self._copies = copies

    @property
    def row(self) -> Tensor:
        """The elements; the tensors' values once :attr:`ready`."""
        return self._buffer.memory

    @property
    def ready(self) -> bool:
        """Whether the row holds the tensors' values. Does not wait."""
        self._copies = [copy for copy in self._copies if not copy.query()]
        return not self._copies

    def bring_back(self, scale: float = 1.0) -> None:
        """Begin to write the row, multiplied, into the tensors, on the current stream."""
        self._buffer.last_reads = []
        for run in self._runs:
            row = run.row.to(run.tensors[0].device, non_blocking=True)
            self._buffer.last_reads.append(run.device.moment())
            write_back(row if scale == 1.0 else row.mul_(scale), run.tensors)
        self._stage.give_back(self._buffer)


class HostStage:
    """The host buffers of one channel. Each serves again once the device has read it.

    Pinned where there is CUDA. What is sent once a period has two: the one in flight, and the one that the
    device may still be reading.

    Args:
        make_device: how work is given to a device.
    """

    def __init__(self, make_device: Callable[[torch.device], Device] = device_of) -> None:
        self._make_device = make_device
        self._devices: dict[torch.device, Device] = {}
        self._buffers: dict[tuple[int, torch.dtype], list[_HostBuffer]] = {}

    def device(self, device: torch.device) -> Device:
        """How work is given to a device."""
        if device not in self._devices:
            self._devices[device] = self._make_device(device)
        return self._devices[device]

    def moments(self, tensors: Sequence[Tensor]) -> dict[torch.device, Event]:
        """For each device of the tensors, the moment up to which its current stream has been given work."""
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        return {device: self.device(device).moment() for device in devices}

    def take(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        after: Mapping[torch.device, Iterable[Event]],
        scale: float = 1.0,
    ) -> StagedRow:
        """Begin to copy tensors into a row.

        Args:
            tensors: flat, on any devices. To be kept, and not changed, until they are brought back.
            dtype: of the row.
            after: for each device, the moments after which the tensors hold their values.
            scale: factor on the values.
        """
        buffer = self._free_buffer(sum(tensor.numel() for tensor in tensors), dtype)
        runs: list[_Run] = []
        copies: list[Event] = []
        for where, neighbours, row in _runs(tensors, buffer.memory):
            device = self.device(where)
            with device.beside(after[where]):
                joined = join(neighbours, dtype)
                row.copy_(joined if scale == 1.0 else joined * scale, non_blocking=True)
                copies.append(device.moment())
            runs.append(_Run(device, neighbours, row))
        return StagedRow(self, buffer, runs, copies)

    def give_back(self, buffer: _HostBuffer) -> None:
        """Let a buffer serve again."""
        self._buffers.setdefault((buffer.memory.numel(), buffer.memory.dtype), []).append(buffer)

    def _free_buffer(self, numel: int, dtype: torch.dtype) -> _HostBuffer:
        known = self._buffers.get((numel, dtype), [])
        for position, buffer in enumerate(known):
            if buffer.free:
                return known.pop(position)
        return _HostBuffer(torch.empty(numel, dtype=dtype, pin_memory=torch.cuda.is_available()))


def _runs(tensors: Sequence[Tensor], row: Tensor) -> Iterator[tuple[torch.device, list[Tensor], Tensor]]:
    """Neighbours on the same device, and their part of the row."""
    begin = 0
    for device, group in groupby(tensors, key=lambda tensor: tensor.device):
        neighbours = list(group)
        end = begin + sum(tensor.numel() for tensor in neighbours)
        yield device, neighbours, row[begin:end]
        begin = end
