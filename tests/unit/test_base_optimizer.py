"""Several optimizer objects stand for one training: whoever is loaded or scheduled, all follow."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import RecordingEngine
from loops import equal, global_weights, same, sgd, small_model, train, train_step, weights, wrap
from torch.optim.lr_scheduler import ExponentialLR

from ssd_allreduce import Loopback, UsageError
from ssd_allreduce.base_optimizer import BaseOptimizer, optimizers_sharing_groups

HOLDERS = ("wrapper", "user's", "relative")
SETTINGS = [
    pytest.param({"delay_steps": 1}, id="k=1"),
    pytest.param({"delay_steps": 3, "overlap_steps": 1, "warmup_steps": 1}, id="k=3,d=1,T=1"),
]


class Family:
    """The user's optimizer, one made from its groups as Horovod makes its own, and the wrapper."""

    def __init__(self, size: int = 2, **options: Any) -> None:
        self.model = small_model()
        self.user = sgd(self.model, momentum=0.9, weight_decay=0.01)
        self.relative = torch.optim.SGD(self.user.param_groups, lr=0.1)
        self.wrapper = wrap(self.model, RecordingEngine(size), self.relative, **options)

    def holder(self, name: str) -> torch.optim.Optimizer:
        return {"wrapper": self.wrapper, "user's": self.user, "relative": self.relative}[name]

    def assert_one(self) -> None:
        for holder in (self.user, self.relative):
            assert holder.param_groups is self.wrapper.param_groups
            assert holder.state is self.wrapper.state


def test_relatives_are_found_by_the_groups_that_they_share() -> None:
    user = sgd(small_model())
    relative = torch.optim.SGD(user.param_groups, lr=0.1)
    stranger = sgd(small_model())
    assert optimizers_sharing_groups(relative) == [user]
    assert optimizers_sharing_groups(user) == [relative]
    assert optimizers_sharing_groups(stranger) == []


def test_all_holders_share_groups_and_state() -> None:
    family = Family()
    family.assert_one()
    train(family.model, family.wrapper, 3)
    family.assert_one()


@pytest.mark.parametrize("loaded", HOLDERS)
@pytest.mark.parametrize("changed", HOLDERS)
@pytest.mark.parametrize("options", SETTINGS)
def test_after_a_load_through_any_of_them_a_change_to_any_of_them_counts(
    options: dict[str, Any], changed: str, loaded: str
) -> None:
    """In the next local update and in the next replay."""
    family, other = Family(**options), Family(**options)
    for one in (family, other):
        train(one.model, one.wrapper, 4)
    state = copy.deepcopy(family.wrapper.state_dict())
    family.holder(loaded).load_state_dict(state)
    other.wrapper.load_state_dict(state)
    family.assert_one()
    for step in range(4, 11):
        family.holder(changed).param_groups[0]["lr"] = 0.2 / step
        other.wrapper.param_groups[0]["lr"] = 0.2 / step
        train_step(family.model, family.wrapper, step)
        train_step(other.model, other.wrapper, step)
        assert equal(weights(family.model), weights(other.model))
    assert equal(global_weights(family.model, family.wrapper), global_weights(other.model, other.wrapper))
    assert family.wrapper.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("loaded", HOLDERS)
