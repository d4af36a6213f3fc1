"""Whole steps on a GPU and on the CPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ssd_allreduce as ssd
from ssd_allreduce.clipping import clip_gradients
from ssd_allreduce.clocks import clock_for

STEPS = 14
Optimizers = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS = [
    pytest.param(lambda p: torch.optim.SGD(p, lr=0.05), id="sgd"),
    pytest.param(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True), id="nesterov"
    ),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=1e-3), id="adamw"),
]


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(7, 33),
        torch.nn.Tanh(),
        torch.nn.Linear(33, 5),
        torch.nn.Tanh(),
        torch.nn.Linear(5, 1),
    ).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(16, 7, generator=generator).double(), torch.randn(16, 1, generator=generator).double())
        for _ in range(STEPS)
    ]


def train(model: torch.nn.Module, make: Optimizers, device: str, **options: Any) -> list[Tensor]:
    """Local weights after each step, and the global ones after the flush."""
    model = copy.deepcopy(model).to(device)
    optimizer = ssd.DistributedOptimizer(
        make(model.parameters()),
        named_parameters=model.named_parameters(),
        communicator=ssd.Loopback(2),
        **options,
    )
    seen: list[Tensor] = []
    for x, y in batches():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).cpu())
    optimizer.flush()
    seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).cpu())
    optimizer.close()
    return seen


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("glu", ["momentum", "gradient", "displacement", "none"])
@pytest.mark.parametrize("issue", ["backward", "step"])
def test_steps_on_the_gpu_are_those_on_the_cpu(make: Optimizers, glu: str, issue: str) -> None:
    options = {"delay_steps": 4, "overlap_steps": 2, "warmup_steps": 2, "glu": glu, "issue": issue}
    model = new_model()
    ours, expected = train(model, make, "cuda", **options), train(model, make, "cpu", **options)
    for step, (on_gpu, on_cpu) in enumerate(zip(ours, expected, strict=True)):
        torch.testing.assert_close(
            on_gpu, on_cpu, rtol=1e-9, atol=1e-9, msg=lambda message, step=step: f"step {step}: {message}"
        )


def test_a_changed_gradient_is_noticed_on_the_gpu() -> None:
    model = new_model().cuda()
    optimizer = ssd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        communicator=ssd.Loopback(2),
        delay_steps=2,
        overlap_steps=1,
    )
    for x, y in batches()[:1]:
        torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    optimizer.zero_grad()
    x, y = batches()[1]
    torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.data.mul_(0.5)
    with pytest.raises(ssd.GradientChangedError, match="issue='step'"):
        optimizer.step()


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_gradients_on_two_devices_are_clipped_by_their_common_norm(devices: tuple[str, str]) -> None:
    parameters = []
    for device, value in zip(devices, (3.0, 4.0), strict=True):
        parameter = torch.nn.Parameter(torch.zeros(1, device=device))
        parameter.grad = torch.full((1,), value, device=device)
        parameters.append(parameter)
    clip_gradients(parameters, 1.0)
    assert [float(p.grad) for p in parameters] == pytest.approx([0.6, 0.8])  # type: ignore[arg-type]
    assert [p.grad.device.type for p in parameters] == list(devices)  # type: ignore[union-attr]


def test_a_gradient_scaler_s_overflow_contributes_nothing() -> None:
    model = new_model().float().cuda()
    optimizer = ssd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        communicator=ssd.Loopback(2),
        delay_steps=2,
        issue="step",
    )
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]
    for factor, moves in ((float("inf"), False), (1.0, True)):
        x, y = batches()[0]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.float().cuda()), y.float().cuda()) * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        unmoved = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert unmoved is not moves


PERIOD: dict[str, Any] = {"delay_steps": 6, "overlap_steps": 2, "warmup_steps": 1, "issue": "step"}
QUIET = (3, 4, 5, 9, 10, 11)
"""Delay steps that neither send nor complete; the first two, in which memory is found, left out."""
OVERFLOWING = (4, 7, 10)


def train_scaled(make: Optimizers, device: str, watch: Callable[[int, Callable[[], None]], None]) -> Tensor:
    """Weights after steps driven by a GradScaler, each of which is given to ``watch`` to make."""
    model = new_model().to(device)
    optimizer = ssd.DistributedOptimizer(
        make(model.parameters()),
        named_parameters=model.named_parameters(),
        communicator=ssd.Loopback(2),
        **PERIOD,
    )
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    data = [(x.to(device), y.to(device)) for x, y in batches()]

    def make_step(step: int) -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data[step][0]), data[step][1])
        scaler.scale(loss * (float("inf") if step in OVERFLOWING else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    for step in range(STEPS):
        watch(step, lambda step=step: make_step(step))  # type: ignore[misc]
    optimizer.flush()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def without_synchronisation(step: int, make_step: Callable[[], None]) -> None:
    torch.cuda.set_sync_debug_mode("error" if step in QUIET else "default")
    try:
        make_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def behind_a_busy_gpu(step: int, make_step: Callable[[], None]) -> None:
    torch.cuda.synchronize()
    if step in QUIET:
        torch.cuda._sleep(1_000_000_000)
    make_step()
    assert step not in QUIET or not torch.cuda.current_stream().query(), f"the host waited in step {step}"


@pytest.mark.parametrize("watch", [without_synchronisation, behind_a_busy_gpu])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_nobody_waits_for_a_gradient_scaler_in_a_delay_step(make: Optimizers, watch: Any) -> None:
    ours = train_scaled(make, "cuda", watch)
    expected = train_scaled(make, "cpu", lambda step, make_step: make_step())
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_work_on_the_gpu_is_measured_there() -> None:
    clock = clock_for([torch.zeros(1), torch.zeros(1, device="cuda")])
    assert clock.spares_the_host
    clock.settle()
    began = time.monotonic()
    first = clock.mark()
    torch.cuda._sleep(200_000_000)
    second = clock.mark()
    handed_over = time.monotonic() - began
    measured = clock.seconds(first, second)
    passed = time.monotonic() - began
    assert handed_over < 0.5 * measured
    assert measured < 1.05 * passed
