"""SSD-SGD on allreduce: several local steps between communications, compensated by the global gradient.

optimizer = ssd_allreduce.DistributedOptimizer(optimizer, delay_steps=8, overlap_steps=4)
"""

from __future__ import annotations

from ssd_allreduce.communicators import Loopback, choose_communicator
from ssd_allreduce.errors import (
    BackwardPassesError,
    CommunicationError,
    CommunicationTimeoutError,
    GradientChangedError,
    PeerFailedError,
    RankMismatchError,
    SequenceMismatchError,
    SSDError,
    UsageError,
    WeightsChangedError,
)
from ssd_allreduce.optimizer import DistributedOptimizer
from ssd_allreduce.statistics import StageStats, Stats

__version__ = "0.1.0"

__all__ = [
    "BackwardPassesError",
    "CommunicationError",
    "CommunicationTimeoutError",
    "DistributedOptimizer",
    "GradientChangedError",
    "Loopback",
    "PeerFailedError",
    "RankMismatchError",
    "SSDError",
    "SequenceMismatchError",
    "StageStats",
    "Stats",
    "UsageError",
    "WeightsChangedError",
    "choose_communicator",
]
