"""Parameters that are unfrozen, frozen or added while training goes on: they join or leave at a flush."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch_plan import WITHOUT_HOROVOD
from problems import perceptron, regression_loss
from ranks import hvd
from support import RecordingCommunicator, assert_equal_on_all_ranks, bits, is_gradient, wrap
from torch import nn

from ssd_allreduce import RankMismatchError

pytestmark = [
    pytest.mark.ranks("mpirun", 2, 3),
    pytest.mark.ranks("horovodrun-gloo", 2),
    *WITHOUT_HOROVOD,
    pytest.mark.timeout(40),
]

PERIOD = {"delay_steps": 4, "overlap_steps": 2}
every_wrapping = pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "horovod"])
every_moment = pytest.mark.parametrize("steps", [4, 5, 6], ids=["in flight", "mid-flight", "completed"])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Tuning:
    """A model whose first layer's weight is frozen, and its optimizer."""

    def __init__(self, wrapped: bool = False, make: Callable[[Any], Any] = sgd, **settings: Any) -> None:
        self.model = perceptron(torch.float64)
        self.model[0].weight.requires_grad_(False)
        self.base = make(self.model.parameters())
        self.wrapped = wrapped
        self.communicator = RecordingCommunicator()
        self.wrap(**settings)

    def wrap(self, **settings: Any) -> None:
        names: dict[str, Any] = {"named_parameters": list(self.model.named_parameters())}
        given = self.base
        if self.wrapped:
            given = hvd.DistributedOptimizer(self.base, **names)
            names = {}
        self.optimizer = wrap(given, communicator=self.communicator, **{**PERIOD, **settings, **names})

    def run(self, steps: int, first: int) -> None:
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            regression_loss(self.model, hvd.rank(), step).backward()
            self.optimizer.step()

    def finish(self) -> list[bytes]:
        self.optimizer.flush()
        assert_equal_on_all_ranks(self.model.parameters())
        return bits(self.model.parameters())


@every_wrapping
@every_moment
def test_unfreezing_with_a_flush_is_wrapping_anew(steps: int, wrapped: bool) -> None:
    joined, anew = Tuning(wrapped), Tuning()
    for tuning in (joined, anew):
        tuning.run(steps, 0)
        tuning.model[0].weight.requires_grad_(True)
    joined.optimizer.flush()
    anew.model[0].weight.requires_grad_(False)
    anew.optimizer.flush()
    anew.optimizer.close()
    anew.model[0].weight.requires_grad_(True)
    anew.wrap()
    for tuning in (joined, anew):
        tuning.run(7, steps)
    assert joined.finish() == anew.finish()


@every_wrapping
def test_what_is_unfrozen_after_a_flush_joins_with_another(wrapped: bool) -> None:
    tuning = Tuning(wrapped)
    tuning.run(3, 0)
    tuning.optimizer.flush()
    before = bits([tuning.model[0].weight])
    tuning.model[0].weight.requires_grad_(True)
    tuning.optimizer.flush()
    tuning.run(6, 3)
    tuning.finish()
    assert bits([tuning.model[0].weight]) != before


@pytest.mark.parametrize("settings", [{"delay_steps": 1}, {"warmup_steps": 99}], ids=["k1", "warm-up"])
def test_synchronous_training_goes_on_with_what_was_unfrozen(settings: dict[str, Any]) -> None:
    tuning = Tuning(overlap_steps=0, **settings)
    tuning.run(2, 0)
    plain_model = perceptron(torch.float64)
    plain_model.load_state_dict(tuning.model.state_dict())
    plain = sgd(plain_model.parameters())
    for theirs, mine in zip(plain_model.parameters(), tuning.model.parameters(), strict=True):
        if mine.requires_grad:
            plain.state[theirs] = {"momentum_buffer": tuning.base.state[mine]["momentum_buffer"].clone()}
    tuning.model[0].weight.requires_grad_(True)
    tuning.optimizer.flush()
    tuning.run(5, 2)
    for step in range(2, 7):
        losses = [regression_loss(plain_model, rank, step) for rank in range(hvd.size())]
        plain.zero_grad()
        (sum(losses) / hvd.size()).backward()
        plain.step()
    for mine, theirs in zip(tuning.model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [sgd, adamw, torch.optim.RMSprop], ids=["sgd", "adamw", "twin"])
