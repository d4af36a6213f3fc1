"""Wrong use is refused, by an error that names what was found and what to do; and the remedy works."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import RecordingEngine, ThreadRank, on_ranks, run_ranks
from loops import (
    a_scaler_says,
    equal,
    fill,
    global_weights,
    loss_of,
    sgd,
    small_model,
    train,
    train_step,
    weights,
    wrap,
)

import ssd_allreduce as ssd
from ssd_allreduce import (
    BackwardPassesError,
    CommunicationError,
    CommunicationTimeoutError,
    GradientChangedError,
    Loopback,
    PeerFailedError,
    RankMismatchError,
    SSDError,
    UsageError,
    WeightsChangedError,
)

Edit = Callable[[torch.nn.Module, ssd.DistributedOptimizer], object]

DELAY = {"delay_steps": 3, "overlap_steps": 1}
SYNC_POINT = 2
WARMUP = {"warmup_steps": 99}


# -- at construction -----------------------------------------------------------------------------


class Renamed(torch.optim.SGD):
    """Keeps SGD's step under another name."""


class LineSearch(torch.optim.LBFGS):
    """What is said of a class holds for its subclasses."""


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (torch.optim.LBFGS, r"torch\.optim\.lbfgs\.LBFGS", "evaluates its closure several times"),
        (LineSearch, r"test_misuse\.LineSearch", "evaluates its closure several times"),
        (torch.optim.SparseAdam, r"torch\.optim\.\w+\.SparseAdam", "takes sparse gradients"),
        (torch.optim.Adafactor, r"torch\.optim.*Adafactor", "second moment"),
    ],
)
def test_an_optimizer_class_that_is_not_supported_is_named_with_the_reason(
    make: Callable[[Any], Any], name: str, reason: str
) -> None:
    model = small_model()
    with pytest.raises(TypeError, match=rf"{name} is not supported: .*{reason}.*Allowed: torch\.optim\.SGD"):
        wrap(model, Loopback(2), make(model.parameters()))


def test_a_subclass_that_keeps_the_step_is_what_it_inherits() -> None:
    model, plain = small_model(), small_model()
    train(model, wrap(model, Loopback(2), Renamed(model.parameters(), lr=0.1, momentum=0.9), **DELAY), 7)
    train(plain, wrap(plain, Loopback(2), **DELAY), 7)
    assert equal(weights(model), weights(plain))


def test_a_differentiable_optimizer_is_refused() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"differentiable=True is not supported.*differentiable=False"):
        wrap(model, Loopback(2), sgd(model, differentiable=True))


@pytest.mark.parametrize("wrong", [None, [], torch.nn.Linear(1, 1), "sgd"])
def test_what_is_no_optimizer_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"optimizer is a {type(wrong).__name__}. Allowed: a torch"):
        ssd.DistributedOptimizer(wrong, communicator=Loopback(2))


def test_wrapping_twice_is_refused() -> None:
    model = small_model()
    base = sgd(model)
    optimizer = wrap(model, Loopback(2), base)
    with pytest.raises(UsageError, match=r"already an ssd_allreduce.*Wrap the base optimizer once"):
        wrap(model, Loopback(2), optimizer)
    with pytest.raises(UsageError, match=r"already wrapped by an ssd_allreduce.*Call its close\(\) first"):
        wrap(model, Loopback(2), base)
    train_step(model, optimizer)


@pytest.mark.parametrize("wrong", [object(), 2, None])
def test_what_is_no_communicator_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"communicator=.* lacks methods.*ssd_allreduce\.Loopback\(size\)"):
        wrap(small_model(), wrong)


@pytest.mark.parametrize("wrong", [object(), "fp16"])
def test_what_does_not_compress_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"compression=.* has no method compress\(\).*Compression\.fp16"):
        wrap(small_model(), Loopback(2), compression=wrong)


def test_an_optimizer_without_anything_to_train_is_refused() -> None:
    model = small_model().requires_grad_(False)
    with pytest.raises(ValueError, match=r"None of the optimizer's 4 parameters requires a gradient"):
        wrap(model, Loopback(2))


def test_a_refused_construction_leaves_the_users_optimizer_alone() -> None:
    model, plain = small_model(), small_model()
    base = sgd(model)
    refused: list[dict[str, Any]] = [
        {"delay_steps": 0},
        {"named_parameters": []},
        {"communicator": object()},
        {"compression": object()},
        {"backward_passes_per_step": 0},
    ]
    for options in refused:
        given = {"named_parameters": model.named_parameters(), "communicator": Loopback(2), **options}
        with pytest.raises((TypeError, ValueError)):
            ssd.DistributedOptimizer(base, **given)
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    train(model, base, 2)
    train(plain, sgd(plain), 2)
    assert equal(weights(model), weights(plain))


# -- gradients that change after they were sent --------------------------------------------------


