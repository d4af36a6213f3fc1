"""What scripts/test.sh prints at its end, and how tests are counted for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def summarise(*arguments: str) -> tuple[int, list[str]]:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "test_summary.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not result.stderr
    return result.returncode, result.stdout.splitlines()


def counts(tmp_path: Path, content: dict[str, dict[str, int]]) -> str:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(content))
    return f"tests={path}"


def test_totals_stand_alone_on_the_last_line(tmp_path: Path) -> None:
    given = counts(tmp_path, {"mpirun, 2 ranks": {"passed": 3}, "one process": {"passed": 4}})
    status, lines = summarise("style=passed", given)
    assert status == 0
    assert lines[-1] == "8 passed, 0 failed"
    assert any(re.match(r"tests +mpirun, 2 ranks +3 +0 +0", line) for line in lines)


def test_skipped_are_named(tmp_path: Path) -> None:
    status, lines = summarise(counts(tmp_path, {"one process": {"passed": 1, "skipped": 2}}))
    assert status == 0
    assert lines[-1] == "1 passed, 0 failed, 2 skipped"


@pytest.mark.parametrize(
    "argument",
    ["style=failed", "tests=/nonexistent/counts.json"],
    ids=["failed check", "crashed run"],
)
def test_failures(argument: str) -> None:
    status, lines = summarise("types=passed", argument)
    assert status == 1
    assert lines[-1] == "1 passed, 1 failed"


def test_no_test_at_all_is_a_failure(tmp_path: Path) -> None:
    status, lines = summarise("types=passed", counts(tmp_path, {}))
    assert status == 1
    assert lines[-1] == "1 passed, 1 failed"


TESTS_OF_EVERY_KIND = """
import pytest

@pytest.mark.parametrize("launched", ["mpirun-2", "case-mpirun-4-more", "horovodrun-gloo-2"])
def test_by_id(launched): pass

@pytest.mark.launcher("horovodrun-mpi", 2)
def test_by_marker(): assert False

def test_alone(): pass

def test_skipped(): pytest.skip()

@pytest.fixture
def broken_end():
    yield
    raise RuntimeError

def test_broken_end(broken_end): pass
"""


def test_counts_per_launcher(tmp_path: Path) -> None:
    (tmp_path / "test_every_kind.py").write_text(TESTS_OF_EVERY_KIND)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = launcher\n")
    written = tmp_path / "counts.json"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--counts-json", str(written), str(tmp_path)],
        capture_output=True,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert json.loads(written.read_text()) == {
        "mpirun, 2 ranks": {"passed": 1},
        "mpirun, 4 ranks": {"passed": 1},
        "horovodrun-gloo, 2 ranks": {"passed": 1},
        "horovodrun-mpi, 2 ranks": {"failed": 1},
        "one process": {"passed": 1, "failed": 1, "skipped": 1},
    }
