"""Training loops as people write them: schedulers, broadcasts, hooks, clipping, loss scaling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import flat, gradient_of, perceptron, regression_loss, weights_of
from ranks import hvd
from simulation import Gradient, Options, Vector
from support import TIMEOUT, assert_equal_on_all_ranks, bits, wrap
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import SETTINGS, SGD, STEPS, Training, no_gradient_left, simulate

import ssd_allreduce as ssd

pytestmark = [pytest.mark.ranks("mpirun", 2), pytest.mark.filterwarnings("error")]

Scheduler = torch.optim.lr_scheduler.LRScheduler
MakeScheduler = Callable[[torch.optim.Optimizer], Scheduler]


# -- schedulers ----------------------------------------------------------------------------------


def exponential(optimizer: torch.optim.Optimizer) -> Scheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def one_cycle(optimizer: torch.optim.Optimizer) -> Scheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * STEPS)


SCHEDULERS = {"exponential": exponential, "one_cycle": one_cycle}


def options_under(make_scheduler: MakeScheduler) -> Callable[[int], Options]:
    """The options of each step that the scheduler gives to plain SGD."""
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], **SGD)
    scheduler = make_scheduler(plain)
    rows = []
    for _ in range(STEPS):
        group = plain.param_groups[0]
        rows.append(Options(group["lr"], group["momentum"], group["weight_decay"]))
        plain.step()
        scheduler.step()
    assert len({row.lr for row in rows}) == STEPS
    return lambda step: rows[step]


def make_scheduled(
    make_scheduler: MakeScheduler, attached: str, **settings: Any
) -> tuple[Training, Scheduler]:
    """``attached`` says when and to which of the three objects."""
    moment, holder = attached.split("_wrapping_to_")
    made = []

    def attach(training: Training) -> None:
        made.append(make_scheduler(getattr(training, holder)))

    if moment == "before":
        training = Training(horovod={}, before_wrapping=attach, **settings)
    else:
        training = Training(horovod={}, **settings)
        attach(training)
    return training, made[0]


ATTACHED = [
    "before_wrapping_to_user",
    "before_wrapping_to_horovod",
    "after_wrapping_to_user",
    "after_wrapping_to_horovod",
    "after_wrapping_to_optimizer",
]


@pytest.mark.parametrize("attached", ATTACHED)
@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_scheduler_changes_the_next_local_update_and_replay(
    make_scheduler: MakeScheduler, attached: str
) -> None:
    training, scheduler = make_scheduled(make_scheduler, attached)
    for _ in range(STEPS):
        training.make_step()
        scheduler.step()
    training.assert_follows(simulate(options=options_under(make_scheduler)))


@pytest.mark.parametrize("loaded_through", ["user", "horovod", "optimizer"])
@pytest.mark.parametrize("attached", ATTACHED)
def test_scheduler_goes_on_after_a_load_through_any_of_the_objects(
    attached: str, loaded_through: str
) -> None:
    """Reloading the present state at the end of a period changes nothing."""
    settings = {"overlap_steps": 0}
    training, scheduler = make_scheduled(one_cycle, attached, **settings)
    for step in range(STEPS):
        if step == SETTINGS["warmup_steps"] + SETTINGS["delay_steps"]:
            holder = getattr(training, loaded_through)
            holder.load_state_dict(copy.deepcopy(holder.state_dict()))
        training.make_step()
        scheduler.step()
    training.assert_follows(simulate(options=options_under(one_cycle), **settings))


@pytest.mark.parametrize("loaded_through", ["user", "horovod", "optimizer"])
def test_options_loaded_through_any_of_the_objects_are_used(loaded_through: str) -> None:
    settings = {"overlap_steps": 0}
    training = Training(horovod={}, **settings)
    changed_at = SETTINGS["warmup_steps"] + SETTINGS["delay_steps"]
    for step in range(STEPS):
        if step == changed_at:
            holder = getattr(training, loaded_through)
            content = copy.deepcopy(holder.state_dict())
            content["param_groups"][0]["lr"] = 0.02
            holder.load_state_dict(content)
        training.make_step()

    def options(step: int) -> Options:
        return Options(**{**SGD, "lr": 0.05 if step < changed_at else 0.02})

    training.assert_follows(simulate(options=options, **settings))
    for holder in (training.user, training.horovod, training.optimizer):
        assert holder.param_groups[0]["lr"] == 0.02


def test_learning_rate_held_in_a_tensor_may_be_changed_in_place() -> None:
    training = Training(sgd={**SGD, "lr": torch.tensor(0.05, dtype=torch.float64)}, horovod={})
    for _ in range(STEPS):
        training.make_step()
        training.optimizer.param_groups[0]["lr"].mul_(0.9)
    training.assert_follows(simulate(options=lambda step: Options(**{**SGD, "lr": 0.05 * 0.9**step})))


def test_options_that_differ_between_ranks_are_the_largest_and_said_once() -> None:
    training = Training()
    training.optimizer.param_groups[0]["lr"] = 0.05 if hvd.rank() == 0 else 0.04
    with pytest.warns(UserWarning, match=r"'lr'\] differs between ranks: 0\.04 .* 0\.05") as caught:
        training.train()
    assert len(caught) == 1
    training.optimizer.flush()
    assert_equal_on_all_ranks(training.model.parameters())


# -- broadcasts ----------------------------------------------------------------------------------


def perceptron_of_rank(rank: int | None = None) -> nn.Module:
    return perceptron(seed=10 + (hvd.rank() if rank is None else rank))


@pytest.mark.parametrize("horovod", [None, {}], ids=["bare", "horovod_wrapped"])
def test_broadcasts_after_wrapping_change_nothing_but_equality(horovod: dict[str, Any] | None) -> None:
    training = Training(perceptron_of_rank, horovod=horovod)
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(training.optimizer, root_rank=0)

    start = weights_of(perceptron_of_rank(0))
    np.testing.assert_array_equal(weights_of(training.model), start)
    assert training.optimizer.stats().steps == 0
    assert no_gradient_left(training.model)
    training.train().assert_follows(simulate(start=start))


def test_broadcasts_before_wrapping_change_nothing_but_equality() -> None:
    def broadcast(training: Training) -> None:
        hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(training.horovod, root_rank=0)

    # Horovod makes a step with zero gradients here: no weight decay, so that it moves nothing.
    sgd = {**SGD, "weight_decay": 0.0}
    training = Training(perceptron_of_rank, sgd=sgd, horovod={}, before_wrapping=broadcast)

    start = weights_of(perceptron_of_rank(0))
    np.testing.assert_array_equal(weights_of(training.model), start)
    training.train().assert_follows(simulate(start=start, options=lambda step: Options(**sgd)))


@pytest.mark.parametrize("when", ["before_wrapping", "after_wrapping"])
def test_broadcasts_hand_on_the_checkpoint_that_rank_0_alone_has_loaded(when: str) -> None:
    """A checkpoint of plain training, as the usual Horovod script resumes."""
    model, plain = trained_alone()

    def resume(optimizer: torch.optim.Optimizer, trained: nn.Module) -> None:
        if hvd.rank() == 0:
            trained.load_state_dict(model.state_dict())
            optimizer.load_state_dict(plain.state_dict())
        if when == "before_wrapping":
            # Horovod creates missing state by a step, which moves weights; so weights come last here.
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            hvd.broadcast_parameters(trained.state_dict(), root_rank=0)
        else:
            hvd.broadcast_parameters(trained.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    if when == "before_wrapping":
        training = Training(
            perceptron_of_rank, horovod={}, before_wrapping=lambda t: resume(t.horovod, t.model)
        )
    else:
        training = Training(perceptron_of_rank, horovod={})
        resume(training.optimizer, training.model)

    momenta = [training.optimizer.state[p]["momentum_buffer"] for p in training.model.parameters()]
    expected = [plain.state[p]["momentum_buffer"] for p in model.parameters()]
    assert bits(momenta) == bits(expected)
    assert bits(training.model.parameters()) == bits(model.parameters())
    assert training.optimizer.stats().steps == 0

    simulation = simulate(0, start=weights_of(model))
    simulation.momentum = flat(expected)
    simulation.run([STEPS] * hvd.size(), flush=False)
    training.train().assert_follows(simulation)


def trained_alone() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that one process has trained, the same on all ranks, and its optimizer."""
    model = perceptron(seed=3)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(5):
        optimizer.zero_grad()
        regression_loss(model, 0, 100 + step).backward()
        optimizer.step()
    return model, optimizer


