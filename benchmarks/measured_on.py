"""When and on what a benchmark measured, for the files that it writes."""

from __future__ import annotations

import os
import platform
from datetime import date

import torch


def measured_on() -> dict[str, str]:
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
