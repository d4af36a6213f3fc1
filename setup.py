"""Builds the compiled kernels against the torch that is installed; pyproject.toml has the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setuptools import setup

if TYPE_CHECKING:
    from setuptools import Extension

ROOT = Path(__file__).resolve().parent
# No -march=native and no contraction into fused multiply-adds: every rank must compute the same
# bits, whatever processor it runs on.
COMPILE_FLAGS = ["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-fopenmp"]
# torch's own headers are not clean under -Wextra.
QUIETED = ["-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-unused-variable"]


def extension_wanted() -> bool:
    return os.environ.get("SSD_ALLREDUCE_NO_EXTENSION", "0") in ("", "0")


def sources() -> list[str]:
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp"))
    if not found:
        sys.exit(
            "setup.py: csrc/ holds no .cpp file, so the extension cannot be built. "
            "Build from a complete source tree, or set SSD_ALLREDUCE_NO_EXTENSION=1 to go without."
        )
    return found


def headers() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.h*"))


def extension_options() -> dict[str, Any]:
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        sys.exit(
            f"setup.py: the extension is built against the installed torch, and torch cannot be "
            f"imported ({error}). Install torch first and build with 'pip install "
            f"--no-build-isolation', or run scripts/setup.sh, which does both. "
            f"SSD_ALLREDUCE_NO_EXTENSION=1 goes without the extension."
        )
    extension: Extension = CppExtension(
        name="ssd_allreduce._C",
        sources=sources(),
        depends=headers(),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": COMPILE_FLAGS + QUIETED},
        # at::parallel_for is a header: without OpenMP it uses one thread. torch's own libgomp serves.
        extra_link_args=["-fopenmp"],
    )
    # Without ninja: one tool less that the machine must have, for a handful of files.
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=False)},
    }


setup(**(extension_options() if extension_wanted() else {}))