# -- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("issue", ["backward", "step"])
def test_zero_grad_either_way(issue: str, set_to_none: bool) -> None:
    training = Training(horovod={}, issue=issue)
    for _ in range(STEPS):
        training.backward()
        training.optimizer.step()
        training.record()
        training.optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in training.model.parameters())
    training.assert_follows(simulate())


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)


def test_clipping_local_gradients() -> None:
    training = Training(issue="step", horovod={})
    for _ in range(STEPS):
        training.make_step(lambda: clip(training.model))
    training.assert_follows(simulate(gradient=gradient_of(perceptron(), regression_loss, clip)))


@pytest.mark.parametrize("synchronize_calls", [1, 2])
def test_clipping_recipe_of_horovod(synchronize_calls: int) -> None:
    """In warm-up the global mean is clipped, as under plain Horovod; later the local gradient."""
    warmup_steps = 5
    training = Training(horovod={}, warmup_steps=warmup_steps)
    plain_model = perceptron()
    plain = hvd.DistributedOptimizer(
        torch.optim.SGD(plain_model.parameters(), **SGD), named_parameters=plain_model.named_parameters()
    )
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.backward()
        for _ in range(synchronize_calls):
            training.optimizer.synchronize()
        clip(training.model)
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
        training.record()
        if step < warmup_steps:
            plain.zero_grad()
            regression_loss(plain_model, hvd.rank(), step).backward()
            plain.synchronize()
            clip(plain_model)
            with plain.skip_synchronize():
                plain.step()
            assert bits(training.model.parameters()) == bits(plain_model.parameters())

    # From the end of the warm-up on, what each rank clips is its own gradient.
    momenta = [plain.state[p]["momentum_buffer"] for p in plain_model.parameters()]
    local = gradient_of(perceptron(), regression_loss, clip)
    simulation = simulate(
        0,
        gradient=lambda rank, step, weights: local(rank, step + warmup_steps, weights),
        start=weights_of(plain_model),
        warmup_steps=0,
    )
    simulation.momentum = flat(momenta)
    for rank in simulation.ranks:
        rank.momentum = simulation.momentum
    simulation.run([STEPS - warmup_steps] * hvd.size(), flush=False)
    del training.local_history[:warmup_steps], training.global_history[:warmup_steps]
    training.assert_follows(simulation)


