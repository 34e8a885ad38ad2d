"""A worker without NIXL: its bytes move in memory, and it is the only one of its engine."""

import sys
from types import SimpleNamespace

import pytest

from nixl_kv.transport.memory import Fabric, MemoryTransport


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """What NIXL is replaced by."""
    fabric = Fabric()
    nixl = SimpleNamespace(nixl_transport=lambda _: MemoryTransport(fabric))
    monkeypatch.setitem(sys.modules, "nixl_kv.transport.nixl", nixl)
    return fabric


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's process groups would say."""
    for name in ("get_pp_group", "get_tp_group"):
        group = SimpleNamespace(rank_in_group=0)
        monkeypatch.setattr(f"nixl_kv.connector.vllm_config.{name}", lambda group=group: group)
