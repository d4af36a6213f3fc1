"""``delay_steps="auto"`` on real ranks: all of them change the period at once, whoever is slow."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from launch_plan import WITHOUT_HOROVOD
from problems import perceptron, regression_loss
from ranks import hvd
from support import assert_equal_on_all_ranks, on_every_rank, wrap

pytestmark = [
    pytest.mark.ranks("mpirun", 2, 3),
    pytest.mark.ranks("horovodrun-gloo", 2),
    *WITHOUT_HOROVOD,
    pytest.mark.timeout(60),
]


def train(optimizer: Any, model: torch.nn.Module, steps: int, first: int = 0) -> list[tuple[int, int]]:
    periods = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        time.sleep(0.003 * hvd.rank())
        optimizer.step()
        stats = optimizer.stats()
        periods.append((stats.delay_steps, stats.overlap_steps))
    return periods


def make(**settings: Any) -> tuple[torch.nn.Module, Any]:
    model = perceptron()
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    names = model.named_parameters()
    return model, wrap(base, named_parameters=names, delay_steps="auto", **settings)


@pytest.mark.parametrize("issue", ["backward", "step"])
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_ranks_change_the_period_together(warmup_steps: int, issue: str) -> None:
    model, optimizer = make(warmup_steps=warmup_steps, issue=issue, retune_periods=2)
    periods = train(optimizer, model, 60)
    assert on_every_rank(periods) == [periods] * hvd.size()
    assert periods[warmup_steps] == (4, 2)
    assert all(2 <= k <= 16 and d <= k // 2 for k, d in periods)
    optimizer.flush()
    assert_equal_on_all_ranks(model.parameters())


def test_ranks_with_fewer_steps_measure_with_the_others() -> None:
    model, optimizer = make(retune_periods=1)
    for epoch in range(3):
        train(optimizer, model, 5 + 9 * hvd.rank(), first=50 * epoch)
        optimizer.flush()
        assert_equal_on_all_ranks(model.parameters())
        stats = optimizer.stats()
        assert len(set(on_every_rank((stats.delay_steps, stats.overlap_steps)))) == 1