def clip(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def unscale(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


def edit_data(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    next(iter(model.parameters())).grad.data.mul_(2.0)  # type: ignore[union-attr]


def replace_gradient(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    parameter = next(iter(model.parameters()))
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def drop_gradient(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    next(iter(model.parameters())).grad = None


def another_backward(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    with pytest.raises(BackwardPassesError):
        loss_of(model, 77).backward()


def zero_without_us(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    model.zero_grad(set_to_none=False)


EDITS: dict[str, Edit] = {
    "clipping": clip,
    "unscale_": unscale,
    "data": edit_data,
    "replacing": replace_gradient,
    "dropping": drop_gradient,
    "another backward": another_backward,
    "zeroing": zero_without_us,
}
# Version counters are all there is in warm-up, and these two leave them alone.
IN_WARMUP = {name: edit for name, edit in EDITS.items() if name not in ("unscale_", "data")}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("d", [0, 1])
def test_a_gradient_changed_after_a_sync_point_sent_it_is_refused(edit: str, d: int) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), delay_steps=3, overlap_steps=d)
    train(model, optimizer, SYNC_POINT)
    with pytest.raises(
        GradientChangedError, match=r"gradient of '.*was changed after its allreduce.*issue='step'"
    ):
        train_step(model, optimizer, SYNC_POINT, edit=lambda: EDITS[edit](model, optimizer))


@pytest.mark.parametrize("edit", IN_WARMUP)
def test_a_gradient_changed_after_warmup_sent_it_is_refused(edit: str) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **WARMUP)
    train_step(model, optimizer)
    with pytest.raises(
        GradientChangedError, match=r"gradient of '.*was changed after its allreduce.*issue='step'"
    ):
        train_step(model, optimizer, 1, edit=lambda: EDITS[edit](model, optimizer))


@pytest.mark.parametrize("edit", [name for name in EDITS if name != "another backward"])
@pytest.mark.parametrize("options", [DELAY, WARMUP])
def test_with_issue_step_gradients_are_final_only_at_step(edit: str, options: dict[str, Any]) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), issue="step", **options)
    for step in range(6):
        train_step(model, optimizer, step, edit=lambda: EDITS[edit](model, optimizer))


def test_gradients_may_be_edited_in_delay_steps_that_send_nothing() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **DELAY)
    train_step(model, optimizer, 0, edit=lambda: clip(model, optimizer))
    train_step(model, optimizer, 1, edit=lambda: clip(model, optimizer))
    train_step(model, optimizer, 2)


def test_clipping_that_changes_no_bit_is_no_change_at_a_sync_point() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **DELAY)
    for step in range(7):
        train_step(
            model,
            optimizer,
            step,
            edit=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6),
        )


def test_a_changed_gradient_is_never_summed() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), delay_steps=3, overlap_steps=0)
    train(model, optimizer, SYNC_POINT)
    before = global_weights(model, optimizer)
    with pytest.raises(GradientChangedError):
        train_step(model, optimizer, SYNC_POINT, edit=lambda: clip(model, optimizer))
    assert equal(global_weights(model, optimizer), before)


# -- and what is possible afterwards -------------------------------------------------------------


def fail_at_a_sync_point(model: torch.nn.Module, **options: Any) -> ssd.DistributedOptimizer:
    optimizer = wrap(model, RecordingEngine(2), **options)
    train(model, optimizer, SYNC_POINT)
    with pytest.raises(GradientChangedError):
        train_step(model, optimizer, SYNC_POINT, edit=lambda: clip(model, optimizer))
    return optimizer


@pytest.mark.parametrize("options", [DELAY, {"delay_steps": 3, "overlap_steps": 0}, WARMUP])
def test_after_an_error_that_ended_training_calls_say_what_is_left(options: dict[str, Any]) -> None:
    model = small_model()
    optimizer = fail_at_a_sync_point(model, **options)
    for call in (optimizer.step, optimizer.flush, optimizer.synchronize):
        with pytest.raises(
            UsageError, match=r"after an error that ended training.*adopt_weights\(\) on all ranks, or load"
        ):
            call()


@pytest.mark.parametrize("options", [DELAY, {"delay_steps": 3, "overlap_steps": 0}, WARMUP])
@pytest.mark.parametrize("iterations", [0, 1])
def test_adopt_weights_mends_a_failure_even_after_the_loop_went_on(
    iterations: int, options: dict[str, Any]
) -> None:
    model = small_model()
    optimizer = fail_at_a_sync_point(model, **options)
    for step in range(iterations):
        with pytest.raises(UsageError):
            train_step(model, optimizer, step)
    optimizer.adopt_weights()
    train(model, optimizer, 7)
    optimizer.flush()
    assert equal(weights(model), global_weights(model, optimizer))


@pytest.mark.parametrize("options", [DELAY, {"delay_steps": 3, "overlap_steps": 0}, WARMUP])
@pytest.mark.parametrize("iterations", [0, 1])
def test_a_checkpoint_mends_a_failure(iterations: int, options: dict[str, Any]) -> None:
    model, straight = small_model(), small_model()
    fresh = wrap(straight, RecordingEngine(2), **options)
    start = fresh.state_dict()
    optimizer = fail_at_a_sync_point(model, **options)
    for step in range(iterations):
        with pytest.raises(UsageError):
            train_step(model, optimizer, step)
    optimizer.load_state_dict(start)
    train(model, optimizer, 7)
    train(straight, fresh, 7)
    assert equal(weights(model), weights(straight))


