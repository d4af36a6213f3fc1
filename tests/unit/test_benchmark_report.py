"""The report on the benchmarks holds what their files hold, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def report(folder: Path) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--folder", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    return (folder / "benchmarks.md").read_text()


def test_tables_hold_the_figures_of_the_files(tmp_path: Path) -> None:
    row = {"method": "ssd d=0", "bytes_per_element": 29.71, "counted": 24, "rank": 1}
    content = {"date": "2030-01-02", "machine": "a machine", "elements": 77, "results": [row]}
    (tmp_path / "memory.json").write_text(json.dumps(content))
    text = report(tmp_path)
    assert "| ssd d=0 | 29.7 | 24 |" in text
    assert "2030-01-02; machine a machine; elements 77." in text
    assert "Throughput" not in text


def test_predictions_stand_beside_measurements(tmp_path: Path) -> None:
    place = {"rate": "1gbit", "ranks": 3}
    compared = {"measured_seconds": 0.4, "predicted_seconds": 0.42, "error": 0.05, "calibrated": False}
    compared |= {"held_out_seconds": None, "held_out_error": None}
    method = {"method": "horovod", "k": None, "d": None}
    engine = {"start": 0.002, "latency": 3e-5, "bandwidth": 9e7, "processor_share": 0.5}
    hosts = {"compute": 0.1, "jitter": 0.004, "stretch": 1.5}
    beside = {**hosts, "compute": 0.11}
    predicted = {"seconds": 0.8, "share_of_compute": 0.125, "least_seconds": 0.79, "most_seconds": 0.82}
    content = {
        "date": "2030-01-02",
        "model": "a model",
        "plot": "scaling.png",
        "parameters": [
            {
                "rate": "1gbit",
                "engines": {"horovod": engine},
                "delay_cost": {"step": -0.01, "sync_point": 0.02},
            }
        ],
        "results": [{**place, **method, **compared}],
        "predictions": [{**method, **predicted, "rate": "1gbit", "ranks": ranks} for ranks in (4, 8, 1024)],
        "measurements": [{**place, "hosts": hosts, "hosts_beside_horovod": beside, "straggling": 0.003}],
    }
    (tmp_path / "scaling.json").write_text(json.dumps(content))
    text = report(tmp_path)
    assert "2030-01-02; model a model.\n" in text
    assert "(images/scaling.png)" in text
    assert "| horovod | 2.00 | 30 | 90.0 | 0.50 |" in text
    assert "-10.0 ms a step and +20.0 ms a sync point" in text
    # The expected maximum of three standard normal values is 0.846.
    assert "| 3 | 100.0 | 110.0 | 1.50 | 4.00 | 3.39 | 3.00 |" in text
    assert "| horovod |  |  | 3 | no | 400.0 | 420.0 | +5.0 |  |" in text
    assert "| 8 | 800 (790 to 820), 0.12 |\n| 1,024 | 800 (790 to 820), 0.12 |" in text
    assert "| 4 |" not in text


def test_cost_of_a_trace_has_its_interval(tmp_path: Path) -> None:
    row = {"untraced_seconds_per_step": 0.1, "traced_seconds_per_step": 0.101, "rounds": [0.01, 0.01]}
    row |= {"cost": 0.004, "cost_low": -0.002, "cost_high": 0.009, "cost_deviation": 0.02}
    row |= {"untraced_flush_seconds": 0.05, "traced_flush_seconds": 0.07, "trace_bytes_per_step": 2500.0}
    (tmp_path / "trace_cost.json").write_text(json.dumps({"date": "2030-01-02", "k": 8, "results": [row]}))
    text = report(tmp_path)
    assert "2030-01-02; k 8; rounds 2." in text
    assert "| 100.00 | 101.00 | +0.40 | -0.20 to +0.90 | 2.00 | 50.0 | 70.0 | 2500 |" in text


def test_the_page_in_the_documentation_is_what_the_files_give(tmp_path: Path) -> None:
    for path in (ROOT / "docs").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    assert report(tmp_path) == (ROOT / "docs" / "benchmarks.md").read_text()
