"""Tensors on a GPU, with engines that read host memory only, and with such that read the GPU's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import OrderedThreadRank, ThreadRank, on_ranks
from loops import inputs, small_model, wrap
from torch import Tensor

from ssd_allreduce.communicators import Capabilities, ReduceOp
from ssd_allreduce.communicators.ordered import Ordered
from ssd_allreduce.communicators.staging import HostStage
from ssd_allreduce.communicators.through_host import ThroughHost

CYCLES_OF_A_BUSY_STREAM = 200_000_000


def train(engine: Any, device: str, **options: Any) -> list[Tensor]:
    model = small_model(torch.float64).to(device)
    optimizer = wrap(model, engine, delay_steps=3, overlap_steps=1, warmup_steps=1, **options)
    for step in range(10):
        optimizer.zero_grad()
        model(inputs(step, engine.rank, torch.float64).to(device)).square().mean().backward()
        optimizer.step()
    optimizer.flush()
    return [p.detach().cpu() for p in model.parameters()]


class HostDrivenRank(OrderedThreadRank):
    """Reduces in the GPU's memory, at once: whoever calls it has seen to the memory holding its values."""

    @property
    def capabilities(self) -> Capabilities:
        able = super().capabilities
        return Capabilities(
            "order", able.dtypes, able.devices | {"cuda"}, threads=True, waits_for_devices=False
        )

    def open_channel(self, timeout: float) -> OrderedThreadRank:
        self._opened += 1
        self.channels.append(type(self)(self._world, self._rank, self._opened))
        return self.channels[-1]

    def allreduce_async(self, *arguments: Any, **options: Any) -> Any:
        handle = super().allreduce_async(*arguments, **options)
        # The rank that came last has reduced for all, on its own stream.
        torch.cuda.synchronize()
        return handle


class StreamDrivenRank(HostDrivenRank):
    """The same, which waits for what its caller's stream has been given."""

    @property
    def capabilities(self) -> Capabilities:
        able = super().capabilities
        return Capabilities("order", able.dtypes, able.devices, threads=True)

    def allreduce_async(self, *arguments: Any, **options: Any) -> Any:
        torch.cuda.current_stream().synchronize()
        return super().allreduce_async(*arguments, **options)


@pytest.mark.parametrize("bucket_bytes", [0, 64, 1 << 20])
@pytest.mark.parametrize("engine", [HostDrivenRank, StreamDrivenRank])
def test_training_by_buckets_on_the_gpu_is_that_on_the_cpu(
    engine: type[ThreadRank], bucket_bytes: int
) -> None:
    on_gpu = on_ranks(2, lambda rank: train(rank, "cuda", bucket_bytes=bucket_bytes), engine)
    on_cpu = on_ranks(2, lambda rank: train(rank, "cpu"), OrderedThreadRank)
    for ours, expected in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without NCCL")
def test_nccl_is_handed_buckets_in_the_gpus_memory() -> None:
    """In a process of its own, whose exit takes torch.distributed down."""
    done = subprocess.run([sys.executable, "-c", THROUGH_NCCL], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[2.0] [6.0]", done.stderr


THROUGH_NCCL = """
import torch, torch.distributed as dist
from ssd_allreduce.communicators import ReduceOp
from ssd_allreduce.communicators.ordered import Ordered
from ssd_allreduce.communicators.torch_distributed import TorchCommunicator

dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
engine = TorchCommunicator()
assert "cuda" in engine.capabilities.devices
ordered = Ordered(engine, 1 << 20, 60.0)
tensors = [torch.full((1 << 16,), float(value), device="cuda") for value in (1, 3)]
ordered.announce([("one", 1 << 18), ("two", 1 << 18)])
handles = [
    ordered.allreduce_async([tensor], name, ReduceOp.SUM, 0.5, 4.0)
    for tensor, name in zip(tensors, ("one", "two"))
]
for handle in handles:
    ordered.wait(handle, 60.0)
print(*(tensor.unique().tolist() for tensor in tensors))
"""


@pytest.mark.parametrize("engine", [ThreadRank, OrderedThreadRank])
def test_training_through_host_memory_is_that_on_the_cpu(engine: type[ThreadRank]) -> None:
    on_gpu = on_ranks(2, lambda rank: train(rank, "cuda"), engine)
    on_cpu = on_ranks(2, lambda rank: train(rank, "cpu"), engine)
    for ours, expected in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [ThreadRank, OrderedThreadRank])
def test_handing_over_waits_for_no_stream(kind: type[ThreadRank]) -> None:
    """What the device is busy with now is waited for by the copy, and by nobody else."""

    def program(engine: Any) -> bool:
        through = ThroughHost(engine) if kind is ThreadRank else Ordered(engine, 1 << 20, 10.0)
        tensor = torch.ones(1 << 16, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES_OF_A_BUSY_STREAM)
        tensor.add_(1.0)
        busy = torch.cuda.Event()
        busy.record()
        handle = through.allreduce_async([tensor], "one", ReduceOp.SUM)
        was_busy = not busy.query()
        through.wait(handle, 10.0)
        assert tensor.unique().tolist() == [4.0]
        return was_busy

    assert on_ranks(2, program, kind) == [True, True]


def test_host_buffers_are_pinned() -> None:
    stage = HostStage()
    tensor = torch.ones(5, device="cuda")
    after = {device: [moment] for device, moment in stage.moments([tensor]).items()}
    row = stage.take([tensor], torch.float32, after)
    assert row.row.is_pinned()
