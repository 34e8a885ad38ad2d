"""Our connector, whose workers log digests of a load's rows: as it landed, and after its request.

PYTHONPATH=tests vllm serve MODEL --kv-transfer-config '{"kv_connector": "NixlKVConnector",
  "kv_connector_module_path": "support.digesting_connector", ...}'

With `overlap`, vLLM may compute a loaded request before its worker reports the load.
"""

import json
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from nixl_kv.connector.connector import NixlKVConnector as SoundConnector
from nixl_kv.geometry.layout import Table
from nixl_kv.protocol.events import StartLoad

LINE: Final = re.compile(r"digested (\{.+\})")
LANDED: Final = "landed"
ENDED: Final = "ended"


Digests = Mapping[str, Sequence[int]]
"""The digests of a layer's rows. A row is the last axis of the layer's tensor."""


def digests_in(log: str) -> dict[str, list[Digests]]:
    """The digests of each load by layer, for `landed` and for `ended`."""
    found: dict[str, list[Digests]] = {LANDED: [], ENDED: []}
    for line in LINE.findall(log):
        content = json.loads(line)
        found[content["when"]].append(content["layers"])
    return found


class NixlKVConnector(SoundConnector):
    """Has the same name, so that nothing else of an engine's configuration changes."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._tensors = kv_caches
        self._tables: dict[str, tuple[Table, ...]] = {}

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        commands: Any = connector_metadata.commands  # type: ignore[attr-defined]
        for command in commands:
            if isinstance(command, StartLoad):
                self._tables[command.request] = command.tables

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request in self._tables.keys() & (results.finished_recving or set()):
            self._tell(LANDED, self._tables[request])
        for request in self._tables.keys() & finished_req_ids:
            self._tell(ENDED, self._tables.pop(request))
        return results

    def _tell(self, when: str, tables: tuple[Table, ...]) -> None:
        groups = self._kv_cache_config.transfer_groups
        layers = {
            layer: self._digest(self._tensors[layer], table)
            for group, table in zip(groups, tables, strict=True)
            for layer in group.layer_names
        }
        sys.stderr.write(f"digested {json.dumps({'when': when, 'layers': layers})}\n")
        sys.stderr.flush()

    def _digest(self, tensor: torch.Tensor, table: Table) -> list[int]:
        """The digests of all rows of these blocks, whichever tokens have them."""
        blocks = tensor[torch.from_numpy(table.block_ids.copy()).long()]
        rows = blocks.contiguous().flatten(0, -2).view(torch.uint8).numpy()
        return [zlib.crc32(row.tobytes()) for row in rows]
