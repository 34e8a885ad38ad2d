"""A second connector for a MultiConnector: it saves some requests' blocks after they have ended."""

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.request import Request, RequestStatus

SAVED: Final = 3  # it saves one request of so many


@dataclass
class SaverMetadata(KVConnectorMetadata):
    """Scheduler to workers: the requests whose blocks are saved from now on."""

    requests: list[str] = field(default_factory=list)


class Saver(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half alone; it loads nothing."""

    _saves: list[str] | None = None

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None:
        pass

    def build_connector_meta(self, _: Any) -> SaverMetadata:
        saves, self._saves = self._saves, None
        return SaverMetadata(saves or [])

    def request_finished(self, request: Request, _: Any) -> tuple[bool, None]:
        """Keep the blocks of some requests that have their whole answer."""
        is_saved = (
            request.status is RequestStatus.FINISHED_LENGTH_CAPPED
            and int(request.request_id[1:]) % SAVED == 0
        )
        if is_saved:
            self._saves = [*(self._saves or []), request.request_id]
        return is_saved, None

    request_finished_all_groups = request_finished

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv
