"""The GLU rules: local update, accumulation and rebase against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from oracle import SGDOptions, sgd
from torch import Tensor
from torch.nn import Parameter

from ssd_allreduce import layout
from ssd_allreduce.accumulators import Sums
from ssd_allreduce.base_optimizer import BaseOptimizer
from ssd_allreduce.compensation import LocalRule, make_rule
from ssd_allreduce.families import choose_family
from ssd_allreduce.group_options import GroupOptions, StepOptions
from ssd_allreduce.ops import Accumulation
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.settings import check_settings

RULES = ("momentum", "gradient", "displacement", "none")
ALPHA, BETA, SCALE = 0.75, 0.25, 1.5
SHAPE = (2, 3, 2, 2)


def number(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)


@dataclass
class GlobalState:
    """The momentum that belongs to the global weights."""

    momenta: list[Tensor | None]

    def tensors(self, key: str) -> list[Tensor | None]:
        assert key == "momentum_buffer"
        return self.momenta

    def entries(self) -> list[dict[str, object]]:
        return [{} if m is None else {"momentum_buffer": m} for m in self.momenta]


@dataclass
class Local:
    """One parameter of one rank under a rule."""

    glu: str
    weight: Parameter
    rule: LocalRule
    options: Callable[[SGDOptions], StepOptions]
    accumulator: Tensor = field(init=False)

    def __post_init__(self) -> None:
        dtype = layout.compute_dtype(self.weight.dtype)
        self.accumulator = torch.full_like(self.weight, 100.0, dtype=dtype).detach()

    @torch.no_grad()
    def step(
        self,
        gradient: Tensor,
        options: SGDOptions,
        accumulation: Accumulation = Accumulation.ADD,
        done: bool = False,
    ) -> None:
        already = frozenset([0]) if done else frozenset[int]()
        sums = Sums([self.accumulator], None)
        self.rule.local_step(self.options(options), [gradient], sums, already, accumulation)

    @property
    def now(self) -> Tensor:
        return self.weight.detach().double().clone()


def build(
    glu: str,
    dtype: torch.dtype = torch.float64,
    gradient_scale: float = 1.0,
    channels_last: bool = False,
) -> Local:
    start = number(1, dtype)
    weight = Parameter(start.to(memory_format=torch.channels_last) if channels_last else start)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    base = BaseOptimizer(optimizer)
    parameters = Parameters(optimizer.param_groups, {weight: "w"})
    corrected = glu in ("gradient", "displacement")
    options: dict[str, Any] = {"alpha": ALPHA, "beta": BETA, "local_lr_scale": SCALE}
    checked = check_settings(
        delay_steps=4,
        overlap_steps=1,
        warmup_steps=0,
        glu=glu,
        issue="backward",
        timeout=1.0,
        **(options if corrected else dict.fromkeys(options)),
    )
    columns = GroupOptions(optimizer.param_groups, tuple(optimizer.defaults))

    def view(step: SGDOptions) -> StepOptions:
        optimizer.param_groups[0].update(vars(step))
        return StepOptions(columns, columns.read(optimizer.param_groups))

    rule = make_rule(checked, choose_family(base, parameters), gradient_scale)
    return Local(glu, weight, rule, view)


def close(actual: Tensor, expected: Any) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-12, atol=1e-13)


def expected_step(
    glu: str, w: Any, v: Any, g: Any, s: Any, o: SGDOptions, factor: float = 1.0
) -> tuple[Any, Any]:
    """The local update of each rule, as its formula gives it."""
    g = factor * g
    if glu == "momentum":
        return sgd(w, v, g, o)
    sign = -1.0 if o.maximize else 1.0
    if glu == "none":
        return w - o.lr * (sign * g + o.weight_decay * w), v
    pull = BETA * (sign * s if glu == "gradient" else s)
    return w - SCALE * o.lr * (ALPHA * sign * g + pull + o.weight_decay * w), v


@st.composite
def sgd_options(draw: Any) -> SGDOptions:
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
    nesterov = momentum > 0 and draw(st.booleans())
    return SGDOptions(
        lr=draw(st.sampled_from([0.0, 0.01, 0.2])),
        momentum=momentum,
        dampening=0.0 if nesterov else draw(st.sampled_from([0.0, 0.4])),
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
        nesterov=nesterov,
        maximize=draw(st.booleans()),
    )


@settings(max_examples=150)
@given(
    glu=st.sampled_from(RULES),
    options=st.lists(sgd_options(), min_size=1, max_size=4),
    factor=st.sampled_from([1.0, 4.0]),
    seeded=st.booleans(),
)
def test_local_steps_follow_the_rules_formula(
    glu: str, options: list[SGDOptions], factor: float, seeded: bool
) -> None:
    """From a seeded state, with options that change, and the factor of summed gradients."""
    local = build(glu, gradient_scale=factor)
    w, v = number(1).numpy(), number(7).numpy() if seeded else None
    local.rule.seed(GlobalState([number(7) if seeded else None]))
    s = 0.0 * w
    if local.rule.corrections is not None:
        local.rule.corrections[0].copy_(number(8))
        s = number(8).numpy()
    for index, step in enumerate(options):
        gradient = number(20 + index)
        local.step(gradient, step)
        w, v = expected_step(glu, w, v, gradient.numpy(), s, step, factor)
        close(local.now, w)


@pytest.mark.parametrize("glu", RULES)
def test_gradients_are_accumulated_as_they_are_whatever_the_rule_makes_of_them(glu: str) -> None:
    local = build(glu, gradient_scale=4.0)
    options = SGDOptions(0.1, momentum=0.9, weight_decay=0.1, maximize=True)
    local.step(number(2), options, Accumulation.OVERWRITE)
    close(local.accumulator, number(2))
    local.step(number(3), options, Accumulation.ADD)
    close(local.accumulator, number(2) + number(3))


@pytest.mark.parametrize("glu", RULES)
@pytest.mark.parametrize("accumulation", [Accumulation.ADD, Accumulation.OVERWRITE])
def test_what_a_hook_has_accumulated_is_stepped_and_not_added_again(
    glu: str, accumulation: Accumulation
) -> None:
    hooked, other = build(glu), build(glu)
    options = SGDOptions(0.1, momentum=0.9)
    hooked.step(number(2), options, accumulation, done=True)
    other.step(number(2), options, accumulation)
    assert (hooked.accumulator == 100.0).all()
    assert torch.equal(hooked.now, other.now)


# -- warm-up -------------------------------------------------------------------------------------


def test_in_warmup_the_gradient_rule_follows_the_reduced_gradient() -> None:
    local = build("gradient")
    assert not local.rule.wants_weights_before_warmup_step
    local.weight.grad = number(5)
    local.rule.observe_warmup(None, local.options(SGDOptions(0.1)))
    assert local.rule.corrections is not None
    close(local.rule.corrections[0], number(5))
    local.weight.grad = None
    local.rule.observe_warmup(None, local.options(SGDOptions(0.1)))
    close(local.rule.corrections[0], number(5))


def test_in_warmup_the_displacement_rule_follows_the_way_over_the_rate() -> None:
    local = build("displacement")
    assert local.rule.wants_weights_before_warmup_step
    before = [number(1)]
    with torch.no_grad():
        local.weight.copy_(number(6))
    local.rule.observe_warmup(before, local.options(SGDOptions(0.2)))
    assert local.rule.corrections is not None
    close(local.rule.corrections[0], (number(1) - number(6)) / 0.2)
    local.rule.observe_warmup([number(9)], local.options(SGDOptions(0.0)))
    close(local.rule.corrections[0], (number(1) - number(6)) / 0.2)


@pytest.mark.parametrize("glu", ["momentum", "none"])
def test_the_other_rules_keep_nothing_of_warmup(glu: str) -> None:
    rule = build(glu).rule
    assert rule.corrections is None
    assert not rule.wants_weights_before_warmup_step


# -- rebase --------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    glu=st.sampled_from(RULES),
    before=sgd_options(),
    since=st.lists(sgd_options(), min_size=1, max_size=4),
    seeded=st.booleans(),
)
def test_a_rebase_moves_the_steps_since_the_sync_point(
    glu: str, before: SGDOptions, since: list[SGDOptions], seeded: bool
) -> None:
    """``v += prod(mu) dv`` and ``w += dW - sum_j(lr_j mu^j) dv``; without momentum ``w += dW``."""
    local = build(glu)
    local.rule.seed(GlobalState([number(7) if seeded else None]))
    w, v = number(1).numpy(), number(7).numpy() if seeded else None
    zero = 0.0 * w
    local.step(number(2), before)
    w, v = expected_step(glu, w, v, number(2).numpy(), zero, before)
    local.rule.snapshot()
    w_s, v_s = w, zero if v is None else v
    for index, step in enumerate(since):
        local.step(number(20 + index), step)
        w, v = expected_step(glu, w, v, number(20 + index).numpy(), zero, step)

    world, momentum = number(40), number(41)
    local.rule.rebase([world], GlobalState([momentum]), [local.options(step) for step in since])
    dw, dv, left = world.numpy() - w_s, momentum.numpy() - v_s, 1.0
    if glu == "momentum":
        for step in since:
            left *= step.momentum
            dw = dw - step.lr * left * (step.momentum if step.nesterov else 1.0) * dv
        v = (zero if v is None else v) + left * dv
    w = w + dw
    close(local.now, w)

    # The momentum shows in the next step.
    last = SGDOptions(0.1, momentum=0.5)
    local.step(number(50), last)
    close(local.now, expected_step(glu, w, v, number(50).numpy(), zero, last)[0])


@pytest.mark.parametrize("glu", RULES)
def test_where_the_global_model_has_no_momentum_weights_are_shifted(glu: str) -> None:
    local = build(glu)
    local.step(number(2), SGDOptions(0.1))
    local.rule.snapshot()
    at_sync = local.now
    local.step(number(3), SGDOptions(0.1))
    moved = local.now
    local.rule.rebase([number(40)], GlobalState([None]), [local.options(SGDOptions(0.1))])
    close(local.now, moved + number(40) - at_sync)


@pytest.mark.parametrize("glu", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_without_a_step_since_the_sync_point_everything_is_copied(glu: str, dtype: torch.dtype) -> None:
    local, fresh = build(glu, dtype), build(glu, dtype)
    options = SGDOptions(0.1, momentum=0.9)
    local.step(number(2, dtype), options)
    world, momentum = number(40, dtype), number(41, dtype)
    with torch.no_grad():
        local.rule.follow([world], GlobalState([momentum]))
        fresh.weight.copy_(world)
    fresh.rule.seed(GlobalState([momentum]))
    assert torch.equal(local.weight.detach(), world)
    for one in (local, fresh):
        one.step(number(3, dtype), options)
    assert torch.equal(local.weight, fresh.weight)


def test_the_seed_is_a_copy() -> None:
    local, other = build("momentum"), build("momentum")
    momentum = number(7)
    local.rule.seed(GlobalState([momentum]))
    other.rule.seed(GlobalState([number(7)]))
    options = SGDOptions(0.1, momentum=0.9)
    local.step(number(2), options)
    assert torch.equal(momentum, number(7)), "local steps leave the global momentum alone"
    momentum.zero_()
    other.step(number(2), options)
    for one in (local, other):
        one.step(number(3), options)
    assert torch.equal(local.weight, other.weight)


# -- dtypes and layouts --------------------------------------------------------------------------


@pytest.mark.parametrize("glu", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_state_of_half_precision_weights_is_float32(glu: str, dtype: torch.dtype) -> None:
    """Many small changes of the momentum and the sums would be lost in the weights' own precision."""
    local = build(glu, dtype)
    options = SGDOptions(0.0, momentum=0.999)
    local.step(torch.ones(SHAPE, dtype=dtype), options, Accumulation.OVERWRITE)
    for _ in range(2999):
        local.step(torch.ones(SHAPE, dtype=dtype), options)
    assert (local.accumulator == 3000.0).all()
    local.rule.snapshot()
    kept = [t for t in flatten(local.rule.export_state()) if t is not None]
    assert kept
    assert all(t.dtype == torch.float32 for t in kept)
    if glu == "momentum":
        largest = max(t.abs().max().item() for t in kept)
        assert largest == pytest.approx((1 - 0.999**3000) / 0.001, rel=1e-3)


