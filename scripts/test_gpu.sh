#!/usr/bin/env bash
# Builds the extension with its CUDA kernels, runs the GPU tests and the kernel benchmark. For a machine
# with a GPU, nvcc and a Python that has torch (a CUDA build), numpy, setuptools, pytest,
# pytest-timeout and hypothesis. Installs nothing and needs no network; what it builds goes to build/gpu.
#
#   scripts/test_gpu.sh              all three
#   scripts/test_gpu.sh STAGE...     some of them: build, tests, benchmark
#
#   SSD_ALLREDUCE_PYTHON      which Python; by default python3
#   SSD_ALLREDUCE_GPU_JSON    where the benchmark's figures go; by default build/gpu/kernels.json
#   TORCH_CUDA_ARCH_LIST      for which GPUs; by default this machine's

set -euo pipefail

STARTED_IN="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT="$PWD"
BUILD="$ROOT/build/gpu"

stop() {
    printf 'test_gpu.sh: %s\n' "$1" >&2
    exit 1
}

# A path that was given relative to the caller's folder, without following links: a virtual environment's
# Python is one.
absolute() {
    case "$1" in
    /*) printf '%s' "$1" ;;
    *) printf '%s/%s' "$STARTED_IN" "$1" ;;
    esac
}

find_python() {
    PYTHON="${SSD_ALLREDUCE_PYTHON:-python3}"
    case "$PYTHON" in
    */*) PYTHON="$(absolute "$PYTHON")" ;;
    esac
    command -v "$PYTHON" >/dev/null || stop "there is no $PYTHON; name a Python with SSD_ALLREDUCE_PYTHON"
    local module
    for module in torch numpy pytest pytest_timeout hypothesis setuptools; do
        "$PYTHON" -c "import $module" 2>/dev/null || stop "$PYTHON has no module $module; install it first"
    done
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        stop "torch finds no GPU (nvidia-smi shows the driver's view)"
    printf '==> %s\n' "$("$PYTHON" -c 'import torch
print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)')"
}

build() {
    if [ -z "${TORCH_CUDA_ARCH_LIST:-}" ]; then
        TORCH_CUDA_ARCH_LIST="$("$PYTHON" -c 'import torch
print("%d.%d" % torch.cuda.get_device_capability())')"
        export TORCH_CUDA_ARCH_LIST
    fi
    printf '\n==> the extension, for %s\n' "$TORCH_CUDA_ARCH_LIST"
    rm -rf "$BUILD/package"
    mkdir -p "$BUILD"
    SSD_ALLREDUCE_CUDA=1 "$PYTHON" setup.py build --build-base "$BUILD" --build-lib "$BUILD/package" \
        >"$BUILD/build.log" 2>&1 || {
        tail -n 40 "$BUILD/build.log" >&2
        stop "the extension could not be built (whole log: $BUILD/build.log)"
    }
    grep -m 1 '^CUDA kernels' "$BUILD/build.log"
}

# From another folder: the package that was just built, not the one in the source tree.
with_built_package() {
    [ -d "$BUILD/package" ] || stop "nothing is built in $BUILD; run the stage build first"
    (cd "$BUILD" && PYTHONPATH="$BUILD/package${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" "$@")
}

tests() {
    printf '\n==> GPU tests\n'
    with_built_package -m pytest --rootdir "$ROOT" -c "$ROOT/pyproject.toml" "$ROOT/tests/gpu"
}

benchmark() {
    printf '\n==> kernel benchmark\n'
    with_built_package "$ROOT/benchmarks/kernels.py" --device cuda --json "$JSON" || return 1
    printf '\nfigures in %s\n' "$JSON"
}

[ "$#" -gt 0 ] || set -- build tests benchmark
for stage; do
    case "$stage" in
    build | tests | benchmark) ;;
    *) stop "there is no stage '$stage'; allowed are build, tests and benchmark" ;;
    esac
done
JSON="$(absolute "${SSD_ALLREDUCE_GPU_JSON:-$BUILD/kernels.json}")"
find_python
STATUS=0
for stage; do
    if [ "$stage" = build ]; then
        build
    else
        "$stage" || STATUS=1
    fi
done
exit "$STATUS"