@pytest.mark.parametrize("issue", ["backward", "step"])
@pytest.mark.parametrize("through_horovod", [True, False])
def test_gradients_accumulated_over_backward_passes(issue: str, through_horovod: bool) -> None:
    passes = 3

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return sum(regression_loss(model, rank, passes * step + i) for i in range(passes))  # type: ignore[return-value]

    announced = {"backward_passes_per_step": passes}
    if through_horovod:
        training = Training(horovod=announced, issue=issue)
    else:
        training = Training(**announced, issue=issue)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        for index in range(passes):
            regression_loss(training.model, hvd.rank(), passes * step + index).backward()
        training.optimizer.step()
        training.record()
    training.assert_follows(simulate(loss=loss))


def test_closure_is_called_once_and_its_loss_returned() -> None:
    training = Training()
    losses = []

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        losses.append(training.backward())
        return losses[-1]

    for step in range(STEPS):
        assert training.optimizer.step(closure) is losses[step]
        training.record()
    assert len(losses) == STEPS
    training.assert_follows(simulate())


def test_sum_over_ranks_where_horovod_was_asked_for_it() -> None:
    training = Training(horovod={"op": hvd.Sum}).train()
    training.assert_follows(simulate(summed=True))


# -- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("holder", ["user", "horovod", "optimizer"])
@pytest.mark.parametrize("moment", ["pre", "post"])
@pytest.mark.parametrize("registered", ["before_wrapping", "after_wrapping"])
def test_step_hooks_run_once_a_step(holder: str, moment: str, registered: str) -> None:
    calls: list[object] = []

    def register(training: Training) -> None:
        target = getattr(training, holder)
        getattr(target, f"register_step_{moment}_hook")(lambda optimizer, *rest: calls.append(optimizer))

    if registered == "before_wrapping" and holder == "optimizer":
        registered = "after_wrapping"
    training = Training(
        horovod={}, before_wrapping=register if registered == "before_wrapping" else lambda training: None
    )
    if registered == "after_wrapping":
        register(training)
    for step in range(STEPS):
        training.make_step()
        assert len(calls) == step + 1


