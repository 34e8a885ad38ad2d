#!/usr/bin/env bash
# Dynamo's frontend, a prefill and a decode worker on one machine with two GPUs:
#
#     NIXL_KV_KEY=$(openssl rand -hex 32) configs/dynamo/launch.sh [MODEL]
#
# They find each other by files in a folder: no etcd, no NATS. See docs/deploy/README.md.
set -euo pipefail

model="${1:-Qwen/Qwen3-0.6B}"
: "${NIXL_KV_KEY:?is not set: 64 hexadecimal digits, the same for all workers}"
export NIXL_KV_KEY
export DYN_FILE_KV="${DYN_FILE_KV:-$(mktemp -d)}" DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq

trap 'kill $(jobs -p)' EXIT

python3 -m dynamo.frontend --http-port 8000 --discovery-backend file &

CUDA_VISIBLE_DEVICES=0 DYN_SYSTEM_PORT=8081 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \
  python3 -m dynamo.vllm --model "$model" --discovery-backend file --disaggregation-mode prefill \
  --kv-transfer-config '{"kv_connector": "NixlConnector",
    "kv_connector_module_path": "nixl_kv.connector", "kv_role": "kv_both"}' &

CUDA_VISIBLE_DEVICES=1 DYN_SYSTEM_PORT=8082 VLLM_NIXL_SIDE_CHANNEL_PORT=5700 \
  python3 -m dynamo.vllm --model "$model" --discovery-backend file --disaggregation-mode decode \
  --kv-transfer-config '{"kv_connector": "NixlConnector",
    "kv_connector_module_path": "nixl_kv.connector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"media": "ticket"}}' &

wait -n  # when one of them ends, the others do
