#!/usr/bin/env python3
"""A virtual cluster on one Linux machine: hosts are network namespaces, joined by links of limited rate.

    sudo python scripts/virtual_cluster.py up --hosts 2 --rate 1gbit
    sudo python scripts/virtual_cluster.py run -- python train.py
    sudo python scripts/virtual_cluster.py run --launcher torchrun -- train.py
    sudo python scripts/virtual_cluster.py down

Each host has a namespace, a host name, an address on a switch (a bridge in a namespace of its own), and a
core of its own where the machine has that many. Both directions of each link are limited with a token
bucket filter. ``run`` starts one rank on each host. From Python::

    with VirtualCluster(hosts=2, rate="1gbit") as cluster:
        cluster.run(["python", "train.py"])

Needs root, and ip, tc and unshare (packages iproute2 and util-linux). Touches only the namespaces that it
made itself, whose names it keeps in a state file; devices live inside them and go with them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PREFIX = "ssdvc"
DEVICE = "eth0"
NETWORK = "10.213.77"
TOOLS = ("ip", "tc", "unshare")
LAUNCHERS = ("mpirun", "torchrun")
DEFAULT_STATE = Path(tempfile.gettempdir()) / "ssd_allreduce_virtual_cluster.json"
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TORCHRUN_PORT = 29511
_GRACE_SECONDS = 5.0


class ClusterError(RuntimeError):
    """The cluster cannot be made or used; the message says what to do."""


@dataclass(frozen=True)
class Host:
    """One virtual host.

    Attributes:
        name: its host name.
        namespace: its network namespace.
        address: its address on the switch.
        core: the processor core that its processes keep to; None where cores are too few.
    """

    name: str
    namespace: str
    address: str
    core: int | None

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command as run on this host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        pinned = [] if self.core is None else ["taskset", "--cpu-list", str(self.core)]
        return ["ip", "netns", "exec", self.namespace, *named, *pinned, *command]


def bits_per_second(rate: str) -> int:
    """A rate as tc writes it, ``"100mbit"``, as a number.

    Raises:
        ClusterError: it is not written so.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ClusterError(
            f"rate {rate!r} is not understood. Allowed: a number with kbit, mbit or gbit: 1gbit."
        )
    return round(float(match[1]) * _UNITS[match[2]])


