"""Engines that read host memory only, with tensors on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import OrderedThreadRank, ThreadRank, on_ranks
from loops import inputs, small_model, wrap
from torch import Tensor

from ssd_allreduce.communicators import ReduceOp
from ssd_allreduce.communicators.ordered import Ordered
from ssd_allreduce.communicators.staging import HostStage
from ssd_allreduce.communicators.through_host import ThroughHost

CYCLES_OF_A_BUSY_STREAM = 200_000_000


def train(engine: Any, device: str) -> list[Tensor]:
    model = small_model(torch.float64).to(device)
    optimizer = wrap(model, engine, delay_steps=3, overlap_steps=1, warmup_steps=1)
    for step in range(10):
        optimizer.zero_grad()
        model(inputs(step, engine.rank, torch.float64).to(device)).square().mean().backward()
        optimizer.step()
    optimizer.flush()
    return [p.detach().cpu() for p in model.parameters()]


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
