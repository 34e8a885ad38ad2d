"""How many of its own threads NIXL gets."""

import os
from dataclasses import replace
from typing import Any

import pytest

from nixl_kv.config import OFF, Config
from nixl_kv.geometry.layout import Memory

nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)


@pytest.mark.parametrize(
    ("memory", "num_cores", "expected"),
    [("DRAM", 1, 2), ("DRAM", 2, 2), ("DRAM", 3, 3), ("DRAM", 64, 4), ("VRAM", 64, 2)],
)
def test_where_a_read_is_a_copy_cores_copy_together(
    memory: Memory, num_cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(nixl, "NixlTransport", lambda *_, **options: made.append(options))
    nixl.nixl_transport(replace(Config(), paced_reads=OFF), memory)
    (options,) = made
    assert options["ucx_options"] == {**nixl.UCX_OPTIONS, "num_threads": str(expected)}
