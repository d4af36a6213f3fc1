"""Clipping by the norm over all gradients, and buffers averaged over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import RecordingEngine, ThreadRank, on_ranks
from hypothesis import given
from hypothesis import strategies as st
from loops import equal, fill, inputs, same, small_model, weights, wrap
from torch import Tensor, nn

from ssd_allreduce import Loopback, PeerFailedError, RankMismatchError, SSDError, UsageError
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


class Renewing(nn.Module):
    """Puts another tensor in its buffer's place in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = small_model()
        self.register_buffer("ema", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.ema = 0.5 * self.ema + y.detach().mean(dim=0)
        return y


def forward_alone(model: Renewing) -> None:
    """What the forward passes do is enough."""


def load_by_assignment(model: Renewing) -> None:
    loaded = {"ema": model.ema + 1.0}
    model.load_state_dict(loaded, strict=False, assign=True)


def convert(model: Renewing) -> None:
    model.ema = model.ema.half()


REPLACEMENTS = [forward_alone, load_by_assignment, convert]


@pytest.mark.parametrize("replace", REPLACEMENTS)
@pytest.mark.parametrize("options", [{"warmup_steps": 99}, {"delay_steps": 3, "overlap_steps": 1}])
def test_flush_averages_the_tensors_that_are_the_models_buffers_then(
    options: dict[str, Any], replace: Callable[[Renewing], None]
) -> None:
    def program(engine: ThreadRank) -> tuple[Tensor, Tensor]:
        model = Renewing()
        optimizer = wrap(model, engine, average_buffers="flush", model=model, **options)
        steps(model, optimizer, 4, engine.rank)
        replace(model)
        own = model.ema.clone()
        optimizer.flush()
        return own, model.ema

    (one, averaged), (other, too) = on_ranks(2, program)
    assert not torch.equal(one, other)
    assert torch.equal(averaged, too)
    torch.testing.assert_close(averaged, (one.float() + other.float()).div(2).to(one.dtype))


def test_a_completion_moves_the_tensor_that_is_the_models_buffer_then() -> None:
    """Sent in the second step; the third puts another in its place before what was sent arrives."""

    def program(engine: ThreadRank) -> list[Tensor]:
        model = Renewing()
        optimizer = wrap(model, engine, delay_steps=2, overlap_steps=1, average_buffers="sync", model=model)
        steps(model, optimizer, 2, engine.rank)
        sent = model.ema.clone()
        own = []
        model.register_forward_hook(lambda *_: own.append(model.ema.clone()))
        steps(model, optimizer, 1, engine.rank, first=2)
        return [sent, own[0], model.ema]

    ranks = on_ranks(2, program)
    middle = (ranks[0][0] + ranks[1][0]) / 2
    for sent, own, moved in ranks:
        assert not torch.equal(sent, middle)
        torch.testing.assert_close(moved, own + middle - sent)


def grow(model: Normed) -> None:
    model.norm.running_mean = torch.zeros(4)


def add(model: Normed) -> None:
    model.register_buffer("extra", torch.zeros(2))


def remove(model: Normed) -> None:
    model.norm.running_mean = None


CHANGES = [(grow, "'norm.running_mean'"), (add, "'extra'"), (remove, "'norm.running_mean'")]


@pytest.mark.parametrize(("change", "name"), CHANGES)
@pytest.mark.parametrize("options", [{"warmup_steps": 99}, {"delay_steps": 3, "overlap_steps": 1}])
@pytest.mark.parametrize("when", ["sync", "flush"])
def test_all_ranks_hear_of_buffers_that_have_no_mean_any_more_and_can_adopt_them(
    when: str, options: dict[str, Any], change: Callable[[Normed], None], name: str
) -> None:
    def program(engine: ThreadRank) -> str:
        model = Linear()
        optimizer = wrap(model, engine, average_buffers=when, model=model, **options)
        steps(model, optimizer, 4, engine.rank)
        if engine.rank == 1:
            change(model)
        with pytest.raises(UsageError if engine.rank == 1 else PeerFailedError) as caught:
            steps(model, optimizer, 3, engine.rank) if when == "sync" else optimizer.flush()
        if engine.rank == 0:
            change(model)
        fill(model, 0.5)
        optimizer.adopt_weights()
        optimizer.zero_grad()
        steps(model, optimizer, 4, engine.rank)
        optimizer.flush()
        return str(caught.value)

    heard, own = on_ranks(2, program)
    assert f"the averaged buffers {name} of model= were added, removed, or given another shape" in own
    assert "load a checkpoint" in own
    assert "Rank 1 refused to go on" in heard
    assert "averaged buffers are others than those that the ranks agreed on" in heard


@pytest.mark.parametrize(("change", "name"), CHANGES)
@pytest.mark.parametrize("when", ["sync", "flush"])
def test_between_flush_and_adopt_weights_all_ranks_may_change_what_is_averaged(
    when: str, change: Callable[[Normed], None], name: str
) -> None:
    def program(engine: ThreadRank) -> None:
        model = Linear()
        optimizer = wrap(model, engine, delay_steps=3, average_buffers=when, model=model)
        steps(model, optimizer, 4, engine.rank)
        optimizer.flush()
        change(model)
        present = name[1:-1] in dict(model.named_buffers())
        optimizer.adopt_weights()
        before = len(engine.sent)
        steps(model, optimizer, 4, engine.rank)
        optimizer.flush()
        assert any(sent.endswith(f".buffer.{name[1:-1]}") for sent in engine.sent[before:]) is present

    on_ranks(2, program)


def test_a_buffer_changed_while_its_mean_travels_is_told_at_the_next_sync_point() -> None:
    def program(engine: ThreadRank) -> type[Exception]:
        model = Linear()
        optimizer = wrap(model, engine, delay_steps=3, overlap_steps=2, average_buffers="sync", model=model)
        steps(model, optimizer, 3, engine.rank)
        if engine.rank == 1:
            grow(model)
        steps(model, optimizer, 2, engine.rank)
        with pytest.raises(SSDError) as caught:
            steps(model, optimizer, 3, engine.rank)
        return caught.type

    assert on_ranks(2, program) == [PeerFailedError, UsageError]


class Linear(Normed):
    """The same with a forward pass that leaves the buffers alone, whatever they are."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.norm.weight + self.norm.bias


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


@pytest.mark.parametrize("then", ["flush", "never"])
def test_buffers_in_flight_are_left_out_where_none_travel_any_more(then: str) -> None:
    options: dict[str, Any] = {"delay_steps": 3, "overlap_steps": 2}
    model, heir = Normed(), Normed()
    optimizer = wrap(model, RecordingEngine(2), model=model, average_buffers="sync", **options)
    steps(model, optimizer, 4, 0)
    resumed = wrap(heir, RecordingEngine(2), model=heir, average_buffers=then, **options)
    heir.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    # Past the completion of what was in flight.
    steps(model, optimizer, 4, 0, first=4)
    steps(heir, resumed, 4, 0, first=4)
    assert equal(weights(heir), weights(model))


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
