"""Clipping by the norm over all gradients, and buffers averaged over the ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engines import RecordingEngine, ThreadRank, on_ranks
from hypothesis import given
from hypothesis import strategies as st
from loops import equal, inputs, same, small_model, wrap
from torch import Tensor, nn

from ssd_allreduce import Loopback, RankMismatchError
from ssd_allreduce.clipping import clip_coefficient, clip_gradients

# -- clipping ------------------------------------------------------------------------------------


def gradients(seed: int, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in ((3,), (2, 4), ()):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        parameters.append(parameter)
    return parameters


@given(seed=st.integers(0, 99), largest=st.floats(1e-3, 20.0))
def test_gradients_are_clipped_as_torch_clips_them(seed: int, largest: float) -> None:
    mine, torchs = gradients(seed, torch.float64), gradients(seed, torch.float64)
    clip_gradients(mine, largest)
    torch.nn.utils.clip_grad_norm_(torchs, largest)
    for one, other in zip(mine, torchs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=0.0)


def test_gradients_within_the_norm_keep_every_bit() -> None:
    mine, given_ = gradients(1, torch.float32), gradients(1, torch.float32)
    clip_gradients(mine, 1e6)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(mine, given_, strict=True))  # type: ignore[arg-type]


def test_parameters_without_gradients_do_not_count() -> None:
    mine = gradients(1, torch.float64)
    clip_gradients([nn.Parameter(torch.zeros(2))], 1.0)
    without = [nn.Parameter(torch.zeros(2)), *mine]
    clip_gradients(without, 0.5)
    norm = torch.cat([p.grad.reshape(-1) for p in mine]).norm()  # type: ignore[union-attr]
    assert norm.item() == pytest.approx(0.5, rel=1e-5)
    assert without[0].grad is None


def test_the_norm_of_half_precision_gradients_does_not_overflow() -> None:
    big = torch.full((1000,), 3000.0, dtype=torch.float16)
    coefficient = clip_coefficient([big], 1.0, 1.0)
    assert coefficient == pytest.approx(1.0 / (3000.0 * 1000**0.5), rel=1e-4)


def test_the_coefficient_of_a_sum_is_that_of_its_scaled_mean() -> None:
    total = [torch.tensor([30.0, 40.0], dtype=torch.float64)]
    assert clip_coefficient(total, 0.1, 1.0) == pytest.approx(1.0 / 5.0, rel=1e-5)
    assert clip_coefficient(total, 0.001, 1.0) == 1.0


# -- buffers -------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A model with two floating-point buffers and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)

    @property
    def floating(self) -> list[Tensor]:
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        return [self.norm.running_mean.clone(), self.norm.running_var.clone()]


def steps(model: nn.Module, optimizer: Any, count: int, rank: int, first: int = 0) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(inputs(step, rank) * (1 + rank)).square().mean().backward()
        optimizer.step()


def own_buffers(rank: int, count: int) -> list[Tensor]:
    """What the buffers of a rank would be without the others."""
    model = Normed()
    for step in range(count):
        model(inputs(step, rank) * (1 + rank))
    return model.floating


def mean(of: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(tensors).mean(dim=0) for tensors in zip(*of, strict=True)]


def assert_close(one: list[Tensor], other: list[Tensor]) -> None:
    for mine, right in zip(one, other, strict=True):
        torch.testing.assert_close(mine, right)


def test_by_default_buffers_are_each_ranks_own_and_are_not_sent() -> None:
    def program(engine: ThreadRank) -> list[Tensor]:
        model = Normed()
        optimizer = wrap(model, engine, delay_steps=2, overlap_steps=1)
        steps(model, optimizer, 5, engine.rank)
        optimizer.flush()
        assert not any(".buffer." in name for name in engine.sent)
        return model.floating

    for rank, buffers in enumerate(on_ranks(2, program)):
        assert equal(buffers, own_buffers(rank, 5))


@pytest.mark.parametrize("options", [{"warmup_steps": 99}, {"delay_steps": 3, "overlap_steps": 1}])
def test_flush_makes_buffers_their_mean_on_request(options: dict[str, Any]) -> None:
    def program(engine: ThreadRank) -> list[Tensor]:
        model = Normed()
        optimizer = wrap(model, engine, average_buffers="flush", model=model, **options)
        steps(model, optimizer, 5, engine.rank)
        assert equal(model.floating, own_buffers(engine.rank, 5))
        optimizer.flush()
        assert model.norm.num_batches_tracked.item() == 5
        return model.floating

    one, other = on_ranks(2, program)
    assert equal(one, other)
    assert_close(one, mean([own_buffers(rank, 5) for rank in range(2)]))


def test_at_a_completion_buffers_move_by_what_the_mean_differed_at_the_sync_point() -> None:
    """Sent after the second forward pass, arrived after the third."""

    def program(engine: ThreadRank) -> list[Tensor]:
        model = Normed()
        optimizer = wrap(model, engine, delay_steps=2, overlap_steps=1, average_buffers="sync", model=model)
        steps(model, optimizer, 3, engine.rank)
        return model.floating

    at_sync = [own_buffers(rank, 2) for rank in range(2)]
    for rank, buffers in enumerate(on_ranks(2, program)):
        expected = [
            own + middle - sent
            for own, middle, sent in zip(own_buffers(rank, 3), mean(at_sync), at_sync[rank], strict=True)
        ]
        assert_close(buffers, expected)


def test_averaged_buffers_in_flight_are_part_of_a_checkpoint() -> None:
    options: dict[str, Any] = {"delay_steps": 3, "overlap_steps": 2, "average_buffers": "sync"}

    def build() -> tuple[Normed, Any]:
        model = Normed()
        return model, wrap(model, RecordingEngine(2), model=model, **options)

    model, optimizer = build()
    steps(model, optimizer, 4, 0)
    heir, resumed = build()
    heir.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 6, 0, first=4)
    steps(heir, resumed, 6, 0, first=4)
    assert same(dict(heir.state_dict()), dict(model.state_dict()))


def test_every_rank_hears_of_buffers_that_differ_in_shape() -> None:
    def program(engine: ThreadRank) -> str:
        model = Normed()
        model.register_buffer("extra", torch.zeros(2 + engine.rank))
        optimizer = wrap(model, engine, average_buffers="sync", model=model)
        with pytest.raises(RankMismatchError) as caught:
            steps(model, optimizer, 1, engine.rank)
        return str(caught.value)

    one, other = on_ranks(2, program)
    assert one == other
    assert "'extra' is (2,) on rank 0 and (3,) on rank 1" in one


def test_a_bad_choice_of_buffers_is_refused() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"average_buffers='always' is not known. Allowed: 'sync', 'flush'"):
        wrap(model, Loopback(2), average_buffers="always", model=model)
    for nothing in (None, "model"):
        with pytest.raises(TypeError, match=r"average_buffers='sync' needs model=, the module whose buffers"):
            wrap(model, Loopback(2), average_buffers="sync", model=nothing)