@pytest.mark.parametrize("scheduled", HOLDERS)
def test_schedulers_work_on_after_a_load_without_a_warning(scheduled: str, loaded: str) -> None:
    family = Family(delay_steps=3, overlap_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = ExponentialLR(family.holder(scheduled), gamma=0.5)
        for step in range(6):
            if step == 3:
                state = copy.deepcopy(family.wrapper.state_dict())
                family.holder(loaded).load_state_dict(state)
            train_step(family.model, family.wrapper, step)
            scheduler.step()
    assert [h.param_groups[0]["lr"] for h in (family.wrapper, family.user, family.relative)] == [0.1 / 64] * 3


@pytest.mark.parametrize("loaded", HOLDERS)
def test_a_load_of_plain_state_through_any_of_them_reaches_the_next_steps(loaded: str) -> None:
    plain = small_model()
    other = sgd(plain, weight_decay=0.01, lr=0.05)
    train(plain, other, 3)
    family = Family(delay_steps=1)
    family.model.load_state_dict(plain.state_dict())
    family.holder(loaded).load_state_dict(copy.deepcopy(other.state_dict()))
    train(family.model, family.wrapper, 3, first=3)
    train(plain, other, 3, first=3)
    assert equal(weights(family.model), weights(plain))


def test_hooks_of_all_holders_run_once_a_step() -> None:
    family = Family(delay_steps=2, overlap_steps=0)
    seen: list[object] = []
    for name in HOLDERS:
        family.holder(name).register_step_post_hook(lambda holder, args, kwargs: seen.append(holder))
    for step in range(4):
        train_step(family.model, family.wrapper, step)
        assert len(seen) == 3 * (step + 1)
        assert set(seen[-3:]) == {family.wrapper, family.user, family.relative}


def test_zeroing_through_any_of_them_zeroes() -> None:
    family = Family(delay_steps=4)
    for name in HOLDERS:
        train_step(family.model, family.wrapper)
        family.holder(name).zero_grad()
        assert all(p.grad is None for p in family.model.parameters())


def test_after_close_a_load_concerns_only_the_one_that_is_loaded() -> None:
    family = Family(delay_steps=2)
    train(family.model, family.wrapper, 3)
    family.wrapper.close()
    kept = copy.deepcopy(family.wrapper.state_dict())
    family.user.load_state_dict(sgd(small_model(), lr=0.5).state_dict())
    assert same(family.wrapper.state_dict(), kept)
    train(family.model, family.user, 2)


# -- its own step --------------------------------------------------------------------------------


def base_of(optimizer: torch.optim.Optimizer) -> BaseOptimizer:
    return BaseOptimizer(optimizer)


def test_its_step_is_the_classs_own_without_hooks() -> None:
    model, plain = small_model(), small_model()
    optimizer, other = sgd(model), sgd(plain)
    called: list[int] = []
    optimizer.register_step_pre_hook(lambda *args: called.append(1))
    base = base_of(optimizer)
    for parameters in (model.parameters(), plain.parameters()):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
    base.step()
    other.step()
    assert equal(weights(model), weights(plain))
    assert called == []


# -- state for a broadcast -----------------------------------------------------------------------


def initial(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}


def test_created_state_is_dropped_again_where_nothing_has_written_it() -> None:
    model = small_model()
    optimizer = sgd(model)
    base = base_of(optimizer)
    base.materialise_state(initial)
    assert set(optimizer.state) == set(model.parameters())
    # As hvd.broadcast_optimizer_state writes another rank's momentum, in place.
    optimizer.state[model[0].bias]["momentum_buffer"].fill_(2.0)
    base.discard_materialised_state()
    assert set(optimizer.state) == {model[0].bias}


def test_state_that_was_there_is_neither_created_nor_dropped() -> None:
    model = small_model()
    optimizer = sgd(model)
    zeros = torch.zeros_like(model[2].weight)
    optimizer.state[model[2].weight]["momentum_buffer"] = zeros
    base = base_of(optimizer)
    base.materialise_state(initial)
    base.discard_materialised_state()
    assert list(optimizer.state) == [model[2].weight]
    assert optimizer.state[model[2].weight]["momentum_buffer"] is zeros


def test_no_state_is_created_for_frozen_parameters_nor_where_the_first_step_creates_none() -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "momentum": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    base_of(optimizer).materialise_state(initial)
    assert set(optimizer.state) == {model[0].bias, model[2].weight}


# -- what the wrapper shadows --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_shadowed_methods_are_back_after_close(size: int) -> None:
    model = small_model()
    user = sgd(model)
    scheduler = ExponentialLR(user, gamma=0.5)
    before: dict[str, Callable[..., Any]] = dict(user.__dict__)
    optimizer = wrap(model, Loopback(size), user)
    with pytest.raises(UsageError):
        user.step()
    optimizer.close()
    assert user.__dict__.get("step") is before.get("step")
    assert "add_param_group" not in user.__dict__
    train_step(model, user)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
