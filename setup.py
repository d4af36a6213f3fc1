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
# Build front ends run this file without its folder among Python's.
sys.path.insert(0, str(ROOT))

import build_cuda  # noqa: E402

# No -march=native and no contraction into fused multiply-adds: every rank must compute the same
# bits, whatever processor it runs on.
COMPILE_FLAGS = ["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-fopenmp"]
# torch's own headers are not clean under -Wextra.
QUIETED = ["-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-unused-variable"]


def extension_wanted() -> bool:
    return os.environ.get("SSD_ALLREDUCE_NO_EXTENSION", "0") in ("", "0")


def sources(suffix: str) -> list[str]:
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob(f"*{suffix}"))
    if not found:
        sys.exit(
            f"setup.py: csrc/ holds no {suffix} file, so the extension cannot be built. "
            "Build from a complete source tree, or set SSD_ALLREDUCE_NO_EXTENSION=1 to go without."
        )
    return found


def headers() -> list[str]:
    found = [*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc").glob("*.cuh")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def installed_torch() -> Any:
    """torch, or None where there is none, as under pip's build isolation."""
    try:
        import torch
    except ImportError as error:
        demanded = [
            f"{name}={value}"
            for name, value in (("SSD_ALLREDUCE_NO_EXTENSION", "0"), ("SSD_ALLREDUCE_CUDA", "1"))
            if os.environ.get(name) == value
        ]
        remedy = (
            f"The compiled kernels are built against the installed torch, and torch cannot be imported "
            f"here ({error}). Install torch first, and build with 'pip install --no-build-isolation .', or "
            "run scripts/setup.sh, which does both."
        )
        if demanded:
            sys.exit(f"setup.py: {demanded[0]} demands them. {remedy}")
        print(
            f"setup.py: without compiled kernels; plain torch serves, which is slower. {remedy}", flush=True
        )
        return None
    return torch


def cuda_options(torch: Any) -> dict[str, Any]:
    """What the CUDA kernels add to the extension; nothing where they are not built."""
    cuda = torch.version.cuda
    pip_folders = build_cuda.pip_cuda_folders(Path(torch.__file__).resolve().parents[1], cuda)
    try:
        decision = build_cuda.decide(os.environ, torch.__version__, cuda, pip_folders)
    except build_cuda.CudaBuildError as error:
        sys.exit(f"setup.py: {error}")
    print(decision.reason, flush=True)
    if decision.nvcc is None:
        return {"sources": [], "flags": {}, "link": []}
    toolkit = build_cuda.toolkit_root(decision.nvcc.path)
    # torch reads it when its module for extensions is imported.
    os.environ["CUDA_HOME"] = str(toolkit)
    return {
        "sources": sources(".cu"),
        "flags": {"nvcc": build_cuda.compile_flags(os.environ, decision.nvcc, pip_folders)},
        "link": ["-lc10_cuda", "-ltorch_cuda", *build_cuda.runtime_library(pip_folders, toolkit)],
    }


def extension_options() -> dict[str, Any]:
    torch = installed_torch()
    if torch is None:
        return {}
    cuda = cuda_options(torch)
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    extension: Extension = CppExtension(
        name="ssd_allreduce._C",
        sources=[*sources(".cpp"), *cuda["sources"]],
        depends=[*headers(), "build_cuda.py"],
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": COMPILE_FLAGS + QUIETED, **cuda["flags"]},
        # at::parallel_for is a header: without OpenMP it uses one thread. torch's own libgomp serves.
        extra_link_args=["-fopenmp", *cuda["link"]],
    )
    # Without ninja: one tool less that the machine must have, for a handful of files.
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=False)},
    }


setup(**(extension_options() if extension_wanted() else {}))
