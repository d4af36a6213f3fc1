"""Counts what a training hands to allreduce and how long it waits, for the demo to compare."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import ssd_allreduce as ssd


class Meter(Protocol):
    """One optimizer's communication on this rank, since the meter was made."""

    def allreduces(self) -> int:
        """How often each tensor was handed to allreduce."""

    def bytes_sent(self) -> int:
        """What was handed to allreduce, all tensors together."""

    def wait_seconds(self) -> float:
        """How long ``step()`` and ``flush()`` waited for communication."""


class HorovodMeter:
    """Horovod counts nothing, so two calls that its optimizer makes are wrapped."""

    def __init__(self, optimizer: Any) -> None:
        self._calls: Counter[str] = Counter()
        self._bytes = 0
        self._waited = 0.0
        import horovod.torch.optimizer as module

        self._allreduce = module.allreduce_async_
        module.allreduce_async_ = self._counted_allreduce
        self._synchronize = optimizer.synchronize
        optimizer.synchronize = self._timed_synchronize

    def _counted_allreduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._calls[kwargs["name"]] += 1
        self._bytes += tensor.numel() * tensor.element_size()
        return self._allreduce(tensor, *args, **kwargs)

    def _timed_synchronize(self) -> None:
        started = time.perf_counter()
        self._synchronize()
        self._waited += time.perf_counter() - started

    def allreduces(self) -> int:
        return max(self._calls.values(), default=0)

    def bytes_sent(self) -> int:
        return self._bytes

    def wait_seconds(self) -> float:
        return self._waited


class SsdMeter:
    """SSD-SGD's optimizer counts for itself."""

    def __init__(self, optimizer: ssd.DistributedOptimizer) -> None:
        self._optimizer = optimizer

    def allreduces(self) -> int:
        return self._optimizer.stats().allreduces

    def bytes_sent(self) -> int:
        return self._optimizer.stats().bytes_sent

    def wait_seconds(self) -> float:
        return self._optimizer.stats().wait_seconds


class Recorder:
    """Keeps nothing: what a training has that nobody compares."""

    def stepped(self, loss: float) -> None:
        pass

    def evaluated(self, test_loss: float, test_accuracy: float) -> None:
        pass

    def write(self, path: Path, seconds: float) -> None:
        pass


class MeteredRecorder(Recorder):
    """Keeps the curves, over steps and over megabytes, and the figures of the demo's table."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._train: list[tuple[float, float]] = []
        self._test: list[tuple[int, float, float, float]] = []

    def stepped(self, loss: float) -> None:
        self._train.append((self._megabytes(), loss))

    def evaluated(self, test_loss: float, test_accuracy: float) -> None:
        self._test.append((len(self._train), self._megabytes(), test_loss, test_accuracy))

    def _megabytes(self) -> float:
        return self._meter.bytes_sent() / 1e6

    def write(self, path: Path, seconds: float) -> None:
        megabytes, losses = zip(*self._train, strict=True)
        steps, test_megabytes, test_losses, accuracies = zip(*self._test, strict=True)
        record = {
            "figures": {
                "test_accuracy": accuracies[-1],
                "steps": len(self._train),
                "allreduces": self._meter.allreduces(),
                "megabytes": self._megabytes(),
                "wait_seconds": self._meter.wait_seconds(),
                "seconds": seconds,
            },
            "train": {"megabytes": megabytes, "loss": losses},
            "test": {
                "steps": steps,
                "megabytes": test_megabytes,
                "loss": test_losses,
                "accuracy": accuracies,
            },
        }
        path.write_text(json.dumps(record) + "\n")


def recorder_for(optimizer: torch.optim.Optimizer, *, enabled: bool) -> Recorder:
    if not enabled:
        return Recorder()
    if isinstance(optimizer, ssd.DistributedOptimizer):
        return MeteredRecorder(SsdMeter(optimizer))
    return MeteredRecorder(HorovodMeter(optimizer))
