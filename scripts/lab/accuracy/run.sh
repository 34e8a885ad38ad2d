# Sourced by run_accuracy_test.sh: the first run installs for CUDA where there is a GPU that may be used.
for name in HF_ENDPOINT HF_HOME HF_DATASETS_CACHE; do  # empty: not the hub's name, nor this folder
  [[ -n "${!name:-}" ]] || unset "$name"
done
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
venv="${NIXL_KV_VENV:-$scripts/../.venv}"
stamp="$venv/.nixl-kv-installed"
gpus="$(nvidia-smi --list-gpus 2> /dev/null)" || gpus=""
asks_for_cpu=" --kv[_-]buffer[_-]device[ =]cpu | --help | -h "
if [[ -z "${NIXL_KV_PYTHON:-}" && "$gpus" == GPU* && -n "${CUDA_VISIBLE_DEVICES-all}" &&
  ! " $* " =~ $asks_for_cpu ]]; then
  if [[ ! -e "$stamp" ]]; then
    "$scripts/install" --cuda --venv "$venv"
  elif [[ "$(< "$stamp")" == cpu\ * ]]; then
    echo "$venv has vLLM's CPU build, and this machine has GPUs. For these:" \
      "scripts/install --cuda --venv $venv (or another folder, named in NIXL_KV_VENV);" \
      "to run on CPU all the same: CUDA_VISIBLE_DEVICES=" >&2
    exit 2
  fi
fi
. "$scripts/lab/run.sh" lab.accuracy "$@"
