"""Memory layouts: what is one flat run of memory, and tensors made alike."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_allreduce import layout

few = settings(deadline=None, max_examples=150)


def memory_offsets(tensor: torch.Tensor) -> list[int]:
    """Where each element lies, relative to the first, counted out one by one."""
    steps = tensor.stride()
    return [
        sum(i * step for i, step in zip(index, steps, strict=True))
        for index in product(*(range(size) for size in tensor.shape))
    ]


@st.composite
def strided(draw: Any) -> torch.Tensor:
    """Any view into a run of numbers: permuted, with gaps, overlapping, broadcast, offset, empty."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    if draw(st.booleans()):
        order = draw(st.permutations(range(len(shape))))
        strides, step = [0] * len(shape), 1
        for dimension in order:
            strides[dimension] = step
            step *= max(1, shape[dimension])
    else:
        strides = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 3))
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True) if size)
    memory = torch.arange(float(offset + last + 1))
    return memory.as_strided(shape, strides, offset)


@st.composite
def permuted(draw: Any) -> torch.Tensor:
    """A dense tensor whose dimensions lie in memory in any order."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    empty = torch.empty_permuted(shape, order) if shape else torch.empty(())
    return empty.copy_(torch.arange(float(math.prod(shape))).reshape(shape))


@few
@given(tensor=strided())
def test_dense_means_every_place_of_a_run_is_used_once(tensor: torch.Tensor) -> None:
    assert layout.is_dense(tensor) == (sorted(memory_offsets(tensor)) == list(range(tensor.numel())))


@few
@given(tensor=permuted())
def test_a_flat_view_is_the_same_memory(tensor: torch.Tensor) -> None:
    flat = layout.flat_view(tensor)
    assert flat.is_contiguous()
    assert flat.data_ptr() == tensor.data_ptr()
    assert flat.numel() == tensor.numel()
    flat.add_(1.0)
    assert torch.equal(tensor, torch.arange(float(tensor.numel())).reshape(tensor.shape) + 1)


def test_a_contiguous_tensor_is_its_own_flat_view() -> None:
    tensor = torch.ones(2, 3)
    assert layout.flat_view(tensor) is tensor


def test_a_flat_view_keeps_the_offset() -> None:
    memory = torch.arange(10.0)
    assert layout.flat_view(memory[4:].view(2, 3).t()).tolist() == [4, 5, 6, 7, 8, 9]


@few
@given(tensor=permuted(), dtype=st.sampled_from([None, torch.float64]))
def test_new_tensors_lie_like_the_dense_ones_they_are_made_for(
    tensor: torch.Tensor, dtype: torch.dtype | None
) -> None:
    parameter = torch.nn.Parameter(tensor)
    for made in (layout.empty_like(parameter, dtype), layout.zeros_like(parameter, dtype)):
        assert made.shape == tensor.shape
        assert memory_offsets(made) == memory_offsets(tensor)
        assert made.dtype == (dtype or torch.float32)
        assert not made.requires_grad
    assert not layout.zeros_like(parameter, dtype).any()


@few
@given(tensor=strided())
def test_new_tensors_are_dense_whatever_they_are_made_for(tensor: torch.Tensor) -> None:
    assert layout.is_dense(layout.zeros_like(tensor))


@few
@given(tensor=strided(), order=st.randoms(use_true_random=False))
def test_matched_has_the_values_of_one_and_the_layout_of_the_other(tensor: torch.Tensor, order: Any) -> None:
    dimensions = list(range(tensor.dim()))
    order.shuffle(dimensions)
    other = torch.empty_permuted(tensor.shape, dimensions) if dimensions else torch.empty(())
    matched = layout.matched(tensor, other)
    assert torch.equal(matched, tensor)
    assert matched.stride() == other.stride()


def test_what_matches_already_is_not_copied() -> None:
    weight = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    gradient = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert layout.matched(gradient, weight) is gradient
    assert layout.matched(gradient.contiguous(), weight) is not gradient


@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_nothing_is_summed_in_less_than_float32(given_dtype: torch.dtype, expected: torch.dtype) -> None:
    assert layout.compute_dtype(given_dtype) == expected
