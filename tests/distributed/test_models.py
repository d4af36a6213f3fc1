"""Models of all kinds: dtypes, layouts, odd parameters, missing gradients, shared and frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from launch_plan import WITHOUT_HOROVOD
from problems import cnn, flat, gradient_of, image_loss, perceptron, regression_loss, weights_of
from ranks import ENGINE, hvd
from simulation import Options
from support import assert_equal_on_all_ranks, bits, is_gradient, wrap
from test_communication import SizingCommunicator
from torch import Tensor, nn
from training import SETTINGS, SGD, STEPS, Training, simulate

pytestmark = [
    pytest.mark.ranks("mpirun", 2),
    pytest.mark.ranks("horovodrun-gloo", 2),
    *WITHOUT_HOROVOD,
    pytest.mark.filterwarnings("error"),
]

AS_THEY_ARE: dict[str, set[torch.dtype]] = {
    "horovod": {torch.float16},
    "mpi": set(),
    "torch": {torch.float16, torch.bfloat16},
}
"""Half-precision types that each engine sends."""

ISSUES = pytest.mark.parametrize("issue", ["backward", "step"])


# -- dtypes and layouts --------------------------------------------------------------------------


@ISSUES
@pytest.mark.parametrize("glu", ["momentum", "gradient", "displacement", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models(dtype: torch.dtype, glu: str, issue: str) -> None:
    """They follow the float64 trajectory as closely as their own dtype allows, on all ranks alike."""
    communicator = SizingCommunicator()
    training = Training(lambda: perceptron(dtype), issue=issue, glu=glu, communicator=communicator)
    expected = simulate(start=weights_of(training.model), glu=glu)
    training.train()

    precision = torch.finfo(dtype).eps
    rank = expected.ranks[hvd.rank()]
    np.testing.assert_allclose(training.local_history, rank.local_history, atol=16 * precision)
    np.testing.assert_allclose(training.global_history, rank.global_history, atol=16 * precision)
    for parameter in training.model.parameters():
        assert parameter.dtype == dtype
        assert training.optimizer.state[parameter]["momentum_buffer"].dtype == dtype
    training.optimizer.flush()
    assert_equal_on_all_ranks(training.model.parameters())
    # Sums of half-precision gradients would overflow or lose their low bits.
    warmup = {dtype if dtype in AS_THEY_ARE[ENGINE] else torch.float32}
    assert communicator.dtypes == {torch.float32} | warmup


def mixed_precision() -> nn.Module:
    model = perceptron(torch.float64)
    model[2].float()
    model[1] = nn.Sequential(nn.Tanh(), Cast(torch.float32))
    return model


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def mixed_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(4, 5, generator=random, dtype=torch.float64)
    return model(x).square().mean()


def test_parameters_of_several_dtypes_in_one_model() -> None:
    training = Training(mixed_precision, mixed_loss, horovod={}).train()
    training.assert_follows(simulate(make_model=mixed_precision, loss=mixed_loss), tolerance=1e-4)
    training.optimizer.flush()
    assert_equal_on_all_ranks(training.model.parameters())


def channels_last() -> nn.Module:
    return cnn(torch.float64).to(memory_format=torch.channels_last)


@ISSUES
@pytest.mark.parametrize("horovod", [None, {"groups": 2}], ids=["bare", "horovod_groups"])
def test_channels_last_trains_as_contiguous(horovod: dict[str, Any] | None, issue: str) -> None:
    training = Training(channels_last, image_loss, horovod=horovod, issue=issue).train()
    assert not training.model[3].weight.is_contiguous()
    training.assert_follows(simulate(make_model=lambda: cnn(torch.float64), loss=image_loss))


def test_gradients_in_another_layout_than_their_parameter() -> None:
    """A gradient replaced by a transposed copy holds the same values in another order of memory."""

    def transpose(training: Training) -> None:
        for parameter in training.model.parameters():
            if parameter.dim() == 2:
                parameter.grad = parameter.grad.t().contiguous().t()

    training = Training(issue="step")
    for _ in range(STEPS):
        training.make_step(lambda: transpose(training))
    training.assert_follows(simulate())


class Odd(nn.Module):
    """Scalars, an empty tensor, a size-1 dimension, a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.row = nn.Parameter(torch.randn(1, 5, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(3, 5, dtype=torch.float64).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x + self.row) @ self.turned + self.empty.sum()


@ISSUES
@pytest.mark.parametrize("horovod", [None, {}], ids=["bare", "horovod_wrapped"])
def test_scalar_empty_and_transposed_parameters(horovod: dict[str, Any] | None, issue: str) -> None:
    training = Training(Odd, regression_loss, horovod=horovod, issue=issue).train()
    training.assert_follows(simulate(make_model=Odd))
    assert training.model.turned.stride() == Odd().turned.stride()


# -- which parameters have gradients ---------------------------------------------------------------


class TwoHeads(nn.Module):
    """Each step uses one head; ranks may use different ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 3) for _ in range(2)])
        self.double()

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


def head_of(rank: int, step: int) -> int:
    return (rank + step // 3) % 2


def two_heads_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(4, 5, generator=random, dtype=torch.float64)
    return model(x, head_of(rank, step)).square().mean()


@ISSUES
@pytest.mark.parametrize("warmup_steps", [0, 5])
@pytest.mark.parametrize("horovod", [None, {}], ids=["bare", "horovod_wrapped"])
def test_parameter_without_gradient_on_some_ranks_contributes_zeros(
    horovod: dict[str, Any] | None, warmup_steps: int, issue: str
) -> None:
    training = Training(TwoHeads, two_heads_loss, horovod=horovod, issue=issue, warmup_steps=warmup_steps)
    training.train()
    assert head_of(0, 0) != head_of(1, 0)
    training.assert_follows(simulate(make_model=TwoHeads, loss=two_heads_loss, warmup_steps=warmup_steps))


class Tied(nn.Module):
    """One matrix used twice, registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


@ISSUES
@pytest.mark.parametrize("horovod", [None, {}], ids=["bare", "horovod_wrapped"])
def test_tied_weights(horovod: dict[str, Any] | None, issue: str) -> None:
    training = Training(Tied, horovod=horovod, issue=issue).train()
    training.assert_follows(simulate(make_model=Tied))
    assert training.model.first.weight is training.model.second.weight


def frozen_start() -> nn.Module:
    model = perceptron()
    model[0].requires_grad_(False)
    return model


@ISSUES
@pytest.mark.parametrize("horovod", [None, {}], ids=["bare", "horovod_wrapped"])
def test_frozen_parameters_are_left_alone_and_not_sent(horovod: dict[str, Any] | None, issue: str) -> None:
    # Not even weight decay moves what is frozen.
    training = Training(frozen_start, horovod=horovod, issue=issue).train()

    def gradient(rank: int, step: int, weights: Any) -> Any:
        free = gradient_of(perceptron(), regression_loss)(rank, step, weights)
        return np.where(trained, free, 0.0)

    trained = flat(torch.full_like(p, float(p.requires_grad)) for p in training.model.parameters()) > 0
    options = Options(np.where(trained, SGD["lr"], 0.0), SGD["momentum"], SGD["weight_decay"])
    training.assert_follows(simulate(gradient=gradient, options=lambda step: options))
    sent = {name for name in training.communicator.take_names() if is_gradient(name)}
    assert {name.rsplit(".", 1)[0] for name in sent} == {"2.weight", "2.bias"}
    assert bits(training.model[0].parameters()) == bits(perceptron()[0].parameters())


def test_param_groups_with_options_of_their_own() -> None:
    model = perceptron()
    parameters = list(model.parameters())
    base = torch.optim.SGD(
        [
            {"params": parameters[:2], "lr": 0.02, "momentum": 0.5},
            {"params": parameters[2:3], "weight_decay": 0.0},
            {"params": parameters[3:], "momentum": 0.0},
        ],
        **SGD,
    )
    optimizer = wrap(base, named_parameters=model.named_parameters(), **SETTINGS)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        history.append(weights_of(model))

    def spread(*values: float) -> Any:
        return flat(torch.full_like(p, v) for p, v in zip(parameters, values, strict=True))

    options = Options(
        lr=spread(0.02, 0.02, 0.05, 0.05),
        momentum=spread(0.5, 0.5, 0.9, 0.0),
        weight_decay=spread(0.01, 0.01, 0.0, 0.01),
    )
    expected = simulate(options=lambda step: options).ranks[hvd.rank()].local_history
    np.testing.assert_allclose(history, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("momentum", [{"momentum": 0.0}, {"momentum": 0.9, "nesterov": True}], ids=str)
@pytest.mark.parametrize("overlap_steps", [0, 1, 3])
def test_sgd_without_momentum_and_with_nesterov(momentum: dict[str, Any], overlap_steps: int) -> None:
    sgd = {"lr": 0.05, "weight_decay": 0.01, **momentum}
    training = Training(sgd=sgd, horovod={}, overlap_steps=overlap_steps).train()
    nesterov = sgd.pop("nesterov", False)
    expected = simulate(options=lambda step: Options(**sgd), nesterov=nesterov, overlap_steps=overlap_steps)
    training.assert_follows(expected)


def test_activation_checkpointing_of_a_shared_layer() -> None:
    """Its hook fires twice in one backward: the gradient is final after the second."""
    from torch.utils.checkpoint import checkpoint

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return reused(model, rank, step, lambda layer, x: checkpoint(layer, x, use_reentrant=True))

    def plain_loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return reused(model, rank, step, lambda layer, x: layer(x))

    training = Training(square, loss, issue="step").train()
    training.assert_follows(simulate(make_model=square, loss=plain_loss))


def square() -> nn.Module:
    torch.manual_seed(8)
    return nn.Linear(4, 4).double()


def reused(model: nn.Module, rank: int, step: int, apply: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    random = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(3, 4, generator=random, dtype=torch.float64).requires_grad_()
    return apply(model, torch.tanh(apply(model, x))).square().mean()
