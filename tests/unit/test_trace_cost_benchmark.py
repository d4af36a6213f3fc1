"""The benchmark of recording a trace: how it sums up what the ranks measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import trace_cost  # noqa: E402


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # Places of the sign test's 95 % interval in printed tables, counted from 1.
    [(3, 1, 3), (6, 1, 6), (9, 2, 8), (10, 2, 9), (20, 6, 15), (100, 40, 61)],
)
def test_interval_of_the_median_is_the_sign_tests(count: int, low: int, high: int) -> None:
    shuffled = [(7 * value) % 101 for value in range(1, 101)][:count]
    ordered = sorted(shuffled)
    assert trace_cost.median_interval(shuffled) == (ordered[low - 1], ordered[high - 1])


def test_cost_is_of_pairs_and_the_slower_rank_counts() -> None:
    reports = [
        {
            "periods": {"untraced": [0.8, 1.6, 0.8], "traced": [0.88, 1.0, 0.8]},
            "flush": {"untraced": 0.1, "traced": 0.3},
        },
        {
            "periods": {"untraced": [0.4, 0.8, 0.5], "traced": [0.4, 2.4, 0.84]},
            "flush": {"untraced": 0.2, "traced": 0.2},
        },
    ]
    row = trace_cost.summarise(reports, trace_bytes=2400.0)
    # Periods of eight steps.
    assert row["untraced_seconds_per_step"] == pytest.approx(0.1)
    assert row["traced_seconds_per_step"] == pytest.approx(0.11)
    assert row["rounds"] == pytest.approx([0.1, 0.5, 0.05])
    assert row["cost"] == pytest.approx(0.1)
    assert (row["cost_low"], row["cost_high"]) == pytest.approx((0.05, 0.5))
    assert (row["untraced_flush_seconds"], row["traced_flush_seconds"]) == (0.2, 0.3)
    assert row["trace_bytes_per_step"] == 100.0
