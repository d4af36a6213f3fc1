"""Hooks fire in an order of their own on each rank, and like is added to like all the same."""

from __future__ import annotations

import random

import pytest
import torch
from launch_plan import WITHOUT_HOROVOD
from ranks import hvd
from support import assert_equal_on_all_ranks, on_every_rank, wrap

pytestmark = [
    pytest.mark.ranks("mpirun", 2),
    *WITHOUT_HOROVOD,
    pytest.mark.ranks("mpirun-mpi4py", 3),
    pytest.mark.ranks("torchrun", 3),
]

LAYERS, STEPS, RATE = 9, 18, 0.125


def train(order_of: random.Random, layers: torch.nn.ParameterList, **settings: object) -> list[list[int]]:
    """Layer i has the gradient (rank + 1) (i + 1). Returns the order of the layers in each step."""
    named = [(f"layer{index}", layer) for index, layer in enumerate(layers)]
    base = torch.optim.SGD(layers.parameters(), lr=RATE)
    optimizer = wrap(base, named_parameters=named, glu="none", **settings)
    orders = [order_of.sample(range(LAYERS), LAYERS) for _ in range(STEPS)]
    for order in orders:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for index in order:
            loss = loss + (hvd.rank() + 1) * (index + 1) * layers[index].sum()
        loss.backward()
        optimizer.step()
    optimizer.flush()
    return orders


@pytest.mark.parametrize("bucket_bytes", [0, 64, 1 << 20])
@pytest.mark.parametrize(("delay_steps", "overlap_steps"), [(1, 0), (4, 2)])
def test_any_order_of_hooks_gives_the_mean(delay_steps: int, overlap_steps: int, bucket_bytes: int) -> None:
    layers = torch.nn.ParameterList([torch.zeros(5) for _ in range(LAYERS)])
    orders = train(
        random.Random(hvd.rank()),
        layers,
        delay_steps=delay_steps,
        overlap_steps=overlap_steps,
        warmup_steps=3,
        bucket_bytes=bucket_bytes,
    )

    assert len({str(theirs) for theirs in on_every_rank(orders)}) == hvd.size(), "nothing was shuffled"
    mean = sum(rank + 1 for rank in range(hvd.size())) / hvd.size()
    for index, layer in enumerate(layers):
        assert layer.tolist() == pytest.approx([-RATE * STEPS * mean * (index + 1)] * 5, rel=1e-5)
    assert_equal_on_all_ranks(layers.parameters())


def test_size_of_buckets_does_not_change_a_bit_between_ranks() -> None:
    """Sums whose rounding depends on the order of the ranks, which buckets may change: for all alike."""
    for bucket_bytes in (0, 100, 1 << 20):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(7, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3))
        optimizer = wrap(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            named_parameters=model.named_parameters(),
            delay_steps=2,
            bucket_bytes=bucket_bytes,
        )
        torch.manual_seed(2 + hvd.rank())
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(4, 7)).square().mean().backward()
            optimizer.step()
        optimizer.flush()
        assert_equal_on_all_ranks(model.parameters())


def test_optimizers_that_take_turns_and_share_a_backward() -> None:
    generator, critic = (torch.nn.ParameterList([torch.zeros(3) for _ in range(LAYERS)]) for _ in range(2))
    optimizers = [
        wrap(
            torch.optim.SGD(model.parameters(), lr=RATE),
            named_parameters=[(f"layer{index}", layer) for index, layer in enumerate(model)],
            glu="none",
            delay_steps=delay_steps,
        )
        for model, delay_steps in ((generator, 2), (critic, 3))
    ]
    shuffled = random.Random(hvd.rank())
    for _ in range(12):
        terms = [
            (hvd.rank() + 1) * (index + 1) * layer.sum()
            for model in (generator, critic)
            for index, layer in enumerate(model)
        ]
        shuffled.shuffle(terms)
        sum(terms).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.flush()

    mean = sum(rank + 1 for rank in range(hvd.size())) / hvd.size()
    for model in (generator, critic):
        for index, layer in enumerate(model):
            assert layer.tolist() == pytest.approx([-RATE * 12 * mean * (index + 1)] * 3, rel=1e-5)
