"""Differences between versions of vLLM: one file has them, and one looks them up at the start."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nixl_kv.connector import vllm_config
from nixl_kv.connector.connector import NixlKVConnector

SOURCES = "vllm.v1.metrics.cache_hit_source"
SLEEP = ("unregister_kv_caches", "restore_kv_caches")


def test_a_vllm_without_sources_of_hits_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, SOURCES, None)
    importlib.reload(vllm_config)
    assert vllm_config.HIT_SOURCE is None
    monkeypatch.undo()
    importlib.reload(vllm_config)


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
    ours = r'\w+, "(in_use|pop_failed)"'  # methods of our own classes
    asking = re.compile(rf"vllm\.__version__|version\(.vllm|except ImportError|hasattr\((?!{ours})")
    files = Path(vllm_config.__file__).parent.rglob("*.py")
    found = [path.name for path in files if asking.search(path.read_text(encoding="utf-8"))]
    assert found == ["__init__.py", "unpromised.py", "vllm_config.py"]