# -- one rank errs, the others hear of it --------------------------------------------------------


def failing_ranks(
    size: int, culprits: set[int], edit: Edit, steps: int, **options: Any
) -> list[tuple[type[BaseException] | None, str]]:
    """What each rank's training ended with, where some ranks edit their gradients before a step."""

    def program(engine: ThreadRank) -> SSDError | None:
        model = small_model()
        optimizer = wrap(model, engine, **options)
        train(model, optimizer, steps, engine.rank)
        guilty = engine.rank in culprits
        try:
            train_step(
                model, optimizer, steps, engine.rank, (lambda: edit(model, optimizer)) if guilty else None
            )
            train(model, optimizer, 5, engine.rank)
        except SSDError as error:
            return error
        return None

    outcomes = run_ranks(size, program)
    return [
        (type(o.value), str(o.value)) if o.error is None else (type(o.error), str(o.error)) for o in outcomes
    ]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("culprits", [{0}, {2}, {0, 1, 2}])
def test_the_other_ranks_hear_of_a_changed_gradient_at_the_sync_point(edit: str, culprits: set[int]) -> None:
    ends = failing_ranks(3, culprits, EDITS[edit], SYNC_POINT, **DELAY)
    for rank, (kind, message) in enumerate(ends):
        if rank in culprits:
            assert kind is GradientChangedError
        else:
            assert kind is PeerFailedError
            assert f"Rank {max(culprits)} refused to go on at sync event 0" in message
            assert "a gradient was changed" in message


@pytest.mark.parametrize("edit", IN_WARMUP)
@pytest.mark.parametrize("culprits", [{0}, {1}])
def test_the_other_ranks_hear_of_a_changed_gradient_in_warmup(edit: str, culprits: set[int]) -> None:
    ends = failing_ranks(2, culprits, EDITS[edit], 1, **WARMUP)
    kinds = [kind for kind, _ in ends]
    assert [kind is GradientChangedError for kind in kinds] == [rank in culprits for rank in range(2)]
    assert kinds.count(PeerFailedError) == 1


def change_weights(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    fill(model, 0.0)


@pytest.mark.parametrize("options", [{"delay_steps": 1}, WARMUP, {"delay_steps": 2, "overlap_steps": 0}])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_other_ranks_hear_of_changed_weights(steps: int, options: dict[str, Any]) -> None:
    ends = failing_ranks(2, {1}, change_weights, steps, **options)
    assert [kind for kind, _ in ends] == [PeerFailedError, WeightsChangedError]
    assert "weights were changed by something other" in ends[0][1]


def test_the_other_ranks_hear_of_weights_changed_in_a_delay_step_once_they_wait_for_this_rank() -> None:
    """The rank that erred ends; the others are told by the engine at the next sync point."""
    ends = failing_ranks(2, {1}, change_weights, 1, delay_steps=4, overlap_steps=0, timeout=1.0)
    assert ends[1][0] is WeightsChangedError
    assert ends[0][0] is not None
    assert issubclass(ends[0][0], SSDError)


def test_the_other_ranks_hear_of_weights_changed_before_a_flush() -> None:
    def program(engine: ThreadRank) -> SSDError | None:
        model = small_model()
        optimizer = wrap(model, engine, delay_steps=4, overlap_steps=1)
        train(model, optimizer, 6, engine.rank)
        if engine.rank == 1:
            fill(model, 0.0)
        try:
            optimizer.flush()
        except SSDError as error:
            fill(model, 0.0)
            optimizer.adopt_weights()
            train(model, optimizer, 6, engine.rank)
            optimizer.flush()
            return error
        return None

    outcomes = run_ranks(2, program)
    assert [type(o.value) for o in outcomes] == [PeerFailedError, WeightsChangedError], outcomes


def nobody_answers(engine: RecordingEngine) -> None:
    engine.hangs = lambda name: True


def another_rank_has_ended(engine: RecordingEngine) -> None:
    engine.refuses = lambda name: True


@pytest.mark.parametrize("engine_fails", [nobody_answers, another_rank_has_ended])
@pytest.mark.parametrize("options", [DELAY, WARMUP])
@pytest.mark.parametrize("call", ["step()", "flush()"])
def test_the_own_error_is_raised_also_where_the_others_cannot_hear_of_it(
    call: str, options: dict[str, Any], engine_fails: Callable[[RecordingEngine], None]
) -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, issue="step", timeout=0.05, **options)
    train(model, optimizer, SYNC_POINT)
    fill(model, 0.0)
    engine_fails(engine)
    with pytest.raises(WeightsChangedError, match=r"adopt_weights\(\) on all ranks") as caught:
        optimizer.step() if call == "step()" else optimizer.flush()
    assert isinstance(caught.value.__cause__, CommunicationError)
    with pytest.raises(UsageError, match="The engine cannot be used any more: restart from the last"):
        optimizer.step()


def a_completion_hangs(model: Any, optimizer: ssd.DistributedOptimizer, engine: RecordingEngine) -> None:
    nobody_answers(engine)
    train_step(model, optimizer, 3)


