"""Ranks describe themselves; when they differ, every one of them hears both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import ThreadRank, on_ranks, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_allreduce import RankMismatchError
from ssd_allreduce.agreement import Lines, compare_ranks, tensor_digest, text_digest
from ssd_allreduce.communicators import ReduceOp

Sections = list[tuple[str, Lines]]


def compare(engine: ThreadRank, sections: Sections) -> int:
    def allreduce(tensor: torch.Tensor, name: str, op: ReduceOp) -> torch.Tensor:
        engine.wait(engine.allreduce_async([tensor], name, op), timeout=10)
        return tensor

    return compare_ranks(sections, engine.rank, engine.size, allreduce, "Do this.")


def messages(size: int, sections_of: Callable[[int], Sections]) -> list[str]:
    outcomes = run_ranks(size, lambda engine: compare(engine, sections_of(engine.rank)))
    assert all(type(outcome.error) is RankMismatchError for outcome in outcomes), outcomes
    return [str(outcome.error) for outcome in outcomes]


SETTINGS: tuple[str, Lines] = ("settings", [("delay_steps", "4"), ("glu", "'momentum'")])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_alike_get_one_digest_of_everything(size: int) -> None:
    digests = on_ranks(size, lambda engine: compare(engine, [SETTINGS, ("weights", [])]))
    assert len(set(digests)) == 1
    other = on_ranks(size, lambda engine: compare(engine, [SETTINGS, ("weights", [("w", "1")])]))
    assert other[0] != digests[0]


def test_ranks_alike_exchange_digests_only() -> None:
    def program(engine: ThreadRank) -> list[str]:
        compare(engine, [SETTINGS])
        return engine.sent

    assert on_ranks(2, program) == [["digests"], ["digests"]]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_every_rank_hears_the_first_difference_with_both_values(odd: int) -> None:
    def sections(rank: int) -> Sections:
        k = "8" if rank == odd else "4"
        return [("settings", [("glu", "'none'"), ("delay_steps", k), ("overlap_steps", str(rank))])]

    here, there, where = ("8", "4", 1) if odd == 0 else ("4", "8", odd)
    expected = (
        f"Ranks differ in settings: delay_steps is {here} on rank 0 and {there} on rank {where}. Do this."
        if odd < 2
        # Rank 1 differs from rank 0 in the overlap, and is looked at first.
        else "Ranks differ in settings: overlap_steps is 0 on rank 0 and 1 on rank 1. Do this."
    )
    assert messages(3, sections) == [expected] * 3


def test_the_first_section_that_differs_is_the_one_told() -> None:
    def sections(rank: int) -> Sections:
        return [SETTINGS, ("shapes", [("w", f"({rank},)")]), ("weights", [("w", str(rank))])]

    expected = "Ranks differ in shapes: w is (0,) on rank 0 and (1,) on rank 1. Do this."
    assert messages(2, sections) == [expected] * 2


def test_a_line_that_is_missing_is_told_as_missing() -> None:
    lines = [("the shape of 'a'", "(2,)"), ("the shape of 'b'", "(3,)")]
    (message, other) = messages(2, lambda rank: [("parameters", lines[: 2 - rank])])
    assert message == other
    assert "'b' = (3,) on rank 0 and missing on rank 1" in message


def test_lines_in_another_order_differ() -> None:
    lines = [("class", "SGD"), ("lr", "0.1")]
    message, _ = messages(2, lambda rank: [("optimizer", lines if rank == 0 else lines[::-1])])
    assert "class = SGD on rank 0 and lr = 0.1 on rank 1" in message


def test_any_text_arrives_as_it_was() -> None:
    message, _ = messages(2, lambda rank: [("names", [("größe\n", f"'ünï\x00{rank}'")])])
    assert "größe\n is 'ünï\x000' on rank 0 and 'ünï\x001' on rank 1" in message


@settings(deadline=None, max_examples=200)
@given(one=st.text(), other=st.text())
def test_digests_tell_texts_apart_and_survive_a_float64(one: str, other: str) -> None:
    assert int(torch.tensor(text_digest(one), dtype=torch.float64).item()) == text_digest(one)
    assert (text_digest(one) == text_digest(other)) == (one == other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_digest_is_of_bits_in_logical_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(24.0, dtype=dtype).reshape(1, 2, 3, 4)
    same = tensor.to(memory_format=torch.channels_last)
    assert tensor_digest(same) == tensor_digest(torch.nn.Parameter(tensor))
    changed = tensor.clone()
    changed[0, 1, 2, 3] = torch.nextafter(changed[0, 1, 2, 3].float(), torch.tensor(99.0)).to(dtype) + 1
    assert tensor_digest(changed) != tensor_digest(tensor)
    assert tensor_digest(torch.zeros(1, dtype=dtype)) != tensor_digest(-torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_empty_tensors_have_digests(shape: tuple[int, ...]) -> None:
    assert tensor_digest(torch.ones(shape)) == tensor_digest(torch.ones(shape))


def test_not_a_number_is_equal_to_itself() -> None:
    tensor: Any = torch.tensor([float("nan"), 1.0])
    assert tensor_digest(tensor) == tensor_digest(tensor.clone())
