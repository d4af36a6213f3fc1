"""The README shows what the demo measured, and the demo's figures keep what they promise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import demo_report
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def figures() -> dict[str, dict[str, float]]:
    return json.loads((ROOT / "docs" / "demo.json").read_text())


def test_readme_holds_the_measured_table(figures: dict[str, dict[str, float]]) -> None:
    readme = (ROOT / "README.md").read_text()
    assert demo_report.with_table(readme, figures) == readme
    assert demo_report.table(figures) in readme


def test_measured_figures(figures: dict[str, dict[str, float]]) -> None:
    horovod, ssd = figures["horovod"], figures["ssd"]
    assert ssd["test_accuracy"] >= horovod["test_accuracy"] - 0.01
    assert ssd["megabytes"] <= horovod["megabytes"] / 3
    assert ssd["steps"] == horovod["steps"]


def test_smoothing_is_the_mean_of_the_steps_before() -> None:
    values = [float(step) for step in range(100)]
    smooth = demo_report.smoothed(values)
    assert len(smooth) == 100
    assert smooth[0] == 0.0
    assert smooth[1] == pytest.approx(0.5)
    assert smooth[-1] == pytest.approx(sum(values[-demo_report.SMOOTHED_STEPS :]) / 25)


def test_reports_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {
        "figures": {
            "test_accuracy": 0.5,
            "steps": 2,
            "allreduces": 2,
            "megabytes": 0.25,
            "wait_seconds": 0.125,
            "seconds": 1.0,
        },
        "train": {"megabytes": [0.125, 0.25], "loss": [2.0, 1.0]},
        "test": {"steps": [2], "megabytes": [0.25], "loss": [1.0], "accuracy": [0.5]},
    }
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    png, written = tmp_path / "new" / "demo.png", tmp_path / "figures.json"
    arguments = ["--horovod", path, "--ssd", path, "--png", png, "--json", written]
    monkeypatch.setattr(sys, "argv", ["demo_report.py", *map(str, arguments)])
    demo_report.main()
    assert png.stat().st_size > 1000
    assert json.loads(written.read_text()) == {
        "horovod": record["figures"],
        "ssd": record["figures"],
    }
