"""A GradScaler's verdict that only the device knows: the same training, and nobody waits for it.

The CPU stands in for the device, whose tensors then take the same way as a GPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engines import RecordingEngine, ThreadRank, on_ranks
from loops import (
    a_scaler_says,
    equal,
    fill,
    global_weights,
    loss_of,
    same,
    sgd,
    small_model,
    train_step,
    weights,
    wrap,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ssd_allreduce as ssd
from ssd_allreduce import Loopback, UsageError, WeightsChangedError, ops, verdict
from ssd_allreduce.verdict import Verdict

STEPS = 15
T, K, D = 2, 4, 2
SETTINGS: dict[str, Any] = {"warmup_steps": T, "delay_steps": K, "overlap_steps": D, "issue": "step"}

OVERFLOWS = {
    "nowhere": [],
    "in warm-up": [1],
    "in all of warm-up": [0, 1],
    "in the first step of a period": [T, T + K],
    "in the first two steps of a period": [T, T + 1],
    "at a sync point": [T + K - 1],
    "between a sync point and its completion": [T + K],
    "at a completion": [T + K + 1],
    "in all steps up to a completion": [T + K, T + K + 1],
    "in a whole period": list(range(T + K, T + 2 * K)),
    "in a whole period and at the completion after it": list(range(T + K, T + 2 * K + 2)),
    "in every step": list(range(STEPS)),
    "in every other step": list(range(0, STEPS, 2)),
}
every_overflow = pytest.mark.parametrize("overflows", OVERFLOWS.values(), ids=OVERFLOWS)

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "momentum": (lambda net: sgd(net, dampening=0.2, weight_decay=0.01), {}),
    "nesterov": (lambda net: sgd(net, nesterov=True), {}),
    "no momentum": (lambda net: sgd(net, momentum=0.0), {}),
    "plain": (sgd, {"glu": "none"}),
    "gradient": (sgd, {"glu": "gradient"}),
    "displacement": (sgd, {"glu": "displacement"}),
    "clipped": (sgd, {"max_grad_norm": 0.1}),
    "adamw": (lambda net: torch.optim.AdamW(net.parameters(), lr=0.01), {}),
    "adam, plain": (lambda net: torch.optim.Adam(net.parameters(), lr=0.01), {"glu": "none"}),
    "rmsprop": (lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01), {}),
}
every_optimizer = pytest.mark.parametrize(("make", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)


@contextlib.contextmanager
def deferring(defers: bool = True) -> Iterator[None]:
    """The CPU's verdicts stay on the device, or not."""
    before, verdict.deferring_devices = verdict.deferring_devices, frozenset({"cpu"} if defers else ())
    try:
        yield
    finally:
        verdict.deferring_devices = before


def scaled_step(
    model: torch.nn.Module,
    optimizer: ssd.DistributedOptimizer,
    scaler: torch.amp.GradScaler,
    step: int,
    overflow: bool = False,
    rank: int = 0,
    unscale: bool = False,
) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step, rank)).backward()
    if overflow:
        next(p.grad for p in model.parameters() if p.grad is not None).fill_(torch.inf)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def new_scaler(scale: float = 1000.0) -> torch.amp.GradScaler:
    # No power of two: the inverse has to be rounded as on the host.
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5)


def trajectory(
    engine: Any,
    make: Make,
    overflows: list[int],
    dtype: torch.dtype = torch.float32,
    unscale: bool = False,
    scale: float = 1000.0,
    **options: Any,
) -> list[list[Tensor]]:
    """Local and global weights after each step, and after a flush."""
    model, scaler = small_model(dtype), new_scaler(scale)
    optimizer = wrap(model, engine, make(model), **{**SETTINGS, **options})
    seen = []
    for step in range(STEPS):
        scaled_step(model, optimizer, scaler, step, step in overflows, engine.rank, unscale)
        seen.append(weights(model) + global_weights(model, optimizer))
    optimizer.flush()
    seen.append(weights(model))
    seen.append([torch.tensor(scaler.get_scale())])
    optimizer.close()
    return seen


def assert_same_either_way(run: Callable[[], Any]) -> None:
    with deferring(False):
        expected = run()
    with deferring():
        ours = run()
    assert same(ours, expected)


@every_optimizer
@every_overflow
def test_every_weight_is_as_if_the_host_had_known(
    make: Make, options: dict[str, Any], overflows: list[int]
) -> None:
    assert_same_either_way(lambda: trajectory(Loopback(3), make, overflows, **options))