def flatten(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in flatten(item)]
    if isinstance(value, Sequence):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


@pytest.mark.parametrize("glu", RULES)
def test_memory_layout_changes_no_bit(glu: str) -> None:
    plain, permuted = build(glu), build(glu, channels_last=True)
    options = SGDOptions(0.1, momentum=0.9, weight_decay=0.1)
    for local in (plain, permuted):
        local.step(number(2), options)
        local.rule.snapshot()
        local.step(number(3), options)
        local.rule.rebase([number(40)], GlobalState([number(41)]), [local.options(options)])
        local.step(number(4), options)
    assert permuted.weight.stride() != plain.weight.stride()
    assert torch.equal(plain.weight, permuted.weight)
    assert torch.equal(plain.accumulator, permuted.accumulator)


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("glu", RULES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_exported_state_goes_on_in_another_rule_bit_for_bit(glu: str, momentum: float) -> None:
    local, heir = build(glu), build(glu)
    options = SGDOptions(0.1, momentum=momentum)
    local.step(number(2), options)
    local.rule.snapshot()
    local.step(number(3), options)
    with torch.no_grad():
        heir.weight.copy_(local.weight)
    heir.rule.import_state(local.rule.export_state())
    world = GlobalState([number(41) if momentum else None])
    for one in (local, heir):
        one.rule.rebase([number(40)], world, [one.options(options)])
        one.step(number(4), options)
    assert torch.equal(local.weight, heir.weight)
    local.step(number(5), options)
    heir.step(number(5), options)
    assert torch.equal(local.weight, heir.weight), "and the two share nothing"
