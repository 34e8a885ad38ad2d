#!/usr/bin/env bash
# Install if needed, then run a module of this folder: scripts/run.sh MODULE [ARGUMENT ...]
# The scripts beside it source it. NIXL_KV_VENV names another environment than .venv;
# NIXL_KV_PYTHON an interpreter that has everything: then nothing is installed.
set -euo pipefail
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ -z "${NIXL_KV_PYTHON:-}" ]]; then
  venv="${NIXL_KV_VENV:-$(dirname "$scripts")/.venv}"
  "$scripts/install" --quiet --venv "$venv" $([[ "$1" != demo ]] || echo --demo)
  NIXL_KV_PYTHON="$venv/bin/python"
fi
export PYTHONPATH="$scripts:$scripts/../tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1  # no modules from where it is started, such as a checkout of vLLM
exec "$NIXL_KV_PYTHON" -m "$@"