def a_flush_hangs(model: Any, optimizer: ssd.DistributedOptimizer, engine: RecordingEngine) -> None:
    engine.hangs = lambda name: ".control." in name
    optimizer.flush()


def a_gradient_is_changed(model: Any, optimizer: ssd.DistributedOptimizer, engine: RecordingEngine) -> None:
    for step in range(3, 6):
        train_step(model, optimizer, step, edit=lambda: clip(model, optimizer))


def weights_are_changed(model: Any, optimizer: ssd.DistributedOptimizer, engine: RecordingEngine) -> None:
    train(model, optimizer, 2, first=3)
    fill(model, 7.0)
    train_step(model, optimizer, 5)


Failing = Callable[[Any, ssd.DistributedOptimizer, RecordingEngine], None]


@pytest.mark.parametrize(
    ("fails", "completed"),
    [
        pytest.param(a_completion_hangs, 0, id="hanging completion"),
        pytest.param(a_flush_hangs, 0, id="hanging flush"),
        pytest.param(a_gradient_is_changed, 1, id="changed gradient"),
        pytest.param(weights_are_changed, 1, id="changed weights"),
    ],
)
def test_after_an_error_the_global_weights_are_saved_without_waiting_and_can_be_resumed(
    fails: Failing, completed: int
) -> None:
    straight = small_model()
    undisturbed = wrap(straight, Loopback(2), **DELAY)
    train(straight, undisturbed, 3 + completed)
    world = global_weights(straight, undisturbed)
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, **{**DELAY, "timeout": 0.05})
    train(model, optimizer, 3)
    with pytest.raises(SSDError):
        fails(model, optimizer, engine)

    waits = len(engine.waited)
    with optimizer.global_weights():
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved = copy.deepcopy(saved)
    assert len(engine.waited) == waits
    assert equal(list(saved["model"].values()), world)
    other = small_model()
    fill(other, 3.0)
    resumed = wrap(other, Loopback(2), **DELAY)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert equal(weights(other), world)
    train(other, resumed, 5)
    resumed.flush()
    assert equal(weights(other), global_weights(other, resumed))
    assert not equal(weights(other), world)


def test_a_failed_step_of_warmup_leaves_weights_that_can_be_saved() -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, timeout=0.05, issue="step", **WARMUP)
    train(model, optimizer, 2)
    before = weights(model)
    nobody_answers(engine)
    with pytest.raises(CommunicationTimeoutError):
        train_step(model, optimizer, 2)
    waits = len(engine.waited)
    assert equal(global_weights(model, optimizer), before)
    assert equal(optimizer.state_dict()["state"]["ssd_allreduce"]["global_weights"], before)
    assert len(engine.waited) == waits


