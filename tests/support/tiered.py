"""Engines on CPU with configs/multi-*.json: our connector beside a tier of host memory."""

import json
from typing import Any, Final

from harness.cluster.engines import EngineSpec
from harness.cluster.models.files import REPO, ensure_tiny_model
from support.engines import PATIENT

CONFIGS: Final = REPO / "configs"
BLOCK: Final = 128
HOST_TIER: Final = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": "HostTierSpec",
        "spec_module_path": "harness.cluster.host_tier",
    },
}


def multi_spec(name: str) -> EngineSpec:
    """An engine with configs/multi-NAME.json, except for parts that this machine lacks."""
    transfer: dict[str, Any] = json.loads((CONFIGS / f"multi-{name}.json").read_text("utf-8"))
    connectors = transfer["kv_connector_extra_config"]["connectors"]
    extra = connectors[0]["kv_connector_extra_config"]
    for name_of_place in ("host", "key_file"):
        extra.pop(name_of_place, None)
    extra |= {"port": 0, "verify": "all", **PATIENT}
    connectors[1] = HOST_TIER
    return EngineSpec(
        f"multi-{name}",
        ensure_tiny_model(),
        kv_cache_bytes=256 << 20,
        block_size=BLOCK,
        extra_args=("--kv-transfer-config", json.dumps(transfer)),
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},  # for `reset_prefix_cache`
    )
