#!/usr/bin/env bash
# Accuracy of prefill and decode apart, by lm-eval through a router: docs/accuracy.md has the knobs.
#
#   [ATTENTION_BACKEND=FLASHINFER] [DECODER_TP_SIZE=2] ... bash scripts/run_accuracy_test.sh [--help]
#
# The first run installs vLLM for CUDA on a machine with GPUs, and its CPU build elsewhere.
set -euo pipefail
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
for name in HF_ENDPOINT HF_HOME HF_DATASETS_CACHE; do  # the libraries take an empty value literally
  [[ -n "${!name:-}" ]] || unset "$name"
done
venv="${NIXL_KV_VENV:-$scripts/../.venv}"
stamp="$venv/.nixl-kv-installed"
gpus="$(nvidia-smi --list-gpus 2> /dev/null)" || gpus=""
asks_for_cpu=" --kv[_-]buffer[_-]device[ =]cpu | --help | -h "
if [[ -z "${NIXL_KV_PYTHON:-}" && "$gpus" == GPU* && -n "${CUDA_VISIBLE_DEVICES-all}" &&
  ! " $* " =~ $asks_for_cpu ]]; then
  if [[ ! -e "$stamp" ]]; then
    "$scripts/install" --cuda --venv "$venv"
  elif [[ "$(< "$stamp")" == cpu\ * ]]; then
    echo "$venv has vLLM's CPU build, but this machine has GPUs. To use the GPUs, run" \
      "scripts/install --cuda --venv $venv (or name another folder in NIXL_KV_VENV);" \
      "to run on CPU, set CUDA_VISIBLE_DEVICES=" >&2
    exit 2
  fi
fi
. "$scripts/run.sh" accuracy "$@"
