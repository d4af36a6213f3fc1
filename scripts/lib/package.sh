# The package itself with its extension, and everything that pyproject.toml asks for.

required_by_pyproject() {
    "$PY" - "$REPO_ROOT/pyproject.toml" <<'PYTHON'
import sys

try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for requirement in sum(project["optional-dependencies"].values(), project["dependencies"]):
    print(requirement)
PYTHON
}

install_requirements() {
    say "dependencies and tools"
    local -a requirements
    mapfile -t requirements < <(required_by_pyproject)
    pip_install "${requirements[@]}"
}

# Everything that decides what is built, and where Python looks for the packages.
package_key() {
    {
        echo "torch $TORCH_VERSION; extension off: ${SSD_ALLREDUCE_NO_EXTENSION:-0}; $REPO_ROOT"
        "$COMPILER" --version | head -n 1
        echo "CUDA: ${SSD_ALLREDUCE_CUDA:-}; ${TORCH_CUDA_ARCH_LIST:-}; ${CUDA_HOME:-}; $(command -v nvcc || true)"
        cd "$REPO_ROOT"
        find ssd_allreduce -type d ! -name __pycache__ 2>/dev/null | LC_ALL=C sort
        find setup.py build_cuda.py pyproject.toml csrc -type f 2>/dev/null | LC_ALL=C sort |
            while IFS= read -r file; do
                echo "$file"
                cat "$file"
            done
    } | digest
}

# The extension lies in the source tree, where another virtual environment's may have replaced it.
built_extension() {
    cat "$REPO_ROOT"/ssd_allreduce/_C*.so 2>/dev/null | digest
}

install_package() {
    say "ssd_allreduce and its extension"
    logged "$VENV/package.log" env CXX="$COMPILER" \
        "$PY" -m pip install --disable-pip-version-check --verbose \
        --no-build-isolation --no-deps --editable "$REPO_ROOT" ||
        die "ssd_allreduce could not be built (whole log: $VENV/package.log)" \
            "Look for the first 'error:' in the log, then run this script again." \
            "SSD_ALLREDUCE_CUDA=0 builds it without the CUDA kernels." \
            "SSD_ALLREDUCE_NO_EXTENSION=1 installs it without the extension, which is slower."
}

ensure_package() {
    local key stamp="$STAMPS/package"
    key="$(package_key)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key $(built_extension)" ]; then
        return 0
    fi
    rm -f "$stamp"
    mkdir -p "$STAMPS"
    install_package
    printf '%s %s\n' "$key" "$(built_extension)" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}
