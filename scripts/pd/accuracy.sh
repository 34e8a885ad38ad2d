#!/usr/bin/env bash
# Sourced by run_accuracy_test.sh and sweep: run one of this folder's modules.
#
# NIXL_KV_PYTHON names an interpreter that has everything (nixl_kv, vLLM, lm-eval, vllm-router):
# then nothing is installed. Else the first run installs into .venv, for CUDA where there is a GPU.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
scripts="$(dirname "$here")"
if [[ -n "${NIXL_KV_PYTHON:-}" ]]; then
  export PYTHONPATH="$scripts${PYTHONPATH:+:$PYTHONPATH}"
  exec "$NIXL_KV_PYTHON" -m "$@"
fi
venv="${NIXL_KV_VENV:-$scripts/../.venv}"
if [[ ! -e "$venv/.nixl-kv-installed" ]] && nvidia-smi --list-gpus > /dev/null 2>&1; then
  "$scripts/install" --cuda --venv "$venv"
fi
. "$here/run.sh" "$@"
