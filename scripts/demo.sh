#!/usr/bin/env bash
# Sets everything up, then trains a small CNN on MNIST digits twice, with plain Horovod and with
# SSD-SGD, and compares the two.
#
#   scripts/demo.sh [--ranks 2] [--epochs N] [--delay-steps K] [--overlap-steps D] [--warmup-steps T]
#                   [--json PATH] [--png PATH]
#   scripts/demo.sh --docs      writes the figures and the picture that the README shows

set -euo pipefail

HERE="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RANKS=2
PNG="runs/demo.png"
JSON=""
README=""
TRAINING=()

usage_error() {
    printf 'demo.sh: %s\n' "$1" >&2
    sed -n '5,7s/^#  //p' scripts/demo.sh >&2
    exit 2
}

from_here() {
    case "$1" in
        /*) printf '%s\n' "$1" ;;
        *) printf '%s/%s\n' "$HERE" "$1" ;;
    esac
}

while [ "$#" -gt 0 ]; do
    option="$1"
    case "$option" in
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' scripts/demo.sh; exit 0 ;;
        --docs) JSON=docs/demo.json PNG=docs/images/demo.png README=README.md; shift; continue ;;
        --*=*) option="${1%%=*}"; value="${1#*=}"; shift ;;
        *) [ "$#" -ge 2 ] || usage_error "$1 needs a value"; value="$2"; shift 2 ;;
    esac
    case "$option" in
        --ranks) RANKS="$value" ;;
        --json) JSON="$(from_here "$value")" ;;
        --png) PNG="$(from_here "$value")" ;;
        --epochs | --delay-steps | --overlap-steps | --warmup-steps) TRAINING+=("$option" "$value") ;;
        *) usage_error "'$option' is not an option" ;;
    esac
done

bash scripts/setup.sh
# shellcheck source=scripts/env.sh
source scripts/env.sh

RECORDS="$(mktemp -d)"
trap 'rm -rf "$RECORDS"' EXIT

# train OPTIMIZER TITLE
train() {
    printf '\n==> %s\n' "$2"
    bash scripts/launch.sh --launcher horovodrun-gloo -n "$RANKS" -- \
        python examples/mnist.py --optimizer "$1" --record "$RECORDS/$1.json" \
        ${TRAINING[@]+"${TRAINING[@]}"}
}

train horovod "plain Horovod, $RANKS ranks"
train ssd "SSD-SGD, $RANKS ranks"

printf '\n'
python examples/demo_report.py --horovod "$RECORDS/horovod.json" --ssd "$RECORDS/ssd.json" \
    --png "$PNG" ${JSON:+--json "$JSON"} ${README:+--readme "$README"}

cat <<'END'

The line that turns your own Horovod script into SSD-SGD, after hvd.DistributedOptimizer
and with "import ssd_allreduce as ssd" above:

    optimizer = ssd.DistributedOptimizer(optimizer, delay_steps=8, overlap_steps=4, warmup_steps=500)
END
