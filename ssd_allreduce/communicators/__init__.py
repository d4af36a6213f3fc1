"""Communication engines: a small protocol (``protocol.py``) and one file per engine.

To write your own, implement :class:`Communicator`, or :class:`OrderMatching` where the n-th operations of
all ranks belong together, and pass the object as ``communicator=``.
"""

from __future__ import annotations

from ssd_allreduce.communicators.choice import choose_communicator
from ssd_allreduce.communicators.horovod import HorovodCommunicator
from ssd_allreduce.communicators.loopback import Loopback
from ssd_allreduce.communicators.mpi import MPICommunicator
from ssd_allreduce.communicators.protocol import (
    Capabilities,
    Communicator,
    Handle,
    OrderMatching,
    ReduceOp,
)
from ssd_allreduce.communicators.torch_distributed import TorchCommunicator

__all__ = [
    "Capabilities",
    "Communicator",
    "Handle",
    "HorovodCommunicator",
    "Loopback",
    "MPICommunicator",
    "OrderMatching",
    "ReduceOp",
    "TorchCommunicator",
    "choose_communicator",
]
