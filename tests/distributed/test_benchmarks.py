"""The benchmarks that start ranks run, on small settings, and write what benchmarks/README.md says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_virtual_cluster import needs_namespaces

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(280)


def run(script: str, path: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--json", str(path), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_convergence(tmp_path: Path) -> None:
    arguments = ["--steps", "40", "--seeds", "2", "--ranks", "2", "--warmup-steps", "5", "--periods", "4:2"]
    report = run("convergence.py", tmp_path / "convergence.json", *arguments, "--rules", "momentum,none")
    methods = [row["method"] for row in report["results"] if (row["seed"], row["shards"]) == (0, "equal")]
    assert methods == [
        *("horovod", "horovod-accumulate", "horovod-fp16", "ssd", "ssd", "ssd-fp16"),
        *("ddp", "ddp-powersgd", "post-local-sgd"),
    ]
    assert len(report["results"]) == 2 * 2 * len(methods)
    assert all(0.0 <= row["test_accuracy"] <= 1.0 for row in report["results"])
    by_method = {row["method"]: row for row in report["results"] if row["shards"] == "equal"}
    # Two ways to the same synchronous steps.
    assert by_method["ddp"]["test_accuracy"] == pytest.approx(by_method["horovod"]["test_accuracy"], abs=0.02)
    (plain,) = [r for r in report["summary"] if (r["method"], r["shards"]) == ("horovod", "equal")]
    assert (plain["seeds"], plain["paired_difference"]) == (2, 0.0)


def test_convergence_in_parts(tmp_path: Path) -> None:
    """What a file holds is kept and not trained again; seconds are added to it afterwards."""
    path = tmp_path / "convergence.json"
    training = ["--steps", "40", "--ranks", "2", "--warmup-steps", "5", "--target-accuracy", "0.3"]
    short = [*training, "--shards", "equal", "--rules", "momentum", "--periods", "4:2", "--resume"]
    first = run("convergence.py", path, *short, "--only", "horovod", "--seeds", "1")
    second = run("convergence.py", path, *short, "--only", "ssd", "--seeds", "1")
    assert second["results"][: len(first["results"])] == first["results"]
    assert [row["method"] for row in second["results"]] == ["horovod", "ssd"]
    timed = {"rate": "1gbit", "model": "alexnet-like"}
    steps = [
        {**timed, "method": "ssd", "k": 4, "d": 2, "seconds_per_step": 0.5},
        {**timed, "method": "ddp", "k": None, "d": None, "seconds_per_step": 2.0},
    ]
    (tmp_path / "throughput.json").write_text(json.dumps({"results": steps}))
    third = run("convergence.py", path, "--only-seconds", "--throughput", str(tmp_path / "throughput.json"))
    plain, ours = third["results"]
    # Five of them in the warm-up stage.
    assert ours["seconds_to_target"] == 5 * 2.0 + 0.5 * (ours["steps_to_target"] - 5)
    assert plain["seconds_to_target"] is None


@needs_namespaces
def test_throughput(tmp_path: Path) -> None:
    methods = "compute,horovod,ssd:4:2,ssd-auto@horovod,post-local-sgd"
    arguments = ["--rates", "1gbit", "--models", "resnet20", "--methods", methods, "--rounds", "2"]
    report = run("throughput.py", tmp_path / "throughput.json", *arguments, "--turn-seconds", "0.3")
    rows = {(row["method"], row["engine"]): row for row in report["results"]}
    assert list(rows) == [
        ("compute", "none"),
        ("horovod", "horovod"),
        ("ssd", "torch"),
        ("ssd-auto", "horovod"),
        ("post-local-sgd", "gloo"),
    ]
    plain, delayed = rows["horovod", "horovod"], rows["ssd", "torch"]
    assert (delayed["k"], delayed["d"]) == (4, 2)
    assert rows["compute", "none"]["share_of_compute"] == plain["speedup_over_horovod"] == 1.0
    # A quarter of the traffic, with headers and the control row; the counter is the network's own.
    assert delayed["megabytes_computed"] == pytest.approx(plain["megabytes_computed"] / 4)
    assert 0.2 < delayed["megabytes_on_wire"] / plain["megabytes_on_wire"] < 0.35
    assert plain["megabytes_on_wire"] > plain["megabytes_computed"] > 1.0
    assert all(row["samples_per_second"] > 0 and len(row["rounds"]) == 2 for row in report["results"])


def test_memory(tmp_path: Path) -> None:
    report = run("memory.py", tmp_path / "memory.json")
    measured = {row["method"]: row["bytes_per_element"] for row in report["results"]}
    assert list(measured) == ["torch", "horovod", "ssd d=0", "ssd d>0"]
    # Global weights, accumulator and momentum; then what is in flight and two snapshots.
    assert measured["ssd d>0"] > measured["ssd d=0"] > measured["torch"] >= 12.0


@needs_namespaces
@pytest.mark.slow
def test_scaling(tmp_path: Path) -> None:
    picture = tmp_path / "images" / "scaling.png"
    arguments = ["--hosts", "2", "--rounds", "1", "--turn-seconds", "0.1", "--plot", str(picture)]
    report = run("scaling.py", tmp_path / "scaling.json", *arguments)
    rows = [(row["method"], row["k"], row["d"], row["ranks"]) for row in report["results"]]
    assert rows == [("horovod", None, None, 2), *[("ssd", k, d, 2) for k, d in ((16, 8), (4, 2), (8, 4))]]
    assert [row["calibrated"] for row in report["results"]] == [False, True, True, False]
    assert all(row["measured_seconds"] > 0 and row["predicted_seconds"] > 0 for row in report["results"])
    (fitted,) = report["parameters"]
    assert set(fitted["engines"]) == {"horovod", "torch"}
    # Not faster than the line, beyond what its token bucket lets through at once.
    assert all(5e6 < engine["bandwidth"] < 150e6 for engine in fitted["engines"].values())
    assert max(row["ranks"] for row in report["predictions"]) == 1024
    assert picture.stat().st_size > 0


def test_trace_cost(tmp_path: Path) -> None:
    (row,) = run("trace_cost.py", tmp_path / "trace_cost.json", "--rounds", "2")["results"]
    assert row["traced_seconds_per_step"] > 0
    assert row["untraced_seconds_per_step"] > 0
    assert row["cost_low"] <= row["cost"] <= row["cost_high"]
    assert len(row["rounds"]) == 2
    # A dozen events a step, each of which has a name and a duration.
    assert row["trace_bytes_per_step"] > 500
