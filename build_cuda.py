"""Whether setup.py builds the CUDA kernels, with which compiler, and for which GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SELECTOR = "SSD_ALLREDUCE_CUDA"
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
# The kernels read their argument as the CUDA programming model has it from here on.
OLDEST_CAPABILITY = (7, 0)
# No contraction into fused multiply-adds: the same bits as the CPU's kernels compute.
NVCC_FLAGS = ["-O3", "-fmad=false", "-Xcompiler=-fvisibility=hidden", "--threads=2"]

Version = tuple[int, int]


class CudaBuildError(Exception):
    """The CUDA kernels were asked for, and cannot be built; the message says what to do."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler.

    Attributes:
        path: the program.
        version: its release.
        capabilities: the compute capabilities that it knows, in order.
    """

    path: Path
    version: Version
    capabilities: tuple[Version, ...]


@dataclass(frozen=True)
class Decision:
    """Whether the CUDA kernels are built, and why.

    Attributes:
        nvcc: what they are built with; None where they are not.
        reason: one line for the user.
    """

    nvcc: Nvcc | None
    reason: str


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def parse_version(text: str) -> Version:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


# Looking for a compiler.


def ask(path: Path, *options: str) -> str:
    try:
        done = subprocess.run([str(path), *options], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def inspect_nvcc(path: Path) -> Nvcc | None:
    """The compiler at a path, if it is one and runs."""
    release = re.search(r"release (\d+)\.(\d+)", ask(path, "--version"))
    if release is None:
        return None
    known = re.findall(r"compute_(\d+)(\d)\b", ask(path, "--list-gpu-arch"))
    capabilities = tuple(sorted({(int(major), int(minor)) for major, minor in known}))
    return Nvcc(path, (int(release[1]), int(release[2])), capabilities)


def candidates(environment: Mapping[str, str], pip_folders: list[Path]) -> list[Path]:
    """Where nvcc may be, the most explicit place first."""
    homes = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    found = [Path(home) / "bin/nvcc" for home in homes]
    on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
    if on_path:
        found.append(Path(on_path))
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    found += [folder / "bin/nvcc" for folder in pip_folders]
    return [path for path in found if path.is_file()]


def toolkit_root(nvcc: Path) -> Path:
    """The folder that torch calls CUDA_HOME. A program found on PATH may be a script or a link."""
    said = re.search(r"_HERE_=(.+)", ask(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull))
    here = Path(said[1].strip()) if said else nvcc.resolve().parent
    return here.parent


# The decision.


def decide(
    environment: Mapping[str, str],
    torch_version: str,
    torch_cuda: str | None,
    pip_folders: list[Path],
    inspect: Callable[[Path], Nvcc | None] = inspect_nvcc,
) -> Decision:
    """Build the CUDA kernels where torch is a CUDA build and a compiler of its CUDA version is there.

    Args:
        environment: ``SSD_ALLREDUCE_CUDA`` decides where it is ``0`` or ``1``.
        torch_version: the installed torch's version.
        torch_cuda: ``torch.version.cuda``.
        pip_folders: folders of pip's CUDA packages.
        inspect: reads off a compiler what it is.

    Raises:
        CudaBuildError: they are demanded and cannot be built, or the environment variable is wrong.
    """
    choice = environment.get(SELECTOR, "")
    if choice not in ("", "0", "1"):
        raise CudaBuildError(
            f"{SELECTOR}={choice!r}; allowed are 1 (build the CUDA kernels), 0 (do not), or unset to "
            "build them where torch is a CUDA build and a matching nvcc is found"
        )
    if choice == "0":
        return Decision(None, f"CUDA kernels: not built, because {SELECTOR}=0")
    obstacle, remedy, nvcc = "", "", None
    if torch_cuda is None:
        obstacle = f"torch {torch_version} is not a CUDA build"
        remedy = "Install a CUDA build of torch (https://pytorch.org/get-started)"
    else:
        nvcc, obstacle, remedy = find_matching(environment, torch_cuda, pip_folders, inspect)
    if nvcc is not None:
        return Decision(
            nvcc,
            f"CUDA kernels: built for {', '.join(named_architectures(environment, nvcc))} with nvcc "
            f"{dotted(nvcc.version)} ({nvcc.path}), because torch {torch_version} is a CUDA {torch_cuda} "
            "build",
        )
    if choice == "1":
        raise CudaBuildError(
            f"{SELECTOR}=1, and the CUDA kernels cannot be built: {obstacle}. {remedy}, or unset "
            f"{SELECTOR} to go without them."
        )
    return Decision(None, f"CUDA kernels: not built, because {obstacle}")


def find_matching(
    environment: Mapping[str, str],
    torch_cuda: str,
    pip_folders: list[Path],
    inspect: Callable[[Path], Nvcc | None],
) -> tuple[Nvcc | None, str, str]:
    """A compiler of torch's CUDA version; else what is in the way, and what to do about it."""
    major = parse_version(torch_cuda)[0]
    remedy = f"Install the CUDA toolkit {torch_cuda} and name its folder with CUDA_HOME"
    seen: list[str] = []
    for path in candidates(environment, pip_folders):
        nvcc = inspect(path)
        if nvcc is None:
            seen.append(f"{path} does not run")
        elif nvcc.version[0] != major:
            seen.append(f"{path} is of CUDA {dotted(nvcc.version)}")
        elif not supported(nvcc):
            seen.append(f"{path} knows no GPU from compute capability {dotted(OLDEST_CAPABILITY)} on")
        else:
            return nvcc, "", ""
    if not seen:
        return None, f"no nvcc was found for torch's CUDA {torch_cuda}", remedy
    return None, f"no nvcc is of torch's CUDA {major} ({'; '.join(seen)})", remedy