class VirtualCluster:
    """Hosts on one machine; a context manager that takes them down again, whatever happens.

    Args:
        hosts: how many, 1 to 200.
        rate: of each direction of each link, as tc writes it: ``"1gbit"``, ``"100mbit"``.
        state: where the names of what was made are kept.

    Raises:
        ClusterError: a value is not allowed.
    """

    def __init__(self, hosts: int = 2, rate: str = "1gbit", state: Path = DEFAULT_STATE) -> None:
        if not 1 <= hosts <= 200:
            raise ClusterError(f"{hosts} hosts are not possible. Allowed: 1 to 200.")
        self.rate = rate
        self.bits_per_second = bits_per_second(rate)
        self.state = state
        name = f"{PREFIX}{os.getpid()}"
        cores = sorted(os.sched_getaffinity(0))
        self.switch = f"{name}-switch"
        self.hosts = [
            Host(
                name=f"{PREFIX}-host{index}",
                namespace=f"{name}-{index}",
                address=f"{NETWORK}.{index + 1}",
                core=cores[index] if hosts <= len(cores) else None,
            )
            for index in range(hosts)
        ]

    # -- up and down -----------------------------------------------------------------------------

    def __enter__(self) -> VirtualCluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Make the hosts and their links; what was made is removed again if that fails half-way.

        Raises:
            ClusterError: not root, a tool is missing, a cluster is up already, or the kernel refused.
        """
        check_machine()
        if self.state.exists():
            raise ClusterError(f"A cluster is up already, by {self.state}. Take it down first: down.")
        # Written first, so that even a process that is killed half-way leaves nothing unknown.
        description = {"rate": self.rate, "switch": self.switch, "hosts": [asdict(h) for h in self.hosts]}
        self.state.write_text(json.dumps(description))
        try:
            self._make()
            self._write_agent()
        except BaseException:
            self.down()
            raise

    def _make(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        for index, host in enumerate(self.hosts):
            self._add_host(host, f"port{index}")

    def _add_host(self, host: Host, port: str) -> None:
        _run("ip", "netns", "add", host.namespace)
        ends = ["type", "veth", "peer", "name", port, "netns", self.switch]
        _run("ip", "link", "add", DEVICE, "netns", host.namespace, *ends)
        _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", DEVICE)
        _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
        _run("ip", "-n", host.namespace, "link", "set", DEVICE, "up")
        _run("ip", "-n", self.switch, "link", "set", port, "master", "bridge0", "up")
        self._limit(host.namespace, DEVICE)
        self._limit(self.switch, port)
        _use_cubic(host.namespace)

    def _limit(self, namespace: str, device: str) -> None:
        # The bucket must hold what the rate lets through in a tick of the kernel's clock, and the
        # largest packet that segmentation offload makes.
        burst = max(128 * 1024, self.bits_per_second // 8 // 200)
        limits = ["rate", self.rate, "burst", str(burst), "latency", "50ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)

    def down(self) -> None:
        """End the processes on the hosts, and remove what :meth:`up` made. May be called repeatedly."""
        remove(self.state)

    @classmethod
    def attach(cls, state: Path = DEFAULT_STATE) -> VirtualCluster:
        """The cluster that another process has brought up.

        Raises:
            ClusterError: none is up.
        """
        check_machine()
        if not state.exists():
            raise ClusterError(
                f"No cluster is up, by {state}. Bring one up first: up --hosts 2 --rate 1gbit."
            )
        description = json.loads(state.read_text())
        cluster = cls(len(description["hosts"]), description["rate"], state)
        cluster.switch = description["switch"]
        cluster.hosts = [Host(**host) for host in description["hosts"]]
        return cluster

    # -- use -------------------------------------------------------------------------------------

    def run(
        self,
        command: Sequence[str],
        launcher: str = "mpirun",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        options: Sequence[str] = (),
    ) -> int:
        """Run a command with one rank on each host, and end whatever runs on the hosts after it.

        Args:
            command: what each rank runs; for torchrun a script and its arguments.
            launcher: ``"mpirun"`` (Open MPI 5) or ``"torchrun"``.
            env: added to this process's environment.
            timeout: seconds after which everything is ended.
            options: further options of the launcher.

        Returns:
            The exit status; that of the first that failed under torchrun.

        Raises:
            ClusterError: the launcher is unknown or not installed.
            TimeoutError: it took too long; nothing of it runs any more.
        """
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes = self.start(command, launcher, env, options)
            return _wait_for_all(processes, timeout)
        finally:
            end_processes(host.namespace for host in self.hosts)
            for process in processes:
                process.wait()

    def start(
        self,
        command: Sequence[str],
        launcher: str = "mpirun",
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        output: int | None = None,
    ) -> list[subprocess.Popen[bytes]]:
        """As :meth:`run`, without waiting: several launches may share the hosts.

        Args:
            output: file descriptor that takes stdout and stderr.

        Returns:
            The launcher's processes: one for mpirun, one for each host for torchrun.
        """
        if launcher not in LAUNCHERS:
            raise ClusterError(f"launcher {launcher!r} is not known. Allowed: {', '.join(LAUNCHERS)}.")
        if shutil.which(launcher) is None:
            raise ClusterError(
                f"{launcher} is not on PATH. Activate the environment first: source scripts/env.sh"
            )
        interface = {"GLOO_SOCKET_IFNAME": DEVICE, "NCCL_SOCKET_IFNAME": DEVICE}
        environment = {**os.environ, **interface, **(env or {})}
        commands = self._torchrun(command, options)
        if launcher == "mpirun":
            commands = [self._mpirun(command, options)]
        return [subprocess.Popen(each, env=environment, stdout=output, stderr=output) for each in commands]

    def _mpirun(self, command: Sequence[str], options: Sequence[str]) -> list[str]:
        network = f"{NETWORK}.0/24"
        sessions = _sessions_of(self.state)
        sessions.mkdir(exist_ok=True)
        places = ",".join(f"{host.address}:1" for host in self.hosts)
        parameters = {
            "--prtemca": {
                "plm_ssh_agent": str(_agent_of(self.state)),
                "plm_ssh_no_tree_spawn": "1",
                "prte_if_include": network,
                # A killed mpirun leaves its session folder, which is named after its process id, and
                # a later one that gets the same id refuses to start.
                "prte_tmpdir_base": tempfile.mkdtemp(dir=sessions),
            },
            "--mca": {"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": network},
        }
        flags = [word for kind, each in parameters.items() for item in each.items() for word in (kind, *item)]
        root = ["--allow-run-as-root", "--bind-to", "none"]
        size = ["-n", str(len(self.hosts)), "-H", places]
        return self.hosts[0].enter(["mpirun", *size, *root, *flags, *options, *command])

    def _write_agent(self) -> None:
        """Stands in for ssh: enters the host's namespace instead of connecting to it."""
        lines = ["#!/bin/sh", 'address="$1"', "shift", 'case "$address" in']
        for host in self.hosts:
            lines.append(f'{host.address}) exec {shlex.join(host.enter(["sh", "-c"]))} "$*" ;;')
        agent = _agent_of(self.state)
        agent.write_text("\n".join([*lines, "esac", "exit 1", ""]))
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)

    def _torchrun(self, command: Sequence[str], options: Sequence[str]) -> list[list[str]]:
        meeting = ["--master-addr", self.hosts[0].address, "--master-port", str(_TORCHRUN_PORT)]
        world = ["--nnodes", str(len(self.hosts)), "--nproc-per-node", "1", *meeting]
        return [
            host.enter(["torchrun", *world, "--node-rank", str(rank), *options, *command])
            for rank, host in enumerate(self.hosts)
        ]

    def bytes_sent(self) -> list[int]:
        """Bytes that each host has sent since it came up, by its network device's own counter."""
        return [_transmitted(host.namespace) for host in self.hosts]