@every_overflow
@pytest.mark.parametrize(
    "options",
    [
        {"overlap_steps": 0},
        {"overlap_steps": K - 1},
        {"warmup_steps": 0},
        {"delay_steps": 1, "overlap_steps": 0},
        {"average_buffers": "never", "unscale": True},
    ],
    ids=["d=0", "d=k-1", "no warm-up", "k=1", "unscaled by the user"],
)
def test_every_schedule_is_as_if_the_host_had_known(options: dict[str, Any], overflows: list[int]) -> None:
    make = OPTIMIZERS["momentum"][0]
    assert_same_either_way(lambda: trajectory(Loopback(2), make, overflows, **options))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    # On the CPU torch rounds a number to half precision before it multiplies by it.
    [(torch.float16, 1024.0), (torch.bfloat16, 1024.0), (torch.float64, 1000.0)],
    ids=str,
)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_every_dtype_is_trained_as_if_the_host_had_known(dtype: torch.dtype, scale: float, name: str) -> None:
    make = OPTIMIZERS[name][0]
    assert_same_either_way(lambda: trajectory(Loopback(2), make, [T + 1, T + K], dtype, scale=scale))


@pytest.mark.parametrize("scale", [3.0, 1000.0, 2.0**-30, 2.0**30, 7e20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_unscaling_rounds_once(scale: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(257,), (3, 5), (), (0,)]
    gradients = [torch.randn(shape, generator=generator).mul_(100).to(dtype) for shape in shapes]
    number = torch.tensor(scale)
    inverse = 1.0 / number.double()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = [(gradient.to(wide) * inverse.to(wide)).to(dtype) for gradient in gradients]
    verdict.unscale_on_device(gradients, number)
    assert equal(gradients, expected)


def overflowing_ranks(kind: str, base: Make, **options: Any) -> list[Any]:
    overflows = {"one rank": {1: [0, T, T + K - 1, T + K]}, "all ranks": {0: [1, T + 1, 9], 1: [1, T + 1, 9]}}
    of_rank = overflows[kind]
    return on_ranks(2, lambda rank: trajectory(rank, base, of_rank.get(rank.rank, []), **options), ThreadRank)


@pytest.mark.parametrize("kind", ["one rank", "all ranks"])
@pytest.mark.parametrize("name", ["momentum", "gradient", "adamw"])
def test_ranks_that_overflow_apart_and_together(kind: str, name: str) -> None:
    make, options = OPTIMIZERS[name]
    assert_same_either_way(lambda: overflowing_ranks(kind, make, **options))


@pytest.mark.parametrize("name", ["momentum", "adamw", "rmsprop"])
def test_one_rank_is_the_base_optimizers_own_step(name: str) -> None:
    assert_same_either_way(lambda: trajectory(Loopback(1), OPTIMIZERS[name][0], [1, 4]))


# -- nobody waits --------------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Counts what the host reads of tensors on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero)
        if func.overloadpacket in waits:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """The verdicts that were waited for; reading their copies is no other read."""
    waited_for: list[Verdict] = []

    def wait(self: Verdict) -> bool:
        waited_for.append(self)
        return bool(self._on_host.numpy() == 0.0)

    monkeypatch.setattr(Verdict, "wait", wait)
    return waited_for


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """All that have been made."""
    made: list[Verdict] = []
    initialise = Verdict.__init__

    def remember(self: Verdict, found_inf: Tensor) -> None:
        initialise(self, found_inf)
        made.append(self)

    monkeypatch.setattr(Verdict, "__init__", remember)
    return made


compiled_only = pytest.mark.skipif(ops.IMPLEMENTATION != "compiled", reason="plain torch reads the verdict")


@compiled_only
@pytest.mark.parametrize("name", ["momentum", "plain", "gradient", "displacement", "adamw", "adam, plain"])
def test_the_host_reads_nothing_in_a_delay_step(
    name: str, waits: list[Verdict], verdicts: list[Verdict]
) -> None:
    """Adam's step count is read of the step before, which the device has left behind."""
    make, options = OPTIMIZERS[name]
    model, scaler = small_model(), new_scaler()
    optimizer = wrap(model, Loopback(2), make(model), **{**SETTINGS, **options})
    with deferring():
        for step in range(STEPS):
            place = step - T
            meets = step < T or place % K == K - 1 or (place > K and place % K == D - 1)
            waits.clear()
            with HostReads() as reads:
                scaled_step(model, optimizer, scaler, step, overflow=step in (4, 7, 8))
            # The first delay step takes over Adam's step counts.
            assert reads.count == 0 or meets or step == T, f"step {step}"
            assert (verdicts[-1] in waits) == meets, f"step {step}"
            earlier = [one for one in waits if one is not verdicts[-1]]
            assert not earlier or meets or (name == "adamw" and earlier == [verdicts[-2]]), f"step {step}"
    with HostReads() as reads:
        scaled_step(model, optimizer, scaler, STEPS)
    assert reads.count >= 2, "found_inf and the scale"


@compiled_only
def test_a_first_momentum_is_taken_back_one_step_later(waits: list[Verdict], verdicts: list[Verdict]) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), **{**SETTINGS, "warmup_steps": 0, "delay_steps": 9})
    with deferring():
        for step, expected in enumerate([[], [0], [1], []]):
            waits.clear()
            scaled_step(model, optimizer, new_scaler(), step, overflow=step == 0)
            assert waits == [verdicts[index] for index in expected]


