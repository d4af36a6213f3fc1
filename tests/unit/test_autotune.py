"""The choice of the period from what steps and transfers cost."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ssd_allreduce.autotune import Costs, Limits, choose_period, step_seconds

seconds = st.floats(1e-5, 100.0)
limits = st.builds(Limits, st.integers(2, 64), st.none() | st.integers(0, 64))


@pytest.mark.parametrize(
    ("costs", "limits", "expected"),
    [
        pytest.param(Costs(0.1, 0.0001, 0.0), Limits(16), (2, 1), id="nothing to hide"),
        # One step hides it, and d is half of k.
        pytest.param(Costs(0.1, 0.07, 0.0), Limits(16), (2, 1), id="one step hides it"),
        # 1.25 * 0.3 s need four steps of 0.1 s, so k is 8.
        pytest.param(Costs(0.1, 0.3, 0.0), Limits(16), (8, 4), id="four steps hide it"),
        pytest.param(Costs(0.1, 0.3, 0.0), Limits(16, overlap=15), (5, 4), id="more overlap allowed"),
        pytest.param(Costs(0.1, 50.0, 0.0), Limits(16), (16, 8), id="nothing hides it"),
        # A transfer that takes 20 ms of processor: 0.02 / k beside 0.1 s fades slowly.
        pytest.param(Costs(0.1, 0.01, 0.02), Limits(16), (7, 1), id="processor time is shared out"),
        pytest.param(
            Costs(0.1, 0.01, 0.0, update=0.02), Limits(16), (7, 1), id="and that of the global update"
        ),
        # 0.5 s were seen where 0.3 s were measured alone.
        pytest.param(
            Costs(0.1, 0.3, 0.0, transfer_beside_steps=0.5), Limits(16, 15), (6, 5), id="slower beside steps"
        ),
        pytest.param(Costs(0.1, 50.0, 0.0), Limits(2), (2, 1), id="the smallest limit"),
        pytest.param(Costs(0.1, 50.0, 0.0), Limits(8, overlap=0), (8, 0), id="no overlap allowed"),
    ],
)
def test_choice(costs: Costs, limits: Limits, expected: tuple[int, int]) -> None:
    assert choose_period(costs, limits) == expected


@given(costs=st.builds(Costs, seconds, seconds, seconds), limits=limits)
def test_choice_keeps_the_limits_and_is_nearly_the_best(costs: Costs, limits: Limits) -> None:
    k, d = choose_period(costs, limits)
    assert 2 <= k <= limits.longest
    assert 0 <= d <= limits.overlap_at(k) < k
    best = min(step_seconds(costs, n, limits.overlap_at(n)) for n in range(2, limits.longest + 1))
    assert step_seconds(costs, k, d) <= best / 0.98 * (1 + 1e-12)


@given(costs=st.builds(Costs, seconds, seconds, seconds), limits=limits)
def test_the_predicted_step_is_computation_and_what_is_not_hidden(costs: Costs, limits: Limits) -> None:
    k, d = choose_period(costs, limits)
    predicted = step_seconds(costs, k, d)
    assert predicted >= costs.compute + costs.processor / k
    if d * costs.compute >= 1.25 * costs.transfer:
        assert predicted == pytest.approx(costs.compute + costs.processor / k)
