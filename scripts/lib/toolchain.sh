# What the machine has to bring: Python and a C++ compiler; and the virtual environment with torch.

MIN_PYTHON="3.10"
DEFAULT_TORCH="torch==2.13.0"
# From 80 on setuptools refuses what Horovod's setup.py does.
BUILD_REQUIREMENTS=("setuptools>=68,<80" wheel packaging cloudpickle psutil pyyaml cffi)

suitable_python() {
    "$1" -c "import sys; sys.exit(sys.version_info < tuple(map(int, '$MIN_PYTHON'.split('.'))))" \
        2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${SSD_ALLREDUCE_PYTHON:+"$SSD_ALLREDUCE_PYTHON"} python3.11 python3 python3.12 python3.10; do
        if command -v "$candidate" >/dev/null && suitable_python "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    die "no Python $MIN_PYTHON or newer was found on PATH" \
        "Install one (Debian, Ubuntu: python3 python3-venv python3-dev) or name one with SSD_ALLREDUCE_PYTHON."
}

find_compiler() {
    local candidate
    for candidate in ${CXX:+"$CXX"} g++ c++ clang++; do
        if command -v "$candidate" >/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    die "no C++ compiler was found (looked for \$CXX, g++, c++, clang++)" \
        "Install one that knows C++20 (Debian, Ubuntu: g++) or name one with CXX."
}

check_compiler() {
    local scratch
    scratch="$(mktemp -d)"
    printf '#include <concepts>\nint main() { return 0; }\n' >"$scratch/probe.cpp"
    if ! "$COMPILER" -std=gnu++20 "$scratch/probe.cpp" -o "$scratch/probe" 2>"$scratch/log"; then
        tail -n "$TAIL_LINES" "$scratch/log" >&2
        rm -rf "$scratch"
        die "$COMPILER cannot compile and link a C++20 program, which torch's headers need" \
            "Install a newer compiler with its standard library (GCC 11 or newer will do) or name one with CXX."
    fi
    rm -rf "$scratch"
}

check_python_headers() {
    "$PY" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        die "the headers of $("$PY" --version) are missing (Python.h)" \
            "Install them (Debian, Ubuntu: python3-dev)."
}

create_venv() {
    say "virtual environment in $VENV"
    rm -rf "$STAMPS" "$VENV/.ready"
    "$PYTHON" -m venv "$VENV" ||
        die "$PYTHON could not create a virtual environment" \
            "Install its venv module (Debian, Ubuntu: python3-venv)."
}

ensure_venv() {
    if [ -x "$PY" ] && "$PY" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    PYTHON="$(find_python)"
    create_venv
}

install_build_requirements() {
    say "build requirements"
    pip_install "${BUILD_REQUIREMENTS[@]}"
}

install_torch() {
    local torch="${SSD_ALLREDUCE_TORCH:-$DEFAULT_TORCH}"
    say "torch: none is installed here, so $torch is"
    echo "    Another one, for CUDA say, is taken if it is in $VENV before this script runs,"
    echo "    or if SSD_ALLREDUCE_TORCH holds what pip should install:"
    echo "    SSD_ALLREDUCE_TORCH=\"torch==X --index-url ...\""
    local arguments
    read -r -a arguments <<<"$torch"
    # numpy first: a torch index given with --index-url may not have it.
    pip_install numpy
    pip_install "${arguments[@]}"
}

ensure_torch() {
    if [ -z "$(version_of torch)" ]; then
        install_torch
    fi
}
