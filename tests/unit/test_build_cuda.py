"""Whether the CUDA kernels get built, by which compiler and for which GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import build_cuda  # noqa: E402

NVCC_13 = """\
case "$1" in
    --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
    --list-gpu-arch) printf 'compute_%s\\n' 75 80 86 89 90 100 110 103 120 121 ;;
    --dryrun) echo '#$ _HERE_=/opt/cuda-13.0/bin' >&2 ;;
esac
"""
NVCC_12 = """\
case "$1" in
    --version) echo "Cuda compilation tools, release 12.4, V12.4.131" ;;
    --list-gpu-arch) printf 'compute_%s\\n' 50 52 60 70 72 75 80 90 ;;
esac
"""


def install(folder: Path, script: str) -> Path:
    """A stand-in for a toolkit; returns its compiler."""
    path = folder / "bin/nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return path


def decide(
    torch_cuda: str | None, pip_folders: list[Path] | None = None, **environment: str
) -> build_cuda.Decision:
    return build_cuda.decide(environment, "2.14.1", torch_cuda, pip_folders or [])


@pytest.fixture(autouse=True)
def _no_toolkit_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = build_cuda.candidates
    monkeypatch.setattr(
        build_cuda,
        "candidates",
        lambda *arguments: [path for path in candidates(*arguments) if "/usr/local/cuda" not in str(path)],
    )


def test_a_cpu_build_of_torch_gets_no_cuda_kernels(tmp_path: Path) -> None:
    install(tmp_path, NVCC_13)
    decision = decide(None, CUDA_HOME=str(tmp_path))
    assert decision.nvcc is None
    assert decision.reason == "CUDA kernels: not built, because torch 2.14.1 is not a CUDA build"


def test_a_matching_compiler_builds_them(tmp_path: Path) -> None:
    nvcc = install(tmp_path, NVCC_13)
    decision = decide("13.0", CUDA_HOME=str(tmp_path))
    assert decision.nvcc is not None
    assert decision.nvcc.path == nvcc
    assert decision.nvcc.version == (13, 0)
    assert decision.reason == (
        f"CUDA kernels: built for 7.5, 8.0, 9.0, 10.0, 11.0, 12.0+PTX with nvcc 13.0 ({nvcc}), because "
        "torch 2.14.1 is a CUDA 13.0 build"
    )


def test_a_minor_version_of_cuda_may_differ(tmp_path: Path) -> None:
    install(tmp_path, NVCC_12)
    assert decide("12.8", CUDA_HOME=str(tmp_path)).nvcc is not None


def test_a_compiler_of_another_cuda_does_not_match(tmp_path: Path) -> None:
    nvcc = install(tmp_path, NVCC_12)
    decision = decide("13.0", CUDA_HOME=str(tmp_path))
    assert decision.nvcc is None
    assert f"no nvcc is of torch's CUDA 13 ({nvcc} is of CUDA 12.4)" in decision.reason


def test_the_matching_compiler_is_found_behind_others(tmp_path: Path) -> None:
    install(tmp_path / "old", NVCC_12)
    on_path = install(tmp_path / "new", NVCC_13)
    decision = decide("13.0", CUDA_HOME=str(tmp_path / "old"), PATH=str(on_path.parent))
    assert decision.nvcc is not None
    assert decision.nvcc.path == on_path


def test_a_compiler_among_pips_packages_is_the_last_choice(tmp_path: Path) -> None:
    carried = install(tmp_path / "nvidia/cu13", NVCC_13)
    decision = decide("13.0", [tmp_path / "nvidia/cu13"], PATH="")
    assert decision.nvcc is not None
    assert decision.nvcc.path == carried


def test_no_compiler_is_said(tmp_path: Path) -> None:
    decision = decide("13.0", PATH=str(tmp_path))
    assert decision.reason == "CUDA kernels: not built, because no nvcc was found for torch's CUDA 13.0"


def test_a_compiler_that_does_not_run_is_said(tmp_path: Path) -> None:
    nvcc = install(tmp_path, "exit 1\n")
    assert f"{nvcc} does not run" in decide("13.0", CUDA_HOME=str(tmp_path)).reason


def test_zero_leaves_them_out(tmp_path: Path) -> None:
    install(tmp_path, NVCC_13)
    decision = decide("13.0", CUDA_HOME=str(tmp_path), SSD_ALLREDUCE_CUDA="0")
    assert decision.nvcc is None
    assert decision.reason == "CUDA kernels: not built, because SSD_ALLREDUCE_CUDA=0"


@pytest.mark.parametrize(
    ("torch_cuda", "says"),
    [
        (None, "torch 2.14.1 is not a CUDA build. Install a CUDA build of torch"),
        (
            "13.0",
            "no nvcc was found for torch's CUDA 13.0. Install the CUDA toolkit 13.0 and name its folder",
        ),
    ],
)
def test_one_demands_them(tmp_path: Path, torch_cuda: str | None, says: str) -> None:
    with pytest.raises(build_cuda.CudaBuildError, match="SSD_ALLREDUCE_CUDA=1") as error:
        decide(torch_cuda, PATH=str(tmp_path), SSD_ALLREDUCE_CUDA="1")
    assert says in str(error.value)
    assert "unset SSD_ALLREDUCE_CUDA" in str(error.value)


def test_other_choices_are_refused() -> None:
    with pytest.raises(build_cuda.CudaBuildError, match="SSD_ALLREDUCE_CUDA='yes'; allowed are 1"):
        decide(None, SSD_ALLREDUCE_CUDA="yes")


def test_a_broken_demand_ends_the_build_with_its_message() -> None:
    """The whole of setup.py, with the installed torch."""
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={"PATH": "", "SSD_ALLREDUCE_CUDA": "maybe"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "setup.py: SSD_ALLREDUCE_CUDA='maybe'; allowed are" in done.stderr


# For which GPUs.


def test_each_generation_from_volta_on_gets_code_and_the_newest_ptx(tmp_path: Path) -> None:
    nvcc = build_cuda.inspect_nvcc(install(tmp_path, NVCC_12))
    assert nvcc is not None
    assert build_cuda.named_architectures({}, nvcc) == ["7.0", "8.0", "9.0+PTX"]
    assert build_cuda.architecture_flags({}, nvcc) == [
        "-gencode=arch=compute_70,code=sm_70",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_the_environment_s_list_is_left_to_torch(tmp_path: Path) -> None:
    nvcc = build_cuda.inspect_nvcc(install(tmp_path, NVCC_13))
    assert nvcc is not None
    environment = {"TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"}
    assert build_cuda.named_architectures(environment, nvcc) == ["8.0", "9.0+PTX"]
    assert build_cuda.architecture_flags(environment, nvcc) == []


# Headers and libraries.


def test_the_toolkit_behind_a_script_is_found(tmp_path: Path) -> None:
    nvcc = install(tmp_path, NVCC_13)
    assert build_cuda.toolkit_root(nvcc) == Path("/opt/cuda-13.0")
    assert build_cuda.toolkit_root(install(tmp_path / "plain", "exit 0\n")) == tmp_path / "plain"


def test_pips_headers_and_runtime_are_found_after_the_toolkits(tmp_path: Path) -> None:
    merged = tmp_path / "nvidia/cu13"
    (merged / "include").mkdir(parents=True)
    (merged / "lib").mkdir()
    (merged / "lib/libcudart.so.13").touch()
    folders = build_cuda.pip_cuda_folders(tmp_path, "13.0")
    assert folders == [merged]
    assert build_cuda.include_flags(folders) == ["-isystem", str(merged / "include")]
    assert build_cuda.runtime_library(folders, Path("/nowhere")) == [str(merged / "lib/libcudart.so.13")]


def test_pips_older_packages_have_a_folder_each(tmp_path: Path) -> None:
    for package in ("cublas", "cuda_runtime"):
        (tmp_path / "nvidia" / package / "include").mkdir(parents=True)
    flags = build_cuda.include_flags(build_cuda.pip_cuda_folders(tmp_path, "12.8"))
    for package in ("cublas", "cuda_runtime"):
        assert str(tmp_path / "nvidia" / package / "include") in flags


def test_the_toolkits_runtime_serves_where_pip_has_none(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libcudart.so").touch()
    assert build_cuda.runtime_library([], tmp_path) == [str(tmp_path / "lib64/libcudart.so")]
    assert build_cuda.runtime_library([], tmp_path / "empty") == ["-lcudart"]


def test_multiplications_and_additions_are_not_contracted(tmp_path: Path) -> None:
    nvcc = build_cuda.inspect_nvcc(install(tmp_path, NVCC_13))
    assert nvcc is not None
    assert "-fmad=false" in build_cuda.compile_flags({}, nvcc, [])


def setup_without_torch(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "torch.py").write_text("raise ImportError('hidden by the build')\n")
    return subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_build_without_torch_goes_without_kernels_and_says_so(tmp_path: Path) -> None:
    done = setup_without_torch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "without compiled kernels" in done.stdout
    assert "pip install --no-build-isolation ." in done.stdout


@pytest.mark.parametrize("demand", [{"SSD_ALLREDUCE_NO_EXTENSION": "0"}, {"SSD_ALLREDUCE_CUDA": "1"}])
def test_kernels_that_are_demanded_need_torch(demand: dict[str, str], tmp_path: Path) -> None:
    done = setup_without_torch(tmp_path, **demand)
    assert done.returncode != 0
    assert "demands them. The compiled kernels are built against the installed torch" in done.stderr
