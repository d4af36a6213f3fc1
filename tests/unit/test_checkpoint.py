"""Saving and loading at any moment: what goes on afterwards is what would have gone on without."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engines import RecordingEngine, ThreadRank, on_ranks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loops import (
    a_scaler_says,
    equal,
    fill,
    global_weights,
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

import ssd_allreduce as ssd
from ssd_allreduce import Loopback

SETTINGS = [
    pytest.param({"delay_steps": 1}, id="k=1"),
    pytest.param({"delay_steps": 3, "overlap_steps": 0, "warmup_steps": 2}, id="k=3,d=0,T=2"),
    pytest.param({"delay_steps": 4, "overlap_steps": 2, "warmup_steps": 1}, id="k=4,d=2,T=1"),
]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


# -- any sequence of calls -----------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


@dataclass(frozen=True)
class Setup:
    """How a training is put together, each time anew."""

    optimizer: str
    options: tuple[tuple[str, Any], ...]

    def build(self) -> tuple[torch.nn.Module, ssd.DistributedOptimizer]:
        model = small_model()
        base = OPTIMIZERS[self.optimizer](model.parameters())
        return model, wrap(model, Loopback(3), base, **dict(self.options))


def act(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer, action: str, step: int) -> None:
    if action == "flush":
        optimizer.flush()
    elif action == "overflow":
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with a_scaler_says(optimizer, overflow=True):
            optimizer.step()
    else:
        train_step(model, optimizer, step)


def straight(setup: Setup, history: list[str]) -> list[Tensor]:
    """Where a training that never stops ends."""
    model, optimizer = setup.build()
    for step, action in enumerate(history):
        act(model, optimizer, action, step)
    return weights(model) + global_weights(model, optimizer)


@st.composite
def setups(draw: Any) -> Setup:
    k = draw(st.integers(1, 5), label="k")
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    sgds = ("plain", "momentum", "nesterov")
    rules = ["momentum", "gradient", "displacement", "none"] if optimizer in sgds else ["momentum"]
    options = {
        "delay_steps": k,
        "overlap_steps": draw(st.integers(0, k - 1), label="d"),
        "warmup_steps": draw(st.integers(0 if optimizer in sgds else 1, 3), label="T"),
        "glu": draw(st.sampled_from(rules)),
        "issue": draw(st.sampled_from(["backward", "step"])),
    }
    return Setup(optimizer, tuple(options.items()))


ACTIONS = st.lists(
    st.one_of(
        st.just("step"),
        st.just("step"),
        st.sampled_from(["flush", "overflow", "save", "load here", "load anew"]),
    ),
    max_size=30,
)


@settings(max_examples=40)
@given(setup=setups(), actions=ACTIONS, choice=st.randoms(use_true_random=False))
@example(  # In flight, with a partial period beside it, and loaded into a fresh process.
    setup=Setup("momentum", (("delay_steps", 4), ("overlap_steps", 3), ("warmup_steps", 0))),
    actions=["step"] * 5 + ["save", "load anew"] + ["step"] * 6,
    choice=None,
)
def test_a_save_and_a_load_at_any_moment_continue_bit_for_bit(
    setup: Setup, actions: list[str], choice: Any
) -> None:
    """Steps, overflows and flushes between saves; loads of any save, by the same or a fresh optimizer."""
    if dict(setup.options).get("issue") != "step":
        actions = [action for action in actions if action != "overflow"]
    model, optimizer = setup.build()
    history: list[str] = []
    saves: list[tuple[dict[str, Any], list[str]]] = []
    for action in actions:
        if action == "save":
            saves.append((through_a_file(optimizer.state_dict()), list(history)))
        elif action.startswith("load"):
            if not saves:
                continue
            state, past = saves[-1] if choice is None else choice.choice(saves)
            if action == "load anew":
                model, optimizer = setup.build()
                fill(model, 7.0)
            history = list(past)
            optimizer.load_state_dict(state)
        else:
            act(model, optimizer, action, len(history))
            history.append(action)
    assert equal(weights(model) + global_weights(model, optimizer), straight(setup, history))


@pytest.mark.parametrize("steps", [0, 1, 4, 6])
@pytest.mark.parametrize("options", SETTINGS)
def test_saving_changes_nothing(options: dict[str, Any], steps: int) -> None:
    model, undisturbed = small_model(), small_model()
    optimizer, other = wrap(model, Loopback(2), **options), wrap(undisturbed, Loopback(2), **options)
    train(model, optimizer, steps)
    optimizer.state_dict()
    optimizer.state_dict()
    train(model, optimizer, 5, first=steps)
    train(undisturbed, other, steps + 5)
    assert equal(weights(model), weights(undisturbed))


@pytest.mark.parametrize("options", SETTINGS)
def test_loading_the_own_state_at_once_changes_nothing(options: dict[str, Any]) -> None:
    """Its tensors are the live ones, as in torch."""
    model, undisturbed = small_model(), small_model()
    optimizer, other = wrap(model, Loopback(2), **options), wrap(undisturbed, Loopback(2), **options)
    for step in range(10):
        optimizer.load_state_dict(optimizer.state_dict())
        train_step(model, optimizer, step)
        train_step(undisturbed, other, step)
        assert equal(weights(model), weights(undisturbed))


@pytest.mark.parametrize("options", SETTINGS)
def test_saving_waits_for_the_own_operations_and_keeps_what_arrived(options: dict[str, Any]) -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, **options)
    for step in range(10):
        train_step(model, optimizer, step)
        first = copy.deepcopy(optimizer.state_dict())
        assert engine.open_operations == []
        assert same(optimizer.state_dict(), first)


# -- several ranks -------------------------------------------------------------------------------


def states(size: int, steps: int, flush: bool = False, **options: Any) -> list[dict[str, Any]]:
    """The checkpoint of every rank after some steps."""

    def program(engine: ThreadRank) -> dict[str, Any]:
        model = small_model()
        optimizer = wrap(model, engine, **options)
        train(model, optimizer, steps, engine.rank)
        if flush:
            optimizer.flush()
        state = through_a_file(optimizer.state_dict())
        optimizer.close()
        return state

    return on_ranks(size, program)


def resume(
    saved: list[dict[str, Any]], first: int, steps: int, flush: bool = False, **options: Any
) -> list[Any]:
    """Local and global weights of every rank that loads its state into a fresh process."""

    def program(engine: ThreadRank) -> tuple[list[Tensor], list[Tensor]]:
        model = small_model()
        fill(model, 3.0)
        optimizer = wrap(model, engine, **options)
        optimizer.load_state_dict(saved[engine.rank])
        train(model, optimizer, steps, engine.rank, first=first)
        if flush:
            optimizer.flush()
        return weights(model), global_weights(model, optimizer)

    return on_ranks(len(saved), program)


def in_one_go(size: int, steps: int, **options: Any) -> list[Any]:
    def program(engine: ThreadRank) -> tuple[list[Tensor], list[Tensor]]:
        model = small_model()
        optimizer = wrap(model, engine, **options)
        train(model, optimizer, steps, engine.rank)
        return weights(model), global_weights(model, optimizer)

    return on_ranks(size, program)


@pytest.mark.parametrize("steps", [0, 1, 4, 5, 6, 8])
@pytest.mark.parametrize("options", SETTINGS)
def test_ranks_that_each_load_their_own_go_on_bit_for_bit(options: dict[str, Any], steps: int) -> None:
    resumed = resume(states(2, steps, **options), steps, 5, **options)
    for mine, right in zip(resumed, in_one_go(2, steps + 5, **options), strict=True):
        assert same(mine, right)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [0, 1, 4, 6, 9])
@pytest.mark.parametrize("options", SETTINGS)
def test_after_flush_one_ranks_state_serves_all(options: dict[str, Any], steps: int) -> None:
    saved = states(2, steps, flush=True, **options)
    own = resume(saved, steps, 5, **options)
    of_one = resume([saved[0]] * 2, steps, 5, **options)
    assert same(own, of_one)


@pytest.mark.parametrize("steps", [6, 7, 8])
def test_another_ranks_state_in_mid_period_gives_the_global_weights_a_new_period_and_one_warning(
    steps: int,
) -> None:
    options = {"delay_steps": 4, "overlap_steps": 1, "warmup_steps": 1}
    saved = states(2, steps, **options)
    entry = saved[0]["state"]["ssd_allreduce"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = resume([saved[0]] * 2, steps, 0, **options)
    told = [str(w.message) for w in caught if "The checkpoint was saved by" in str(w.message)]
    assert len(told) == 1, "only the rank whose state it is not"
    assert "saved by rank 0 of 2 and is loaded by rank 1 of 2" in told[0]
    assert "flush() before saving" in told[0]
    for _, world in resumed:
        assert equal(world, entry["global_weights"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = resume([saved[0]] * 2, steps, 3, **options)
        ended = resume([saved[0]] * 2, steps, 7, flush=True, **options)
    for local, world in after:
        assert equal(world, entry["global_weights"]), "three steps end no period of four"
        assert not equal(local, world)
    assert equal(ended[0][1], ended[1][1])
    assert equal(ended[0][0], ended[0][1])


def states_around_an_error(loop_goes_on: bool, **options: Any) -> list[dict[str, Any]]:
    """What ranks save once rank 1 has spoilt the sync point of the step after 7.

    Args:
        loop_goes_on: whether rank 0 saves only when it has heard of the error too.
    """

    def program(engine: ThreadRank) -> dict[str, Any]:
        model = small_model()
        optimizer = wrap(model, engine, **options)
        train(model, optimizer, 7, engine.rank)
        guilty = engine.rank == 1
        try:
            for step in range(7, 20):
                edit = (lambda: model[0].weight.grad.zero_()) if guilty else None
                train_step(model, optimizer, step, engine.rank, edit)
                if not (guilty or loop_goes_on):
                    break
            failed = False
        except ssd.SSDError:
            failed = True
        assert failed == (guilty or loop_goes_on)
        return through_a_file(optimizer.state_dict())

    return on_ranks(2, program)


FAILING = [
    pytest.param({"delay_steps": 4, "overlap_steps": 2, "glu": "momentum"}, id="momentum"),
    pytest.param({"delay_steps": 4, "overlap_steps": 2, "glu": "gradient"}, id="gradient"),
    pytest.param({"delay_steps": 4, "overlap_steps": 0, "glu": "displacement"}, id="displacement,d=0"),
    pytest.param({"delay_steps": 1}, id="k=1"),
]


@pytest.mark.filterwarnings("ignore:The checkpoint was saved by rank")
@pytest.mark.parametrize("options", FAILING)
def test_states_saved_after_an_error_begin_a_new_period_from_the_global_weights(
    options: dict[str, Any],
) -> None:
    saved = states_around_an_error(loop_goes_on=True, **options)
    for state, (_, world) in zip(saved, in_one_go(2, 7, **options), strict=True):
        assert equal(state["state"]["ssd_allreduce"]["global_weights"], world)
    resumed = resume(saved, 30, 9, flush=True, **options)
    # A third rank's state gives the same: global weights, their optimizer state, and nothing else.
    of_another = states(2, 7, **options)[0]
    of_another["state"]["ssd_allreduce"]["rank"] = 2
    assert same(resumed, resume([of_another] * 2, 30, 9, flush=True, **options))


@pytest.mark.filterwarnings("ignore:The checkpoint was saved by rank")
def test_a_state_saved_before_its_rank_heard_of_an_error_goes_with_those_saved_after() -> None:
    options = {"delay_steps": 4, "overlap_steps": 2}
    saved = states_around_an_error(loop_goes_on=False, **options)
    assert saved[0]["state"]["ssd_allreduce"]["schedule"]["steps_since_sync"] is not None
    world = saved[1]["state"]["ssd_allreduce"]["global_weights"]
    for _, after_three_steps in resume(saved, 30, 3, **options):
        assert equal(after_three_steps, world)
    (local, here), (_, there) = resume(saved, 30, 9, flush=True, **options)
    assert equal(here, there)
    assert equal(local, here)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("glu", ["momentum", "gradient", "displacement"])
def test_another_world_size_takes_global_weights_and_state(before: int, after: int, glu: str) -> None:
    options = {"delay_steps": 3, "overlap_steps": 1, "glu": glu}
    saved = states(before, 5, **options)[0]
    entry = saved["state"]["ssd_allreduce"]
    with pytest.warns(UserWarning, match=rf"saved by rank 0 of {before} .*rank \d of {after}"):
        resumed = resume([saved] * after, 5, 0, **options)
    for local, world in resumed:
        assert equal(world, entry["global_weights"])
        assert equal(local, entry["global_weights"])


def test_other_settings_take_global_weights_and_begin_a_new_period() -> None:
    saved = states(2, 6, delay_steps=4, overlap_steps=1)
    entry = saved[0]["state"]["ssd_allreduce"]
    with pytest.warns(UserWarning, match="or with other settings"):
        resumed = resume(saved, 6, 5, delay_steps=8, overlap_steps=3)
    for local, world in resumed:
        assert equal(world, entry["global_weights"])
        assert not equal(local, world)


# -- what a checkpoint is to others --------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_the_base_optimizers_part_is_what_torch_would_have_saved(size: int) -> None:
    model, plain = small_model(), small_model()
    optimizer, other = wrap(model, Loopback(size), delay_steps=1), sgd(plain)
    train(model, optimizer, 3)
    train(plain, other, 3)
    mine, torchs = optimizer.state_dict(), other.state_dict()
    assert same(mine["param_groups"], torchs["param_groups"])
    assert same({k: v for k, v in mine["state"].items() if isinstance(k, int)}, torchs["state"])
    heir = small_model()
    heir.load_state_dict(model.state_dict())
    resumed = sgd(heir, lr=0.5)
    resumed.load_state_dict(through_a_file(mine))
    train(heir, resumed, 2, first=3)
    train(plain, other, 2, first=3)
    assert equal(weights(heir), weights(plain))


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_of_plain_training_can_be_loaded(size: int) -> None:
    model, plain = small_model(), small_model()
    other = sgd(plain)
    train(plain, other, 3)
    optimizer = wrap(model, Loopback(size), delay_steps=1)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(through_a_file(other.state_dict()))
    train(model, optimizer, 3, first=3)
    train(plain, other, 3, first=3)
    assert equal(weights(model), weights(plain))


@pytest.mark.filterwarnings("ignore:The checkpoint was saved by rank")
@pytest.mark.parametrize("through", ["the wrapper", "the user's own"])
@pytest.mark.parametrize("flag", ["of each parameter", "of all"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("base", ["momentum", "adamw", "nadam"])
def test_state_created_for_one_parameter_does_not_cost_the_others_theirs(
    base: str, size: int, flag: str, through: str
) -> None:
    """One that never had a gradient has no state, until it is asked for to be broadcast or saved."""
    plain, between, model = small_model(), small_model(), small_model()
    other = OPTIMIZERS[base](plain.parameters())
    for step in range(3):
        train_step(plain, other, step, edit=lambda: setattr(plain[2].bias, "grad", None))
    options = {"delay_steps": 4, "overlap_steps": 1, "warmup_steps": 9}
    courier = wrap(between, Loopback(2), OPTIMIZERS[base](between.parameters()), **options)
    between.load_state_dict(plain.state_dict())
    courier.load_state_dict(other.state_dict())
    saved = through_a_file(courier.state_dict())
    if flag == "of all":
        saved["state"]["ssd_allreduce"]["state_is_initial"] = True

    user = OPTIMIZERS[base](model.parameters())
    optimizer = wrap(model, Loopback(size), user, **options)
    (user if through == "the user's own" else optimizer).load_state_dict(saved)
    assert set(optimizer.state) == set(model.parameters())
    train(model, optimizer, 3, first=3)
    train(plain, other, 3, first=3)
    assert equal(weights(model), weights(plain))
    assert same(optimizer.state_dict()["state"][0], other.state_dict()["state"][0])


def test_state_that_a_broadcast_has_brought_is_saved_as_real() -> None:
    model, heir, plain = small_model(), small_model(), small_model()
    optimizer, resumed = wrap(model, Loopback(2), delay_steps=1), wrap(heir, Loopback(2), delay_steps=1)
    # As hvd.broadcast_optimizer_state writes another rank's momentum, in place.
    for entry in list(optimizer.state_dict()["state"].values())[:-1]:
        entry["momentum_buffer"].fill_(2.0)
    saved = through_a_file(optimizer.state_dict())
    resumed.load_state_dict(saved)
    other = sgd(plain)
    other.load_state_dict(saved)
    train(heir, resumed, 2)
    train(plain, other, 2)
    assert equal(weights(heir), weights(plain))


def broadcast_state(optimizer: ssd.DistributedOptimizer, engine: ThreadRank) -> None:
    """As hvd.broadcast_optimizer_state: every tensor of the state, in place."""
    saved = optimizer.state_dict()
    for place, entry in ((k, v) for k, v in saved["state"].items() if isinstance(k, int)):
        for key, value in entry.items():
            engine.broadcast(value, 0, f"state.{place}.{key}", 10.0)


def test_a_momentum_of_zero_that_one_rank_loaded_and_broadcast_is_kept_by_all() -> None:
    """With dampening, a momentum of zero is not the same as none."""
    trained, plain = small_model(), small_model()
    first, other = sgd(trained, dampening=0.5), sgd(plain, dampening=0.5)
    for step in range(3):
        train_step(trained, first, step, edit=lambda: trained[2].bias.grad.zero_())
    saved = through_a_file(first.state_dict())
    assert not saved["state"][3]["momentum_buffer"].any()

    def program(engine: ThreadRank) -> list[Tensor]:
        model = small_model()
        optimizer = wrap(model, engine, sgd(model, dampening=0.5), delay_steps=1)
        if engine.rank == 0:
            optimizer.load_state_dict(copy.deepcopy(saved))
        broadcast_state(optimizer, engine)
        train(model, optimizer, 3)
        return weights(model)

    results = on_ranks(2, program)
    other.load_state_dict(saved)
    train(plain, other, 3)
    assert all(equal(result, weights(plain)) for result in results)


def test_state_that_one_rank_alone_created_is_dropped() -> None:
    plain = small_model()
    train(plain, sgd(plain, dampening=0.5), 3)

    def program(engine: ThreadRank) -> list[Tensor]:
        model = small_model()
        optimizer = wrap(model, engine, sgd(model, dampening=0.5), delay_steps=1)
        if engine.rank == 1:
            optimizer.state_dict()
        train(model, optimizer, 3)
        return weights(model)

    assert all(equal(result, weights(plain)) for result in on_ranks(2, program))


def of_a_torch_without_the_option(saved: dict[str, Any]) -> None:
    del saved["param_groups"][0]["decoupled_weight_decay"]


def of_adam(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["decoupled_weight_decay"] = False


def of_a_torch_that_counted_steps_in_numbers(saved: dict[str, Any]) -> None:
    for entry in saved["state"].values():
        entry["step"] = int(entry["step"])


def test_a_checkpoint_may_choose_another_implementation_of_the_same_step() -> None:
    """``foreach`` and its kind are None where torch chooses, and False or True where the user did."""
    model, other = small_model(), small_model()
    source = torch.optim.Adam(model.parameters())
    train(model, source, 2)
    optimizer = wrap(
        other, Loopback(2), torch.optim.Adam(other.parameters(), foreach=False, fused=False), warmup_steps=3
    )
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(source.state_dict())
    for trained, by in ((model, source), (other, optimizer)):
        train(trained, by, 3, first=2)
    assert equal(weights(model), weights(other))


@pytest.mark.parametrize(
    "make_older", [of_a_torch_without_the_option, of_adam, of_a_torch_that_counted_steps_in_numbers]
)
@pytest.mark.parametrize("through", ["the wrapper", "the user's own"])
@pytest.mark.parametrize("size", [1, 2])
def test_what_a_class_mends_in_its_own_load_is_mended_in_a_load_through_the_wrapper(
    size: int, through: str, make_older: Callable[[dict[str, Any]], None]
) -> None:
    def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5)

    trained, plain, model = small_model(), small_model(), small_model()
    first = adamw(trained)
    train(trained, first, 3)
    saved = copy.deepcopy(first.state_dict())
    make_older(saved)
    other, user = adamw(plain), adamw(model)
    optimizer = wrap(model, Loopback(size), user, warmup_steps=9)
    other.load_state_dict(saved)
    (user if through == "the user's own" else optimizer).load_state_dict(saved)
    assert same(optimizer.state_dict()["param_groups"], other.state_dict()["param_groups"])
    assert user.param_groups is optimizer.param_groups
    assert user.state is optimizer.state
    train(model, optimizer, 3)
    train(plain, other, 3)
    assert equal(weights(model), weights(plain))


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("options", [{"delay_steps": 1}, {"warmup_steps": 9}])
def test_while_synchronous_model_and_optimizer_are_loaded_in_any_order(
    options: dict[str, Any], order: str
) -> None:
    model, straight_on = small_model(), small_model()
    optimizer, other = wrap(model, Loopback(2), **options), wrap(straight_on, Loopback(2), **options)
    train(straight_on, other, 3)
    loads = [
        lambda: model.load_state_dict(straight_on.state_dict()),
        lambda: optimizer.load_state_dict(other.state_dict()),
    ]
    for load in loads if order == "model first" else reversed(loads):
        load()
    train(model, optimizer, 2, first=3)
    train(straight_on, other, 2, first=3)
    assert equal(weights(model), weights(straight_on))


@pytest.mark.parametrize("options", SETTINGS)
def test_the_models_checkpoint_holds_the_global_weights_inside_the_context(options: dict[str, Any]) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **options)
    train(model, optimizer, 7)
    entry = optimizer.state_dict()["state"]["ssd_allreduce"]
    with optimizer.global_weights():
        assert equal(list(model.state_dict().values()), entry["global_weights"])


def test_what_was_loaded_does_not_change_with_training() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), delay_steps=3, overlap_steps=1)
    train(model, optimizer, 5)
    saved = through_a_file(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(model, optimizer, 7)
    assert same(saved, kept)


# -- refusals ------------------------------------------------------------------------------------


def another_shape(state: dict[str, Any]) -> None:
    state["state"]["ssd_allreduce"]["global_weights"][0] = torch.zeros(9, 9)


def another_dtype(state: dict[str, Any]) -> None:
    world = state["state"]["ssd_allreduce"]["global_weights"]
    world[3] = world[3].double()


def another_name(state: dict[str, Any]) -> None:
    state["state"]["ssd_allreduce"]["names"][1] = "head.bias"


def another_order(state: dict[str, Any]) -> None:
    state["state"]["ssd_allreduce"]["names"].reverse()


def a_parameter_less(state: dict[str, Any]) -> None:
    state["state"]["ssd_allreduce"]["names"].pop()


def another_format(state: dict[str, Any]) -> None:
    state["state"]["ssd_allreduce"]["format"] = 99


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("loader", ["wrapper", "user's"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (another_shape, r"Parameter '0\.weight' is \(4, 3\) torch.float32 in the model and \(9, 9\)"),
        (another_dtype, r"Parameter '2\.bias' is \(2,\) torch.float32 in the model and \(2,\) torch.float64"),
        (another_name, r"holds 4 parameters and the optimizer 4; they differ in 0\.bias, head\.bias"),
        (another_order, r"the same names in another order"),
        (a_parameter_less, r"holds 3 parameters and the optimizer 4; they differ in 2\.bias"),
        (another_format, r"has format 99; this version reads format 2"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_has_changed(
    spoil: Callable[[dict[str, Any]], None], message: str, loader: str, size: int
) -> None:
    model = small_model()
    base = sgd(model)
    optimizer = wrap(model, Loopback(size), base, delay_steps=3, overlap_steps=1)
    train(model, optimizer, 5)
    state = through_a_file(optimizer.state_dict())
    spoil(state)
    train(model, optimizer, 2, first=5)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        (optimizer if loader == "wrapper" else base).load_state_dict(state)
    assert same(optimizer.state_dict(), before)
    train(model, optimizer, 2, first=7)


CLASSES: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("loader", ["wrapper", "user's"])
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [("Adam", "SGD"), ("SGD", "Adam"), ("SGD", "RMSprop"), ("Adam", "NAdam")]
)
def test_a_checkpoint_of_another_class_is_refused_and_nothing_has_changed(
    saved_by: str, loaded_by: str, loader: str, size: int
) -> None:
    source, model = small_model(), small_model()
    saving = wrap(source, Loopback(size), CLASSES[saved_by](source.parameters()), warmup_steps=2)
    train(source, saving, 5)
    state = through_a_file(saving.state_dict())
    base = CLASSES[loaded_by](model.parameters())
    optimizer = wrap(model, Loopback(size), base, warmup_steps=2)
    train(model, optimizer, 4)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"holds the state of {saved_by}, and the optimizer is {loaded_by}"):
        (optimizer if loader == "wrapper" else base).load_state_dict(state)
    assert same(optimizer.state_dict(), before)
    train(model, optimizer, 2, first=4)


@pytest.mark.parametrize("named", [True, False], ids=["now", "older checkpoints"])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("Adam", "AdamW"), ("AdamW", "Adam"), ("SGD", "SGD")])
def test_classes_with_the_same_state_go_on_from_each_other(
    saved_by: str, loaded_by: str, named: bool
) -> None:
    source, model = small_model(), small_model()
    saving = wrap(source, Loopback(2), CLASSES[saved_by](source.parameters()), warmup_steps=2)
    train(source, saving, 5)
    state = through_a_file(saving.state_dict())
    if not named:
        del state["state"]["ssd_allreduce"]["optimizer"]
    optimizer = wrap(model, Loopback(2), CLASSES[loaded_by](model.parameters()), warmup_steps=2)
    optimizer.load_state_dict(state)
    assert equal(weights(model), weights(source))
    train(model, optimizer, 4, first=5)


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_with_other_groups_is_refused_and_nothing_has_changed(size: int) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(size), delay_steps=3, overlap_steps=1)
    train(model, optimizer, 5)
    before = copy.deepcopy(optimizer.state_dict())
    other = torch.optim.SGD([{"params": [p]} for p in small_model().parameters()], lr=0.1)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(other.state_dict())
    assert same(optimizer.state_dict(), before)
    train(model, optimizer, 2, first=5)
