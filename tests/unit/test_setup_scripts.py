"""The set-up's decisions, with stand-ins for what it would install or build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "bash"


def bash(
    script: str, *arguments: str, path: str | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a piece of bash with the set-up's functions loaded, in a minimal environment."""
    prologue = f"""
        set -euo pipefail
        REPO_ROOT={str(ROOT)!r}
        for library in common toolchain mpi horovod package; do
            source "$REPO_ROOT/scripts/lib/$library.sh"
        done
        STAMPS="$VENV/.stamps"
        PY={sys.executable!r}
    """
    return subprocess.run(
        [BASH, "-c", prologue + script, "bash", *arguments],
        env={"HOME": os.environ.get("HOME", "/"), "PATH": path or "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def program(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)


class TestRunStep:
    SCRIPT = """
        attempt() { echo attempt; }
        broken() { echo attempt; false; }
        run_step thing "$1" "$2"
    """

    def run(self, venv: Path, key: str, function: str) -> subprocess.CompletedProcess[str]:
        return bash(self.SCRIPT, key, function, SSD_ALLREDUCE_VENV=str(venv))

    def test_runs_once_per_key(self, tmp_path: Path) -> None:
        outputs = [self.run(tmp_path, key, "attempt").stdout for key in ("a", "a", "b", "b")]
        assert outputs == ["attempt\n", "", "attempt\n", ""]

    def test_failed_step_is_tried_again(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, "a", "attempt").returncode == 0
        assert self.run(tmp_path, "b", "broken").returncode != 0
        assert self.run(tmp_path, "b", "attempt").stdout == "attempt\n"
        # The failed attempt for "b" may have spoilt what the one for "a" had done.
        assert self.run(tmp_path, "a", "attempt").stdout == "attempt\n"

    def test_ready_marker_goes_while_a_step_runs(self, tmp_path: Path) -> None:
        ready = tmp_path / ".ready"
        ready.touch()
        self.run(tmp_path, "a", "broken")
        assert not ready.exists()


class TestMissingTools:
    def test_no_compiler(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        result = bash("PATH=$1; find_compiler", str(tmp_path / "empty"))
        assert result.returncode == 1
        assert "no C++ compiler was found" in result.stderr
        assert "g++" in result.stderr

    def test_compiler_without_cxx20(self, tmp_path: Path) -> None:
        program(tmp_path / "oldcxx", "echo 'unrecognized option -std=gnu++20' >&2", "exit 1")
        result = bash('COMPILER="$1"; check_compiler', str(tmp_path / "oldcxx"))
        assert result.returncode == 1
        assert "unrecognized option" in result.stderr
        assert "C++20" in result.stderr

    def test_no_python(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        result = bash("PATH=$1; find_python", str(tmp_path / "empty"))
        assert result.returncode == 1
        assert "no Python 3.10 or newer" in result.stderr

    def test_failed_build_shows_the_end_of_its_log(self, tmp_path: Path) -> None:
        script = 'logged "$1/log" bash -c "seq 1 500; exit 3" || die "it broke" "mend it"'
        result = bash(script, str(tmp_path))
        assert result.returncode == 1
        assert "500" in result.stderr
        assert "\n100\n" not in result.stderr
        assert "it broke" in result.stderr
        assert "mend it" in result.stderr


class TestChooseMpi:
    SCRIPT = 'choose_mpi; printf "%s|%s" "$MPI_SOURCE" "$MPI_BIN"'

    def fake_mpi(self, folder: Path, *names: str) -> Path:
        for name in names:
            program(folder / name, "echo 'mpirun (Open MPI) 4.1.4'")
        return folder

    def choose(self, venv: Path, *folders: Path) -> str:
        # An MPI that this machine happens to have must not be found.
        tools = venv.parent / "tools"
        tools.mkdir()
        for name in ("dirname", "head", "tr"):
            (tools / name).symlink_to(shutil.which(name) or name)
        path = ":".join(map(str, (*folders, tools)))
        result = bash(self.SCRIPT, path=path, SSD_ALLREDUCE_VENV=str(venv))
        assert result.returncode == 0, result.stderr
        return result.stdout

    def test_none_on_path(self, tmp_path: Path) -> None:
        assert self.choose(tmp_path / "venv").startswith("pypi|")

    def test_complete_one_wins(self, tmp_path: Path) -> None:
        found = self.fake_mpi(tmp_path / "my mpi" / "bin", "mpirun", "mpicxx")
        assert self.choose(tmp_path / "venv", found) == f"system|{found}"

    def test_runtime_without_compiler_is_not_enough(self, tmp_path: Path) -> None:
        found = self.fake_mpi(tmp_path / "mpi", "mpirun")
        assert self.choose(tmp_path / "venv", found).startswith("pypi|")

    def test_active_environment_is_not_the_system(self, tmp_path: Path) -> None:
        venv = tmp_path / "venv"
        own = self.fake_mpi(venv / "bin", "mpirun", "mpicxx")
        assert self.choose(venv, own).startswith("pypi|")


class TestCompilerWrapper:
    def arguments_after(self, tmp_path: Path, source: str, *given: str) -> list[str]:
        compiler = tmp_path / "real c++"
        program(compiler, 'printf "%s\\n" "$@"')
        result = bash(
            f'COMPILER={str(compiler)!r}; MPI_SOURCE={source}; write_compiler_wrapper "$1"; "$@"',
            str(tmp_path / "cxx"),
            *given,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    @pytest.mark.parametrize("standard", ["c++11", "gnu++14", "c++17"])
    def test_raises_the_standard(self, tmp_path: Path, standard: str) -> None:
        got = self.arguments_after(tmp_path, "pypi", f"-std={standard}", "-O2", "a b.cc")
        assert got == ["-std=gnu++20", "-O2", "a b.cc"]

    def test_own_mpi_is_found_relative_to_the_library(self, tmp_path: Path) -> None:
        given = ("-shared", "-Wl,-rpath,/build/lib:/other", "-Wl,-rpath", "-Wl,/build/lib", "-lmpi")
        got = self.arguments_after(tmp_path, "pypi", *given)
        assert got == ["-shared", "-lmpi", "-Wl,-rpath,$ORIGIN/../../../.."]

    def test_system_mpi_keeps_its_place(self, tmp_path: Path) -> None:
        given = ["-shared", "-Wl,-rpath", "-Wl,/opt/mpi/lib", "-lmpi"]
        assert self.arguments_after(tmp_path, "system", *given) == given

    def test_folders_of_the_build_are_not_kept(self, tmp_path: Path) -> None:
        given = f"-Wl,-rpath,/opt/mpi/lib:{tmp_path}/venv/lib:/opt/other"
        got = self.arguments_after(tmp_path, "system", "-shared", given)
        assert got == ["-shared", "-Wl,-rpath,/opt/mpi/lib", "-Wl,-rpath,/opt/other"]


class TestOptions:
    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, str(ROOT / "scripts" / script), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @pytest.mark.parametrize(
        ("script", "arguments", "message"),
        [
            ("demo.sh", ["--colour", "red"], "'--colour' is not an option"),
            ("demo.sh", ["--ranks"], "--ranks needs a value"),
            ("launch.sh", ["-n", "2"], "no command after --"),
            ("launch.sh", ["-n", "none", "--", "true"], "not 'none'"),
            ("launch.sh", ["python", "x.py"], "the command to run stands after --"),
            ("launch.sh", ["--launcher", "srun", "--", "true"], "'srun' is not a launcher"),
        ],
    )
    def test_wrong_use(self, script: str, arguments: list[str], message: str) -> None:
        result = self.run(script, *arguments)
        assert result.returncode == 2
        assert message in result.stderr

    def test_launch_prints_its_command(self) -> None:
        result = self.run("launch.sh", "--print", "--launcher", "mpirun", "-n", "3", "--", "a b")
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("mpirun -n 3 ")
        assert result.stdout.rstrip().endswith("a\\ b")


class TestGpuScript:
    """With a Python that builds nothing and tells how it was called."""

    PYTHON = (
        'case "$1" in',
        '    -c) case "$2" in *get_device_capability*) echo 9.0 ;; esac ;;',
        '    setup.py) echo "CUDA kernels: for $TORCH_CUDA_ARCH_LIST"; mkdir -p build/gpu/package ;;',
        '    -m) echo "tests with $PYTHONPATH"; exit "${TESTS_END_WITH:-0}" ;;',
        '    *) echo "benchmark into $5" ;;',
        "esac",
    )

    def run(self, root: Path, *stages: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs it from another folder than its own, in which the Python is."""
        (root / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / "test_gpu.sh", root / "scripts")
        program(root / "here" / "python", *self.PYTHON)
        return subprocess.run(
            [BASH, "../scripts/test_gpu.sh", *stages],
            cwd=root / "here",
            env={"PATH": "/usr/bin:/bin", "SSD_ALLREDUCE_PYTHON": "./python", **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def test_builds_tests_and_measures(self, tmp_path: Path) -> None:
        result = self.run(tmp_path)
        assert result.returncode == 0, result.stderr
        said = [line for line in result.stdout.splitlines() if line and not line.startswith("==>")]
        build = tmp_path / "build" / "gpu"
        assert said == [
            "CUDA kernels: for 9.0",
            f"tests with {build}/package",
            f"benchmark into {build}/kernels.json",
            f"figures in {build}/kernels.json",
        ]

    def test_stages_run_one_at_a_time(self, tmp_path: Path) -> None:
        assert "run the stage build first" in self.run(tmp_path, "tests").stderr
        assert "CUDA kernels" in self.run(tmp_path, "build", TORCH_CUDA_ARCH_LIST="8.0").stdout
        result = self.run(tmp_path, "benchmark", SSD_ALLREDUCE_GPU_JSON="figures.json")
        assert "CUDA kernels" not in result.stdout
        assert f"benchmark into {tmp_path}/here/figures.json" in result.stdout

    def test_search_path_of_the_caller_is_kept(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, "build", "tests", PYTHONPATH="/tools")
        assert f"tests with {tmp_path}/build/gpu/package:/tools" in result.stdout

    def test_benchmark_runs_after_tests_that_failed(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, TESTS_END_WITH="1")
        assert result.returncode == 1
        assert "benchmark into" in result.stdout

    def test_unknown_stage_is_refused(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, "bench")
        assert result.returncode == 1
        assert "there is no stage 'bench'; allowed are build, tests and benchmark" in result.stderr
