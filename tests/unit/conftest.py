"""Settings of the tests that need no launcher."""

from __future__ import annotations

import gc

import torch
from hypothesis import HealthCheck, settings

# A machine that is busy with other things must not fail a test for being slow.
settings.register_profile(
    "unit", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("unit")

# The tensors here are tiny, and several ranks run as threads of one process.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Wrapping an optimizer looks for other holders of its groups among all objects of the process.

    What pytest and torch have made until the tests begin need not be looked through each time.
    """
    gc.collect()
    gc.freeze()
