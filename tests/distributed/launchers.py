"""Starts a program in several ranks under a real launcher, and always ends it.

A launcher's processes do not all stay in its process group: ``horovodrun --gloo`` starts each rank
in a session of its own, and Open MPI has daemons. So every process of a launch carries a marker in
its environment, and at the end whatever still carries it is killed.

A killed ``mpirun`` leaves its session folder behind, which is named after its process id, and a later
one that gets the same id refuses to start ("The PMIx server's listener thread failed to start"). So
every launch has a place of its own for session folders.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranks import ENGINE_VARIABLE, ENGINES

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_SCRIPT = ROOT / "scripts" / "launch.sh"
LAUNCHERS = ("mpirun", "horovodrun-gloo", "horovodrun-mpi", "mpirun-mpi4py", "torchrun")
WITHOUT_HOROVOD = Path(__file__).parent / "without_horovod"
MARKER = "SSD_ALLREDUCE_LAUNCH_ID"
GRACE_SECONDS = 2.0
SESSION_FOLDER_VARIABLES = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
"""Of Open MPI 5 and of Open MPI 4."""


@dataclass(frozen=True)
class LaunchResult:
    """What a launch left behind; ``returncode`` is None where it had to be killed."""

    command: tuple[str, ...]
    returncode: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.returncode is None

    def check(self) -> LaunchResult:
        """Raises with everything that was printed, unless the launch succeeded."""
        if self.returncode != 0:
            raise AssertionError(f"{self.describe_end()}\n{self.report()}")
        return self

    def describe_end(self) -> str:
        if self.timed_out:
            return f"killed after {self.seconds:.1f} s without an end"
        return f"exit status {self.returncode} after {self.seconds:.1f} s"

    def report(self) -> str:
        command = " ".join(self.command)
        return f"$ {command}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def launch(
    launcher: str,
    ranks: int,
    argv: Sequence[str | os.PathLike[str]],
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
) -> LaunchResult:
    """Runs ``argv`` in ``ranks`` ranks and waits for its end, ``timeout`` seconds at most.

    ``env`` is added to this process's environment. Neither a rank that hangs nor a daemon that a
    launcher forgets outlives this call.
    """
    command = (
        "bash",
        str(LAUNCH_SCRIPT),
        "--launcher",
        launcher,
        "-n",
        str(ranks),
        "--",
        *map(os.fspath, argv),
    )
    marker = uuid.uuid4().hex
    started = time.monotonic()
    # Files and not pipes: a rank that outlives its launcher would keep a pipe open, and reading
    # from it would never end.
    with (
        tempfile.TemporaryDirectory(prefix="ssd_allreduce-sessions-") as sessions,
        tempfile.TemporaryFile("w+b") as stdout,
        tempfile.TemporaryFile("w+b") as stderr,
    ):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=launch_environment(launcher, env, marker, sessions),
            cwd=cwd,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
            returncode = process.returncode
            seconds = time.monotonic() - started
        finally:
            end_everything(process, marker)
        return LaunchResult(command, returncode, read(stdout), read(stderr), seconds)


def launch_environment(
    launcher: str, extra: Mapping[str, str] | None, marker: str, sessions: str
) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not of_a_launcher(name)}
    environment.update(dict.fromkeys(SESSION_FOLDER_VARIABLES, sessions))
    environment["PYTHONUNBUFFERED"] = "1"
    if launcher in ENGINES:
        environment[ENGINE_VARIABLE] = ENGINES[launcher]
        paths = [str(WITHOUT_HOROVOD), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.update(extra or {})
    environment[MARKER] = marker
    return environment


def of_a_launcher(name: str) -> bool:
    """Whether this variable tells a process that it is a rank of a launch already under way."""
    return name.startswith(("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_LAUNCHED", "TORCHELASTIC_")) or name in {
        ENGINE_VARIABLE,
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        "HOROVOD_CONTROLLER",
    }


def read(file: object) -> str:
    file.seek(0)  # type: ignore[attr-defined]
    return file.read().decode(errors="replace")  # type: ignore[attr-defined,no-any-return]


def end_everything(process: subprocess.Popen[bytes], marker: str) -> None:
    """Asks politely, so that launchers remove their session folders, then kills what is left."""
    if process.poll() is None:
        send(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    deadline = time.monotonic() + 10 * GRACE_SECONDS
    while survivors := marked_processes(marker):
        for pid in survivors:
            send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of a launch cannot be killed: {survivors}")
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
        process.wait()


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def marked_processes(marker: str) -> list[int]:
    wanted = f"{MARKER}={marker}".encode()
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and wanted in environment_of(folder)
    ]


def environment_of(folder: Path) -> list[bytes]:
    # A process may end at any moment, may belong to someone else, or be a zombie (empty then).
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
