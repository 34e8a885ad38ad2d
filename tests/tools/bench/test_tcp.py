"""Reads over TCP between namespaces, run briefly."""

import os
import shutil
from pathlib import Path

import pytest

from lab.bench import __main__ as bench
from lab.bench import record

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

GBIT = 0.1

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root, and `ip` of iproute2",
)


@needs_root
@pytest.mark.slow
@pytest.mark.nixl
def test_each_way_moves_all_bytes_over_the_same_link(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = ["tcp", "--round-trip-ms", "4", "--gbit", str(GBIT), "--mib", "2"]
    command += ["--run-kib", "16", "--rounds", "2"]
    assert bench.main([*command, "--record", str(path)]) == 0
    (row,) = record.load(path).rows
    assert row["link"] == "0.1 Gbit/s, 4 ms"
    assert all(0 < row[f"{way} Gbit/s"] <= GBIT for way in ("one stream", "nixl_kv", "in-tree"))
    assert " to " in row["nixl_kv share"]


def test_without_root_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="root"):
        bench.main(["tcp"])
