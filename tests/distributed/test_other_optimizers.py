"""Optimizers other than SGD: Adam, AdamW, torch's others, and classes that have only a ``step``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from problems import perceptron, regression_loss
from ranks import hvd
from support import assert_equal_on_all_ranks, bits, wrap
from torch import Tensor
from twin_simulation import MakeOptimizer, TwinSimulation, with_options

pytestmark = [pytest.mark.ranks("mpirun", 2, 3)]

STEPS = 15


class SignOfMomentum(torch.optim.Optimizer):
    """A third-party optimizer in the manner of Lion, with a default, a state and a step."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.sub_(state["mean"].sign(), alpha=group["lr"])


class KeepsStateEverywhere(SignOfMomentum):
    """Keeps its mean in a list, one count in its group, and another under a key that is no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", torch.zeros(1, dtype=torch.float64)) + 1.0
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            rate = group["lr"] / group["count"] ** 0.5 / float(self.state["steps"]) ** 0.5
            for p in group["params"]:
                if p.grad is not None:
                    (mean,) = self.state[p].setdefault("means", [torch.zeros_like(p)])
                    mean.lerp_(p.grad, 1 - group["beta"])
                    p.sub_(mean, alpha=rate)


class HoldsParameters(SignOfMomentum):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.excluded = set(self.param_groups[0]["params"][:1])


TWINS: dict[str, tuple[MakeOptimizer, tuple[str, float] | None]] = {
    "RMSprop": (with_options(torch.optim.RMSprop, lr=0.01, alpha=0.9, momentum=0.5), ("square_avg", 0.9)),
    "NAdam": (with_options(torch.optim.NAdam, lr=0.01, betas=(0.9, 0.95)), ("exp_avg_sq", 0.95)),
    "RAdam": (with_options(torch.optim.RAdam, lr=0.01, betas=(0.9, 0.95)), ("exp_avg_sq", 0.95)),
    "Adadelta": (with_options(torch.optim.Adadelta, lr=0.5, rho=0.8), ("square_avg", 0.8)),
    "Adagrad": (with_options(torch.optim.Adagrad, lr=0.02), None),
    "Adamax": (with_options(torch.optim.Adamax, lr=0.01), None),
    "SignOfMomentum": (with_options(SignOfMomentum, lr=0.01), None),
}
ADAMS: dict[str, MakeOptimizer] = {
    "Adam": with_options(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "AdamW": with_options(torch.optim.AdamW, lr=0.01, weight_decay=0.1, maximize=False),
}
KEEPER = {"KeepsStateEverywhere": with_options(KeepsStateEverywhere, lr=0.05)}
ALL = {**KEEPER, **{name: make for name, (make, _) in TWINS.items()}, **ADAMS}


def named(model: torch.nn.Module) -> dict[str, Any]:
    return {"named_parameters": model.named_parameters()}


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    regression_loss(model, hvd.rank(), step).backward()
    optimizer.step()


@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("name", TWINS)
def test_twin_follows_the_formulas(name: str, overlap_steps: int) -> None:
    make, second_moment = TWINS[name]
    model = perceptron()
    settings = {"delay_steps": 4, "overlap_steps": overlap_steps, "warmup_steps": 3}
    simulation = TwinSimulation(
        model, regression_loss, hvd.size(), make, **settings, second_moment=second_moment
    )
    optimizer = wrap(make(list(model.parameters())), **named(model), **settings)
    for step in range(STEPS):
        train_step(model, optimizer, step)
        simulation.step()
        local = simulation.locals[hvd.rank()].weights
        assert_close(list(model.parameters()), local, f"local weights after step {step}")
        with optimizer.global_weights():
            assert_close(list(model.parameters()), simulation.whole.weights, f"global, step {step}")


def assert_close(mine: list[Tensor], expected: list[Tensor], what: str) -> None:
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-8, atol=1e-10, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("name", ALL)
def test_synchronous_training_equals_plain_horovod(name: str) -> None:
    plain_model, model, warm_model = perceptron(), perceptron(), perceptron()
    plain = hvd.DistributedOptimizer(ALL[name](list(plain_model.parameters())), **named(plain_model))
    optimizer = wrap(ALL[name](list(model.parameters())), **named(model), delay_steps=1)
    inner = hvd.DistributedOptimizer(ALL[name](list(warm_model.parameters())), **named(warm_model))
    warm = wrap(inner, delay_steps=4, warmup_steps=STEPS)
    for step in range(STEPS):
        for m, o in ((plain_model, plain), (model, optimizer), (warm_model, warm)):
            train_step(m, o, step)
        wanted = bits(plain_model.parameters())
        assert bits(model.parameters()) == wanted
        assert bits(warm_model.parameters()) == wanted


@pytest.mark.parametrize("glu", ["momentum", "gradient", "displacement", "none"])
@pytest.mark.parametrize("name", ALL)
def test_global_weights_and_state_are_equal_on_all_ranks(name: str, glu: str) -> None:
    model = perceptron()
    optimizer = wrap(
        ALL[name](list(model.parameters())),
        **named(model),
        delay_steps=4,
        overlap_steps=1,
        warmup_steps=2,
        glu=glu,
    )
    for step in range(STEPS):
        train_step(model, optimizer, step)
        with optimizer.global_weights():
            assert_equal_on_all_ranks(model.parameters())
        state = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
        state += [tensor for v in state if isinstance(v, list) for tensor in v]
        assert_equal_on_all_ranks(v for v in state if isinstance(v, Tensor))
    optimizer.flush()
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("stopped_at", [1, 4, 7, 8, 11])
@pytest.mark.parametrize("name", ["Adam", "RMSprop", "SignOfMomentum", "KeepsStateEverywhere"])
def test_continues_after_any_step(name: str, stopped_at: int) -> None:
    def make() -> tuple[torch.nn.Module, Any]:
        model = perceptron()
        settings = {"delay_steps": 4, "overlap_steps": 2, "warmup_steps": 2}
        return model, wrap(ALL[name](list(model.parameters())), **named(model), **settings)

    model, optimizer = make()
    for step in range(stopped_at):
        train_step(model, optimizer, step)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed_model, resumed = make()
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for step in range(stopped_at, STEPS):
        train_step(model, optimizer, step)
        train_step(resumed_model, resumed, step)
        assert bits(resumed_model.parameters()) == bits(model.parameters())


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_state_outside_of_parameters_counts_every_step(warmup_steps: int) -> None:
    model = perceptron()
    base = KEEPER["KeepsStateEverywhere"](list(model.parameters()))
    optimizer = wrap(base, **named(model), delay_steps=4, overlap_steps=2, warmup_steps=warmup_steps)
    for step in range(STEPS):
        train_step(model, optimizer, step)
    optimizer.flush()
    assert (base.param_groups[0]["count"], float(base.state["steps"])) == (STEPS, STEPS)
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("name", ["Adam", "NAdam", "SignOfMomentum"])
def test_uneven_ends_leave_equal_weights(name: str) -> None:
    model = perceptron()
    optimizer = wrap(ALL[name](list(model.parameters())), **named(model), delay_steps=3, warmup_steps=2)
    for step in range(4 + 5 * hvd.rank()):
        train_step(model, optimizer, step)
    optimizer.flush()
    assert_equal_on_all_ranks(model.parameters())


REFUSED = {
    "held parameters": (
        HoldsParameters,
        {"delay_steps": 4},
        TypeError,
        "HoldsParameters is not supported: its attribute 'excluded' holds parameters",
    ),
    "LBFGS": (with_options(torch.optim.LBFGS), {"delay_steps": 4}, TypeError, "LBFGS.*several times"),
    "SparseAdam": (with_options(torch.optim.SparseAdam), {"delay_steps": 4}, TypeError, "SparseAdam"),
    "amsgrad": (
        with_options(torch.optim.Adam, amsgrad=True),
        {"delay_steps": 4, "warmup_steps": 5},
        ValueError,
        "amsgrad=True",
    ),
    "no warm-up": (
        with_options(torch.optim.Adam),
        {"delay_steps": 4},
        ValueError,
        "warmup_steps=0 with Adam",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(case: str) -> None:
    make, settings, error, message = REFUSED[case]
    model = perceptron()
    base = make(list(model.parameters()))
    with pytest.raises(error, match=message):
        wrap(base, **named(model), **settings)
    assert "step" not in base.__dict__, "a refused optimizer keeps its own behaviour"
