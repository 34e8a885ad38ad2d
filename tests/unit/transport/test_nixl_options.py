"""How many of its own threads NIXL gets, and which build of it is used."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
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


def test_amds_build_is_used_where_it_is_installed(tmp_path: Path) -> None:
    package = tmp_path / "nixl_rocm"
    package.mkdir()
    (package / "__init__.py").touch()
    for module in ("_api", "_bindings"):
        (package / f"{module}.py").write_text(f"from nixl.{module} import *\n")
    code = "import nixl_kv.transport.nixl as one; print(one.api.__name__, one.bindings.__name__)"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.split()[-2:] == ["nixl_rocm._api", "nixl_rocm._bindings"]
