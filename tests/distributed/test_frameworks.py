"""The ways in which trainers, averaging and compiling wrappers use an optimizer and a model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from problems import perceptron, regression_loss
from support import assert_equal_on_all_ranks, bits, on_every_rank, wrap
from torch import nn

import ssd_allreduce as ssd

pytestmark = [pytest.mark.ranks("mpirun", 2)]

STEPS = 11
SETTINGS: dict[str, Any] = {"delay_steps": 4, "overlap_steps": 2, "warmup_steps": 2}


def make(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[nn.Module, Any]:
    model = perceptron(dtype)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, wrap(base, named_parameters=model.named_parameters(), **{**SETTINGS, **settings})


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        optimizer.step()


def trained_weights(**settings: Any) -> list[bytes]:
    model, optimizer = make(**settings)
    train(model, optimizer)
    return bits(model.parameters())


def test_closure_that_zeroes_and_runs_backward_as_lightning_calls_it() -> None:
    model, optimizer = make()
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            loss = regression_loss(model, hvd.rank(), step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            return loss

        assert optimizer.step(closure=closure).item() > 0
    assert bits(model.parameters()) == trained_weights()


class AcceleratedOptimizer(torch.optim.Optimizer):
    """What an accelerator puts around an optimizer: an optimizer itself, which passes everything on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()


def test_accelerated_loop_with_scheduler_and_clipping() -> None:
    def run(accelerate: bool) -> list[bytes]:
        model, inner = make(issue="step")
        optimizer = AcceleratedOptimizer(inner) if accelerate else inner
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=STEPS)
        for step in range(STEPS):
            regression_loss(model, hvd.rank(), step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        return bits(model.parameters())

    assert run(accelerate=True) == run(accelerate=False)


def test_averaged_model_follows_the_global_weights() -> None:
    model, optimizer = make()
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        with optimizer.global_weights():
            average.update_parameters(model)
    assert_equal_on_all_ranks(average.module.parameters())
    mine = on_every_rank(bits(model.parameters()))
    assert mine[0] != mine[1], "local weights differ here, so that averaging them would not be equal"


def test_autocast_with_bfloat16_trains() -> None:
    model, optimizer = make(torch.float32)
    before = bits(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = regression_loss(model, hvd.rank(), step)
        loss.backward()
        optimizer.step()
    optimizer.flush()
    assert_equal_on_all_ranks(model.parameters())
    assert bits(model.parameters()) != before


@pytest.mark.timeout(120)
def test_compiled_model_trains_as_the_model_itself() -> None:
    model, optimizer = make()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        regression_loss(compiled, hvd.rank(), step).backward()
        optimizer.step()
    plain, plain_optimizer = make()
    train(plain, plain_optimizer)
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def test_layers_skipped_at_random_on_each_rank() -> None:
    model, optimizer = make()
    for step in range(STEPS):
        optimizer.zero_grad()
        if (step + hvd.rank()) % 3:
            regression_loss(model, hvd.rank(), step).backward()
        else:
            model[2](torch.ones(2, 6, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    optimizer.flush()
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_sparse_gradients_are_made_dense_on_request(warmup_steps: int) -> None:
    def run(sparse: bool) -> list[bytes]:
        torch.manual_seed(1)
        model = nn.Embedding(7, 3, sparse=sparse).double()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"named_parameters": model.named_parameters(), "sparse_as_dense": sparse or None}
        optimizer = wrap(base, **names, **{**SETTINGS, "warmup_steps": warmup_steps})
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.tensor([step % 7, (step + hvd.rank()) % 7])).square().sum().backward()
            optimizer.step()
        optimizer.flush()
        return bits(model.parameters())

    assert run(sparse=True) == run(sparse=False)


class MeanOverRanks(torch.autograd.Function):
    """Communicates in forward and in backward, as the layers of hvd.SyncBatchNorm do."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x, op=hvd.Average, name="layer.forward")

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(gradient, op=hvd.Average, name="layer.backward")


class NormalisedOverRanks(nn.Module):
    """Batch normalisation with the statistics of all ranks' batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = MeanOverRanks.apply(x.mean(dim=0))
        variance = MeanOverRanks.apply((x - mean).square().mean(dim=0))
        return (x - mean) / (variance + 1e-5).sqrt()


def normalised(layer: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), layer, nn.Linear(6, 3)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("settings", [{"delay_steps": 1, "overlap_steps": 0}, {"warmup_steps": 99}])
def test_statistics_over_ranks_are_those_of_one_large_batch(settings: dict[str, Any]) -> None:
    model = normalised(NormalisedOverRanks())
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = wrap(base, named_parameters=model.named_parameters(), **{**SETTINGS, **settings})
    whole = normalised(nn.BatchNorm1d(6, affine=False))
    plain = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        model(batch(hvd.rank(), step)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        whole(torch.cat([batch(rank, step) for rank in range(hvd.size())])).square().mean().backward()
        plain.step()
    for mine, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def test_layers_that_communicate_train_in_delay_steps_too() -> None:
    model = normalised(NormalisedOverRanks())
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = wrap(base, named_parameters=model.named_parameters(), **SETTINGS)
    losses = []
    for step in range(3 * STEPS):
        optimizer.zero_grad()
        loss = model(batch(hvd.rank(), step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-STEPS:]) < sum(losses[:STEPS]) / 2
    optimizer.flush()
    assert_equal_on_all_ranks(model.parameters())


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5,), float(index**2), dtype=torch.float64)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_data_loader_workers_beside_the_engine(start_method: str) -> None:
    """Forked workers share MPI's connections and locks with the rank; started afresh they do not."""
    model, optimizer = make()
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=3, num_workers=1, multiprocessing_context=start_method
    )
    seen: list[float] = []
    for x in loader:
        optimizer.zero_grad()
        model(x / 100).square().mean().backward()
        optimizer.step()
        seen += x[:, 0].tolist()
    assert seen == [float(index**2) for index in range(12)]
    optimizer.flush()
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("wrapped", [False, True])
def test_complex_parameters_are_refused_by_name(wrapped: bool) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    base: Any = torch.optim.SGD([weight], lr=0.1)
    names: dict[str, Any] = {"named_parameters": [("phase", weight)]}
    if wrapped:
        base, names = hvd.DistributedOptimizer(base, **names), {}
    with pytest.raises(TypeError, match=r"'phase' has dtype torch\.complex64.*view_as_real"):
        wrap(base, **names)


