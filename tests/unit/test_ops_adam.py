"""The Adam operations, compiled and reference, against torch's own Adam and AdamW; what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import OPERATIONS, plain_call

from ssd_allreduce import ops, reference

every_implementation = pytest.mark.parametrize(
    "implementation", [ops, reference], ids=["compiled", "reference"]
)
every_kind = pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
BY_NAME = {operation.name: operation for operation in OPERATIONS}
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.05}


def trained(kind: type[torch.optim.Optimizer], maximize: bool) -> tuple[torch.Tensor, Any]:
    weight = torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    return weight, kind([weight], maximize=maximize, **OPTIONS)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


@every_implementation
@every_kind
@pytest.mark.parametrize("maximize", [False, True])
def test_local_adam_is_torchs(implementation: Any, kind: Any, maximize: bool) -> None:
    weight, optimizer = trained(kind, maximize)
    ours, first, second = weight.detach().clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 6):
        weight.grad = torch.randn(6, 5, dtype=torch.float64)
        optimizer.step()
        implementation.local_adam_(
            [ours],
            [weight.grad],
            [first.detach()],
            [second.detach()],
            [],
            [],
            lr=0.1,
            beta1=0.8,
            beta2=0.95,
            eps=1e-3,
            weight_decay=0.05,
            decoupled=kind is torch.optim.AdamW,
            maximize=maximize,
            gradient_scale=1.0,
            step=step,
            accumulation=0,
        )
    assert_same(ours, weight)
    assert_same(first, optimizer.state[weight]["exp_avg"])
    assert_same(second, optimizer.state[weight]["exp_avg_sq"])


@every_implementation
@every_kind
@pytest.mark.parametrize("steps_before", [0, 3])
def test_without_noise_a_replay_is_torchs_steps(implementation: Any, kind: Any, steps_before: int) -> None:
    """Equal gradients have no variance, and a mean over one gradient shows none."""
    weight, optimizer = trained(kind, maximize=False)
    weight.grad = torch.randn(6, 5, dtype=torch.float64)
    first, second = torch.zeros_like(weight).detach(), torch.zeros_like(weight).detach()
    for _ in range(steps_before):
        optimizer.step()
        first, second = optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]
    state = {"weights": [weight.detach().clone()], "firsts": [first.clone()], "seconds": [second.clone()]}
    rates = [0.1, 0.05, 0.2]
    for count in (1, 4):
        replayed = {name: [t.clone() for t in tensors] for name, tensors in state.items()}
        implementation.replay_adam_(
            **replayed,
            sums=[weight.grad * count],
            squares=[weight.grad.square() * count],
            corrections=[],
            count=count,
            divisor=float(count),
            steps_before=steps_before,
            lrs=rates,
            beta1s=[0.8] * 3,
            beta2s=[0.95] * 3,
            epsilons=[1e-3] * 3,
            weight_decays=[0.05] * 3,
            missing_noises=[0.5] * 3,
            decoupled=kind is torch.optim.AdamW,
            maximize=False,
            correction=0,
        )
        if count == 1:
            for rate in rates:
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
        assert_same(replayed["weights"][0], weight)
        assert_same(replayed["seconds"][0], optimizer.state[weight]["exp_avg_sq"])


@every_implementation
def test_an_infinite_divisor_gives_no_gradient(implementation: Any) -> None:
    """What clipping asks for where the norm is infinite, as torch's own does."""
    arguments = plain_call(BY_NAME["replay_adam_"]).build()
    arguments |= {"divisor": float("inf"), "weight_decays": [0.0, 0.0], "correction": 0}
    before = [tensor.clone() for tensor in arguments["firsts"]]
    implementation.replay_adam_(**arguments)
    for tensor, old in zip(arguments["firsts"], before, strict=True):
        torch.testing.assert_close(tensor, old * 0.9 * 0.8)


@every_implementation
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("local_adam_", {"step": 0}, r"local_adam_: step is 0; allowed are integers of at least 1"),
        ("local_adam_", {"squares": []}, r"squares has 0 tensors, weights has 2"),
        ("replay_adam_", {"count": 0}, r"count is 0; give the number of gradients, at least 1"),
        ("replay_adam_", {"divisor": 0.0}, r"divisor is 0; give the number of gradients over"),
        ("replay_adam_", {"steps_before": -1}, r"step is -1; allowed are integers of at least 0"),
        (
            "replay_adam_",
            {"epsilons": [0.1]},
            r"lrs, beta1s, beta2s, epsilons, weight_decays and missing_noises have \[2, 2, 2, 1, 2, 2\]",
        ),
        ("replay_adam_", {"correction": 3}, r"correction is 3; allowed are 0 \(none\)"),
        ("rebase_adam_", {"step": 0}, r"step is 0; allowed are integers of at least 1"),
    ],
)
def test_wrong_options_are_refused(implementation: Any, name: str, changes: Any, message: str) -> None:
    arguments = plain_call(BY_NAME[name]).build() | changes
    with pytest.raises(ValueError, match=message):
        getattr(implementation, name)(**arguments)
