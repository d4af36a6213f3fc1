"""The control row: what any number of ranks say, reduced, is what each of them reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_allreduce.control import FAILURE_TEXT, ControlCodec, ControlResult, ControlRow, Failure

LARGEST_DIGEST = 2**48 - 1


def reduce_rows(rows: Sequence[ControlRow], period: int, columns: int) -> list[ControlResult]:
    """What each rank decodes after the sum and the maximum over all ranks, taken by NumPy."""
    encoded = [ControlCodec(period, columns, rank).encode(row) for rank, row in enumerate(rows)]
    sums = np.sum([s.numpy() for s, _ in encoded], axis=0)
    extremes = np.max([e.numpy() for _, e in encoded], axis=0)
    return [
        ControlCodec(period, columns, rank).decode(torch.from_numpy(sums), torch.from_numpy(extremes))
        for rank in range(len(rows))
    ]


options = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=64), st.sampled_from([0.0, 0.1, 0.9, 1e-300])
)


@st.composite
def worlds(draw: Any) -> tuple[list[ControlRow], int, int]:
    size, period, columns = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(0, 4))
    common = [tuple(draw(options) for _ in range(columns)) for _ in range(period)]
    rows = []
    for _ in range(size):
        steps = []
        for position in range(draw(st.integers(0, period))):
            differs = draw(st.booleans())
            row = tuple(draw(options) for _ in range(columns)) if differs else common[position]
            steps.append((row, draw(st.booleans())))
        rows.append(
            ControlRow(
                event=draw(st.sampled_from([7, 7, 8])),
                settings_digest=draw(st.sampled_from([LARGEST_DIGEST, LARGEST_DIGEST, 3])),
                steps=steps,
                flushing=draw(st.booleans()),
                failure=draw(st.sampled_from([Failure.NONE, Failure.NONE, *Failure])),
                regrouping=draw(st.booleans()),
                synchronizing=draw(st.booleans()),
            )
        )
    return rows, period, columns


@settings(deadline=None, max_examples=200)
@given(world=worlds())
def test_every_rank_reads_what_all_have_said(world: tuple[list[ControlRow], int, int]) -> None:
    rows, period, columns = world
    results = reduce_rows(rows, period, columns)
    assert all(result == results[0] for result in results)
    result = results[0]

    made = [[row.steps[t] for row in rows if t < len(row.steps)] for t in range(period)]
    assert result.counts == [sum(contributed for _, contributed in steps) for steps in made]
    assert result.flushing == sum(row.flushing for row in rows)
    assert result.regrouping == sum(row.regrouping for row in rows)
    assert result.synchronizing == sum(row.synchronizing for row in rows)
    assert result.events == (min(r.event for r in rows), max(r.event for r in rows))
    digests = [r.settings_digest for r in rows]
    assert result.digests == (min(digests), max(digests))

    differing = []
    for position, steps in enumerate(made):
        for column in range(columns):
            found = [row[column] for row, _ in steps]
            if found:
                assert result.options[position][column] == max(found)
            if found and min(found) < max(found):
                differing.append((position, column, min(found), max(found)))
    assert result.differing == differing

    failed = [(row.failure, rank) for rank, row in enumerate(rows) if row.failure is not Failure.NONE]
    assert result.failures == len(failed)
    assert result.failure == (failed[-1] if failed else (Failure.NONE, -1))


def test_options_travel_bit_for_bit() -> None:
    row = (0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.30000000000000004)
    rows = [ControlRow(0, 0, [(row, True)]) for _ in range(3)]
    assert reduce_rows(rows, 1, 5)[0].options == [row]
    assert reduce_rows(rows, 1, 5)[0].differing == []


def test_a_step_that_only_some_ranks_made_has_their_options() -> None:
    fast = ControlRow(0, 0, [((0.1,), True), ((0.2,), True)])
    slow = ControlRow(0, 0, [((0.1,), True)], flushing=True)
    result = reduce_rows([slow, fast], 3, 1)[0]
    assert result.counts == [2, 1, 0]
    assert result.options[:2] == [(0.1,), (0.2,)]
    assert result.differing == []


def test_the_first_difference_names_both_values_and_the_place() -> None:
    rows = [ControlRow(0, 0, [((0.1, 0.9), True), ((0.1, m), True)]) for m in (0.8, 0.9, 0.85)]
    assert reduce_rows(rows, 2, 2)[0].differing == [(1, 1, 0.8, 0.9)]


@pytest.mark.parametrize("failure", [f for f in Failure if f is not Failure.NONE])
@pytest.mark.parametrize("rank", [0, 1, 63])
def test_a_failure_arrives_with_the_rank_that_failed(failure: Failure, rank: int) -> None:
    rows = [ControlRow(2, 5, [((0.1,), True)]) for _ in range(64)]
    rows[rank] = ControlRow(2, 5, [], failure=failure)
    result = reduce_rows(rows, 1, 1)[0]
    assert result.failure == (failure, rank)
    assert result.failures == 1
    assert result.counts == [63]


def test_every_failure_can_be_told_in_words() -> None:
    assert set(FAILURE_TEXT) == set(Failure) - {Failure.NONE}
    assert len(set(FAILURE_TEXT.values())) == len(FAILURE_TEXT)


@given(event=st.integers(0, 2**48), digest=st.integers(0, LARGEST_DIGEST))
def test_numbers_up_to_48_bits_survive(event: int, digest: int) -> None:
    result = reduce_rows([ControlRow(event, digest, [])], 1, 0)[0]
    assert result.events == (event, event)
    assert result.digests == (digest, digest)
