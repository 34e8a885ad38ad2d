"""A second connector for a MultiConnector: a tier that saves some requests' blocks at their end.

If its configuration says so, it also loads the beginnings of some prompts within a step, as
LMCacheConnectorV1 does.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.request import Request, RequestStatus

from support.vllm_scheduler import BLOCK

SAVED: Final = 3  # it saves every third request
LOADED: Final = 2  # and loads every second one
LOADS: Final = "loads"  # in kv_connector_extra_config


@dataclass
class SaverMetadata(KVConnectorMetadata):
    """Scheduler to workers."""

    requests: list[str] = field(default_factory=list)  # whose blocks are saved from now on
    loads: dict[str, range] = field(default_factory=dict)  # the tokens that this step loads


class Saver(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half alone."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._saves: list[str] = []
        self._loads: dict[str, range] = {}
        self._hits: dict[str, int] = {}  # tokens in vLLM's own cache
        self._may_load = self._kv_transfer_config.get_from_extra_config(LOADS, False)  # noqa: FBT003 - vLLM's

    def get_num_new_matched_tokens(self, request: Request, num_hit: int) -> tuple[int, bool]:
        self._hits[request.request_id] = num_hit
        number = int(request.request_id[1:])
        end = BLOCK * (1 + number % 4)
        if not self._may_load or number % LOADED or end >= request.num_prompt_tokens:
            return 0, False
        return max(0, end - num_hit), False

    def update_state_after_alloc(self, request: Request, _: Any, num_tokens: int) -> None:
        name = request.request_id
        if num_tokens:
            self._loads[name] = range(self._hits[name], self._hits[name] + num_tokens)

    def build_connector_meta(self, _: Any) -> SaverMetadata:
        metadata = SaverMetadata(self._saves, self._loads)
        self._saves, self._loads = [], {}
        return metadata

    def request_finished(self, request: Request, _: Any) -> tuple[bool, None]:
        """Keep the blocks of some requests that have their whole answer."""
        is_saved = (
            request.status is RequestStatus.FINISHED_LENGTH_CAPPED
            and int(request.request_id[1:]) % SAVED == 0
        )
        if is_saved:
            self._saves.append(request.request_id)
        return is_saved, None

    request_finished_all_groups = request_finished

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv
