"""The object that the user holds is an optimizer to everyone who asks, and leaves nothing behind."""

from __future__ import annotations

import atexit
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from engines import RecordingEngine, ThreadRank, on_ranks
from loops import (
    equal,
    fill,
    global_weights,
    inputs,
    loss_of,
    same,
    sgd,
    small_model,
    train,
    train_step,
    weights,
    wrap,
)
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ssd_allreduce as ssd
from ssd_allreduce import Loopback, UsageError, WeightsChangedError

PARAMETERS = 3 * 4 + 4 + 4 * 2 + 2
STAGES = [pytest.param({"warmup_steps": 99}, id="warm-up"), pytest.param({}, id="delay stage")]
SETTINGS = [
    pytest.param({"delay_steps": 1}, id="k=1"),
    pytest.param({"delay_steps": 3, "overlap_steps": 0, "warmup_steps": 2}, id="k=3,d=0,T=2"),
    pytest.param({"delay_steps": 4, "overlap_steps": 2}, id="k=4,d=2"),
]


# -- it is an optimizer --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4])
def test_it_is_a_torch_optimizer_with_the_groups_and_state_of_the_users_own(size: int) -> None:
    model = small_model()
    base = sgd(model, weight_decay=0.1)
    optimizer = wrap(model, Loopback(size), base, warmup_steps=1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is base.param_groups
    assert optimizer.defaults == base.defaults
    assert optimizer.base_optimizer is base
    assert "weight_decay: 0.1" in repr(optimizer)
    train_step(model, optimizer)
    assert optimizer.state is base.state
    assert set(optimizer.state) == set(model.parameters())


def test_construction_sends_nothing() -> None:
    engine = RecordingEngine(3)
    wrap(small_model(), engine)
    assert engine.sent == []


@pytest.mark.parametrize("options", SETTINGS)
def test_one_rank_is_the_base_optimizers_own_step(options: dict[str, Any]) -> None:
    model, plain = small_model(), small_model()
    train(model, wrap(model, Loopback(1), **options), 9)
    train(plain, sgd(plain), 9)
    assert equal(weights(model), weights(plain))


def test_one_rank_clips_as_several_do() -> None:
    model, other = small_model(), small_model()
    options: dict[str, Any] = {"delay_steps": 1, "max_grad_norm": 0.01}
    train(model, wrap(model, Loopback(1), **options), 4)
    train(other, wrap(other, Loopback(2), **options), 4)
    plain = small_model()
    train(plain, sgd(plain), 4)
    assert equal(weights(model), weights(other))
    assert not equal(weights(model), weights(plain))


@pytest.mark.parametrize("options", [{"delay_steps": 1}, {"delay_steps": 4, "warmup_steps": 99}])
@pytest.mark.parametrize(
    "base",
    [{}, {"dampening": 0.3}, {"nesterov": True, "weight_decay": 0.1}, {"momentum": 0.0, "maximize": True}],
)
def test_synchronous_stages_of_equal_ranks_are_the_base_optimizers_own_step(
    options: dict[str, Any], base: dict[str, Any]
) -> None:
    model, plain = small_model(), small_model()
    train(model, wrap(model, Loopback(4), sgd(model, **base), **options), 5)
    train(plain, sgd(plain, **base), 5)
    assert equal(weights(model), weights(plain))


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    model = small_model()
    optimizer, calls = wrap(model, Loopback(2), delay_steps=1), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, len(calls))
        loss.backward()
        calls.append(loss)
        return loss

    for _ in range(3):
        assert optimizer.step(closure) is calls[-1]
    assert len(calls) == 3
    plain = small_model()
    train(plain, sgd(plain), 3)
    assert equal(weights(model), weights(plain))


@pytest.mark.parametrize("size", [1, 2])
def test_hooks_of_the_users_optimizer_run_around_the_closure_and_are_handed_it(size: int) -> None:
    model = small_model()
    base = sgd(model)
    optimizer = wrap(model, Loopback(size), base, delay_steps=1)
    order: list[Any] = []

    def closure() -> Tensor:
        order.append("closure")
        loss = loss_of(model)
        loss.backward()
        return loss

    base.register_step_pre_hook(lambda holder, args, kwargs: order.append(("pre", args, kwargs)))
    base.register_step_post_hook(lambda holder, args, kwargs: order.append(("post", args, kwargs)))
    optimizer.step(closure)
    assert order == [("pre", (closure,), {}), "closure", ("post", (closure,), {})]


@pytest.mark.parametrize("size", [1, 2])
def test_zero_grad_has_torchs_signature(size: int) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(size))
    loss_of(model).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("size", [1, 2])
def test_groups_are_added_to_the_wrapper_alone(size: int) -> None:
    model = small_model()
    base = sgd(model)
    optimizer = wrap(model, Loopback(size), base)
    group = {"params": [("extra", torch.nn.Parameter(torch.ones(2)))], "lr": 0.5}
    with pytest.raises(UsageError, match=r"driven by .*Call add_param_group\(\) on that one"):
        base.add_param_group(dict(group))
    optimizer.add_param_group(group)
    assert [g["lr"] for g in base.param_groups] == [0.1, 0.5]
    assert base.param_groups is optimizer.param_groups
    optimizer.close()
    base.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(base.param_groups) == 3


def test_names_of_the_groups_serve_those_that_are_added() -> None:
    """torch wants names in all groups or in none."""
    model, other = small_model(), small_model()
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = wrap(model, Loopback(2), named, named_parameters=None)
    optimizer.add_param_group({"params": [(f"other.{n}", p) for n, p in other.named_parameters()]})
    assert optimizer.param_groups[1]["param_names"][0] == "other.0.weight"


@pytest.mark.parametrize("glu", ["momentum", "gradient", "displacement", "none"])
@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_the_model_may_be_given_another_dtype_before_the_first_step(glu: str, warmup_steps: int) -> None:
    def run(model: torch.nn.Sequential, convert: bool) -> list[Tensor]:
        optimizer = wrap(model, Loopback(2), glu=glu, warmup_steps=warmup_steps, delay_steps=3)
        if convert:
            model.double()
        train(model, optimizer, 8)
        return weights(model)

    assert equal(run(small_model(), convert=True), run(small_model(torch.float64), convert=False))


@pytest.mark.parametrize("end", ["close", "drop"])
def test_nothing_is_left_to_do_at_exit(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    # Optimizers of other tests may be collected in this one.
    monkeypatch.setattr(atexit, "unregister", lambda f: registered.remove(f) if f in registered else None)
    model, other = small_model(), small_model()
    optimizer = wrap(model, Loopback(2))
    optimizer.add_param_group({"params": [(f"other.{n}", p) for n, p in other.named_parameters()]})
    optimizer.flush()
    assert len(registered) == 1
    if end == "close":
        optimizer.close()
    else:
        del optimizer
        gc.collect()
    assert registered == []


@pytest.mark.parametrize("number", [np.float32, np.float64], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_options_may_be_numbers_of_other_libraries(kind: Any, number: Any) -> None:
    def run(convert: Any) -> list[Tensor]:
        model = small_model()
        base = kind(model.parameters(), lr=convert(0.125), weight_decay=convert(0.5))
        optimizer = wrap(model, Loopback(2), base, warmup_steps=2, delay_steps=3)
        train(model, optimizer, 12)
        return weights(model)

    assert equal(run(number), run(float))


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.AdamW])
def test_a_checkpoint_can_be_loaded_again_into_an_optimizer_that_trains(kind: Any) -> None:
    model, other = small_model(), small_model()
    optimizer = wrap(model, Loopback(2), kind(model.parameters(), lr=0.01), warmup_steps=1, delay_steps=2)
    train(model, optimizer, 8)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 4, first=8)
    optimizer.load_state_dict(copy.deepcopy(state))
    resumed = wrap(other, Loopback(2), kind(other.parameters(), lr=0.01), warmup_steps=1, delay_steps=2)
    resumed.load_state_dict(state)
    train(model, optimizer, 6, first=8)
    train(other, resumed, 6, first=8)
    assert equal(weights(model), weights(other))


def test_twins_can_be_saved_between_adding_a_group_and_its_joining() -> None:
    model, other = small_model(), small_model()
    base = torch.optim.RMSprop(model.parameters(), lr=0.01)
    optimizer = wrap(model, Loopback(2), base, warmup_steps=9)
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": [(f"other.{n}", p) for n, p in other.named_parameters()]})
    assert len(optimizer.state_dict()["param_groups"]) == 2


def test_one_rank_clips_what_was_unfrozen() -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = wrap(model, Loopback(1), sgd(model, lr=1.0, momentum=0.0), max_grad_norm=1e-3)
    train_step(model, optimizer)
    model[0].weight.requires_grad_(True)
    before = weights(model)
    train_step(model, optimizer, 1)
    moved = torch.cat([(a - b).reshape(-1) for a, b in zip(weights(model), before, strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_holds_what_has_joined(size: int) -> None:
    model, other = small_model(), small_model()
    optimizer = wrap(model, Loopback(size), delay_steps=3)
    train_step(model, optimizer)
    optimizer.add_param_group({"params": [(f"other.{n}", p) for n, p in other.named_parameters()]})
    optimizer.flush()
    train_step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    trained = weights(other)
    fill(other, 0.0)
    optimizer.adopt_weights()
    optimizer.load_state_dict(state)
    assert equal(weights(other), trained)


@pytest.mark.parametrize(
    "copying", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
def test_it_says_why_it_cannot_be_copied(copying: Callable[[Any], Any]) -> None:
    optimizer = wrap(small_model(), Loopback(2))
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: hooks.*state_dict\(\)"):
        copying(optimizer)


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("size", [1, 2])
def test_step_hooks_run_once_a_step_on_whomever_they_are_registered(
    size: int, options: dict[str, Any]
) -> None:
    model = small_model()
    base = sgd(model)
    optimizer = wrap(model, Loopback(size), base, **options)
    seen: list[tuple[str, object]] = []

    def noting(kind: str) -> Callable[..., None]:
        return lambda holder, args, kwargs: seen.append((kind, holder))

    with ExitStack() as stack:
        for holder in (optimizer, base):
            holder.register_step_pre_hook(noting("pre"))
            holder.register_step_post_hook(noting("post"))
        stack.callback(register_optimizer_step_pre_hook(noting("global pre")).remove)
        stack.callback(register_optimizer_step_post_hook(noting("global post")).remove)
        for step in range(9):
            seen.clear()
            train_step(model, optimizer, step)
            assert sorted(kind for kind, _ in seen) == [
                "global post", "global pre", "post", "post", "pre", "pre"
            ]  # fmt: skip
            assert {holder for kind, holder in seen if kind == "pre"} == {optimizer, base}
            assert {holder for kind, holder in seen if kind == "post"} == {optimizer, base}


def test_the_users_own_optimizer_is_not_stepped_behind_the_wrapper() -> None:
    model = small_model()
    base = sgd(model)
    wrapper = wrap(model, Loopback(2), base)
    with pytest.raises(UsageError, match=r"driven by ssd_allreduce.*Call step\(\) on that one.*close\(\)"):
        base.step()
    wrapper.close()


# -- schedulers ----------------------------------------------------------------------------------


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def exponential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, gamma=0.5)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=20)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("make", [exponential, one_cycle])
@pytest.mark.parametrize("when", ["before, on the user's", "after, on the user's", "after, on the wrapper"])
@pytest.mark.parametrize("options", SETTINGS)
def test_a_scheduler_drives_every_local_update_and_every_replay(
    options: dict[str, Any], when: str, make: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    """Against the same run whose groups are set by hand to what the scheduler would have set."""
    model, scripted = small_model(), small_model()
    base = sgd(model)
    scheduler = make(base) if when.startswith("before") else None
    optimizer = wrap(model, Loopback(2), base, **options)
    if scheduler is None:
        scheduler = make(base if when.endswith("user's") else optimizer)

    other = sgd(scripted)
    script = make(sgd(small_model()))
    by_hand = wrap(scripted, Loopback(2), other, **options)
    for step in range(12):
        values = {key: script.optimizer.param_groups[0][key] for key in ("lr", "momentum")}
        by_hand.param_groups[0].update(values)
        train_step(scripted, by_hand, step)
        script.optimizer.step()
        script.step()
        train_step(model, optimizer, step)
        scheduler.step()
        assert equal(weights(model), weights(scripted))
    assert equal(global_weights(model, optimizer), global_weights(scripted, by_hand))


def test_a_learning_rate_that_is_a_tensor_counts_by_its_value_in_each_step() -> None:
    model, scripted = small_model(), small_model()
    rate = torch.tensor(0.5)
    optimizer = wrap(model, Loopback(2), sgd(model, lr=rate), delay_steps=3, overlap_steps=1)
    by_hand = wrap(scripted, Loopback(2), sgd(scripted, lr=0.5), delay_steps=3, overlap_steps=1)
    for step in range(8):
        train_step(model, optimizer, step)
        train_step(scripted, by_hand, step)
        rate.mul_(0.5)
        by_hand.param_groups[0]["lr"] *= 0.5
        assert equal(weights(model), weights(scripted))
    assert optimizer.param_groups[0]["lr"] is rate


def adadelta(lr: float) -> tuple[torch.nn.Module, ssd.DistributedOptimizer]:
    model = small_model()
    base = torch.optim.Adadelta(model.parameters(), lr=lr)
    return model, wrap(model, Loopback(2), base, warmup_steps=1, delay_steps=2, overlap_steps=1)


def test_a_learning_rate_given_as_an_int_can_be_lowered_to_a_fraction() -> None:
    """Adadelta is stepped on copies of its groups, which keep the int that the user gave."""
    (model, optimizer), (scripted, other) = adadelta(lr=1), adadelta(lr=1.0)
    for step in range(9):
        if step == 3:
            optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.5
        before = weights(model) + global_weights(model, optimizer)
        train_step(model, optimizer, step)
        train_step(scripted, other, step)
        after = weights(model) + global_weights(model, optimizer)
        assert equal(after, weights(scripted) + global_weights(scripted, other))
        assert not equal(after, before)


# -- GradScaler ----------------------------------------------------------------------------------


def scaled_step(
    model: torch.nn.Module,
    optimizer: ssd.DistributedOptimizer,
    scaler: torch.amp.GradScaler,
    step: int,
    overflow: bool = False,
    unscale: bool = False,
) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step)).backward()
    if overflow:
        next(p.grad for p in model.parameters() if p.grad is not None).fill_(torch.inf)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("options", SETTINGS)
def test_a_scaler_changes_nothing_but_the_range_of_gradients(options: dict[str, Any], unscale: bool) -> None:
    """With scales that are powers of two every gradient comes back bit for bit."""
    model, plain = small_model(), small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    optimizer = wrap(model, Loopback(2), **options)
    other = wrap(plain, Loopback(2), **options)
    for step in range(9):
        scaled_step(model, optimizer, scaler, step, unscale=unscale)
        train_step(plain, other, step)
        assert equal(weights(model), weights(plain))
    assert scaler.get_scale() == 2.0**13


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("options", SETTINGS)
def test_a_step_that_overflows_moves_nothing_and_lowers_the_scale(
    options: dict[str, Any], unscale: bool
) -> None:
    model = small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrap(model, Loopback(2), **options)
    for step in range(9):
        before = weights(model)
        scaled_step(model, optimizer, scaler, step, overflow=step < 2, unscale=unscale)
        assert equal(weights(model), before) == (step < 2)
    assert scaler.get_scale() == 2.0**8
    assert all(w.isfinite().all() for w in weights(model))


@pytest.mark.parametrize("options", [{"delay_steps": 1}, {"warmup_steps": 9}])
def test_an_overflow_is_skipped_after_synchronize_too(options: dict[str, Any]) -> None:
    """Horovod's recipe: backward, synchronize, unscale, clip, step without synchronizing again."""
    model = small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrap(model, Loopback(2), **options)
    for step in range(3):
        before = weights(model)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert equal(weights(model), before) == (step == 1)
        assert all(w.isfinite().all() for w in weights(model))
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("options", SETTINGS)
def test_a_scaler_without_any_gradient_passes_a_plain_zero(options: dict[str, Any]) -> None:
    model = small_model()
    optimizer: Any = wrap(model, Loopback(2), sgd(model, momentum=0.0), **options)
    before = weights(model)
    for _ in range(5):
        optimizer.found_inf, optimizer.grad_scale = 0, torch.tensor(1024.0)
        optimizer.step()
    assert equal(weights(model), before)
    assert optimizer.stats().steps == 5


def test_a_scaler_is_noticed_when_it_comes_too_late() -> None:
    model = small_model()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = wrap(model, Loopback(2), warmup_steps=9)
    train_step(model, optimizer)
    with pytest.raises(UsageError, match=r"GradScaler.*already sent scaled gradients.*issue='step'"):
        scaled_step(model, optimizer, scaler, 1)


def test_after_an_error_and_its_remedy_gradients_are_unscaled_once() -> None:
    """torch leaves the scale on an optimizer whose step has raised, and multiplies the next one by it."""
    model, plain = small_model(), small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrap(model, Loopback(2), warmup_steps=9)
    scaled_step(model, optimizer, scaler, 0)
    fill(model, 0.25)
    with pytest.raises(WeightsChangedError):
        scaled_step(model, optimizer, scaler, 1)
    scaler.update()
    optimizer.adopt_weights()
    before = weights(model)
    scaled_step(model, optimizer, scaler, 2)
    optimizer.close()
    other = sgd(plain)
    train_step(plain, other, 0)
    fill(plain, 0.25)
    train_step(plain, other, 2)
    assert not equal(weights(model), before)
    assert equal(weights(model), weights(plain))


# -- synchronize() -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"delay_steps": 1}, {"warmup_steps": 9}])
@pytest.mark.parametrize("issue", ["backward", "step"])
def test_the_clipping_recipe_reduces_once_and_clips_the_mean(issue: str, options: dict[str, Any]) -> None:
    engine, model, plain = RecordingEngine(2), small_model(), small_model()
    optimizer, other = wrap(model, engine, issue=issue, **options), sgd(plain)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        train_step(plain, other, step, edit=lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        assert equal(weights(model), weights(plain))
    assert len(engine.gradients_sent) == 4 * 4


@pytest.mark.parametrize(
    "zeroing", [lambda model, optimizer: optimizer.zero_grad(), lambda model, _: model.zero_grad()]
)
@pytest.mark.parametrize("options", [{"delay_steps": 1}, {"warmup_steps": 9}])
def test_a_step_left_out_after_synchronize_leaves_nothing_behind(
    options: dict[str, Any], zeroing: Callable[[torch.nn.Module, ssd.DistributedOptimizer], object]
) -> None:
    """As a loop does that skips batches whose norm is not finite."""

    def program(engine: ThreadRank, batches: Iterable[int], left_out: int | None = None) -> list[Tensor]:
        model = small_model()
        optimizer = wrap(model, engine, **options)
        for batch in batches:
            loss_of(model, batch, engine.rank).backward()
            optimizer.synchronize()
            if batch != left_out:
                with optimizer.skip_synchronize():
                    optimizer.step()
            zeroing(model, optimizer)
        return weights(model)

    first, second = on_ranks(2, lambda engine: program(engine, range(4), left_out=2))
    expected = on_ranks(2, lambda engine: program(engine, (0, 1, 3)))[0]
    assert equal(first, second)
    assert equal(first, expected)


@pytest.mark.parametrize("options", [{"delay_steps": 1}, {"warmup_steps": 9}])
def test_an_epoch_may_end_with_a_step_left_out_after_synchronize(options: dict[str, Any]) -> None:
    model, plain = small_model(), small_model()
    optimizer = wrap(model, Loopback(2), **options)
    train(model, optimizer, 2)
    train(plain, sgd(plain), 2)
    loss_of(model, 2).backward()
    optimizer.synchronize()
    with pytest.raises(UsageError, match=r"Call step\(\) or zero_grad\(\) first"):
        optimizer.flush()
    optimizer.zero_grad()
    optimizer.flush()
    assert equal(weights(model), weights(plain))


def test_a_backward_pass_after_synchronize_adds_to_the_mean_and_is_reduced_with_it() -> None:
    def program(engine: ThreadRank) -> list[Tensor]:
        model = small_model()
        optimizer = wrap(model, engine, delay_steps=1)
        loss_of(model, 0, engine.rank).backward()
        optimizer.synchronize()
        loss_of(model, 1, engine.rank).backward()
        with optimizer.skip_synchronize(), pytest.raises(UsageError, match=r"Call synchronize\(\) first"):
            optimizer.step()
        optimizer.step()
        return weights(model)

    plain = small_model()
    other = sgd(plain)
    for step in range(2):
        for rank in range(2):
            (loss_of(plain, step, rank) / 2).backward()
    other.step()
    first, second = on_ranks(2, program)
    assert equal(first, second)
    for ours, theirs in zip(first, weights(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{"delay_steps": 1}, {"warmup_steps": 9}])
def test_editing_the_mean_while_another_rank_flushes_is_refused_on_both(options: dict[str, Any]) -> None:
    def program(engine: ThreadRank) -> UsageError | None:
        model = small_model()
        optimizer = wrap(model, engine, **options)
        try:
            for step in range(2 + engine.rank):
                loss_of(model, step, engine.rank).backward()
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
            optimizer.flush()
        except UsageError as error:
            return error
        return None

    for error in on_ranks(2, program):
        assert "1 rank(s) called synchronize()" in str(error)
        assert "Pass max_grad_norm= to clip" in str(error)


def test_in_the_delay_stage_synchronize_sends_nothing_and_lets_gradients_be_edited() -> None:
    engine, model, scripted = RecordingEngine(2), small_model(), small_model()
    optimizer = wrap(model, engine, delay_steps=2, overlap_steps=0)
    by_hand = wrap(scripted, Loopback(2), delay_steps=2, overlap_steps=0, issue="step")
    train_step(model, optimizer)
    train_step(scripted, by_hand)

    def edit(which: torch.nn.Module) -> Callable[[], object]:
        return lambda: torch.nn.utils.clip_grad_norm_(which.parameters(), 0.1)

    for step in range(1, 6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 1:
            # The hooks of this sync point have sent already; clip from the next step on.
            optimizer.synchronize()
            optimizer.step()
            train_step(scripted, by_hand, step)
        else:
            before = len(engine.sent)
            optimizer.synchronize()
            assert len(engine.sent) == before
            edit(model)()
            with optimizer.skip_synchronize():
                optimizer.step()
            train_step(scripted, by_hand, step, edit=edit(scripted))
        assert equal(weights(model), weights(scripted))


def test_skipping_what_was_not_done_is_refused_in_warmup() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), warmup_steps=3)
    loss_of(model).backward()
    with optimizer.skip_synchronize(), pytest.raises(UsageError, match=r"Call synchronize\(\) first"):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("options", STAGES)
def test_state_created_for_a_broadcast_does_not_change_the_first_step(options: dict[str, Any]) -> None:
    """The first momentum of SGD is undampened, but only where there was none."""
    for synchronize in (False, True):
        model, plain = small_model(), small_model()
        optimizer = wrap(model, Loopback(2), sgd(model, dampening=0.5), delay_steps=4, **options)
        other = wrap(plain, Loopback(2), sgd(plain, dampening=0.5), delay_steps=4, **options)
        optimizer.state_dict()
        loss_of(model).backward()
        if synchronize:
            optimizer.synchronize()
        optimizer.step()
        train_step(plain, other)
        assert equal(weights(model), weights(plain))


# -- global_weights() ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", SETTINGS)
def test_the_model_holds_the_global_weights_in_the_same_memory(options: dict[str, Any]) -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, **options)
    for step in range(9):
        train_step(model, optimizer, step)
        local, places, sent = weights(model), [p.data_ptr() for p in model.parameters()], len(engine.sent)
        with optimizer.global_weights():
            assert [p.data_ptr() for p in model.parameters()] == places
            inside = weights(model)
            with optimizer.global_weights():
                assert equal(weights(model), inside)
        assert [p.data_ptr() for p in model.parameters()] == places
        assert equal(weights(model), local)
        assert len(engine.sent) == sent
    assert equal(inside, local) == (options["delay_steps"] == 1)


def test_the_global_weights_stand_still_between_completions() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), delay_steps=3, overlap_steps=1)
    start, seen = weights(model), []
    for step in range(8):
        train_step(model, optimizer, step)
        seen.append(global_weights(model, optimizer))
    # Sync points in the steps 2 and 5, completed in 3 and 6.
    assert [equal(w, start) for w in seen] == [True] * 3 + [False] * 5
    assert [equal(a, b) for a, b in pairwise(seen)] == [
        True, True, False, True, True, False, True
    ]  # fmt: skip


@pytest.mark.parametrize("options", STAGES)
def test_leaving_by_an_error_brings_the_local_weights_back(options: dict[str, Any]) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **options)
    train_step(model, optimizer)
    local = weights(model)
    with pytest.raises(KeyError), optimizer.global_weights():
        raise KeyError
    assert equal(weights(model), local)
    train_step(model, optimizer, 1)


@pytest.mark.parametrize("options", STAGES)
def test_training_inside_global_weights_is_refused(options: dict[str, Any]) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **options)
    train_step(model, optimizer)
    refused: list[Callable[[], object]] = [
        lambda: loss_of(model).backward(),
        optimizer.step,
        optimizer.synchronize,
        optimizer.flush,
        optimizer.adopt_weights,
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
    ]
    with optimizer.global_weights():
        for call in refused:
            with pytest.raises(UsageError, match=r"inside global_weights\(\)"):
                call()
    optimizer.zero_grad()
    train_step(model, optimizer, 1)


@pytest.mark.parametrize("options", STAGES)
def test_weights_changed_inside_global_weights_are_noticed(options: dict[str, Any]) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **options)
    train_step(model, optimizer)

    def change_and_go_on() -> None:
        with optimizer.global_weights():
            fill(model, 0.0)
        train_step(model, optimizer, 1)

    with pytest.raises(WeightsChangedError, match=r"adopt_weights\(\)"):
        change_and_go_on()


def test_what_state_dict_stores_does_not_depend_on_where_it_is_called() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), delay_steps=4, overlap_steps=2)
    train(model, optimizer, 6)
    outside = copy.deepcopy(optimizer.state_dict())
    with optimizer.global_weights():
        inside = copy.deepcopy(optimizer.state_dict())
    assert same(inside, outside)


# -- stats() -------------------------------------------------------------------------------------


def test_stats_count_by_stage() -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, warmup_steps=2, delay_steps=3, overlap_steps=1)
    train(model, optimizer, 10)
    stats = optimizer.stats()
    assert (stats.steps, stats.sync_points, stats.allreduces) == (10, 4, 4)
    assert (stats.warmup.steps, stats.warmup.sync_points, stats.warmup.allreduces) == (2, 2, 2)
    assert (stats.delay.steps, stats.delay.sync_points, stats.delay.allreduces) == (8, 2, 2)
    assert stats.bytes_sent == sum(sent.bytes for sent in engine.sent)
    gradients = [sent for sent in engine.gradients_sent if sent.name.endswith(".gradient")]
    assert sum(sent.bytes for sent in gradients) == 2 * 4 * PARAMETERS
    control = sum(sent.bytes for sent in engine.sent if ".control." in sent.name)
    assert 2 * 4 * PARAMETERS <= stats.delay.bytes_sent <= 2 * 4 * PARAMETERS + control
    assert stats.wait_seconds == stats.warmup.wait_seconds + stats.delay.wait_seconds
    assert stats.wait_seconds > 0


def test_stats_are_a_copy() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2))
    stats = optimizer.stats()
    stats.steps = stats.delay.steps = 99
    train_step(model, optimizer)
    assert (optimizer.stats().steps, optimizer.stats().delay.steps) == (1, 1)
    assert stats.delay.steps == 99


def test_stats_of_one_rank_count_steps_and_no_bytes() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(1), warmup_steps=2)
    train(model, optimizer, 3)
    assert (optimizer.stats().steps, optimizer.stats().bytes_sent) == (3, 0)


@pytest.mark.parametrize("options", SETTINGS)
def test_rank_local_calls_send_nothing(options: dict[str, Any]) -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, **options)
    for step in range(9):
        before = len(engine.sent)
        saved = optimizer.state_dict()
        optimizer.stats()
        global_weights(model, optimizer)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert len(engine.sent) == before
        train_step(model, optimizer, step)
    before = len(engine.sent)
    optimizer.close()
    assert len(engine.sent) == before


# -- adopt_weights() -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_adopted_weights_are_the_global_ones_and_a_new_period_begins(
    options: dict[str, Any], steps: int
) -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, **options)
    train(model, optimizer, steps)
    fill(model, 0.25)
    with pytest.raises(WeightsChangedError, match=r"weights '0\.weight', '0\.bias', '2\.weight' and 1 more"):
        train_step(model, optimizer, steps)
    optimizer.zero_grad()
    optimizer.adopt_weights()
    assert all((w == 0.25).all() for w in global_weights(model, optimizer))
    assert all((w == 0.25).all() for w in weights(model))
    train(model, optimizer, 5, first=steps)
    assert engine.open_operations == [] or optimizer.stats().delay.sync_points > 0


