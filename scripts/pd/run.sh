# Sourced by the scripts beside this folder: install if needed, then run one of the package's modules.
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${NIXL_KV_VENV:-$scripts/../.venv}"
"$scripts/install" --quiet --venv "$venv"
export PYTHONPATH="$scripts${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1  # no modules from where it is started, such as a checkout of vLLM
exec "$venv/bin/python" -m "$@"
