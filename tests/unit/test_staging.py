"""Tensors in memory that an engine does not read reach it through host memory, and nobody waits for it.

There is no such memory here: the engines of these tests claim not to read this machine's, and the devices are
told when to have made their copies.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import OrderedThreadRank, RecordingEngine, ThreadRank, on_ranks
from loops import equal, small_model, train, weights, wrap
from torch import Tensor

from ssd_allreduce import CommunicationError
from ssd_allreduce.communicators import Capabilities, ReduceOp
from ssd_allreduce.communicators.mpi import reads_cuda_memory
from ssd_allreduce.communicators.ordered import Ordered
from ssd_allreduce.communicators.staging import HostStage
from ssd_allreduce.communicators.through_host import ThroughHost

BUSY_SECONDS = 0.05


class BusyDevice:
    """A device that comes to the moments it is asked for only when it is let."""

    def __init__(self) -> None:
        self.busy = True
        self.awaited = 0

    def moment(self) -> SimpleNamespace:
        return SimpleNamespace(query=lambda: not self.busy)

    def beside(self, after: Iterable[Any] = ()) -> AbstractContextManager[object]:
        self.awaited += len(list(after))
        return nullcontext()

    def take_over(self, tensor: Tensor) -> None:
        return None


class BlindThreadRank(ThreadRank):
    """An engine that matches by name and reads no memory of the tests'."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("name", super().capabilities.dtypes, frozenset())


