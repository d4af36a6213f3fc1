"""The kernel benchmark: its foreach forms compute what the operations do, and it writes its figures."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import kernels  # noqa: E402


@pytest.mark.parametrize("operation", kernels.OPERATIONS, ids=lambda operation: operation.name)
def test_both_forms_compute_the_same(operation: kernels.Operation) -> None:
    torch.manual_seed(0)
    ours = kernels.make_set(operation, [37, 5], torch.float64, "cpu").lists
    foreach = copy.deepcopy(ours)
    operation.run(ours)
    operation.run_foreach(foreach)
    for name, tensors in ours.items():
        for tensor, other in zip(tensors, foreach[name], strict=True):
            torch.testing.assert_close(tensor, other, msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.parametrize(
    ("name", "expected"), [("local_momentum_", 28), ("local_corrected_", 24), ("local_plain_", 20)]
)
def test_bytes_are_those_that_the_rule_must_move(name: str, expected: int) -> None:
    operation = next(operation for operation in kernels.OPERATIONS if operation.name == name)
    assert operation.bytes_per_element(torch.float32) == expected


@pytest.mark.timeout(120)
def test_a_run_writes_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    command = [sys.executable, str(ROOT / "benchmarks/kernels.py"), "--ops", "local_plain_", "accumulate_"]
    command += ["--sizes", "1000", "--rounds", "2", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())
    assert figures["copy_gbps"] > 0
    measured = {(result["op"], result["layout"]) for result in figures["results"]}
    assert measured == {(op, lay) for op in ("local_plain_", "accumulate_") for lay in ("single", "resnet50")}
    for result in figures["results"]:
        assert result["device"] == "cpu"
        assert result["share_of_copy"] > 0
        assert result["ratio_to_foreach"] > 0
        assert (result["ratio_to_fused_sgd"] is None) == (result["op"] == "accumulate_")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_said() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/kernels.py"), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "--device cuda needs a GPU" in done.stderr
