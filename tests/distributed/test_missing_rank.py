"""A rank that does not come ends the whole job within the time limit, and the others say what they missed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launchers import ROOT, LaunchResult, launch
from problems import perceptron
from programs.missing_rank import TIMEOUT

PROGRAM = ROOT / "tests" / "distributed" / "programs" / "missing_rank.py"
NAMES = [name for name, _ in perceptron().named_parameters()]
LIMIT = 120.0
END_SECONDS = 30.0
"""How long a job may need to end after the time limit of the wait, whatever state its ranks are in."""

pytestmark = pytest.mark.timeout(2 * LIMIT)


def lose_rank(launched: str, where: str, how: str, folder: Path) -> tuple[LaunchResult, list[dict[str, Any]]]:
    """The launch, and what the ranks that waited wrote."""
    launcher, _, ranks = launched.rpartition("-")
    result = launch(launcher, int(ranks), [sys.executable, PROGRAM, folder, where, how], timeout=LIMIT)
    waited = [folder / f"{rank}.json" for rank in range(int(ranks) - 1)]
    return result, [json.loads(path.read_text()) for path in waited if path.exists()]


# Where ranks wait: how many steps they have made, their last completed sync event, and for what.
EXPECTED: dict[str, tuple[int, str, list[str]]] = {
    "first_step": (0, "none", ["agreement"]),
    "warmup": (1, "0", NAMES),
    "sync_point": (5, "1", NAMES),
    "completion": (6, "1", NAMES),
    "flush": (8, "2", NAMES),
}


@pytest.mark.parametrize(
    ("launched", "where"),
    [
        ("mpirun-2", "completion"),
        ("mpirun-2", "flush"),
        ("mpirun-3", "warmup"),
        ("horovodrun-gloo-2", "sync_point"),
        ("horovodrun-mpi-2", "first_step"),
        ("mpirun-mpi4py-2", "completion"),
        ("mpirun-mpi4py-3", "warmup"),
        ("torchrun-2", "completion"),
        ("torchrun-2", "first_step"),
        ("torchrun-3", "flush"),
    ],
)
def test_waiting_for_a_rank_that_does_not_come(launched: str, where: str, tmp_path: Path) -> None:
    result, waited = lose_rank(launched, where, "sleep", tmp_path)

    assert result.returncode not in (0, None), result.report()
    assert waited, result.report()
    steps, last_completed, missed = EXPECTED[where]
    for found in waited:
        text = found["message"]
        if found["error"] != "CommunicationTimeoutError":
            # With several ranks waiting, the first to give up ends the engine under the others.
            assert len(waited) > 1
            assert found["error"] == "CommunicationError"
            continue
        assert f"waited {TIMEOUT:g} seconds for the allreduce of" in text
        assert any(name in text for name in missed), text
        assert f"This rank has made {steps} steps" in text
        assert f"the last completed one is {last_completed}." in text
        assert TIMEOUT <= found["seconds"] < TIMEOUT + END_SECONDS
        # The thread that waits leaves the processor to others. What Horovod's own threads take depends
        # on who else runs here: MPI polls while it waits.
        assert found["cpu_seconds"] < 0.2 * TIMEOUT
    assert any(found["error"] == "CommunicationTimeoutError" for found in waited)


@pytest.mark.parametrize("launched", ["mpirun-2", "horovodrun-gloo-2", "horovodrun-mpi-2", "mpirun-mpi4py-2"])
def test_job_ends_when_a_rank_is_frozen(launched: str, tmp_path: Path) -> None:
    result, waited = lose_rank(launched, "completion", "stop", tmp_path)

    assert result.returncode not in (0, None), result.report()
    assert [found["error"] for found in waited] == ["CommunicationTimeoutError"], result.report()
    assert waited[0]["seconds"] < TIMEOUT + END_SECONDS


@pytest.mark.parametrize("launched", ["mpirun-2", "horovodrun-gloo-2", "mpirun-mpi4py-2", "torchrun-2"])
def test_job_ends_when_a_rank_is_killed(launched: str, tmp_path: Path) -> None:
    result, waited = lose_rank(launched, "completion", "kill", tmp_path)

    assert result.returncode not in (0, None), result.report()
    # Most launchers end the other ranks before these have waited for long.
    for found in waited:
        assert found["error"] in ("CommunicationError", "CommunicationTimeoutError")


@pytest.mark.parametrize("launched", ["mpirun-2", "horovodrun-gloo-2", "mpirun-mpi4py-2", "torchrun-2"])
def test_rank_that_ends_without_flush_ends_the_others(launched: str, tmp_path: Path) -> None:
    result, waited = lose_rank(launched, "completion", "end", tmp_path)

    assert result.returncode not in (0, None), result.report()
    if launched.startswith("mpirun-mpi4py"):
        # MPI's end waits for all ranks, so that the others find none missing until their time is up.
        assert [found["error"] for found in waited] == ["CommunicationTimeoutError"], result.report()
        return
    assert [found["error"] for found in waited] == ["CommunicationError"], result.report()
    assert "Another rank has probably ended" in waited[0]["message"]
