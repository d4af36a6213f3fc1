"""Every launcher starts the ranks, passes on what it is given, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launchers import LAUNCHERS, MARKER, launch, marked_processes
from ranks import ENGINES

HANGS = "import time; print('started', flush=True); time.sleep(600)"
ALLREDUCE = """
import horovod.torch as hvd, torch
hvd.init()
summed = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="ones")
print("sum", int(summed[0]), "of", hvd.size(), flush=True)
"""
ALLREDUCE_WITHOUT_HOROVOD = """
import importlib, torch, ssd_allreduce as ssd
from ssd_allreduce.communicators import ReduceOp
try:
    importlib.import_module("horovod.torch")
except ImportError:
    engine = ssd.choose_communicator("auto").open_channel(30.0)
    ones = torch.ones(3)
    engine.wait(engine.allreduce_async([ones], "ones", ReduceOp.SUM), 30.0)
    # In one write: torchrun gives all ranks the same output.
    print(f"sum {int(ones[0])} of {engine.size} by {engine.key}\\n", end="", flush=True)
"""


@pytest.fixture(params=[f"{launcher}-2" for launcher in LAUNCHERS])
def launcher(request: pytest.FixtureRequest) -> str:
    return request.param.removesuffix("-2")


def test_ranks_reduce_together(launcher: str) -> None:
    program = ALLREDUCE_WITHOUT_HOROVOD if launcher in ENGINES else ALLREDUCE
    result = launch(launcher, 2, ["python", "-c", program]).check()
    assert result.stdout.count(f"sum 2 of 2{' by ' + ENGINES[launcher] if launcher in ENGINES else ''}") == 2


def test_words_options_and_environment_arrive(launcher: str, tmp_path: Path) -> None:
    words = ["--log", "two words", "--min", 'quo"te', "it's $HOME"]
    program = (
        "import os, pathlib, sys, uuid; "
        "pathlib.Path(os.environ['FOLDER'], uuid.uuid4().hex).write_text('|'.join(sys.argv[1:]))"
    )
    launch(launcher, 2, ["python", "-c", program, *words], env={"FOLDER": str(tmp_path)}).check()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["|".join(words)] * 2


def test_failure_of_a_rank_is_seen(launcher: str) -> None:
    result = launch(launcher, 2, ["python", "-c", "raise SystemExit(7)"])
    assert result.returncode not in (0, None)
    with pytest.raises(AssertionError, match="exit status"):
        result.check()


def test_nothing_outlives_a_timeout(launcher: str, tmp_path: Path) -> None:
    marker_file = tmp_path / "marker"
    program = f"import os; open({str(marker_file)!r}, 'w').write(os.environ['{MARKER}']); {HANGS}"
    started = time.monotonic()
    result = launch(launcher, 2, ["python", "-c", program], timeout=8)
    assert result.timed_out
    assert "started" in result.stdout
    assert time.monotonic() - started < 40
    assert marked_processes(marker_file.read_text()) == []


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun-mpi"])
def test_session_folder_of_a_killed_launch_is_met_by_no_later_one(launcher: str, tmp_path: Path) -> None:
    noted = tmp_path / "folder"
    program = f"import os; open({str(noted)!r}, 'w').write(os.environ['PMIX_SERVER_TMPDIR']); {HANGS}"
    assert launch(launcher, 2, ["python", "-c", program], timeout=8).timed_out
    of_the_launch, of_the_process = Path(noted.read_text()).parent, Path(noted.read_text())
    assert of_the_process.name.startswith("ompi.")
    assert of_the_launch.name.startswith("ssd_allreduce-sessions-")
    assert not of_the_launch.exists()
