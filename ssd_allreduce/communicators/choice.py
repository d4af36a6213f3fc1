"""Which engine is used: the one that is named, else the one that runs, else the launcher's."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

from ssd_allreduce.communicators.horovod import HorovodCommunicator, horovod_is_running
from ssd_allreduce.communicators.loopback import Loopback
from ssd_allreduce.communicators.mpi import MPICommunicator
from ssd_allreduce.communicators.protocol import Communicator
from ssd_allreduce.communicators.torch_distributed import TorchCommunicator, torch_distributed_is_running
from ssd_allreduce.errors import UsageError

NAMES = ("auto", "horovod", "mpi", "torch")

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""What Open MPI, the MPICH family and MVAPICH tell a process that they launch."""

_log = logging.getLogger("ssd_allreduce")
_logged: set[str] = set()


def choose_communicator(name: str = "auto", process_set: Any = None) -> Communicator:
    """The engine of that name, for all ranks of this job.

    With ``"torch"`` the first call may initialise ``torch.distributed``, which waits for all ranks; with
    ``"mpi"`` it initialises MPI. Nothing else is communicated.

    Args:
        name: ``"horovod"``, ``"mpi"`` or ``"torch"``. ``"auto"``: an initialised Horovod, else an
            initialised ``torch.distributed``, else what the launcher's environment (``torchrun``,
            ``mpirun``) asks for, else one rank.
        process_set: the ``hvd.ProcessSet`` that trains together; only with Horovod.

    Raises:
        ValueError: the name is not known, or a process set was given for another engine than Horovod.
        UsageError: the engine is missing or not ready; the message says what to install or to call.
    """
    if name not in NAMES:
        raise ValueError(f"communicator={name!r} is not known. Allowed: {', '.join(map(repr, NAMES))}.")
    chosen, reason = _find(process_set) if name == "auto" else (name, "it was named")
    if process_set is not None and chosen != "horovod":
        raise ValueError(
            f"process_set was given, which only Horovod knows, and the engine is {chosen!r} ({reason}). "
            "Leave it out, or call hvd.init() and use communicator='horovod'."
        )
    makers: dict[str, Callable[[], Communicator]] = {
        "horovod": lambda: HorovodCommunicator(process_set),
        "mpi": MPICommunicator,
        "torch": TorchCommunicator,
        "one rank": lambda: Loopback(1),
    }
    engine = makers[chosen]()
    _log_once(f"communication engine: {chosen}, because {reason}; rank {engine.rank} of {engine.size}")
    return engine


def _find(process_set: Any) -> tuple[str, str]:
    """The engine that "auto" stands for, and why."""
    if horovod_is_running() or process_set is not None:
        return "horovod", "hvd.init() has been called"
    if torch_distributed_is_running():
        return "torch", "torch.distributed is initialised"
    if _size_in("WORLD_SIZE") > 1 and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return "torch", "the environment is torchrun's"
    if _size_in("HOROVOD_SIZE") > 1:
        raise UsageError(
            f"This process is one of {_size_in('HOROVOD_SIZE')} that horovodrun has started, and Horovod is "
            "not initialised. Call hvd.init() first, or name another engine with communicator=."
        )
    ranks = max(map(_size_in, _MPI_SIZES))
    if ranks > 1:
        if not _importable("mpi4py"):
            raise UsageError(
                f"This process is one of {ranks} that mpirun has started, and no engine can reach the "
                "others: mpi4py is not installed, and neither Horovod nor torch.distributed is initialised. "
                "Install an extra (pip install 'ssd-allreduce[mpi]', or 'ssd-allreduce[horovod]' and call "
                "hvd.init()), or launch with torchrun."
            )
        return "mpi", "the environment is mpirun's"
    return "one rank", "no engine is initialised, and no launcher has started this process with others"


def _size_in(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # An entry of None in sys.modules, which forbids the import.
        return False


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _log.info(message)
