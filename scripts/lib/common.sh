# Shared by the scripts of this folder; sourced, never run. Wants REPO_ROOT to be set.

VENV="${SSD_ALLREDUCE_VENV:-$REPO_ROOT/.venv}"
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/ssd_allreduce"

say() {
    printf '\033[1m==>\033[0m %s\n' "$*"
}

# die "what is wrong" "what to do about it"
die() {
    printf '\nset-up stopped: %s\n' "$1" >&2
    shift
    if [ "$#" -gt 0 ]; then
        printf '  %s\n' "$@" >&2
    fi
    exit 1
}

# How much of a log a person reads before they know what went wrong.
TAIL_LINES=40

# logged LOG COMMAND...: runs quietly; when the command fails, shows the end of what it wrote, and
# the compiler's first errors, which build tools bury under their own.
logged() {
    local log="$1"
    shift
    if ! "$@" >"$log" 2>&1; then
        printf '\n--- last lines of %s\n' "$log" >&2
        tail -n "$TAIL_LINES" "$log" >&2
        if grep -q ': error: ' "$log"; then
            printf '%s\n' '--- first errors' >&2
            grep -m 5 ': error: ' "$log" >&2
        fi
        return 1
    fi
}

# take_turns FOLDER DESCRIPTOR: until this shell ends or closes the descriptor, others who want the
# folder wait: two set-ups at once would install into each other's environment.
take_turns() {
    eval "exec $2<\"\$1\""
    if command -v flock >/dev/null && ! flock --nonblock "$2"; then
        say "waiting for another set-up that uses $1"
        flock "$2"
    fi
}

# pip_install ARGUMENTS...: leaves a mark while pip is at work, see repair_interrupted_install.
pip_install() {
    local log="$VENV/pip.log"
    touch "$VENV/.installing"
    logged "$log" "$PY" -m pip install --disable-pip-version-check "$@" ||
        die "pip could not install: $*" \
            "Is the package index reachable (pip config, proxy)? Then run this script again."
    rm "$VENV/.installing"
}

repair_interrupted_install() {
    if [ -e "$VENV/.installing" ]; then
        say "the last set-up was interrupted: looking for what it left incomplete"
        "$PY" "$REPO_ROOT/scripts/lib/forget_incomplete.py"
        rm -rf "$STAMPS" "$VENV/.installing"
    fi
}

digest() {
    "$PY" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:32])'
}

# run_step NAME KEY FUNCTION: calls FUNCTION unless it has succeeded with this KEY before. The stamp
# is removed first and written last, so that an interrupted step is never taken for a complete one.
run_step() {
    local name="$1" key="$2" function="$3"
    local stamp="$STAMPS/$name"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
        return 0
    fi
    mkdir -p "$STAMPS"
    rm -f "$stamp" "$VENV/.ready"
    "$function"
    printf '%s\n' "$key" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

# Version of an installed distribution, or nothing.
version_of() {
    "$PY" - "$1" <<'PYTHON'
import importlib.metadata
import sys

try:
    print(importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    pass
PYTHON
}
