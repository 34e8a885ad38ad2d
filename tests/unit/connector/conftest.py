"""A worker without NIXL: its bytes move in memory, and it is the only one of its engine.

Most tests here need vLLM; where it is not installed they are left out.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.transport.base import NoPorts

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its modules warn of while they are imported
        import vllm.v1.core.kv_cache_manager  # noqa: F401
except ImportError:
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    without = ("decode", "paging", "plugin", "prefill")
    collect_ignore = sorted(files - {f"test_{subject}.py" for subject in without})


@pytest.fixture(autouse=True)
def _logger() -> Iterator[None]:
    """A connector makes our logger one like vLLM's; other tests want it as it was."""
    logger = logging.getLogger("nixl_kv")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def engines_of() -> Iterator[Callable[[Any], Callable[..., Any]]]:
    """Makes engines of a class, and shuts their connectors down after the test."""
    engines: list[Any] = []

    def of(kind: Any) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            engines.append(kind(*args, **options))
            return engines[-1]

        return make

    yield of
    for engine in engines:
        if engine.connector is not None:
            engine.connector.shutdown()


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """Replaces NIXL."""
    fabric = Fabric()

    def transports(*_: object, **__: object) -> tuple[Callable[[], MemoryTransport], NoPorts]:
        return lambda: MemoryTransport(fabric), NoPorts()

    nixl = SimpleNamespace(nixl_transports=transports)
    monkeypatch.setitem(sys.modules, "nixl_kv.transport.nixl", nixl)
    return fabric


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces vLLM's process groups by those of one rank."""
    for name in ("get_pp_group", "get_tp_group"):
        group = SimpleNamespace(rank_in_group=0)
        monkeypatch.setattr(f"nixl_kv.connector.vllm_config.{name}", lambda group=group: group)
