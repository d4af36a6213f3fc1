"""A run is stopped, and goes on in new processes: as many, or another number, under any launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from checkpoints import RULES
from launchers import ROOT, launch

PROGRAM = ROOT / "tests" / "distributed" / "programs" / "resume.py"
STATES = ("2", "5", "7", "8", "9", "flushed")
CASES = [f"{rule}-{state}" for rule in RULES for state in STATES]
LIMIT = 240.0

pytestmark = pytest.mark.timeout(2 * LIMIT)


def run(launcher: str, ranks: int, mode: str, folder: Path) -> None:
    launch(launcher, ranks, [sys.executable, PROGRAM, mode, folder], timeout=LIMIT).check()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States that two ranks have saved."""
    folder = tmp_path_factory.mktemp("saved")
    run("mpirun", 2, "save", folder)
    return folder


@pytest.fixture(scope="module")
def loaded(saved: Path, request: pytest.FixtureRequest) -> list[dict[str, list[str]]]:
    """What each rank found when the states were loaded: one launch for all of them."""
    launcher, ranks, mode = request.param
    run(launcher, ranks, mode, saved)
    return [json.loads((saved / f"{mode}.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    "loaded",
    [
        pytest.param(("mpirun", 2, "load"), id="mpirun-2"),
        pytest.param(("horovodrun-gloo", 2, "load"), id="horovodrun-gloo-2"),
    ],
    indirect=True,
)
@pytest.mark.parametrize("case", CASES)
def test_new_processes_go_on_bit_for_bit(loaded: list[dict[str, list[str]]], case: str) -> None:
    assert [found[case] for found in loaded] == [[]] * len(loaded)


@pytest.mark.parametrize(
    "loaded", [pytest.param(("mpirun", 3, "load-elsewhere"), id="mpirun-3")], indirect=True
)
@pytest.mark.parametrize("case", CASES)
def test_other_number_of_ranks_starts_a_new_period(loaded: list[dict[str, list[str]]], case: str) -> None:
    assert [found[case] for found in loaded] == [[]] * len(loaded)
