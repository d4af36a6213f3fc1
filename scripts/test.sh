#!/usr/bin/env bash
# Sets everything up and runs every check: style, types, unit tests, the distributed tests under mpirun,
# horovodrun and torchrun, and the GPU tests where there is a GPU. All parts run; the status is non-zero if one failed.

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
# shellcheck source=scripts/env.sh
source scripts/env.sh

RESULTS="$(mktemp -d)"
trap 'rm -rf "$RESULTS"' EXIT
SUMMARY=()
STATUS=0

# check NAME COMMAND...
check() {
    local name="$1"
    shift
    printf '\n==> %s\n' "$name"
    if "$@"; then
        SUMMARY+=("$name=passed")
    else
        SUMMARY+=("$name=failed")
        STATUS=1
    fi
}

# run_tests NAME FOLDER
run_tests() {
    local counts="$RESULTS/${1// /-}.json"
    printf '\n==> %s\n' "$1"
    # What the summary cannot see in the counts (an internal error, say) still decides the status.
    python -m pytest "$2" --counts-json "$counts" || STATUS=1
    SUMMARY+=("$1=$counts")
}

check_cpp_style() {
    find csrc -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) \
        -exec clang-format --dry-run -Werror {} +
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "clang-format" check_cpp_style
check "mypy" mypy --strict ssd_allreduce
run_tests "unit tests" tests/unit
run_tests "distributed tests" tests/distributed
run_tests "GPU tests" tests/gpu

python scripts/test_summary.py "${SUMMARY[@]}" || STATUS=1
exit "$STATUS"
