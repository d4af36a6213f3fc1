"""``max_grad_norm`` and ``average_buffers``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import flat, generator, gradient_of, perceptron, regression_loss
from ranks import hvd
from support import assert_equal_on_all_ranks, on_every_rank, wrap
from torch import Tensor, nn
from training import STEPS, Training, simulate

pytestmark = [pytest.mark.ranks("mpirun", 2, 3)]

NORM = 0.3


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)


def clipped(gradient: Tensor) -> Tensor:
    return gradient * min(1.0, NORM / (gradient.norm().item() + 1e-6))


# -- max_grad_norm -------------------------------------------------------------------------------


def test_warmup_clips_the_global_mean_as_horovods_recipe() -> None:
    plain_model, model = perceptron(), perceptron()
    names = {"named_parameters": plain_model.named_parameters()}
    plain = hvd.DistributedOptimizer(torch.optim.SGD(plain_model.parameters(), lr=0.1, momentum=0.9), **names)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(base, named_parameters=model.named_parameters(), delay_steps=1, max_grad_norm=NORM)
    for step in range(STEPS):
        plain.zero_grad()
        regression_loss(plain_model, hvd.rank(), step).backward()
        plain.synchronize()
        clip(plain_model)
        with plain.skip_synchronize():
            plain.step()
        optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        for mine, expected in zip(model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


def test_delay_steps_clip_the_local_gradient_and_completions_the_mean() -> None:
    """One period of plain SGD, by hand."""
    model = perceptron()
    start = flat(model.parameters())
    lr, k = 0.1, 3
    base = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = wrap(
        base,
        named_parameters=model.named_parameters(),
        delay_steps=k,
        overlap_steps=0,
        max_grad_norm=NORM,
    )
    local = torch.from_numpy(start)
    gradients = []
    raw_norms = []
    for step in range(k):
        gradient = gradient_of(perceptron(), regression_loss)
        raw = torch.from_numpy(gradient(hvd.rank(), step, local.numpy()))
        raw_norms.append(raw.norm().item())
        gradients.append(clipped(raw))
        local = local - lr * gradients[-1]
        optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        if step < k - 1:
            mine = torch.from_numpy(flat(model.parameters()))
            torch.testing.assert_close(mine, local, rtol=1e-9, atol=1e-12)
    assert max(raw_norms) > NORM, "the problem must be one in which clipping does something"
    everyone = torch.stack([torch.stack(g) for g in on_every_rank(gradients)])
    mean = clipped(everyone.mean(dim=(0, 1)))
    expected = torch.from_numpy(start) - k * lr * mean
    torch.testing.assert_close(torch.from_numpy(flat(model.parameters())), expected, rtol=1e-9, atol=1e-12)


def test_a_norm_that_is_never_reached_changes_nothing() -> None:
    training = Training(max_grad_norm=1e9).train()
    training.assert_follows(simulate())


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "1"])
def test_impossible_norms_are_refused(value: Any) -> None:
    model = perceptron()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((ValueError, TypeError), match="max_grad_norm="):
        wrap(base, named_parameters=model.named_parameters(), delay_steps=2, max_grad_norm=value)


# -- average_buffers -----------------------------------------------------------------------------


def with_batch_norm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [b.clone() for b in model.buffers() if b.is_floating_point()]


def batch(step: int) -> Tensor:
    shift = 3.0 * hvd.rank()
    return torch.randn(8, 4, generator=generator(hvd.rank(), step), dtype=torch.float64) + shift


def make(average_buffers: str, **settings: Any) -> tuple[nn.Module, Any]:
    model = with_batch_norm()
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options = {"delay_steps": 4, "overlap_steps": 2, "warmup_steps": 2, **settings}
    names = {"named_parameters": model.named_parameters()}
    return model, wrap(base, **names, **options, average_buffers=average_buffers, model=model)


def train_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(batch(step)).square().mean().backward()
    optimizer.step()


def mean_over_ranks(buffers: list[Tensor]) -> list[Tensor]:
    return [torch.stack(column).mean(0) for column in zip(*on_every_rank(buffers), strict=True)]


@pytest.mark.parametrize("average_buffers", ["sync", "flush"])
def test_flush_leaves_the_mean_on_all_ranks(average_buffers: str) -> None:
    model, optimizer = make(average_buffers)
    for step in range(9):
        train_step(model, optimizer, step)
    optimizer.flush()
    assert_equal_on_all_ranks(buffers_of(model))


def test_flush_averages_what_each_rank_has_seen() -> None:
    model, optimizer = make("flush")
    for step in range(9):
        train_step(model, optimizer, step)
    expected = mean_over_ranks(buffers_of(model))
    optimizer.flush()
    for mine, mean in zip(buffers_of(model), expected, strict=True):
        torch.testing.assert_close(mine, mean, rtol=1e-12, atol=1e-14)


def test_warmup_averages_with_every_step() -> None:
    model, optimizer = make("sync", warmup_steps=5)
    for step in range(5):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        expected = mean_over_ranks(buffers_of(model))
        optimizer.step()
        for mine, mean in zip(buffers_of(model), expected, strict=True):
            torch.testing.assert_close(mine, mean, rtol=1e-12, atol=1e-14)


def test_completion_moves_buffers_by_what_the_mean_differs_from_the_copy_sent() -> None:
    model, optimizer = make("sync", warmup_steps=0)
    for step in range(3):
        train_step(model, optimizer, step)
    optimizer.zero_grad()
    model(batch(3)).square().mean().backward()
    sent = buffers_of(model)
    mean = mean_over_ranks(sent)
    optimizer.step()
    train_step(model, optimizer, 4)
    optimizer.zero_grad()
    model(batch(5)).square().mean().backward()
    before = buffers_of(model)
    optimizer.step()
    for mine, old, copy, average in zip(buffers_of(model), before, sent, mean, strict=True):
        torch.testing.assert_close(mine, old + average - copy, rtol=1e-10, atol=1e-12)


def test_never_leaves_buffers_to_each_rank() -> None:
    model, optimizer = make("never")
    for step in range(9):
        train_step(model, optimizer, step)
    before = buffers_of(model)
    optimizer.flush()
    assert all(torch.equal(a, b) for a, b in zip(buffers_of(model), before, strict=True))
    first = on_every_rank(before)[0]
    assert hvd.rank() == 0 or not torch.equal(first[0], before[0])


def test_missing_model_and_unknown_values_are_refused() -> None:
    model = with_batch_norm()
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    names = {"named_parameters": model.named_parameters()}
    with pytest.raises(TypeError, match="needs model="):
        wrap(base, **names, average_buffers="sync")
    with pytest.raises(ValueError, match="'sync', 'flush', 'never'"):
        wrap(base, **names, average_buffers="always", model=model)
