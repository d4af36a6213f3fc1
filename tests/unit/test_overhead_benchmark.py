"""The benchmark of a step's bookkeeping: what it counts, and that it runs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import overhead  # noqa: E402


class Timer:
    """Seconds that each call is said to have taken, and the order of the calls."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.seconds = seconds
        self.calls: list[str] = []

    def contestant(self, name: str) -> overhead.Contestant:
        return overhead.Contestant(name, lambda: self.calls.append(name))

    def __call__(self, function: Callable[[], object]) -> float:
        function()
        return self.seconds[self.calls[-1]].pop(0)


def test_medians_leave_the_warming_up_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer({"torch": [9.0, 1e-6, 2e-6, 9e-6, 4e-6], "ssd": [8.0, 3e-6, 3e-6, 5e-6, 7e-6]})
    monkeypatch.setattr(overhead, "seconds", timer)
    times = overhead.median_times([timer.contestant("torch"), timer.contestant("ssd")], rounds=4)
    assert times == pytest.approx({"torch": 3.0, "ssd": 4.0})


def test_whoever_begins_a_round_ends_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer({"torch": [0.0] * 5, "ssd": [0.0] * 5})
    monkeypatch.setattr(overhead, "seconds", timer)
    overhead.median_times([timer.contestant("torch"), timer.contestant("ssd")], rounds=4)
    rounds = [tuple(timer.calls[i : i + 2]) for i in range(0, len(timer.calls), 2)]
    assert all(first == second[::-1] for first, second in itertools.pairwise(rounds))


@pytest.mark.parametrize(("ssd_us", "verdict"), [(35.0, "met"), (35.1, "missed")])
def test_the_bar_is_torch_and_five_microseconds_a_tensor(ssd_us: float, verdict: str) -> None:
    result = overhead.as_result(3, {"torch": 20.0, "ssd": ssd_us})
    assert overhead.bar_us(result) == 35.0
    assert overhead.verdict(result) == verdict


def test_what_was_not_measured_is_null() -> None:
    assert overhead.as_result(1, {"torch": 1.0, "ssd": 2.0})["horovod_us"] is None


@pytest.mark.timeout(120)
def test_a_run_writes_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    command = [sys.executable, str(ROOT / "benchmarks/overhead.py"), "--one-process", "--tensors", "1", "3"]
    done = subprocess.run(
        [*command, "--rounds", "4", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())
    assert [result["tensors"] for result in figures["results"]] == [1, 3]
    for result in figures["results"]:
        assert set(result) == {"tensors", "torch_us", "horovod_us", "ssd_us"}
        assert result["torch_us"] > 0
        assert result["ssd_us"] > 0
    assert figures["two_ranks"] is None
