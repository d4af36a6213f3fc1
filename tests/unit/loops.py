"""Small models and loops that the tests train."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from oracle import Case, Trace
from torch import Tensor

import ssd_allreduce as ssd
from ssd_allreduce.communicators import Communicator


def _first_model() -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


_MODEL = _first_model()


def small_model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Four parameters in two layers; always the same start."""
    return copy.deepcopy(_MODEL).to(dtype)


def inputs(step: int = 0, rank: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 3, generator=generator).to(dtype)


def loss_of(model: torch.nn.Module, step: int = 0, rank: int = 0) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(inputs(step, rank, dtype)).square().mean()


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def wrap(
    net: torch.nn.Module,
    engine: Communicator,
    base: torch.optim.Optimizer | None = None,
    **options: Any,
) -> ssd.DistributedOptimizer:
    """Our optimizer around a bare SGD with momentum."""
    defaults = {"named_parameters": net.named_parameters(), "timeout": 10.0}
    optimizer = sgd(net) if base is None else base
    return ssd.DistributedOptimizer(optimizer, communicator=engine, **{**defaults, **options})


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int = 0,
    rank: int = 0,
    edit: Callable[[], object] | None = None,
) -> None:
    """One iteration of the usual loop; ``edit`` runs between backward and step."""
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    if edit is not None:
        edit()
    optimizer.step()


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int = 0, first: int = 0
) -> None:
    for step in range(first, first + steps):
        train_step(model, optimizer, step, rank)


def weights(model: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def global_weights(model: torch.nn.Module, optimizer: ssd.DistributedOptimizer) -> list[Tensor]:
    with optimizer.global_weights():
        return weights(model)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


class LeastSquares(torch.nn.Module):
    """The problem of ``oracle``; its loss has the gradient that is computed there."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.from_numpy(case.start().copy()))

    def loss(self, x: np.ndarray, y: np.ndarray) -> Tensor:
        residual = torch.from_numpy(x) @ self.w - torch.from_numpy(y)
        return 0.5 * residual.square().mean()


@contextlib.contextmanager
def a_scaler_says(optimizer: Any, overflow: bool) -> Iterator[None]:
    """What torch's GradScaler sets around ``step()`` when gradients have been unscaled.

    As torch does, it removes that only where ``step()`` has succeeded.
    """
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(overflow)), None
    yield
    del optimizer.found_inf, optimizer.grad_scale


def train_case(
    case: Case, engine: Communicator, issue: str = "backward", base: Callable[..., Any] | None = None
) -> Trace:
    """The product on what :func:`oracle.simulate` computes."""
    rank, trace = engine.rank, Trace()
    model = LeastSquares(case)
    bare = torch.optim.SGD(model.parameters(), **asdict(case.optimizer))
    corrected = case.glu in ("gradient", "displacement")
    rule = {"alpha": case.alpha, "beta": case.beta, "local_lr_scale": case.local_lr_scale}
    optimizer = ssd.DistributedOptimizer(
        bare if base is None else base(bare, model),
        named_parameters=None if base else model.named_parameters(),
        communicator=engine,
        delay_steps=case.delay_steps,
        overlap_steps=case.overlap_steps,
        warmup_steps=case.warmup_steps,
        glu=case.glu,
        issue=issue,
        timeout=20.0,
        **(rule if corrected else {}),
    )
    for step in range(case.steps[rank]):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = case.options(step).lr
        before = optimizer.stats().sync_points
        model.loss(*case.data(step, rank)).backward()
        if case.overflows:
            overflow = (step, rank) in case.overflows
            if overflow:
                assert model.w.grad is not None
                model.w.grad.fill_(torch.inf)
            with a_scaler_says(optimizer, overflow):
                optimizer.step()
        else:
            optimizer.step()
        trace.sent.append(optimizer.stats().sync_points > before)
        record(trace, model, optimizer)
    if case.flush:
        optimizer.flush()
    record(trace, model, optimizer)
    state = bare.state.get(model.w, {}).get("momentum_buffer")
    trace.momentum = None if state is None else state.numpy().copy()
    optimizer.close()
    return trace


def record(trace: Trace, model: LeastSquares, optimizer: ssd.DistributedOptimizer) -> None:
    trace.local.append(model.w.detach().numpy().copy())
    with optimizer.global_weights():
        trace.world.append(model.w.detach().numpy().copy())


def assert_traces_agree(actual: list[Trace], expected: list[Trace]) -> None:
    """Local weights, global weights and momentum; and these last equal on all ranks, bit for bit."""
    for rank, (mine, right) in enumerate(zip(actual, expected, strict=True)):
        assert mine.sent == right.sent, f"rank {rank} communicated in other steps"
        np.testing.assert_allclose(mine.local, right.local, rtol=1e-9, atol=1e-12, err_msg=f"local, {rank}")
        np.testing.assert_allclose(mine.world, right.world, rtol=1e-9, atol=1e-12, err_msg=f"global, {rank}")
        if right.momentum is not None:
            assert mine.momentum is not None
            np.testing.assert_allclose(mine.momentum, right.momentum, rtol=1e-9, atol=1e-12)
            assert np.array_equal(mine.momentum, actual[0].momentum)
    assert all(np.array_equal(trace.world[-1], actual[0].world[-1]) for trace in actual)


def same(one: Any, other: Any) -> bool:
    """Whether nested state is equal, tensors bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
