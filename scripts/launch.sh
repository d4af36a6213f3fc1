#!/usr/bin/env bash
# Starts a program in several ranks on this machine, with the flags that the launcher at hand needs.
#
#   scripts/launch.sh [--launcher LAUNCHER] [-n RANKS] -- COMMAND...
#   scripts/launch.sh --print ...      shows the command instead of running it
#
# LAUNCHER: mpirun, mpirun-mpi4py (the same, for programs that use MPI without Horovod), horovodrun-gloo,
# horovodrun-mpi or torchrun.

set -euo pipefail

LIBRARY="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/lib"
LAUNCHERS="mpirun, mpirun-mpi4py, horovodrun-gloo, horovodrun-mpi, torchrun"

usage_error() {
    printf 'launch.sh: %s\n' "$1" >&2
    sed -n '4,5s/^#  //p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

parse_arguments() {
    LAUNCHER=horovodrun-gloo
    RANKS=2
    PRINT=no
    while [ "$#" -gt 0 ]; do
        case "$1" in
            --launcher) LAUNCHER="${2:-}"; shift ;;
            -n | -np) RANKS="${2:-}"; shift ;;
            --print) PRINT=yes ;;
            --) shift; break ;;
            *) usage_error "'$1' is not an option; the command to run stands after --" ;;
        esac
        shift || usage_error "the last option needs a value"
    done
    [[ "$RANKS" =~ ^[1-9][0-9]*$ ]] || usage_error "-n takes a number of ranks from 1 on, not '$RANKS'"
    [ "$#" -gt 0 ] || usage_error "there is no command after --"
    PROGRAM=("$@")
}

# openmpi5, openmpi4 or other.
mpi_flavour() {
    local version
    version="$(mpirun --version 2>&1 | head -n 3)" || true
    case "$version" in
        *"(Open MPI) "[5-9]*) echo openmpi5 ;;
        *"Open MPI"* | *OpenRTE*) echo openmpi4 ;;
        *) echo other ;;
    esac
}

# More ranks than cores are allowed, no rank is bound to a core, and a rank that waits gives its
# core to one that computes. Only loopback is used: nothing leaves the machine.
mpirun_command() {
    local flavour
    flavour="$(mpi_flavour)"
    COMMAND=(mpirun -n "$RANKS")
    case "$flavour" in
        openmpi5) COMMAND+=(--bind-to none --map-by slot:OVERSUBSCRIBE) ;;
        openmpi4) COMMAND+=(--bind-to none --map-by slot --oversubscribe --mca oob_tcp_if_include lo) ;;
    esac
    if [ "$flavour" != other ]; then
        COMMAND+=(--mca pml ob1 --mca btl_tcp_if_include lo --mca mpi_yield_when_idle 1)
        if [ "$(id -u)" = 0 ]; then
            COMMAND+=(--allow-run-as-root)
        fi
    fi
    COMMAND+=("${PROGRAM[@]}")
}

# As one word, so that horovodrun and torchrun take no option of the program for its own.
shield_program() {
    PROGRAM=(bash "$LIBRARY/exec_words.sh" "$(printf '%q ' "${PROGRAM[@]}")")
}

horovodrun_gloo_command() {
    shield_program
    COMMAND=(horovodrun --gloo --disable-cache -np "$RANKS" -H "localhost:$RANKS"
        --network-interfaces lo "${PROGRAM[@]}")
}

# horovodrun passes Open MPI 4's single-dash binding flags, which Open MPI 5 rejects.
horovodrun_mpi_command() {
    shield_program
    COMMAND=(horovodrun --mpi --disable-cache -np "$RANKS" -H "localhost:$RANKS"
        --network-interfaces lo)
    case "$(mpi_flavour)" in
        openmpi5) COMMAND+=(--binding-args="--bind-to none --map-by slot:OVERSUBSCRIBE"
            --mpi-args="--mca mpi_yield_when_idle 1") ;;
        openmpi4) COMMAND+=(--mpi-args="--oversubscribe --mca oob_tcp_if_include lo --mca mpi_yield_when_idle 1") ;;
    esac
    COMMAND+=("${PROGRAM[@]}")
}

# A port of its own, so that launches do not meet; gloo would look for an address of the host's name.
torchrun_command() {
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
    shield_program
    COMMAND=(torchrun --nproc-per-node "$RANKS" --standalone --no-python "${PROGRAM[@]}")
}

parse_arguments "$@"
# shellcheck source=scripts/env.sh
source "$LIBRARY/../env.sh"
case "$LAUNCHER" in
    # The same ranks; which engine joins them is the program's choice.
    mpirun | mpirun-mpi4py) mpirun_command ;;
    torchrun) torchrun_command ;;
    horovodrun-gloo) horovodrun_gloo_command ;;
    horovodrun-mpi) horovodrun_mpi_command ;;
    *) usage_error "'$LAUNCHER' is not a launcher; there are $LAUNCHERS" ;;
esac
if [ "$PRINT" = yes ]; then
    printf '%q ' "${COMMAND[@]}"
    echo
else
    exec "${COMMAND[@]}"
fi