# Architectures.


def supported(nvcc: Nvcc) -> list[Version]:
    return [capability for capability in nvcc.capabilities if capability >= OLDEST_CAPABILITY]


def default_architectures(nvcc: Nvcc) -> list[Version]:
    """The oldest capability of each generation that nvcc knows.

    Machine code for one serves all later ones of its generation, so the others would only take
    time: kernels that wait for memory gain nothing from them.
    """
    oldest: dict[int, Version] = {}
    for capability in supported(nvcc):
        oldest.setdefault(capability[0], capability)
    return list(oldest.values())


def named_architectures(environment: Mapping[str, str], nvcc: Nvcc) -> list[str]:
    """The GPUs that are built for, as ``TORCH_CUDA_ARCH_LIST`` names them."""
    asked = environment.get(ARCHITECTURES, "")
    if asked:
        return re.split(r"[;\s]+", asked.strip())
    named = [dotted(capability) for capability in default_architectures(nvcc)]
    return [*named[:-1], f"{named[-1]}+PTX"]


def architecture_flags(environment: Mapping[str, str], nvcc: Nvcc) -> list[str]:
    """Options that select the GPUs; none where the environment does, which torch reads itself."""
    if environment.get(ARCHITECTURES, ""):
        return []
    numbers = [f"{major}{minor}" for major, minor in default_architectures(nvcc)]
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    return [*flags, f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}"]


# What pip's CUDA packages hold: torch's CUDA builds need their libraries, and have their headers.


def pip_cuda_folders(site_packages: Path, torch_cuda: str | None) -> list[Path]:
    """``nvidia/cu13`` and the like, and the folders of the packages before them."""
    root = site_packages / "nvidia"
    if torch_cuda is None or not root.is_dir():
        return []
    merged = f"cu{parse_version(torch_cuda)[0]}"
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    single = [path for path in folders if not re.fullmatch(r"cu\d+", path.name)]
    return [path for path in folders if path.name == merged] + single


def include_flags(pip_folders: list[Path]) -> list[str]:
    """After the toolkit's own headers, for those that it lacks."""
    flags: list[str] = []
    for folder in pip_folders:
        if (folder / "include").is_dir():
            flags += ["-isystem", str(folder / "include")]
    return flags


def runtime_library(pip_folders: list[Path], toolkit: Path) -> list[str]:
    """How to link the CUDA runtime: the one that torch loads, else the toolkit's."""
    folders = [folder / "lib" for folder in pip_folders] + [toolkit / "lib64", toolkit / "lib"]
    for folder in folders:
        found = sorted(folder.glob("libcudart.so*"))
        if found:
            return [str(found[0])]
    return ["-lcudart"]


def compile_flags(environment: Mapping[str, str], nvcc: Nvcc, pip_folders: list[Path]) -> list[str]:
    """nvcc's options."""
    flags = [*NVCC_FLAGS, *include_flags(pip_folders), *architecture_flags(environment, nvcc)]
    compiler = environment.get("CXX", "")
    # torch passes CC on, if it is set; a C++ compiler that the user names must serve nvcc as well.
    if not environment.get("CC") and compiler and shutil.which(compiler):
        flags += ["-ccbin", compiler]
    return flags
