"""Virtual hosts: two ranks on two hosts with limited links, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "virtual_cluster.py"
PROGRAM = Path(__file__).parent / "programs" / "two_hosts.py"
MEGABITS = 32.0
"""What each of two hosts sends in the program's allreduce: half of 4 MB, twice."""
TOOLS = ("ip", "tc", "unshare")


def why_not() -> str | None:
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    probe = ["ip", "netns", "add", f"ssdvc-probe-{os.getpid()}"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        return "this machine does not allow network namespaces"
    subprocess.run(["ip", "netns", "delete", probe[-1]], capture_output=True, check=False)
    return None


REASON = why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))
pytestmark = pytest.mark.timeout(120)


def call(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--state", str(state), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    yield path
    call(path, "down")


@needs_namespaces
@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("mpirun", [sys.executable, str(PROGRAM), "horovod"]),
        ("torchrun", [str(PROGRAM), "gloo"]),
    ],
)
def test_two_hosts_reduce_over_links_of_the_rate_asked_for(
    launcher: str, command: list[str], state: Path
) -> None:
    before = namespaces()
    up = call(state, "up", "--hosts", "2", "--rate", "100mbit")
    assert up.returncode == 0, up.stderr
    run = call(state, "run", "--launcher", launcher, "--", *command)
    assert run.returncode == 0, run.stderr
    ranks = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert sorted(rank["host"] for rank in ranks) == ["ssdvc-host0", "ssdvc-host1"]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    assert [rank["sum"] for rank in ranks] == [4.0, 4.0]
    fastest = MEGABITS / min(rank["seconds"] for rank in ranks)
    # The bucket lets a first burst through at once, and headers take their share.
    assert 10.0 < fastest < 110.0, f"{fastest} Mbit/s"
    down = call(state, "down")
    assert down.returncode == 0, down.stderr
    assert namespaces() == before
    assert not state.exists()


@needs_namespaces
def test_context_manager_takes_down_what_still_runs(state: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from virtual_cluster import VirtualCluster\n"
        "with VirtualCluster(2, '1gbit', Path(sys.argv[2])) as cluster:\n"
        "    try:\n"
        "        cluster.run(['sleep', '60'], timeout=2.0)\n"
        "    except TimeoutError as error:\n"
        "        print(error, sum(cluster.bytes_sent()) > 0)\n"
    )
    before = namespaces()
    sessions = set(Path(tempfile.gettempdir()).glob("ompi.[0-9]*"))
    command = [sys.executable, "-c", code, str(SCRIPT.parent), str(state)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "not done within 2 seconds True\n", result.stderr
    assert namespaces() == before
    assert list(state.parent.iterdir()) == []
    assert set(Path(tempfile.gettempdir()).glob("ompi.[0-9]*")) == sessions


@needs_namespaces
def test_failing_command_gives_its_status_and_interrupted_runs_end_their_processes(state: Path) -> None:
    assert call(state, "up").returncode == 0
    assert call(state, "run", "--", "sh", "-c", "exit 7").returncode == 7
    marker = f"{61 + os.getpid() % 7}.{os.getpid()}"
    command = [sys.executable, str(SCRIPT), "--state", str(state), "run", "--", "sleep", marker]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(processes_with(marker)) >= 2)
        running.terminate()
        running.wait(30)
    finally:
        running.kill()
    assert processes_with(marker) == []


@needs_namespaces
def test_second_cluster_is_refused_and_the_first_stays(state: Path) -> None:
    assert call(state, "up").returncode == 0
    there = namespaces()
    again = call(state, "up", "--hosts", "3")
    assert again.returncode == 2
    assert "A cluster is up already" in again.stderr
    assert namespaces() == there


@needs_namespaces
def test_run_without_a_cluster_says_how_to_bring_one_up(state: Path) -> None:
    result = call(state, "run", "--", "true")
    assert result.returncode == 2
    assert "Bring one up first" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "rate 'fast' is not understood. Allowed: a number with kbit, mbit or gbit"),
        (["--rate", "0mbit"], "rate '0mbit' is not understood"),
        (["--hosts", "0"], "0 hosts are not possible. Allowed: 1 to 200"),
    ],
)
def test_impossible_clusters_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = call(tmp_path / "cluster.json", "up", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def processes_with(argument: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", argument.encode()]:
                found.append(int(folder.name))
    return found


def wait_until(done: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.1)
