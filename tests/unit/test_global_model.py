"""The global update: SGD replayed on the global weights is ``torch.optim.SGD`` stepped that often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import Parameter

from ssd_allreduce.base_optimizer import BaseOptimizer
from ssd_allreduce.families import choose_family
from ssd_allreduce.global_model import GlobalModel
from ssd_allreduce.group_options import GroupOptions, StepOptions
from ssd_allreduce.ops import Correction
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.update_family import Replay

SHAPES = ((3,), (2, 2), ())


def values(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


@dataclass
class Replayed:
    """A global model of two param groups, and what a replay made of it."""

    optimizer: torch.optim.SGD
    model: GlobalModel
    corrections: list[Tensor]

    @property
    def momenta(self) -> list[Tensor | None]:
        return self.model.tensors("momentum_buffer")


def in_groups(parameters: Sequence[Tensor], options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first parameter in one group, the others in another."""
    members = (list(parameters[:1]), list(parameters[1:]))
    return [{"params": group, **own} for group, own in zip(members, options, strict=True)]


def build(options: Sequence[dict[str, Any]], dtype: torch.dtype = torch.float64) -> Replayed:
    optimizer = torch.optim.SGD(in_groups([Parameter(v) for v in values(1, dtype)], options), lr=0.1)
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    base = BaseOptimizer(optimizer)
    parameters = Parameters(optimizer.param_groups, {p: str(i) for i, p in enumerate(everything)})
    model = GlobalModel(parameters, base, choose_family(base, parameters))
    model.take_from_model()
    return Replayed(optimizer, model, parameters.new_accumulators())


def replay(
    replayed: Replayed,
    sums: Sequence[Tensor],
    steps: Sequence[Sequence[dict[str, Any]]],
    contributions: int = 4,
    correction: Correction = Correction.NONE,
    gradient_scale: float = 1.0,
) -> None:
    """Global update; ``steps`` are the options of both groups in each step."""
    groups = replayed.optimizer.param_groups
    options = GroupOptions(groups, tuple(replayed.optimizer.defaults))
    rows = []
    for step in steps:
        for group, changed in zip(groups, step, strict=True):
            group.update(changed)
        rows.append(options.read(groups))
    replayed.model.replay(
        Replay(
            sums=sums,
            squares=None,
            contributions=contributions,
            gradient_scale=gradient_scale,
            steps=[StepOptions(options, row) for row in rows],
            counts=[contributions] * len(steps),
            corrections=replayed.corrections if correction != Correction.NONE else None,
            correction=correction,
        )
    )


