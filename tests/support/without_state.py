"""Our connector, but that decode reads no recurrent state: what its answers are worth without.

PYTHONPATH=tests vllm serve MODEL --kv-transfer-config '{
  "kv_connector": "NixlKVConnector", "kv_connector_module_path": "support.without_state", ...}'
"""

from collections.abc import Sequence

from nixl_kv.connector.connector import NixlKVConnector
from nixl_kv.connector.paging import StatePaging
from nixl_kv.geometry.layout import Table

__all__ = ["NixlKVConnector"]


def _nothing(_: StatePaging, ids: Sequence[int], tokens: range) -> Table:
    del ids
    return Table.of([], tokens.stop)


StatePaging.table = _nothing  # type: ignore[assignment, method-assign]
