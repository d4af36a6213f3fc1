"""Communication engines: a small protocol (``protocol.py``) and one file per engine.

To write your own, implement :class:`Communicator` and pass the object as ``communicator=``.
"""

from __future__ import annotations

from ssd_allreduce.communicators.horovod import HorovodCommunicator
from ssd_allreduce.communicators.loopback import Loopback
from ssd_allreduce.communicators.protocol import Capabilities, Communicator, Handle, ReduceOp

__all__ = [
    "Capabilities",
    "Communicator",
    "Handle",
    "HorovodCommunicator",
    "Loopback",
    "ReduceOp",
]
