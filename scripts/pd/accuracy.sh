#!/usr/bin/env bash
# Sourced by run_accuracy_test.sh and sweep: run one of this folder's modules.
#
# NIXL_KV_PYTHON names an interpreter that has everything (nixl_kv, vLLM, lm-eval, vllm-router):
# then nothing is installed. Else the first run installs into .venv, for CUDA where there is a GPU.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
scripts="$(dirname "$here")"
for name in HF_ENDPOINT HF_HOME HF_DATASETS_CACHE; do  # not the hub's empty name, nor this folder
  [[ -n "${!name:-}" ]] || unset "$name"
done
if [[ -n "${NIXL_KV_PYTHON:-}" ]]; then
  export PYTHONPATH="$scripts${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONSAFEPATH=1  # as in run.sh
  exec "$NIXL_KV_PYTHON" -m "$@"
fi
venv="${NIXL_KV_VENV:-$scripts/../.venv}"
stamp="$venv/.nixl-kv-installed"
gpus="$(nvidia-smi --list-gpus 2> /dev/null)" || gpus=""
asks_for_cpu=" --kv[_-]buffer[_-]device[ =]cpu | --help | -h "
if [[ "$gpus" == GPU* && -n "${CUDA_VISIBLE_DEVICES-all}" && ! " $* " =~ $asks_for_cpu ]]; then
  if [[ ! -e "$stamp" ]]; then
    "$scripts/install" --cuda --venv "$venv"
  elif [[ "$(< "$stamp")" == cpu\ * ]]; then
    echo "$venv has vLLM's CPU build, and this machine has GPUs. For these:" \
      "scripts/install --cuda --venv $venv (or another folder, named in NIXL_KV_VENV);" \
      "to run on CPU all the same: CUDA_VISIBLE_DEVICES=" >&2
    exit 2
  fi
fi
. "$here/run.sh" "$@"