def test_weights_may_be_changed_freely_before_the_first_step() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2))
    fill(model, 0.5)
    optimizer.adopt_weights()
    train_step(model, optimizer)
    assert all((w == 0.5).all() for w in global_weights(model, optimizer))


def test_weights_may_be_adopted_right_after_a_load() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), delay_steps=4, overlap_steps=2)
    train(model, optimizer, 5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fill(model, 0.125)
    optimizer.adopt_weights()
    train_step(model, optimizer, 5)
    assert all((w == 0.125).all() for w in global_weights(model, optimizer))


INFERENCE_CALLS: dict[str, Callable[[ssd.DistributedOptimizer], object]] = {
    "flush": lambda optimizer: optimizer.flush(),
    "adopt_weights": lambda optimizer: optimizer.adopt_weights(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
}


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("steps", [0, 2, 5])
@pytest.mark.parametrize("call", INFERENCE_CALLS)
def test_calls_under_inference_mode_change_nothing_of_later_steps(call: str, steps: int, base: Any) -> None:
    """As where an evaluation ends an epoch. No step may write a tensor that was made in inference mode."""

    def trained(mode: AbstractContextManager[Any]) -> list[Tensor]:
        model = small_model()
        bare = base(model.parameters(), lr=0.01, **({"momentum": 0.9} if base is torch.optim.SGD else {}))
        optimizer = wrap(model, Loopback(2), bare, delay_steps=4, overlap_steps=2, warmup_steps=1)
        train(model, optimizer, steps)
        with mode:
            INFERENCE_CALLS[call](optimizer)
        train(model, optimizer, 6, first=steps)
        optimizer.flush()
        state = [t for entry in bare.state.values() for t in entry.values()]
        assert not any(t.is_inference() for t in [*model.parameters(), *state])
        optimizer.close()
        train_step(model, bare)
        return weights(model)

    assert equal(trained(torch.inference_mode()), trained(nullcontext()))


# -- nothing is left behind ----------------------------------------------------------------------


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or {}) for p in model.parameters())


def assert_free(model: torch.nn.Module, base: torch.optim.Optimizer) -> None:
    """The user's optimizer behaves as if it had never been wrapped."""
    assert hooks_of(model) == 0
    reference = copy.deepcopy(model)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(copy.deepcopy(base.state_dict()))
    train(model, base, 2)
    train(reference, other, 2)
    assert equal(weights(model), weights(reference))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", SETTINGS)
