"""Clocks that tell how long work took where it was done: on the host, or on devices that follow behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Clock(Protocol):
    """Marks moments in the work of a rank.

    Attributes:
        spares_the_host: whether the work is done by something else than the host's processor.
    """

    spares_the_host: bool

    def mark(self) -> Any:
        """This moment: behind all work that was given so far. Does not wait for it."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to a later one. Waits until the later one has come to pass."""

    def settle(self) -> None:
        """Wait until all work that was given is done."""


class HostClock:
    """For what the host does itself: it is done when the call returns."""

    spares_the_host = False

    def mark(self) -> float:
        return time.monotonic()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def settle(self) -> None:
        return None


class CudaClock:
    """For CUDA devices, which are given work much faster than they do it.

    Args:
        devices: those that the work is shared among; the slowest counts.
    """

    spares_the_host = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)

    def mark(self) -> list[torch.cuda.Event]:
        events: list[torch.cuda.Event] = []
        for device in self._devices:
            event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events

    def seconds(self, begin: Sequence[torch.cuda.Event], end: Sequence[torch.cuda.Event]) -> float:
        longest = 0.0
        for first, last in zip(begin, end, strict=True):
            last.synchronize()
            milliseconds: float = first.elapsed_time(last)
            longest = max(longest, milliseconds / 1000.0)
        return longest

    def settle(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)


def clock_for(tensors: Sequence[Tensor]) -> Clock:
    """The clock of the devices that hold these tensors."""
    devices = [device for device in dict.fromkeys(t.device for t in tensors) if device.type == "cuda"]
    return CudaClock(devices) if devices else HostClock()
