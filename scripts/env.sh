# source scripts/env.sh: this shell then has the project's Python, mpirun and horovodrun, and may
# start ranks as root (in a container, say).

_ssd_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_ssd_venv="${SSD_ALLREDUCE_VENV:-$_ssd_root/.venv}"

if [ ! -x "$_ssd_venv/bin/python" ]; then
    echo "scripts/env.sh: there is no environment in $_ssd_venv; run scripts/setup.sh first" >&2
    return 1
fi
_ssd_venv="$(cd "$_ssd_venv" && pwd)"

export VIRTUAL_ENV="$_ssd_venv"
case ":$PATH:" in
    ":$_ssd_venv/bin:"*) ;;
    *) export PATH="$_ssd_venv/bin:$PATH" ;;
esac
unset PYTHONHOME

if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Ranks share this machine's cores: torch's threads of one rank must not take those of the others.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

unset _ssd_root _ssd_venv
