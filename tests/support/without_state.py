"""Our connector, but that decode reads no recurrent state: what its answers are worth without.

PYTHONPATH=tests vllm serve MODEL --kv-transfer-config '{
  "kv_connector": "NixlKVConnector", "kv_connector_module_path": "support.without_state", ...}'
"""

from collections.abc import Sequence

from nixl_kv.connector.connector import NixlKVConnector
from nixl_kv.connector.paging import NULL_BLOCK, StatePaging, table_bytes

__all__ = ["NixlKVConnector"]


def _nothing(_: StatePaging, ids: Sequence[int], tokens: range) -> bytes:
    del ids
    return table_bytes([NULL_BLOCK] * len(tokens))


StatePaging.table = _nothing  # type: ignore[assignment, method-assign]