@pytest.mark.parametrize("moment", ["pre", "post"])
def test_global_step_hooks_run_once_a_step(moment: str) -> None:
    training = Training(horovod={})
    calls: list[object] = []
    register = {"pre": register_optimizer_step_pre_hook, "post": register_optimizer_step_post_hook}
    handle = register[moment](lambda optimizer, *rest: calls.append(optimizer))
    try:
        training.train()
    finally:
        handle.remove()
    assert calls == [training.optimizer] * STEPS


# -- loss scaling --------------------------------------------------------------------------------


class Overflows:
    """Which rank's gradients overflow in which step."""

    def __init__(self, steps_of_rank: dict[int, list[int]]) -> None:
        self.steps_of_rank = steps_of_rank

    def __call__(self, rank: int, step: int) -> bool:
        return step in self.steps_of_rank.get(rank, [])

    def gradient(self, edit: Callable[[nn.Module], object] = lambda model: None) -> Gradient:
        finite = gradient_of(perceptron(), regression_loss, edit)

        def gradient(rank: int, step: int, weights: Vector) -> Vector | None:
            return None if self(rank, step) else finite(rank, step, weights)

        return gradient


T, K = SETTINGS["warmup_steps"], SETTINGS["delay_steps"]
OVERFLOWS = {
    "nowhere": {},
    "one_rank_in_warmup": {1: [1]},
    "all_ranks_in_warmup": {0: [1], 1: [1]},
    "one_rank_in_delay_steps": {0: [T], 1: [T + 1, T + K + 2]},
    "one_rank_at_a_sync_point": {1: [T + K - 1]},
    "one_rank_before_a_completion": {0: [T + K, T + K + 1]},
    "all_ranks_in_one_step": {0: [T + 1], 1: [T + 1]},
    "one_rank_in_a_whole_period": {1: list(range(T + K, T + 2 * K))},
    "all_ranks_in_a_whole_period": {0: list(range(T + K, T + 2 * K)), 1: list(range(T + K, T + 2 * K))},
}