def torchs(
    options: Sequence[dict[str, Any]],
    periods: Sequence[tuple[Sequence[Tensor], Sequence[Sequence[dict[str, Any]]]]],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """``torch.optim.SGD`` stepped once for each step, with the mean gradient of its period."""
    parameters = [Parameter(v) for v in values(1)]
    optimizer = torch.optim.SGD(in_groups(parameters, options), lr=0.1)
    for mean, steps in periods:
        for step in steps:
            for group, changed in zip(optimizer.param_groups, step, strict=True):
                group.update(changed)
            for parameter, gradient in zip(parameters, mean, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    return [p.detach() for p in parameters], [
        optimizer.state.get(p, {}).get("momentum_buffer") for p in parameters
    ]


numbers = {
    "lr": st.sampled_from([0.0, 0.01, 0.3]),
    "momentum": st.sampled_from([0.0, 0.5, 0.9]),
    "dampening": st.sampled_from([0.0, 0.4]),
    "weight_decay": st.sampled_from([0.0, 0.1]),
}


@st.composite
def group_options(draw: Any) -> dict[str, Any]:
    nesterov = draw(st.booleans())
    options = {name: draw(strategy) for name, strategy in numbers.items()}
    if nesterov:
        options |= {"momentum": 0.9, "dampening": 0.0}
    return {**options, "nesterov": nesterov, "maximize": draw(st.booleans())}


@st.composite
def step_options(draw: Any, fixed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a scheduler may change from step to step."""
    step = []
    for group in fixed:
        changed = {name: draw(numbers[name]) for name in ("lr", "weight_decay")}
        if not group["nesterov"]:
            changed["momentum"] = draw(numbers["momentum"])
        step.append(changed)
    return step


@settings(max_examples=150)
@given(data=st.data())
def test_any_replay_is_torchs_sgd_stepped_that_often(data: Any) -> None:
    """Two groups of their own options, which change from step to step; several periods."""
    options = [data.draw(group_options()) for _ in range(2)]
    replayed, periods = build(options), []
    for period in range(data.draw(st.integers(1, 3))):
        steps = [data.draw(step_options(options)) for _ in range(data.draw(st.integers(1, 4)))]
        contributions = data.draw(st.integers(1, 9))
        mean = values(100 + period)
        replay(replayed, [gradient * contributions for gradient in mean], steps, contributions)
        periods.append((mean, steps))
    expected_weights, expected_momenta = torchs(options, periods)
    torch.testing.assert_close(replayed.model.weights, expected_weights, rtol=1e-12, atol=1e-14)
    for mine, right in zip(replayed.momenta, expected_momenta, strict=True):
        if right is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-14)


def test_the_state_is_the_base_optimizers_own() -> None:
    replayed = build([{"momentum": 0.9}, {"momentum": 0.0}])
    assert replayed.momenta == [None, None, None]
    replay(replayed, values(2), [[{}, {}]])
    first = replayed.optimizer.param_groups[0]["params"][0]
    assert replayed.momenta[0] is replayed.optimizer.state[first]["momentum_buffer"]
    assert replayed.momenta[1:] == [None, None], "without momentum there is no state"
    place = replayed.momenta[0]
    replay(replayed, values(3), [[{}, {}]])
    assert replayed.momenta[0] is place


def test_the_model_is_not_touched() -> None:
    replayed = build([{"momentum": 0.9}, {}])
    parameters = [p for group in replayed.optimizer.param_groups for p in group["params"]]
    versions = [p._version for p in parameters]
    replay(replayed, values(2), [[{}, {}]] * 3)
    assert [p._version for p in parameters] == versions
    for parameter, start in zip(parameters, values(1), strict=True):
        assert torch.equal(parameter.detach(), start)


def test_where_gradients_are_summed_over_ranks_the_mean_is_scaled_back() -> None:
    """Eight gradients of four ranks: the global update sees the sum over ranks, averaged over steps."""
    replayed = build([{}, {}])
    replay(replayed, values(2), [[{}, {}]] * 2, contributions=8, gradient_scale=4.0)
    expected, _ = torchs([{}, {}], [([g * 4 / 8 for g in values(2)], [[{}, {}]] * 2)])
    torch.testing.assert_close(replayed.model.weights, expected, rtol=1e-12, atol=1e-14)


def test_the_gradient_rule_receives_the_mean_gradient() -> None:
    replayed = build([{"maximize": True, "momentum": 0.9}, {"weight_decay": 0.1}])
    replay(replayed, values(2), [[{}, {}]] * 3, contributions=5, correction=Correction.MEAN_GRADIENT)
    expected = [gradient / 5 for gradient in values(2)]
    torch.testing.assert_close(replayed.corrections, expected, rtol=1e-12, atol=1e-14)


def test_the_displacement_rule_receives_the_way_over_the_sum_of_rates() -> None:
    rates = ([0.1, 0.2], [0.3, 0.0], [0.05, 0.4])
    steps = [[{"lr": one}, {"lr": other}] for one, other in rates]
    replayed = build([{"momentum": 0.9, "nesterov": True}, {"maximize": True}])
    before = [w.clone() for w in replayed.model.current()]
    replay(replayed, values(2), steps, correction=Correction.DISPLACEMENT)
    sums = [sum(one for one, _ in rates), *2 * [sum(other for _, other in rates)]]
    expected = [
        (old - new) / total for old, new, total in zip(before, replayed.model.current(), sums, strict=True)
    ]
    torch.testing.assert_close(replayed.corrections, expected, rtol=1e-12, atol=1e-14)


def test_without_any_rate_the_displacement_stays() -> None:
    replayed = build([{}, {}])
    for correction in replayed.corrections:
        correction.fill_(3.0)
    replay(replayed, values(2), [[{"lr": 0.0}, {"lr": 0.1}]], correction=Correction.DISPLACEMENT)
    assert (replayed.corrections[0] == 3.0).all()
    assert not (replayed.corrections[1] == 3.0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_and_state_keep_the_base_optimizers_dtype(dtype: torch.dtype) -> None:
    options = [{"momentum": 0.9}, {"weight_decay": 0.1}]
    replayed = build(options, dtype)
    sums = [value.float() for value in values(2)]
    replay(replayed, sums, [[{}, {}]] * 2)
    assert all(w.dtype == dtype for w in replayed.model.current())
    assert replayed.momenta[0] is not None
    assert replayed.momenta[0].dtype == dtype
    rounding = 4 * torch.finfo(dtype).eps
    expected, _ = torchs(options, [([value / 4 for value in values(2)], [[{}, {}]] * 2)])
    for mine, right in zip(replayed.model.current(), expected, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=rounding, atol=rounding)


def test_before_the_delay_stage_the_model_itself_holds_the_global_weights() -> None:
    replayed = build([{}, {}])
    replayed.model.weights = None
    parameters = [p for group in replayed.optimizer.param_groups for p in group["params"]]
    assert all(mine is p for mine, p in zip(replayed.model.current(), parameters, strict=True))
    replayed.model.set_weights(values(5))
    assert all(map(torch.equal, replayed.model.current(), values(5)))
