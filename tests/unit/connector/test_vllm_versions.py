"""What differs between versions of vLLM, and that one file holds it."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nixl_kv
from nixl_kv.connector import vllm_config
from nixl_kv.connector.connector import NixlKVConnector

PACKAGE = Path(nixl_kv.__file__).parent
SOURCES = "vllm.v1.metrics.cache_hit_source"
SLEEP = ("unregister_kv_caches", "restore_kv_caches")


@pytest.fixture
def reloaded() -> Iterator[ModuleType]:
    """The module, which is loaded anew afterwards."""
    yield vllm_config
    importlib.reload(vllm_config)


def test_a_vllm_without_sources_of_hits_is_served(
    reloaded: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, SOURCES, None)
    importlib.reload(reloaded)
    assert reloaded.HIT_SOURCE is None
    monkeypatch.undo()


def test_loaded_tokens_are_counted_as_a_peers() -> None:
    pytest.importorskip(SOURCES, reason="this vLLM tells no sources of hits apart")
    source: Any = NixlKVConnector._cache_hit_source
    assert source.value == "p2p"


@pytest.mark.parametrize(("hooks", "is_told"), [((), False), (SLEEP, True)])
def test_sleep_needs_both_hooks(
    monkeypatch: pytest.MonkeyPatch, hooks: tuple[str, ...], *, is_told: bool
) -> None:
    base: Any = type("Base", (), dict.fromkeys(hooks, lambda _: None))
    monkeypatch.setattr(vllm_config, "KVConnectorBase_V1", base)
    assert vllm_config.has_sleep_hooks() is is_told
    assert NixlKVConnector.supports_sleep_mode(None) is is_told


def test_no_other_file_asks_for_a_version() -> None:
    asking = re.compile(r"__version__|importlib\.metadata|except ImportError|hasattr\(")
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in (PACKAGE / "connector").glob("*.py")
        if asking.search(path.read_text(encoding="utf-8"))
    }
    assert files == {"connector/vllm_config.py"}
