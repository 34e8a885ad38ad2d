"""Our connector, whose every hook is timed: what it takes of the step thread and the scheduler.

    PYTHONPATH=scripts NIXL_KV_HOOK_TIMES=FOLDER vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "NixlKVConnector", "kv_connector_module_path": "lab.bench.timed_connector",
      ...}'

Each role of each process writes what it has measured by now to a file of its own in the folder.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from lab.bench.hook_times import VARIABLE, HasWork, HookTimer, file_name
from nixl_kv.connector.connector import NixlKVConnector as OurConnector

EMPTY: Final = {"start_load_kv", "wait_for_layer_load", "save_kv_layer"}
"""They do nothing, two of them for each layer: to time them would cost more than they do."""

HAS_WORK: Final[Mapping[str, HasWork]] = {
    "build_connector_meta": lambda _, step: bool(step.commands),
    "bind_connector_metadata": lambda given, _: bool(given[0].commands),
    "wait_for_save": lambda *_: False,
    "get_transfer_results": lambda _, ended: bool(ended.finished_recving or ended.finished_sending),
    "update_connector_output": lambda given, _: bool(
        given[0].finished_recving or given[0].finished_sending
    ),
    "get_kv_connector_stats": lambda _, stats: stats is not None,
}
"""Of the hooks that are called with each step; the others are called for a request."""

HOOKS: Final = frozenset(
    name
    for hooks in OurConnector.__mro__[:3]  # both roles', the scheduler's, and a worker's
    for name, hook in vars(hooks).items()
    if callable(hook) and not name.startswith("_") and name not in EMPTY
)


class NixlKVConnector(OurConnector):
    """See the module's head."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Time all hooks from here on."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        engine = "prefill" if transfer.kv_role == "kv_producer" else "decode"
        name = file_name(engine, role.name.lower(), os.getpid())
        timer = HookTimer(Path(os.environ[VARIABLE]) / name)
        for name in HOOKS:
            has_work = {"has_work": HAS_WORK[name]} if name in HAS_WORK else {}
            setattr(self, name, timer.timed(name, getattr(self, name), **has_work))