def test_is_an_optimizer_and_keeps_the_users_own_reachable() -> None:
    model = perceptron()
    user = torch.optim.SGD(model.parameters(), lr=0.05)
    given = hvd.DistributedOptimizer(user, named_parameters=model.named_parameters())
    optimizer = wrap(given)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.base_optimizer is given
    assert user.param_groups is optimizer.param_groups
    assert user.state is optimizer.state


def test_nested_state_of_distributed_checkpoints_fails_by_name_and_plain_state_serves() -> None:
    """torch looks for a parameter behind every entry of the state; this optimizer's own has none."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = make()
    train(model, optimizer)
    with pytest.raises(KeyError, match="ssd_allreduce"):
        get_optimizer_state_dict(model, optimizer)
    before = bits(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert bits(model.parameters()) == before


def test_copies_say_why_they_are_refused() -> None:
    _, optimizer = make()
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict"):
        pickle.dumps(optimizer)


def test_elastic_horovod_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ssd.UsageError, match="Elastic Horovod"):
        make()


def test_model_inside_ddp_is_refused_by_name(shared_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{shared_path / 'ddp'}", rank=hvd.rank(), world_size=hvd.size()
    )
    try:
        model = nn.parallel.DistributedDataParallel(perceptron())
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ssd.UsageError, match="wrapped by DistributedDataParallel"):
            wrap(base, named_parameters=model.named_parameters(), **SETTINGS)
    finally:
        torch.distributed.destroy_process_group()


def test_names_are_taken_from_the_param_groups() -> None:
    model = perceptron()
    base = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    optimizer = wrap(base, **SETTINGS)
    train(model, optimizer)
    assert bits(model.parameters()) == trained_weights()


def test_process_set_trains_apart() -> None:
    process_set = hvd.global_process_set
    assert trained_weights(process_set=process_set) == trained_weights()


@pytest.mark.ranks("mpirun", 2, alone=True)
def test_join_is_refused_by_name() -> None:
    model, optimizer = make()
    if hvd.rank() == 0:
        train(model, optimizer, 4)
        with pytest.raises(HorovodInternalError):
            hvd.join()
    else:
        with pytest.raises(ssd.RankMismatchError, match=r"hvd\.join\(\).*flush\(\)"):
            train(model, optimizer, 20)
        hvd.shutdown()