def test_the_accumulated_gradients_leave_before_the_verdict_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = RecordingEngine(2), small_model()
    sent_before: list[list[str]] = []
    wait = Verdict.wait
    monkeypatch.setattr(
        Verdict, "wait", lambda self: (sent_before.append([s.name for s in engine.sent]), wait(self))[1]
    )
    optimizer = wrap(model, engine, **{**SETTINGS, "warmup_steps": 1, "delay_steps": 2, "overlap_steps": 0})
    with deferring():
        for step in range(3):
            engine.sent.clear()
            scaled_step(model, optimizer, new_scaler(), step)
    for suffix in (".gradient", ".accumulated"):
        assert any(sum(name.endswith(suffix) for name in names) == 4 for names in sent_before), suffix
    assert not any("control" in name for names in sent_before for name in names if len(names) == 4)


# -- where the host has to know ------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"delay_steps": 1, "overlap_steps": 0}, {"warmup_steps": 99}])
def test_an_overflow_is_skipped_after_synchronize_too(options: dict[str, Any]) -> None:
    def run() -> list[list[Tensor]]:
        model, scaler, seen = small_model(), new_scaler(), []
        optimizer = wrap(model, Loopback(2), **{**SETTINGS, **options})
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 1:
                next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            seen.append(weights(model))
        return seen

    assert_same_either_way(run)


@pytest.mark.parametrize(
    "found_inf", [0, torch.tensor(0.0).double(), torch.zeros(2)[:1].to("meta")], ids=["int", "double", "meta"]
)
def test_what_is_not_the_device_s_own_number_is_read_by_the_host(found_inf: Any) -> None:
    with deferring():
        assert not verdict.can_be_deferred(found_inf, None, [torch.zeros(1)])


def test_tensors_elsewhere_or_sparse_are_the_host_s() -> None:
    found_inf, scale, here = torch.zeros(()), torch.ones(()), torch.zeros(3)
    with deferring():
        assert verdict.can_be_deferred(found_inf, scale, [here])
        assert verdict.can_be_deferred(found_inf.reshape(1), None, [here])
        assert not verdict.can_be_deferred(found_inf, 1024.0, [here])
        assert not verdict.can_be_deferred(found_inf, scale.to("meta"), [here])
        assert not verdict.can_be_deferred(found_inf, scale, [here, here.to("meta")])
        assert not verdict.can_be_deferred(found_inf, scale, [here, torch.eye(2).to_sparse()])
    assert not verdict.can_be_deferred(found_inf, scale, [here])


def test_a_scaler_without_any_gradient_passes_a_plain_zero() -> None:
    def run() -> list[Tensor]:
        model = small_model()
        optimizer: Any = wrap(model, Loopback(2), sgd(model, momentum=0.0), **SETTINGS)
        for _ in range(5):
            optimizer.found_inf, optimizer.grad_scale = 0, torch.tensor(1024.0)
            optimizer.step()
        return weights(model)

    assert_same_either_way(run)


def test_steps_with_and_without_a_scaler_may_alternate() -> None:
    def run() -> list[list[Tensor]]:
        model, scaler, seen = small_model(), new_scaler(), []
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = wrap(model, Loopback(2), base, **SETTINGS)
        for step in range(STEPS):
            if step % 3 == 0:
                train_step(model, optimizer, step)
            else:
                scaled_step(model, optimizer, scaler, step, overflow=step % 3 == 1)
            seen.append(weights(model))
        return seen

    assert_same_either_way(run)


