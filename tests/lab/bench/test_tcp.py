"""Reads over TCP between namespaces, run briefly: what each way moves, and beside what."""

import json
import os
import shutil
from pathlib import Path

import pytest

from lab.bench import __main__ as bench
from lab.bench import tcp
from lab.bench.tcp_ways import BULK, IN_TREE, NIXL_KV

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

MIB = 2
GBIT = 0.1

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root, and `ip` of iproute2",
)


@needs_root
@pytest.mark.slow
@pytest.mark.nixl
def test_each_way_moves_all_bytes_over_the_same_link(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = ["tcp", "--round-trip-ms", "4", "--gbit", str(GBIT), "--mib", str(MIB)]
    command += ["--run-kib", "16", "--rounds", "2", "--congestion-control", "reno"]
    assert bench.main([*command, "--json", str(path)]) == 0
    rows = [result["figures"] for result in json.loads(path.read_text(encoding="utf-8"))]
    assert [row["way"] for row in rows] == [BULK, NIXL_KV, IN_TREE]
    for row in rows:
        assert row["link"] == "0.1 Gbit/s"
        assert row["round trip ms"] == 4
        assert row["ms"] > 4
        assert 0 < row["Gbit/s"] <= GBIT
    assert rows[0]["share of one stream"] == "1.00 (1.00 to 1.00)"


def test_share_is_of_the_same_round() -> None:
    assert tcp.share([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == "0.50 (0.50 to 0.50)"
    assert tcp.share([], [2.0]) == ""


def test_without_root_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert bench.main(["tcp"]) == 2
    assert "root" in capsys.readouterr().err