def test_nothing_is_loaded_through_an_engine_that_is_lost() -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, **{**DELAY, "timeout": 0.05})
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    train_step(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(CommunicationTimeoutError):
        a_completion_hangs(model, optimizer, engine)
    waits = len(engine.waited)
    for holder in (optimizer, optimizer.base_optimizer):
        with pytest.raises(UsageError, match=r"load_state_dict\(\) after an error.*restart from the last"):
            holder.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert len(engine.waited) == waits


def test_the_other_ranks_hear_of_a_failure_after_synchronize() -> None:
    def program(engine: ThreadRank) -> SSDError | None:
        model = small_model()
        optimizer = wrap(model, engine, delay_steps=1, timeout=5.0)
        train_step(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            try:
                optimizer.synchronize()
                if step == 1 and engine.rank == 0:
                    fill(model, 0.0)
                optimizer.step()
            except SSDError as error:
                if engine.rank == 0:
                    with pytest.raises(SSDError):
                        train_step(model, optimizer)
                return error
        return None

    outcomes = run_ranks(2, program)
    assert [type(o.value) for o in outcomes] == [WeightsChangedError, PeerFailedError], outcomes


@pytest.mark.parametrize("options", [{"delay_steps": 1}, {"delay_steps": 2, "overlap_steps": 0}])
def test_the_other_ranks_hear_of_a_parameter_that_was_unfrozen(options: dict[str, Any]) -> None:
    def program(engine: ThreadRank) -> SSDError | None:
        model = small_model()
        model[0].weight.requires_grad_(False)
        optimizer = wrap(model, engine, **options)
        train(model, optimizer, 3, engine.rank)
        if engine.rank == 0:
            model[0].weight.requires_grad_(True)
        try:
            train(model, optimizer, 4, engine.rank)
        except SSDError as error:
            return error
        return None

    outcomes = run_ranks(2, program)
    assert [type(o.value) for o in outcomes] == [UsageError, PeerFailedError], outcomes
    assert "'0.weight' was frozen" in str(outcomes[0].value)


def test_a_rank_that_stops_is_told_by_the_others_as_a_timeout() -> None:
    def program(engine: ThreadRank) -> str:
        model = small_model()
        optimizer = wrap(model, engine, delay_steps=2, overlap_steps=0, timeout=0.5)
        train(model, optimizer, 4 if engine.rank == 0 else 2, engine.rank)
        return "ended"

    slow, gone = run_ranks(2, program)
    assert gone.value == "ended"
    assert type(slow.error) is CommunicationTimeoutError
    message = str(slow.error)
    assert "Rank 0 of 2 waited 0.5 seconds for the allreduce of 4 tensors (0.weight.accumulated, " in message
    assert "This rank has made 3 steps" in message
    assert "the last completed one is 0." in message
    assert "flush()" in message


# -- ranks that differ ---------------------------------------------------------------------------


def messages_of_differing_ranks(
    build: Callable[[int], tuple[torch.nn.Module, dict[str, Any]]], size: int = 2
) -> list[str]:
    def program(engine: ThreadRank) -> None:
        model, options = build(engine.rank)
        train_step(model, wrap(model, engine, **options))

    outcomes = run_ranks(size, program)
    assert all(type(outcome.error) is RankMismatchError for outcome in outcomes), outcomes
    return [str(outcome.error) for outcome in outcomes]


@pytest.mark.parametrize(
    ("option", "here", "there"),
    [
        ("delay_steps", 4, 8),
        ("overlap_steps", 0, 1),
        ("warmup_steps", 3, 5),
        ("glu", "momentum", "none"),
        ("alpha", 0.5, 1.0),
        ("beta", 0.5, 0.25),
        ("local_lr_scale", 1.0, 2.0),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_hears_of_a_setting_that_differs(option: str, here: Any, there: Any, size: int) -> None:
    others = {"glu": "gradient"} if option in ("alpha", "beta", "local_lr_scale") else {}
    found = messages_of_differing_ranks(
        lambda rank: (small_model(), {**others, option: there if rank == size - 1 else here}), size
    )
    for message in found:
        # Of delay_steps follows the default of overlap_steps, which is not the first to be named.
        assert (
            f"Ranks differ in settings: {option} is {here!r} on rank 0 and {there!r} on rank {size - 1}."
            in message
        )
        assert "Give every rank the same script, options and data types" in message


def reshaped(rank: int) -> torch.nn.Module:
    model = small_model()
    if rank:
        model[2] = torch.nn.Linear(4, 3)
    return model


def retyped(rank: int) -> torch.nn.Module:
    return small_model(torch.float64 if rank else torch.float32)


def restrided(rank: int) -> torch.nn.Module:
    model = small_model()
    if rank:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return model


def refrozen(rank: int) -> torch.nn.Module:
    model = small_model()
    model[2].bias.requires_grad_(not rank)
    return model


def reweighted(rank: int) -> torch.nn.Module:
    model = small_model()
    with torch.no_grad():
        model[2].bias[1].add_(float(rank))
    return model


def regrouped(rank: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = small_model()
    parameters = list(model.parameters())
    cut = 3 if rank else 2
    groups = [{"params": parameters[:cut]}, {"params": parameters[cut:]}]
    return model, {"base": torch.optim.SGD(groups, lr=0.1)}


class Another(torch.optim.SGD):
    """A class of another name."""


def reclassed(rank: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = small_model()
    return model, {"base": (Another if rank else torch.optim.SGD)(model.parameters(), lr=0.1)}


def renesterov(rank: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = small_model()
    return model, {"base": sgd(model, nesterov=bool(rank))}


def restated(rank: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = small_model()
    base = sgd(model)
    if rank:
        base.state[model[0].bias]["momentum_buffer"] = torch.ones(4)
    return model, {"base": base}


def renamed(rank: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = small_model()
    prefix = "net." if rank else ""
    names = [(prefix + name, p) for name, p in model.named_parameters()]
    return model, {"named_parameters": names}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (reshaped, "the shape of '2.weight' is (2, 4) on rank 0 and (3, 4) on rank 1"),
        (retyped, "the dtype of '0.weight' is torch.float32 on rank 0 and torch.float64 on rank 1"),
        (restrided, "the strides of '0.weight' is (3, 1) on rank 0 and (1, 4) on rank 1"),
        (refrozen, "'2.bias'"),
        (reweighted, "the digest of '2.bias' is "),
        (regrouped, "the param group of '2.weight' is 1 on rank 0 and 0 on rank 1"),
        (reclassed, "class is torch.optim.sgd.SGD on rank 0 and test_misuse.Another on rank 1"),
        (renesterov, "param_groups[0]['nesterov'] is False on rank 0 and True on rank 1"),
        (restated, "momentum_buffer of '0.bias'"),
        (renamed, "'net.0."),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_rank_hears_of_tensors_and_optimizers_that_differ(
    build: Callable[[int], Any], expected: str
) -> None:
    def model_and_options(rank: int) -> tuple[torch.nn.Module, dict[str, Any]]:
        built = build(rank)
        return built if isinstance(built, tuple) else (built, {})

    here, there = messages_of_differing_ranks(model_and_options)
    assert here == there
    assert here.startswith("Ranks differ in ")
    assert expected in here


def test_what_differs_is_compared_before_any_gradient_is_sent() -> None:
    sent: dict[int, list[str]] = {}

    def program(engine: ThreadRank) -> None:
        sent[engine.rank] = engine.sent
        model = reweighted(engine.rank)
        train_step(model, wrap(model, engine, warmup_steps=3))

    run_ranks(2, program)
    assert all(".agreement." in name for names in sent.values() for name in names)


@pytest.mark.parametrize("options", [{"delay_steps": 1}, {"delay_steps": 2}])
def test_options_that_differ_are_the_largest_on_all_ranks_with_one_warning(options: dict[str, Any]) -> None:
    def train_at(engine: ThreadRank, rates: tuple[float, float]) -> list[torch.Tensor]:
        """With gradients that do not depend on the weights, only the replayed rates decide."""
        model = small_model()
        optimizer = wrap(model, engine, **options)
        for step in range(6):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rates[engine.rank] / (1 + step)
            sum(p.sum() * (1 + engine.rank) for p in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == rates[engine.rank] / 6, "its own option stays"
        return global_weights(model, optimizer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one, other = on_ranks(2, lambda engine: train_at(engine, (0.1, 0.3)))
    told = [str(warning.message) for warning in caught if "differs between ranks" in str(warning.message)]
    assert len(told) == 2, "each rank says it once"
    for message in told:
        assert "param_groups[0]['lr'] differs between ranks: 0.1 on one and 0.3 on another" in message
        assert "All ranks use the larger" in message
    everywhere, _ = on_ranks(2, lambda engine: train_at(engine, (0.3, 0.3)))
    assert equal(one, everywhere)
    assert equal(other, everywhere)


def test_ranks_that_loaded_different_progress_are_refused() -> None:
    def program(engine: ThreadRank) -> None:
        model = small_model()
        optimizer = wrap(model, engine, warmup_steps=9, timeout=1.0)
        start = optimizer.state_dict()
        train(model, optimizer, 2)
        if engine.rank == 0:
            optimizer.load_state_dict(start)
        train(model, optimizer, 2)

    outcomes = run_ranks(2, program)
    assert all(isinstance(outcome.error, SSDError) for outcome in outcomes), outcomes


@pytest.mark.parametrize("holder", ["wrapper", "user's"])
def test_state_loaded_on_one_rank_alone_is_refused_at_the_next_sync_point(holder: str) -> None:
    def program(engine: ThreadRank) -> None:
        model = small_model()
        base = sgd(model)
        optimizer = wrap(model, engine, base, delay_steps=2, overlap_steps=0, timeout=1.0)
        train(model, optimizer, 2, engine.rank)
        if engine.rank == 0:
            loader = optimizer if holder == "wrapper" else base
            fresh = sgd(small_model())
            loader.load_state_dict(fresh.state_dict())
        train(model, optimizer, 2, engine.rank)

    outcomes = run_ranks(2, program)
    assert all(isinstance(outcome.error, SSDError) for outcome in outcomes), outcomes


# -- backward passes -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("options", [DELAY, WARMUP])
def test_more_backward_passes_than_announced_are_refused_in_any_step(
    step: int, options: dict[str, Any]
) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **options)
    train(model, optimizer, step)
    optimizer.zero_grad()
    loss_of(model, step).backward()
    with pytest.raises(
        BackwardPassesError,
        match=r"Parameter '.*' .*has received gradients from 2 backward passes.* 1 were announced.*"
        r"backward_passes_per_step=, or pass issue='step'",
    ):
        loss_of(model, step).backward()


@pytest.mark.parametrize("options", [DELAY, WARMUP, {"delay_steps": 1}])
def test_announced_backward_passes_make_one_step(options: dict[str, Any]) -> None:
    """As one backward of the summed loss; and nothing is sent before the last of them."""
    engine, model, summed = RecordingEngine(2), small_model(torch.float64), small_model(torch.float64)
    optimizer = wrap(model, engine, backward_passes_per_step=2, **options)
    other = wrap(summed, Loopback(2), **options)
    for step in range(7):
        optimizer.zero_grad()
        sent = len(engine.gradients_sent)
        loss_of(model, 2 * step).backward()
        assert len(engine.gradients_sent) == sent
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()
        other.zero_grad()
        (loss_of(summed, 2 * step) + loss_of(summed, 2 * step + 1)).backward()
        other.step()
        for mine, right in zip(weights(model), weights(summed), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-14)
    for _ in range(2):
        loss_of(model).backward()
    with pytest.raises(BackwardPassesError, match=r"from 3 backward passes.* 2 were announced"):
        loss_of(model).backward()


def test_with_issue_step_any_number_of_backward_passes_makes_a_step() -> None:
    model, summed = small_model(), small_model()
    optimizer, other = wrap(model, Loopback(2), issue="step", **DELAY), wrap(summed, Loopback(2), **DELAY)
    for step in range(7):
        optimizer.zero_grad()
        for _ in range(1 + step % 3):
            loss_of(model, step).backward()
        optimizer.step()
        other.zero_grad()
        sum(loss_of(summed, step) for _ in range(1 + step % 3)).backward()  # type: ignore[union-attr]
        other.step()
    for mine, right in zip(weights(model), weights(summed), strict=True):
        torch.testing.assert_close(mine, right)


def test_a_step_may_have_fewer_backward_passes_than_announced() -> None:
    model, other = small_model(), small_model()
    optimizer = wrap(model, Loopback(2), backward_passes_per_step=3, **DELAY)
    reference = wrap(other, Loopback(2), **DELAY)
    train(model, optimizer, 7)
    train(other, reference, 7)
    assert equal(weights(model), weights(other))


# -- calls at the wrong moment -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda o: o.zero_grad(), r"zero_grad\(\)"),
        (lambda o: o.flush(), r"flush\(\)"),
        (lambda o: o.adopt_weights(), r"adopt_weights\(\)"),
        (lambda o: o.state_dict(), r"state_dict\(\)"),
        (lambda o: o.load_state_dict(sgd(small_model()).state_dict()), r"load_state_dict\(\)"),
    ],
)
@pytest.mark.parametrize(("options", "steps"), [(DELAY, SYNC_POINT), (WARMUP, 1)])
def test_between_backward_and_step_of_a_sync_point_is_the_wrong_moment(
    call: Callable[[Any], object], name: str, options: dict[str, Any], steps: int
) -> None:
    model, straight = small_model(), small_model()
    optimizer, other = wrap(model, Loopback(2), **options), wrap(straight, Loopback(2), **options)
    train(model, optimizer, steps)
    optimizer.zero_grad()
    loss_of(model, steps).backward()
    with pytest.raises(UsageError, match=rf"{name} between backward\(\) and step\(\)"):
        call(optimizer)
    optimizer.step()
    train(straight, other, steps + 1)
    assert equal(weights(model), weights(straight)), "the refused call has changed nothing"


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1))
    optimizer = wrap(model, Loopback(2), sgd(model), **DELAY)
    loss = model(torch.tensor([1, 2])).sum()
    with pytest.raises(
        TypeError, match=r"gradient of parameter '0\.weight' is sparse.*sparse=False.*sparse_as_dense=True"
    ):
        loss.backward()
    assert optimizer.stats().steps == 0


@pytest.mark.parametrize(
    ("options", "steps"), [(DELAY, SYNC_POINT), (WARMUP, 1)], ids=["sync point", "warm-up"]
)
def test_a_gradient_with_a_graph_of_its_own_is_refused_where_hooks_send(
    options: dict[str, Any], steps: int
) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **options)
    train(model, optimizer, steps)
    optimizer.zero_grad()
    loss = loss_of(model, steps)
    with pytest.raises(UsageError, match=r"create_graph=True.*issue='step'"):
        loss.backward(create_graph=True)


def test_a_parameter_unfrozen_later_is_refused_by_name_until_a_flush() -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = wrap(model, Loopback(2), **DELAY)
    train_step(model, optimizer)
    model[0].weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"'0\.weight' was frozen.*Call flush\(\) on all ranks"):
        train_step(model, optimizer)
    optimizer.flush()
    before = weights(model)
    train_step(model, optimizer)
    assert not torch.equal(model[0].weight, before[0])


def test_a_group_added_later_is_refused_until_a_flush() -> None:
    model, other = small_model(), small_model()
    optimizer = wrap(model, Loopback(2), **DELAY)
    train_step(model, optimizer)
    optimizer.add_param_group({"params": [(f"other.{n}", p) for n, p in other.named_parameters()]})
    with pytest.raises(UsageError, match=r"1 param groups were added.*Call flush\(\) on all ranks"):
        train_step(model, optimizer)
    optimizer.flush()
    before = weights(other)
    loss_of(other).backward()
    optimizer.step()
    assert not equal(weights(other), before)


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_without_names_or_with_names_in_use_is_refused(size: int) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(size), **DELAY)
    new = torch.nn.Parameter(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"1 parameters have no name \(shapes \(2, 7\)\).*pairs"):
        optimizer.add_param_group({"params": new})
    with pytest.raises(ValueError, match=r"must be unique; used more than once: 0\.weight"):
        optimizer.add_param_group({"params": [("0.weight", new)]})
    with pytest.raises(TypeError, match=r"'c' has dtype torch.complex64"):
        optimizer.add_param_group({"params": [("c", torch.nn.Parameter(new.to(torch.complex64)))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_options_that_cannot_be_honoured_are_refused_in_added_and_loaded_groups_too(size: int) -> None:
    model = small_model()
    base = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = wrap(model, Loopback(size), base, warmup_steps=1)
    new = ("new", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match=r"amsgrad=True.*Allowed: amsgrad=False"):
        optimizer.add_param_group({"params": [new], "amsgrad": True})
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        optimizer.add_param_group({"params": [new], "differentiable": True})
    assert len(optimizer.param_groups) == 1
    other = small_model()
    amsgrad = torch.optim.Adam(other.parameters(), lr=0.5, amsgrad=True)
    for holder in (optimizer, base):
        with pytest.raises(ValueError, match=r"amsgrad=True.*Allowed: amsgrad=False"):
            holder.load_state_dict(amsgrad.state_dict())
    assert base.param_groups[0]["lr"] == 0.01


def test_a_group_of_frozen_parameters_joins_at_a_flush() -> None:
    model, other = small_model(), small_model().requires_grad_(False)
    optimizer = wrap(model, Loopback(2), **DELAY)
    train_step(model, optimizer)
    optimizer.add_param_group({"params": [(f"other.{n}", p) for n, p in other.named_parameters()]})
    optimizer.flush()
    train_step(model, optimizer)
    other.requires_grad_(True)
    optimizer.flush()
    before = weights(other)
    loss_of(other).backward()
    optimizer.step()
    assert not equal(weights(other), before)


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_is_frozen_for_anothers_step_may_be_flushed_and_saved(size: int) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(size), **DELAY)
    train(model, optimizer, 4)
    model.requires_grad_(False)
    optimizer.flush()
    names = optimizer.state_dict()["state"]["ssd_allreduce"]["names"]
    model.requires_grad_(True)
    train(model, optimizer, 4, first=4)
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_what_was_added_must_join_before_its_checkpoint_is_loaded() -> None:
    def grown() -> Any:
        model, other = small_model(), small_model()
        optimizer = wrap(model, Loopback(2), **DELAY)
        optimizer.add_param_group({"params": [(f"other.{n}", p) for n, p in other.named_parameters()]})
        return model, other, optimizer

    model, _, optimizer = grown()
    optimizer.flush()
    train_step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    _, _, resumed = grown()
    with pytest.raises(ValueError, match=r"Parameters were unfrozen, frozen or added here: flush\(\) first"):
        resumed.load_state_dict(state)
    resumed.flush()
    resumed.load_state_dict(state)


def replace_first(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    """As a new head is put into a model, and its optimizer told of it."""
    old = model[0].weight
    new = model[0].weight = torch.nn.Parameter(old.detach().clone())
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = optimizer.state.pop(old, {})


def append_one(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(2)))


def empty_the_group(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> None:
    optimizer.param_groups[0]["params"].clear()


GROUP_EDITS: list[Edit] = [replace_first, append_one, empty_the_group]


@pytest.mark.parametrize("edit", GROUP_EDITS)
@pytest.mark.parametrize("options", [DELAY, WARMUP])
def test_an_edited_group_is_refused_on_all_ranks_at_the_next_sync_point(
    options: dict[str, Any], edit: Edit
) -> None:
    def program(engine: ThreadRank) -> SSDError | None:
        model = small_model()
        optimizer = wrap(model, engine, **options)
        train(model, optimizer, 2, engine.rank)
        if engine.rank == 0:
            edit(model, optimizer)
        try:
            train(model, optimizer, 5, engine.rank, first=2)
        except SSDError as error:
            return error
        return None

    outcomes = run_ranks(2, program)
    assert [type(o.value) for o in outcomes] == [UsageError, PeerFailedError], outcomes
    assert "param_groups[0]['params']" in str(outcomes[0].value)


@pytest.mark.parametrize("edit", [append_one, empty_the_group])
def test_a_group_of_another_length_is_noticed_in_any_step_which_may_be_made_once_it_is_mended(
    edit: Edit,
) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **DELAY)
    train_step(model, optimizer)
    members = list(optimizer.param_groups[0]["params"])
    edit(model, optimizer)
    with pytest.raises(UsageError, match=r"param_groups\[0\]\['params'\].*add_param_group\(\)"):
        train_step(model, optimizer, 1)
    optimizer.param_groups[0]["params"][:] = members
    train(model, optimizer, 5, first=1)


@pytest.mark.parametrize("edit", GROUP_EDITS)
@pytest.mark.parametrize("call", ["flush", "state_dict", "load_state_dict"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_edited_group_is_neither_flushed_nor_saved_nor_loaded(size: int, call: str, edit: Edit) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(size), **DELAY)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    edit(model, optimizer)
    with pytest.raises(UsageError, match=r"param_groups\[0\]\['params'\].*close\(\) this optimizer"):
        getattr(optimizer, call)(*([saved] if call == "load_state_dict" else []))


def test_a_scaler_first_seen_after_hooks_have_sent_is_refused_on_all_ranks() -> None:
    def program(engine: ThreadRank) -> SSDError | None:
        model = small_model()
        optimizer = wrap(model, engine, **WARMUP)
        train_step(model, optimizer)
        optimizer.zero_grad()
        loss_of(model).backward()
        try:
            if engine.rank == 0:
                with a_scaler_says(optimizer, overflow=False):
                    optimizer.step()
            else:
                optimizer.step()
        except SSDError as error:
            return error
        return None

    outcomes = run_ranks(2, program)
    assert [type(o.value) for o in outcomes] == [UsageError, PeerFailedError], outcomes
    assert "issue='step'" in str(outcomes[0].value)


# -- the package itself --------------------------------------------------------------------------


def test_all_errors_of_training_have_one_base_class_that_is_a_runtime_error() -> None:
    names = [name for name in ssd.__all__ if name.endswith("Error") and name != "SSDError"]
    assert names
    for name in names:
        assert issubclass(getattr(ssd, name), SSDError)
    assert issubclass(SSDError, RuntimeError)