@pytest.mark.parametrize(("overlap_steps", "unscale_and_clip"), [(0, True), (2, False)])
@pytest.mark.parametrize("overflows", OVERFLOWS.values(), ids=OVERFLOWS)
def test_grad_scaler(overflows: dict[int, list[int]], overlap_steps: int, unscale_and_clip: bool) -> None:
    """A step that overflowed on a rank counts for the others alone; the scales of ranks may differ."""
    overflow = Overflows(overflows)
    training = Training(horovod={}, issue="step", overlap_steps=overlap_steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        loss = regression_loss(training.model, hvd.rank(), step)
        if overflow(hvd.rank(), step):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if unscale_and_clip:
            scaler.unscale_(training.optimizer)
            if not overflow(hvd.rank(), step):
                clip(training.model)
        scaler.step(training.optimizer)
        scaler.update()
        training.record()

    assert scaler.get_scale() == 2.0 ** (10 - len(overflows.get(hvd.rank(), [])))
    gradient = overflow.gradient(clip if unscale_and_clip else lambda model: None)
    training.assert_follows(simulate(gradient=gradient, overlap_steps=overlap_steps))
    training.optimizer.flush()
    assert_equal_on_all_ranks(training.model.parameters())


# -- several optimizers, and one after another ---------------------------------------------------


def test_two_optimizers_in_one_script() -> None:
    """As for a generator and its critic, whose parameters have the same names."""
    first = Training(horovod={})
    second_settings: dict[str, Any] = {"delay_steps": 3, "overlap_steps": 1, "glu": "none", "warmup_steps": 4}
    second = Training(**second_settings)
    for step in range(STEPS):
        first.make_step()
        # The second one rests now and then.
        if step % 3:
            second.make_step()
    first.assert_follows(simulate())
    second.assert_follows(simulate(second.steps, **second_settings))


def test_one_model_with_two_optimizers() -> None:
    """Each trains its own half; both halves see each other's changes."""
    model = perceptron()
    halves = [list(model[0].named_parameters()), list(model[2].named_parameters())]
    optimizers = [
        wrap(torch.optim.SGD([p for _, p in half], lr=0.05), named_parameters=half, **SETTINGS)
        for half in halves
    ]
    history = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        for optimizer in optimizers:
            optimizer.step()
        history.append(weights_of(model))

    expected = simulate(options=lambda step: Options(lr=0.05)).ranks[hvd.rank()].local_history
    np.testing.assert_allclose(history, expected, rtol=1e-9, atol=1e-12)


def test_close_gives_back_plain_horovod() -> None:
    training = Training(horovod={}).train(9)
    training.optimizer.flush()
    model = copy.deepcopy(training.model)
    plain = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), **SGD), named_parameters=model.named_parameters()
    )
    plain.load_state_dict(copy.deepcopy(training.horovod.state_dict()))

    training.optimizer.close()
    training.communicator.take_names()
    for step in range(5):
        for trained, optimizer in ((training.model, training.horovod), (model, plain)):
            optimizer.zero_grad()
            regression_loss(trained, hvd.rank(), step).backward()
            optimizer.step()
        assert bits(training.model.parameters()) == bits(model.parameters())
    assert training.communicator.take_names() == []
    assert_equal_on_all_ranks(model.parameters())


def test_wrapped_anew_after_close() -> None:
    training = Training(horovod={}).train(9)
    training.optimizer.flush()
    training.optimizer.close()
    start = weights_of(training.model)
    momenta = [training.horovod.state[p]["momentum_buffer"] for p in training.model.parameters()]
    simulation = simulate(0, start=start, warmup_steps=0)
    simulation.momentum = flat(momenta)
    for rank in simulation.ranks:
        rank.momentum = simulation.momentum
    simulation.run([10] * hvd.size(), flush=False)

    optimizer = ssd.DistributedOptimizer(training.horovod, delay_steps=4, overlap_steps=2, timeout=TIMEOUT)
    for step in range(10):
        optimizer.zero_grad()
        regression_loss(training.model, hvd.rank(), step).backward()
        optimizer.step()

    expected = simulation.ranks[hvd.rank()].local_history[-1]
    np.testing.assert_allclose(weights_of(training.model), expected, rtol=1e-9, atol=1e-12)


def test_adopted_weights_are_the_global_ones() -> None:
    training = Training(overlap_steps=1).train(8)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(0.25)
    training.optimizer.adopt_weights()
    training.record()
    np.testing.assert_array_equal(training.global_history[-1], 0.25)
    np.testing.assert_array_equal(training.local_history[-1], 0.25)
    training.train(8)
    training.optimizer.flush()
    assert_equal_on_all_ranks(training.model.parameters())