def test_every_kind_of_optimizer_takes_newcomers_in(make: Callable[[Any], Any]) -> None:
    tuning = Tuning(make=make, warmup_steps=2)
    tuning.run(7, 0)
    before = bits([tuning.model[0].weight])
    tuning.model[0].weight.requires_grad_(True)
    tuning.optimizer.flush()
    tuning.run(9, 7)
    tuning.finish()
    assert bits([tuning.model[0].weight]) != before
    assert_equal_on_all_ranks(
        value
        for parameter in tuning.model.parameters()
        for value in tuning.optimizer.state[parameter].values()
    )


@every_wrapping
def test_an_added_group_trains_with_its_own_options(wrapped: bool) -> None:
    """Two equal models, one of them added, with the same data: after one step they are equal."""
    tuning = Tuning(wrapped, delay_steps=4, overlap_steps=0)
    tuning.model[0].weight.requires_grad_(True)
    tuning.optimizer.flush()
    tuning.run(5, 0)
    torch.manual_seed(3)
    head = nn.Linear(3, 1).double()
    pairs = [(f"head.{name}", parameter) for name, parameter in head.named_parameters()]
    tuning.optimizer.add_param_group({"params": pairs, "lr": 0.5, "momentum": 0.0})
    tuning.optimizer.flush()
    start = head.weight.detach().clone()
    data = [torch.full((1, 3), float(rank + 1), dtype=torch.float64) for rank in range(hvd.size())]
    for _ in range(4):
        tuning.optimizer.zero_grad()
        head(data[hvd.rank()]).sum().backward()
        tuning.optimizer.step()
    mean = torch.stack(data).mean(dim=0)
    torch.testing.assert_close(head.weight.detach(), start - 4 * 0.5 * mean)
    assert_equal_on_all_ranks([*head.parameters(), *tuning.model.parameters()])


def test_what_is_frozen_leaves_at_a_flush() -> None:
    tuning = Tuning()
    tuning.run(5, 0)
    tuning.model[2].bias.requires_grad_(False)
    tuning.optimizer.flush()
    frozen = bits([tuning.model[2].bias])
    tuning.communicator.take_names()
    tuning.run(4, 5)
    sent = [name for name in tuning.communicator.take_names() if is_gradient(name)]
    assert sorted(sent) == ["0.bias.accumulated", "2.weight.accumulated"]
    tuning.finish()
    assert bits([tuning.model[2].bias]) == frozen


@every_wrapping
def test_unfreezing_on_one_rank_alone_is_an_error_on_all(wrapped: bool) -> None:
    tuning = Tuning(wrapped)
    tuning.run(5, 0)
    if hvd.rank() == hvd.size() - 1:
        tuning.model[0].weight.requires_grad_(True)
    tuning.optimizer.flush()
    with pytest.raises(RankMismatchError, match=r"requires_grad of '0\.weight'"):
        tuning.run(1, 5)


def test_schedulers_and_gradients_at_step_stay_as_they_were() -> None:
    tuning = Tuning()
    scheduler = torch.optim.lr_scheduler.StepLR(tuning.optimizer, 2, 0.5)
    tuning.run(2, 0)
    tuning.optimizer.synchronize()
    scheduler.step()
    scheduler.step()
    tuning.model[0].weight.requires_grad_(True)
    tuning.optimizer.flush()
    assert tuning.base.param_groups[0]["lr"] == 0.025
    tuning.run(3, 2)
    tuning.optimizer.zero_grad()
    for _ in range(2):  # a second backward, which only gradients that are final at step() allow
        regression_loss(tuning.model, hvd.rank(), 5).backward()
    tuning.optimizer.step()
    tuning.finish()
