#!/usr/bin/env bash
# Compiles the CUDA kernels for one GPU architecture, in an environment of its own, and looks at the
# machine code: is every kernel there, does it load 16 bytes at a time, does it keep out of local
# memory? Needs nvcc and about 8 GB of disk, and no GPU: nothing is run on one. Where nvcc is missing,
# it says so and succeeds.
#
#   SSD_ALLREDUCE_CUDA_VENV     where the environment goes; by default .venv-cuda
#   SSD_ALLREDUCE_CUDA_TORCH    which torch pip installs there if there is none: a CUDA build

set -euo pipefail

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export SSD_ALLREDUCE_VENV="${SSD_ALLREDUCE_CUDA_VENV:-$REPO_ROOT/.venv-cuda}"
for library in common toolchain; do
    # shellcheck source=/dev/null
    source "$REPO_ROOT/scripts/lib/$library.sh"
done

TORCH="${SSD_ALLREDUCE_CUDA_TORCH:-torch==2.14.1}"
ARCHITECTURE="9.0"
NEEDED_GB=8

skip() {
    printf 'SKIPPED check_cuda: %s\n' "$1"
    exit 0
}

has_nvcc() {
    command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]
}

free_gb() {
    df -Pk "$1" | awk 'NR == 2 { print int($4 / 1048576) }'
}

ensure_cuda_torch() {
    if [ -n "$(version_of torch)" ]; then
        return 0
    fi
    if [ "$(free_gb "$VENV")" -lt "$NEEDED_GB" ]; then
        skip "a CUDA build of torch needs $NEEDED_GB GB of disk, and $(free_gb "$VENV") GB are free in $VENV"
    fi
    say "$TORCH, a CUDA build, into $VENV"
    local arguments
    read -r -a arguments <<<"$TORCH"
    pip_install numpy "${arguments[@]}"
}

build_extension() {
    local build="$VENV/build"
    rm -rf "$build"
    mkdir -p "$build"
    say "the extension with its CUDA kernels, for compute capability $ARCHITECTURE"
    local began="$SECONDS"
    # Beside the source tree, where another environment keeps its own extension.
    (cd "$REPO_ROOT" && logged "$VENV/build.log" env CXX="$COMPILER" SSD_ALLREDUCE_CUDA=1 \
        TORCH_CUDA_ARCH_LIST="$ARCHITECTURE" NVCC_APPEND_FLAGS="--time=$build/phases.csv" \
        "$PY" setup.py build_ext --build-lib "$build/lib" --build-temp "$build/temp") ||
        die "the CUDA kernels could not be built (whole log: $VENV/build.log)"
    grep -m 1 '^CUDA kernels' "$VENV/build.log"
    say "built in $((SECONDS - began)) seconds, of which nvcc took for each file"
    compile_seconds "$build/phases.csv"
}

# nvcc appends one line for each phase: file, phase, input, output, architecture, tool, time, "ms".
compile_seconds() {
    awk -F ' *, *' '$8 ~ /^ms/ && $1 ~ /\.cu$/ { name = $1; sub(".*/", "", name); total[name] += $7 }
        END { for (name in total) printf "%6.1f s  %s\n", total[name] / 1000, name }' "$1" | sort -rn
}

main() {
    unset PYTHONHOME PYTHONPATH
    export PYTHONNOUSERSITE=1
    has_nvcc || skip "there is no nvcc on this machine (looked on PATH and in CUDA_HOME)"
    mkdir -p "$VENV" "$CACHE"
    VENV="$(cd "$VENV" && pwd)"
    STAMPS="$VENV/.stamps"
    PY="$VENV/bin/python"
    take_turns "$VENV" 9
    COMPILER="$(find_compiler)"
    ensure_venv
    run_step build-requirements "${BUILD_REQUIREMENTS[*]}" install_build_requirements
    ensure_cuda_torch
    check_python_headers
    build_extension
    say "what the compiler made of the kernels"
    "$PY" "$REPO_ROOT/scripts/lib/inspect_cuda.py" "$VENV"/build/lib/ssd_allreduce/_C*.so \
        --architecture "$ARCHITECTURE"
}

main "$@"