# -- checkpoints, flushes, errors ----------------------------------------------------------------


@every_overflow
@pytest.mark.parametrize("name", ["momentum", "adamw", "rmsprop"])
def test_a_checkpoint_taken_in_any_step_is_what_the_host_s_would_be(name: str, overflows: list[int]) -> None:
    def run() -> list[Any]:
        model, scaler, saved = small_model(), new_scaler(), []
        optimizer = wrap(model, Loopback(2), OPTIMIZERS[name][0](model), **SETTINGS)
        for step in range(STEPS):
            scaled_step(model, optimizer, scaler, step, overflow=step in overflows)
            entry = optimizer.state_dict()["state"]["ssd_allreduce"]
            local = {
                k: v for k, v in entry["local"].items() if k in ("period_steps", "rows_since_sync", "rule")
            }
            # Snapshots are garbage until the first sync point.
            saved.append(
                {**local, "schedule": entry["schedule"]} if step > T + K else local["rule"].get("steps")
            )
        return saved

    assert_same_either_way(run)


@pytest.mark.parametrize("cut", range(1, STEPS))
def test_a_checkpoint_in_any_step_continues_bit_for_bit(cut: int) -> None:
    overflows = (T, T + 2, T + K, T + K + 1, T + 2 * K - 1)

    def start() -> tuple[torch.nn.Module, ssd.DistributedOptimizer]:
        model = small_model()
        return model, wrap(model, Loopback(2), OPTIMIZERS["adamw"][0](model), **SETTINGS)

    with deferring():
        model, optimizer = start()
        for step in range(STEPS):
            if step == cut:
                state = optimizer.state_dict()
                optimizer.close()
                model, optimizer = start()
                optimizer.load_state_dict(state)
            scaled_step(model, optimizer, new_scaler(), step, overflow=step in overflows)
        expected_model, expected = start()
        for step in range(STEPS):
            scaled_step(expected_model, expected, new_scaler(), step, overflow=step in overflows)
        assert equal(weights(model), weights(expected_model))
        assert equal(global_weights(model, optimizer), global_weights(expected_model, expected))


@pytest.mark.parametrize("name", ["momentum", "gradient", "adamw"])
def test_flushes_and_loads_of_the_state_at_any_moment(name: str) -> None:
    def run() -> list[list[Tensor]]:
        model, seen = small_model(), []
        base = OPTIMIZERS[name][0](model)
        optimizer = wrap(model, Loopback(2), base, **{**SETTINGS, **OPTIMIZERS[name][1]})
        for step in range(STEPS):
            scaled_step(model, optimizer, new_scaler(), step, overflow=step % 3 == 0)
            if step in (4, 9, 12):
                optimizer.flush()
            if step == 6:
                state = base.state_dict()
                state["state"].pop("ssd_allreduce", None)
                base.load_state_dict(state)
            seen.append(weights(model))
        return seen

    assert_same_either_way(run)


def test_nothing_is_left_behind_after_an_error_and_its_remedy() -> None:
    def run() -> list[list[Tensor]]:
        model, seen = small_model(), []
        optimizer = wrap(model, Loopback(2), OPTIMIZERS["adamw"][0](model), **SETTINGS)
        for step in range(STEPS):
            if step == T + K + 1:
                fill(model, 0.25)
                with pytest.raises(WeightsChangedError):
                    scaled_step(model, optimizer, new_scaler(), step)
                assert not hasattr(optimizer, "found_inf")
                optimizer.adopt_weights()
            scaled_step(model, optimizer, new_scaler(), step, overflow=step in (3, T + K, T + K + 1))
            seen.append(weights(model))
        return seen

    assert_same_either_way(run)


def test_a_scaler_that_comes_too_late_is_noticed() -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(2), warmup_steps=9)
    with deferring():
        train_step(model, optimizer)
        with pytest.raises(UsageError, match=r"GradScaler.*already sent scaled gradients"):
            scaled_step(model, optimizer, new_scaler(), 1)


def test_parameters_without_a_gradient() -> None:
    def run() -> list[list[Tensor]]:
        model, seen = small_model(), []
        optimizer = wrap(model, Loopback(2), **SETTINGS)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            next(model.parameters()).grad = None
            with a_scaler_says(optimizer, overflow=step % 4 == 1):
                optimizer.step()
            seen.append(weights(model))
        return seen

    assert_same_either_way(run)