def _agent_of(state: Path) -> Path:
    return state.with_suffix(".agent")


def _sessions_of(state: Path) -> Path:
    return state.with_suffix(".sessions")


def _transmitted(namespace: str) -> int:
    answer = _run("ip", "-n", namespace, "-json", "-statistics", "link", "show", DEVICE)
    return int(json.loads(answer)[0]["stats64"]["tx"]["bytes"])


def _use_cubic(namespace: str) -> None:
    """Linux's usual congestion control, where the machine's own default is another one."""
    with contextlib.suppress(ClusterError):
        control = "/proc/sys/net/ipv4/tcp_congestion_control"
        _run("ip", "netns", "exec", namespace, "sh", "-c", f"echo cubic > {control}")


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> int:
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return failed[0] if failed else 0
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"not done within {timeout:g} seconds")
        time.sleep(0.05)


def check_machine() -> None:
    """Raise unless this process can make namespaces.

    Raises:
        ClusterError: it is not root, or a tool is missing.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise ClusterError(f"{', '.join(missing)} not found. Install iproute2 and util-linux (Linux only).")
    if os.geteuid() != 0:
        raise ClusterError("Network namespaces need root. Run as root: sudo, or in a container of your own.")


def remove(state: Path) -> None:
    """Take down what a state file names, as far as it is still there."""
    if not state.exists():
        return
    description = json.loads(state.read_text())
    names = [description["switch"], *(host["namespace"] for host in description["hosts"])]
    ours = [name for name in names if name.startswith(PREFIX)]
    there = set(_run("ip", "netns", "list").split())
    end_processes(name for name in ours if name in there)
    for name in ours:
        if name in there:
            _run("ip", "netns", "delete", name)
    _agent_of(state).unlink(missing_ok=True)
    shutil.rmtree(_sessions_of(state), ignore_errors=True)
    state.unlink()


def end_processes(namespaces: Iterable[str]) -> None:
    """End every process in the namespaces: politely, then by force."""
    names = list(namespaces)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _GRACE_SECONDS
        while pids := [pid for name in names for pid in _processes_in(name)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)


def _processes_in(namespace: str) -> list[int]:
    with contextlib.suppress(ClusterError):
        return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]
    return []


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ClusterError(f"'{shlex.join(command)}' failed: {result.stderr.strip()}")
    return result.stdout


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--state", type=Path, default=DEFAULT_STATE, help="file that remembers the cluster")
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="make the hosts")
    up.add_argument("--hosts", type=int, default=2)
    up.add_argument("--rate", default="1gbit", help="of each direction of each link")
    run = actions.add_parser("run", help="run a command with one rank on each host")
    run.add_argument("--launcher", choices=LAUNCHERS, default="mpirun")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    actions.add_parser("down", help="remove the hosts")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    # As Ctrl-C, so that processes on the hosts are ended whichever way this one is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _act(arguments)
    except ClusterError as error:
        print(f"virtual_cluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _act(arguments: argparse.Namespace) -> int:
    if arguments.action == "up":
        VirtualCluster(arguments.hosts, arguments.rate, arguments.state).up()
        print(f"{arguments.hosts} hosts are up, joined at {arguments.rate}")
        return 0
    if arguments.action == "down":
        check_machine()
        remove(arguments.state)
        return 0
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ClusterError("run needs a command: run -- python train.py")
    return VirtualCluster.attach(arguments.state).run(command, arguments.launcher)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
