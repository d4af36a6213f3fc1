"""What the engine asks of ``torch.distributed``, with one rank and stand-ins for GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ssd_allreduce.communicators import torch_distributed


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # What ends the process at its exit is not for the tests' own.
    monkeypatch.setattr(torch_distributed, "_leaving", object())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("backends", "devices"),
    [
        ("cpu:gloo,cuda:nccl", {"cpu", "cuda"}),
        ("cuda:nccl", {"cpu", "cuda"}),
        ("cpu:gloo,cuda:gloo", {"cpu"}),
    ],
)
def test_cuda_memory_is_handed_to_nccl_only_where_the_user_does_so(
    backends: str, devices: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert torch_distributed.TorchCommunicator().capabilities.devices == devices


@pytest.mark.usefixtures("_one_rank")
def test_opening_a_channel_is_bounded_and_its_operations_are_not() -> None:
    """They may be in flight while a rank evaluates; whoever waits for them has a limit of its own."""
    limits = []
    make: Any = dist.new_group

    def new_group(**options: Any) -> Any:
        limits.append(options["timeout"])
        return make(**options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        channel = torch_distributed.TorchCommunicator().open_channel(30.0)
    assert limits == [datetime.timedelta(seconds=30)]
    backend = channel._group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == datetime.timedelta(days=7)
    channel.close()