class BlindOrderedThreadRank(OrderedThreadRank):
    """The same, matching by order."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("order", super().capabilities.dtypes, frozenset(), threads=True)

    def open_channel(self, timeout: float) -> BlindOrderedThreadRank:
        self.channels.append(BlindOrderedThreadRank(self._world, self._rank, 1))
        return self.channels[-1]


class HostDrivenThreadRank(BlindOrderedThreadRank):
    """One that reads the memory, but does not wait for what the device has been given."""

    @property
    def capabilities(self) -> Capabilities:
        dtypes = frozenset({torch.float32, torch.float64})
        return Capabilities("order", dtypes, frozenset({"cpu"}), threads=True, waits_for_devices=False)

    def open_channel(self, timeout: float) -> HostDrivenThreadRank:
        self.channels.append(HostDrivenThreadRank(self._world, self._rank, 1))
        return self.channels[-1]


class BlindEngine(RecordingEngine):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("name", super().capabilities.dtypes, frozenset())


def ordered_on(engine: Any, device: BusyDevice) -> Ordered:
    ordered = Ordered(engine, 1 << 20, 10.0)
    ordered._stage = HostStage(lambda _: device)
    return ordered


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(1e-3)


def test_engine_that_matches_by_name_is_given_a_copy_once_it_has_been_made() -> None:
    device, engine = BusyDevice(), BlindEngine(2)
    through = ThroughHost(engine, HostStage(lambda _: device))
    tensor = torch.tensor([1.0, 2.0])
    handle = through.allreduce_async([tensor], "one", ReduceOp.SUM)
    time.sleep(BUSY_SECONDS)
    assert not through.poll(handle)
    assert engine.sent == []
    device.busy = False
    until(lambda: len(engine.sent) == 1)
    assert tensor.tolist() == [1.0, 2.0], "results are written where they are waited for"
    through.wait(handle, 10.0)
    assert tensor.tolist() == [2.0, 4.0]


def test_tensors_of_one_operation_stay_together() -> None:
    engine = BlindEngine(2)
    device = BusyDevice()
    device.busy = False
    through = ThroughHost(engine, HostStage(lambda _: device))
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    through.wait(through.allreduce_async(tensors, "group", ReduceOp.AVERAGE, 0.5, 4.0), 10.0)
    (sent,) = engine.sent
    assert (sent.name, sent.op, sent.prescale, sent.postscale) == ("group", ReduceOp.AVERAGE, 0.5, 4.0)
    assert sent.sizes == (3, 2)
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3, [2.0] * 2]


def test_tensors_that_the_engine_reads_are_not_copied() -> None:
    engine = RecordingEngine(2)
    through = ThroughHost(engine)
    tensor = torch.ones(3)
    handle = through.allreduce_async([tensor], "one", ReduceOp.SUM)
    assert tensor.tolist() == [2.0] * 3
    through.wait(handle, 1.0)


def test_failure_of_the_engine_in_the_thread_is_raised_in_the_users() -> None:
    device, engine = BusyDevice(), BlindEngine(2)
    engine.refuses = lambda name: True
    through = ThroughHost(engine, HostStage(lambda _: device))
    handle = through.allreduce_async([torch.ones(1)], "one", ReduceOp.SUM)
    device.busy = False
    with pytest.raises(CommunicationError, match="refuses one"):
        through.wait(handle, 10.0)


def test_copy_that_never_ends_is_a_timeout() -> None:
    through = ThroughHost(BlindEngine(2), HostStage(lambda _: BusyDevice()))
    handle = through.allreduce_async([torch.ones(1)], "one", ReduceOp.SUM)
    with pytest.raises(TimeoutError):
        through.wait(handle, 0.05)
    through.abort()


@pytest.mark.parametrize("engine", [BlindOrderedThreadRank, HostDrivenThreadRank])
def test_engine_that_matches_by_order_waits_for_the_device(engine: type[OrderedThreadRank]) -> None:
    def program(engine: OrderedThreadRank) -> tuple[list[str], list[float]]:
        device = BusyDevice()
        ordered = ordered_on(engine, device)
        tensors = [torch.full((2,), float(engine.rank + 1)) for _ in range(2)]
        ordered.announce([("a", 8), ("b", 8)])
        handles = [
            ordered.allreduce_async([tensor], name, ReduceOp.AVERAGE, 0.5, 2.0)
            for tensor, name in zip(tensors, "ab", strict=True)
        ]
        until(lambda: device.awaited == 2)
        time.sleep(BUSY_SECONDS)
        before = list(engine.channels[0].sent)
        device.busy = False
        # No call of ours sends it.
        until(lambda: len(engine.channels[0].sent) > len(before))
        for handle in handles:
            ordered.wait(handle, 10.0)
        return before, torch.cat(tensors).tolist()

    assert on_ranks(2, program, engine) == [(["header"], [1.5] * 4)] * 2


def test_half_precision_is_reduced_in_float32_on_the_way() -> None:
    def program(engine: BlindOrderedThreadRank) -> list[float]:
        device = BusyDevice()
        device.busy = False
        ordered = ordered_on(engine, device)
        tensor = torch.full((3,), 1.0 + engine.rank, dtype=torch.bfloat16)
        ordered.wait(ordered.allreduce_async([tensor], "a", ReduceOp.SUM), 10.0)
        return tensor.tolist()

    assert on_ranks(2, program, BlindOrderedThreadRank) == [[3.0] * 3] * 2


def test_host_buffer_serves_again_once_the_device_has_read_it() -> None:
    device = BusyDevice()
    stage = HostStage(lambda _: device)

    def send() -> int:
        tensor = torch.ones(4)
        after = {device: [moment] for device, moment in stage.moments([tensor]).items()}
        row = stage.take([tensor], torch.float32, after)
        row.bring_back()
        return row.row.data_ptr()

    first, second = send(), send()
    assert first != second, "the device still reads the first"
    device.busy = False
    assert {send(), send(), send()} <= {first, second}


@pytest.mark.parametrize("bucket_bytes", [0, 64, 1 << 20])
def test_training_by_order_through_host_memory_changes_no_bit(bucket_bytes: int) -> None:
    def program(engine: Any) -> list[Tensor]:
        model = small_model()
        optimizer = wrap(model, engine, delay_steps=3, overlap_steps=1, bucket_bytes=bucket_bytes)
        train(model, optimizer, 10, engine.rank)
        optimizer.flush()
        return weights(model)

    through_host, directly = (
        on_ranks(2, program, kind) for kind in (BlindOrderedThreadRank, OrderedThreadRank)
    )
    assert all(equal(one, other) for one, other in zip(through_host, directly, strict=True))


def test_training_by_name_through_host_memory_changes_no_bit() -> None:
    def program(engine: Any) -> list[Tensor]:
        blind = isinstance(engine, BlindThreadRank)
        model = small_model()
        optimizer = wrap(model, ThroughHost(engine) if blind else engine, delay_steps=3, overlap_steps=1)
        train(model, optimizer, 10, engine.rank)
        optimizer.flush()
        return weights(model)

    through_host, directly = (on_ranks(2, program, kind) for kind in (BlindThreadRank, ThreadRank))
    assert all(equal(one, other) for one, other in zip(through_host, directly, strict=True))


SAYS_YES = "int MPIX_Query_cuda_support(void) { return 1; }"


@pytest.mark.parametrize(
    ("version", "source", "reads"),
    [
        ("MPICH Version: 4.3.0", SAYS_YES, True),
        ("MPICH Version: 4.3.0", "int MPIX_Query_cuda_support(void) { return 0; }", False),
        ("MPICH Version: 4.3.0", "int something_else(void) { return 1; }", False),
        ("Open MPI v5.0.8, package: Open MPI", SAYS_YES, False),
    ],
    ids=["says yes", "says no", "does not say", "says yes of blocking operations only"],
)
def test_mpi_is_asked_whether_it_reads_cuda_memory(
    version: str, source: str, reads: bool, tmp_path: Path
) -> None:
    library = tmp_path / "mpi.so"
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=source, text=True, check=True)
    mpi = SimpleNamespace(__file__=str(library), Get_library_version=lambda: version)
    assert reads_cuda_memory(mpi) is reads


def test_thread_that_waited_for_the_device_ends() -> None:
    device, before = BusyDevice(), set(threading.enumerate())
    through = ThroughHost(BlindEngine(2), HostStage(lambda _: device))
    handle = through.allreduce_async([torch.ones(1)], "one", ReduceOp.SUM)
    (thread,) = set(threading.enumerate()) - before
    device.busy = False
    through.wait(handle, 10.0)
    thread.join(10.0)
    assert not thread.is_alive()