def test_close_gives_the_users_optimizer_back(size: int, options: dict[str, Any]) -> None:
    model = small_model()
    base = sgd(model)
    optimizer = wrap(model, Loopback(size), base, **options)
    train(model, optimizer, 5)
    assert hooks_of(model) == (4 if size > 1 else 0)
    optimizer.close()
    optimizer.close()
    assert_free(model, base)


@pytest.mark.parametrize("options", SETTINGS)
def test_an_optimizer_that_is_dropped_leaves_nothing_behind(options: dict[str, Any]) -> None:
    model = small_model()
    base = sgd(model)
    optimizer = wrap(model, Loopback(2), base, **options)
    train(model, optimizer, 5)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert_free(model, base)


@pytest.mark.parametrize("closed", [True, False])
def test_parameters_are_freed_with_their_optimizer(closed: bool) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), delay_steps=2, overlap_steps=1)
    train(model, optimizer, 4)
    gone = [weakref.ref(p) for p in model.parameters()]
    if closed:
        optimizer.close()
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_it_can_be_wrapped_anew_after_close_and_after_being_dropped() -> None:
    model = small_model()
    base = sgd(model)
    engine = RecordingEngine(2)
    first = wrap(model, engine, base, delay_steps=2, overlap_steps=0)
    train(model, first, 3)
    first.close()
    second = wrap(model, engine, base, delay_steps=2, overlap_steps=0)
    train(model, second, 3)
    del second
    gc.collect()
    third = wrap(model, engine, base, delay_steps=2, overlap_steps=0)
    train(model, third, 4)
    assert hooks_of(model) == 4
    prefixes = [sent.name.split(".")[1] for sent in engine.gradients_sent if "0.weight" in sent.name]
    assert len(prefixes) == 1 + 1 + 2
    assert len(set(prefixes)) == 3, "each optimizer has names of its own"


CLOSED_CALLS: dict[str, Callable[[ssd.DistributedOptimizer], object]] = {
    "step": lambda optimizer: optimizer.step(),
    "synchronize": lambda optimizer: optimizer.synchronize(),
    "flush": lambda optimizer: optimizer.flush(),
    "adopt_weights": lambda optimizer: optimizer.adopt_weights(),
    "global_weights": lambda optimizer: optimizer.global_weights().__enter__(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("call", CLOSED_CALLS)
def test_calls_after_close_are_refused(call: str, size: int) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(size))
    train_step(model, optimizer)
    optimizer.close()
    with pytest.raises(UsageError, match=rf"{call}\(\) after close\(\)\. Wrap the base optimizer anew"):
        CLOSED_CALLS[call](optimizer)
    assert optimizer.stats().steps == 1


# -- two optimizers, as for a GAN ----------------------------------------------------------------


def test_two_optimizers_do_not_disturb_each_other() -> None:
    """Each has names of its own, and an idle one does not trip the other."""
    engine = RecordingEngine(2)
    one, two = small_model(), small_model()
    alone = small_model()
    first = wrap(one, engine, delay_steps=3, overlap_steps=1)
    second = wrap(two, engine, warmup_steps=9)
    reference = wrap(alone, Loopback(2), delay_steps=3, overlap_steps=1)
    for step in range(9):
        train_step(one, first, step)
        train_step(alone, reference, step)
        if step % 3 == 0:
            train_step(two, second, step)
    assert equal(weights(one), weights(alone))
    plain = small_model()
    other = sgd(plain)
    for step in (0, 3, 6):
        train_step(plain, other, step)
    assert equal(weights(two), weights(plain))


def test_gradients_of_another_loss_that_were_sent_are_refused_and_the_error_names_the_optimizer() -> None:
    discriminator = small_model()
    optimizer = wrap(discriminator, Loopback(2), warmup_steps=9)
    train_step(discriminator, optimizer)
    discriminator(inputs(1)).sum().backward()
    with pytest.raises(UsageError, match=r"zero_grad\(\) between backward\(\) and step\(\).*'0\.weight'"):
        optimizer.zero_grad()


def test_with_issue_step_gradients_of_another_loss_may_be_zeroed() -> None:
    model, plain = small_model(), small_model()
    optimizer, other = wrap(model, Loopback(2), warmup_steps=9, issue="step"), sgd(plain)
    for step in range(4):
        model(inputs(step)).sum().backward()
        train_step(model, optimizer, step)
        train_step(plain, other, step)
    assert equal(weights(model), weights(plain))
