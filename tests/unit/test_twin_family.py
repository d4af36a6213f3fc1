"""Optimizers that are known only by their ``step()``, wherever they keep their state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import RecordingEngine, ThreadRank, on_ranks
from loops import equal, small_model, train, train_step, weights, wrap
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from ssd_allreduce import Loopback

PERIOD: dict[str, Any] = {"delay_steps": 2, "overlap_steps": 0}
Base = torch.optim.Optimizer


class Descent(Base):
    """Plain descent by a factor that subclasses find in their state."""

    def __init__(self, params: Any, lr: float = 0.1, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    def factor(self, group: dict[str, Any]) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            factor = self.factor(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * factor)


class CountsInGroup(Descent):
    """Keeps count in its groups, without saying so in its defaults."""

    def factor(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        return 1.0 / group["step"]


class AdaptsAnOption(Descent):
    """Has a number among its defaults that it changes itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, d=1.0)

    def factor(self, group: dict[str, Any]) -> float:
        group["d"] *= 0.9
        return float(group["d"])


class CountsInState(Descent):
    """Keeps count under a key of its state that is no parameter."""

    def factor(self, group: dict[str, Any]) -> float:
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1.0
        return 1.0 / float(self.state["k"])


KEEPERS: list[type[Descent]] = [CountsInGroup, AdaptsAnOption, CountsInState]


def kept_by(base: Base) -> float:
    """What these optimizers count or adapt."""
    group = base.param_groups[0]
    return float(base.state["k"] if "k" in base.state else group.get("step", group.get("d")))


def trained(kind: type[Base], size: int, steps: int, **options: Any) -> tuple[Base, list[Tensor]]:
    model = small_model(torch.float64)
    base = kind(model.parameters())
    optimizer = wrap(model, Loopback(size), base, **{**PERIOD, **options})
    train(model, optimizer, steps)
    optimizer.flush()
    return base, weights(model)


@pytest.mark.parametrize("kind", KEEPERS)
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_what_a_step_keeps_outside_of_parameters_counts_every_step(
    kind: type[Descent], warmup_steps: int
) -> None:
    alone, _ = trained(kind, 1, 11)
    several, _ = trained(kind, 2, 11, warmup_steps=warmup_steps)
    assert kept_by(several) == pytest.approx(kept_by(alone))
    assert kept_by(several) not in (0.0, 1.0)


