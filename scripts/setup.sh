#!/usr/bin/env bash
# Sets everything up in .venv (or $SSD_ALLREDUCE_VENV): torch, an MPI, Horovod, this package with its
# extension, and the tools of the demo and the tests. Run it as often as you like: what is done
# already is not done again. Needs Python 3.10 or newer and a C++ compiler; no root, no apt.
#
#   SSD_ALLREDUCE_VENV          where the virtual environment goes
#   SSD_ALLREDUCE_TORCH         which torch pip installs if there is none: "torch==X --index-url ..."
#   SSD_ALLREDUCE_PYTHON        which Python the virtual environment is made of
#   SSD_ALLREDUCE_NO_EXTENSION  1: without the compiled extension
#   SSD_ALLREDUCE_CUDA          1: with CUDA kernels or not at all; 0: without them; by default with
#                               them where torch is a CUDA build and an nvcc of its version is found
#   TORCH_CUDA_ARCH_LIST        for which GPUs; by default all from compute capability 7.0 on
#   CXX                         the C++ compiler

set -euo pipefail

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
for library in common toolchain mpi horovod package; do
    # shellcheck source=/dev/null
    source "$REPO_ROOT/scripts/lib/$library.sh"
done

main() {
    # An active environment's settings and modules of the user's home must not leak into this one.
    unset PYTHONHOME PYTHONPATH
    export PYTHONNOUSERSITE=1
    mkdir -p "$VENV" "$CACHE"
    VENV="$(cd "$VENV" && pwd)"
    STAMPS="$VENV/.stamps"
    PY="$VENV/bin/python"
    take_turns "$VENV" 9
    COMPILER="$(find_compiler)"
    check_compiler
    ensure_venv
    check_python_headers
    repair_interrupted_install
    run_step build-requirements "${BUILD_REQUIREMENTS[*]}" install_build_requirements
    ensure_torch
    TORCH_VERSION="$(version_of torch)"
    ensure_mpi
    ensure_horovod
    run_step requirements "torch $TORCH_VERSION $(required_by_pyproject | digest)" install_requirements
    ensure_package
    touch "$VENV/.ready"
    say "ready: source scripts/env.sh"
}

main "$@"
