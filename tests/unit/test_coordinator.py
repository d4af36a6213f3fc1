"""The algorithm on several ranks, against the same algorithm written down a second time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import OrderedThreadRank, RecordingEngine, ThreadRank, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import assert_traces_agree, train_case
from oracle import Case, SGDOptions, simulate

RULES = ("momentum", "gradient", "displacement", "none")


ENGINES = (ThreadRank, OrderedThreadRank)
"""One that matches operations by name, and one that matches them by order."""


def run(case: Case, issue: str, engine: type[ThreadRank] = ThreadRank) -> list[Any]:
    return on_ranks(case.size, lambda rank: train_case(case, rank, issue), engine)


@st.composite
def optimizers(draw: Any) -> SGDOptions:
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
    nesterov = momentum > 0 and draw(st.booleans())
    return SGDOptions(
        lr=draw(st.sampled_from([0.02, 0.1])),
        momentum=momentum,
        dampening=0.0 if nesterov else draw(st.sampled_from([0.0, 0.3])),
        weight_decay=draw(st.sampled_from([0.0, 0.01])),
        nesterov=nesterov,
        # Ascent on a least squares loss runs away within a few dozen steps; a small rate keeps it near.
        maximize=draw(st.booleans()),
    )


@st.composite
def cases(draw: Any) -> Case:
    k = draw(st.integers(1, 4), label="k")
    longest = draw(st.integers(1, 11), label="steps")
    size = draw(st.integers(2, 3), label="ranks")
    uneven = draw(st.booleans())
    steps = tuple(draw(st.integers(0, longest)) if uneven else longest for _ in range(size))
    glu = draw(st.sampled_from(RULES))
    overflows: frozenset[tuple[int, int]] = frozenset()
    if draw(st.booleans()):
        places = st.tuples(st.integers(0, longest), st.integers(0, size - 1))
        overflows = draw(st.frozensets(places, max_size=longest * size))
    return Case(
        size=size,
        delay_steps=k,
        overlap_steps=draw(st.integers(0, k - 1), label="d"),
        warmup_steps=draw(st.integers(0, 3), label="T"),
        glu=glu,
        steps=steps,
        optimizer=draw(optimizers()),
        lr_decay=draw(st.sampled_from([1.0, 0.9, 0.0])),
        alpha=draw(st.sampled_from([1.0, 0.5])),
        beta=draw(st.sampled_from([0.5, 0.0])),
        local_lr_scale=draw(st.sampled_from([1.0, 0.7])),
        overflows=overflows,
    )


@settings(deadline=None, max_examples=40)
@given(case=cases(), issue=st.sampled_from(["backward", "step"]), engine=st.sampled_from(ENGINES))
def test_any_training_gives_what_the_algorithm_says(case: Case, issue: str, engine: type[ThreadRank]) -> None:
    """Any rule, period, overlap, warm-up and optimizer; ranks that end early, and steps that overflow."""
    expected = simulate(case)
    assert_traces_agree(run(case, "step" if case.overflows else issue, engine), expected)


@pytest.mark.parametrize("issue", ["backward", "step"])
@pytest.mark.parametrize(("k", "d"), [(1, 0), (2, 0), (2, 1), (4, 1), (4, 3)])
@pytest.mark.parametrize("glu", RULES)
def test_every_rule_in_every_kind_of_period(glu: str, k: int, d: int, issue: str) -> None:
    optimizer = SGDOptions(0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    case = Case(2, k, d, 1, glu, steps=(10, 10), optimizer=optimizer, flush=False)
    assert_traces_agree(run(case, issue), simulate(case))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((9, 8), id="one step apart, same period"),
        pytest.param((9, 4), id="more than a period apart"),
        pytest.param((9, 0), id="a rank without any step"),
        pytest.param((13, 1), id="across the end of warm-up"),
        pytest.param((2, 1), id="within warm-up"),
        pytest.param((7, 7), id="even"),
    ],
)
@pytest.mark.parametrize("d", [0, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_may_end_at_different_steps(steps: tuple[int, ...], d: int, engine: type[ThreadRank]) -> None:
    case = Case(2, 4, d, 3, "momentum", steps, SGDOptions(0.1, momentum=0.9))
    traces = run(case, "backward", engine)
    assert_traces_agree(traces, simulate(case))
    for trace in traces:
        assert np.array_equal(trace.local[-1], trace.world[-1]), "after flush() local are global weights"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("warmup", [0, 20])
def test_a_step_skipped_by_some_ranks_is_the_mean_of_the_others(size: int, warmup: int) -> None:
    overflows = frozenset({(0, 0), (3, 1), (4, 0), (4, 1), *((6, rank) for rank in range(size))})
    case = Case(size, 3, 1, warmup, "gradient", (11,) * size, SGDOptions(0.1), overflows=overflows)
    assert_traces_agree(run(case, "step"), simulate(case))


def test_a_period_to_which_no_rank_contributed_leaves_everything_as_it_is() -> None:
    overflows = frozenset((step, rank) for step in range(3, 6) for rank in (0, 1))
    for glu in RULES:
        case = Case(2, 3, 0, 0, glu, (6, 6), SGDOptions(0.1, momentum=0.9), overflows=overflows, flush=False)
        for trace in run(case, "step"):
            assert all(np.array_equal(w, trace.world[2]) for w in trace.world[3:])
            assert all(np.array_equal(w, trace.world[2]) for w in trace.local[2:])


def test_a_learning_rate_of_zero_leaves_the_displacement_as_it_was() -> None:
    case = Case(2, 2, 0, 0, "displacement", (6, 6), SGDOptions(0.1), lr_decay=0.0)
    assert_traces_agree(run(case, "backward"), simulate(case))


def test_nothing_is_sent_in_delay_steps_and_one_allreduce_a_tensor_at_sync_points() -> None:
    def sends(engine: ThreadRank) -> list[str]:
        case = Case(2, 4, 2, 1, "momentum", (9, 9), flush=False)
        train_case(case, engine)
        return [name for name in engine.sent if ".agreement." not in name]

    for names in on_ranks(2, sends):
        kinds = [name.rsplit(".", 2)[-2:] for name in names]
        control = [["control", "sum"], ["control", "max"]]
        assert kinds == [["w", "gradient"], *control, *2 * [["w", "accumulated"], *control]]


@pytest.mark.parametrize("issue", ["backward", "step"])
def test_equal_ranks_are_what_loopback_computes(issue: str) -> None:
    case = Case(
        4, 3, 1, 2, "momentum", (12,) * 4, SGDOptions(0.1, momentum=0.9), equal_data=True, flush=False
    )
    trace = train_case(case, RecordingEngine(4), issue)
    assert_traces_agree([trace] * 4, simulate(case))