@pytest.mark.parametrize("kind", KEEPERS)
def test_steps_of_twins_are_those_of_the_optimizer(kind: type[Descent]) -> None:
    """One rank runs the optimizer itself; several with equal gradients repeat its steps on twins."""
    constant = torch.full((3,), 0.25, dtype=torch.float64)

    def run(size: int) -> Tensor:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        base = kind([parameter])
        names = [("p", parameter)]
        optimizer = wrap(torch.nn.Module(), Loopback(size), base, named_parameters=names, **PERIOD)
        for _ in range(10):
            optimizer.zero_grad()
            (parameter * constant).sum().backward()
            optimizer.step()
        optimizer.flush()
        return parameter.detach()

    torch.testing.assert_close(run(2), run(1), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("kind", KEEPERS)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("saved_after", [2, 5, 7, 8])
def test_a_checkpoint_takes_it_along(kind: type[Descent], size: int, saved_after: int) -> None:
    options: dict[str, Any] = {"delay_steps": 3, "overlap_steps": 2, "warmup_steps": 3}

    def start() -> tuple[torch.nn.Module, Base, Any]:
        model = small_model(torch.float64)
        base = kind(model.parameters())
        return model, base, wrap(model, Loopback(size), base, **options)

    model, base, optimizer = start()
    train(model, optimizer, saved_after)
    state = copy.deepcopy(optimizer.state_dict())
    other, heir, resumed = start()
    resumed.load_state_dict(state)
    for net, by in ((model, optimizer), (other, resumed)):
        train(net, by, 9, first=saved_after)
        by.flush()
    if size == 1:
        # A plain checkpoint holds no weights.
        assert kept_by(heir) == kept_by(base)
    else:
        assert equal(weights(model), weights(other))
        assert kept_by(heir) == kept_by(base)


class Nested(Descent):
    """Keeps its momentum in a list, or in a dictionary, in each parameter's state."""

    make: Callable[[Tensor], Any] = staticmethod(lambda zeros: [zeros])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "m" not in state:
                    state["m"] = type(self).make(torch.zeros_like(p))
                momentum = state["m"][0]
                momentum.lerp_(p.grad, 0.5)
                p.add_(momentum, alpha=-group["lr"])


class NestedInDictionary(Nested):
    make = staticmethod(lambda zeros: {0: zeros})


class NestedTwice(Nested):
    make = staticmethod(lambda zeros: ([zeros][0], [{"unused": torch.ones(1)}]))


@pytest.mark.parametrize("kind", [Nested, NestedInDictionary, NestedTwice])
def test_nested_state_is_equal_on_all_ranks(kind: type[Nested]) -> None:
    def program(engine: ThreadRank) -> list[Tensor]:
        model = small_model(torch.float64)
        base = kind(model.parameters())
        optimizer = wrap(model, engine, base, delay_steps=4, overlap_steps=2, warmup_steps=2)
        train(model, optimizer, 13, engine.rank)
        optimizer.flush()
        return weights(model) + [base.state[p]["m"][0].clone() for p in model.parameters()]

    one, other = on_ranks(2, program)
    assert equal(one, other)


class WithoutDefaults(Descent):
    """Leaves its options to the groups, and declares none."""

    def __init__(self, params: Any) -> None:
        Base.__init__(self, [{"params": list(params), "lr": 0.1}], {})


@pytest.mark.parametrize("glu", ["momentum", "none"])
@pytest.mark.parametrize("size", [1, 2])
def test_schedules_reach_options_that_are_not_declared(size: int, glu: str) -> None:
    model = small_model()
    optimizer = wrap(model, Loopback(size), WithoutDefaults(model.parameters()), glu=glu, **PERIOD)
    schedule = StepLR(optimizer, step_size=4, gamma=0.0)
    for step in range(4):
        train_step(model, optimizer, step)
        schedule.step()
    after_one = weights(model)
    train(model, optimizer, 4, first=4)
    assert equal(weights(model), after_one)


class HoldsParameters(Descent):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.excluded = {"first": [self.param_groups[0]["params"][0]]}


class HoldsIdentities(Descent):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.excluded = {id(p) for p in self.param_groups[0]["params"]}


class HoldsAnother(Descent):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [(HoldsParameters, "excluded"), (HoldsIdentities, "excluded"), (HoldsAnother, "inner")],
)
def test_parameters_held_in_attributes_are_refused(kind: type[Base], attribute: str) -> None:
    model = small_model()
    with pytest.raises(TypeError, match=rf"{kind.__name__} is not supported: its attribute '{attribute}'"):
        wrap(model, Loopback(2), kind(model.parameters()))


@pytest.mark.parametrize("wrapped_by_horovod", [False, True])
def test_attributes_without_parameters_are_welcome(wrapped_by_horovod: bool) -> None:
    model = small_model()
    base: Any = torch.optim.RMSprop(model.parameters(), lr=0.01)
    base.notes = {"limits": [1, 2.0, True], "name": "mine"}
    if wrapped_by_horovod:
        import horovod.torch as hvd

        hvd.init()
        base = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters())
        optimizer = wrap(model, RecordingEngine(2), base, named_parameters=None, warmup_steps=1)
    else:
        optimizer = wrap(model, RecordingEngine(2), base, warmup_steps=1)
    train(model, optimizer, 5)
    assert optimizer.stats().delay.steps == 4


class StepsByItsBaseClass(torch.optim.RMSprop):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_hooks_run_once_a_step_and_not_on_twins() -> None:
    model = small_model()
    base = StepsByItsBaseClass(model.parameters(), lr=0.01)
    optimizer = wrap(model, Loopback(2), base, warmup_steps=1, delay_steps=2)
    seen: list[Any] = []
    base.register_step_post_hook(lambda holder, args, kwargs: seen.append(holder))
    train(model, optimizer, 5)
    assert all(holder is base for holder in seen)


@pytest.mark.parametrize("lr", ["0.1", None])
def test_local_steps_by_a_learning_rate_need_one(lr: Any) -> None:
    model = small_model()
    base = Descent(model.parameters())
    base.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=rf"param_groups\[0\] has lr={lr!r}, and glu='none'"):
        wrap(model, Loopback(2), base, glu="none")
