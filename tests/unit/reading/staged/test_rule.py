"""Which reads are staged: those of many short runs, unless the setting `path` asks for all."""

from types import SimpleNamespace
from typing import Any

import pytest

from nixl_kv.geometry.layout import Memory
from nixl_kv.reading.staged import path as staged_path
from nixl_kv.reading.staged.path import FEW_RUNS, LONG_RUN, LONG_TCP_RUN, StagedPath

MANY = 100_000


@pytest.fixture(autouse=True)
def _accept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_path, "StagedOp", lambda *_: "staged")


def is_staged(memory: Memory, num_runs: int, run: int, **options: bool) -> bool:
    ring = SimpleNamespace(num_slots=4)
    staging: Any = SimpleNamespace(ring=ring)
    layout: Any = SimpleNamespace(memory=memory)
    path = StagedPath(layout, staging, is_forced=options.get("is_forced", False))
    source = SimpleNamespace(is_tcp=options.get("is_tcp", False))
    read: Any = SimpleNamespace(num_runs=num_runs, num_bytes=num_runs * run, source=source)
    rank: Any = None
    return path.start(rank, read) is not None


@pytest.mark.parametrize("memory", ["VRAM", "DRAM"])
def test_many_short_runs_are_staged(memory: Memory) -> None:
    run, few = LONG_RUN[memory], FEW_RUNS[memory]
    assert is_staged(memory, MANY, run - 1)
    assert not is_staged(memory, MANY, run)
    assert is_staged(memory, few + 1, 1)
    assert not is_staged(memory, few, 1)


def test_over_tcp_also_few_runs_and_longer_ones_are_staged() -> None:
    """A run of a host cache takes 0.45 ms there instead of 1.5 us."""
    assert not is_staged("DRAM", 100, LONG_TCP_RUN - 1)
    assert is_staged("DRAM", 100, LONG_TCP_RUN - 1, is_tcp=True)
    assert not is_staged("DRAM", 100, LONG_TCP_RUN, is_tcp=True)


def test_the_setting_overrides_the_rule() -> None:
    assert is_staged("VRAM", 1, 1 << 30, is_forced=True)
