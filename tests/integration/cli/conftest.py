"""Engines that commands ask."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.local.caches import Cache, Sizes
from harness.local.engine import LocalEngine
from harness.local.memory import Fabric
from nixl_kv.keys import write_key_file
from support.integration import CONFIG, MakeEngine, MakeTransport


@pytest.fixture
def make_engine(memory: MakeTransport, fabric: Fabric) -> Iterator[MakeEngine]:
    """Starts an engine whose ranks, one or two, divide two heads."""
    kept: list[Cache] = []  # engines read and write their memory
    with contextlib.ExitStack() as stack:

        def make(name: str, num_ranks: int, **options: Any) -> LocalEngine:
            heads = 2 // num_ranks
            caches = [Cache(Sizes(heads=heads), first_head=n * heads) for n in range(num_ranks)]
            kept.extend(caches)
            layouts = [cache.fill(1).layout() for cache in caches]
            engine = LocalEngine(name, layouts, memory, config=CONFIG, **options)
            stack.callback(engine.close)
            return engine

        yield make
        fabric.reads_hang = False


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    write_key_file(path)
    return path
