"""NIXL's threads, the interfaces on which UCX may listen, and which build of NIXL is used."""

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


@pytest.mark.parametrize(
    ("host", "only_loopback"), [("127.0.0.1", True), ("::1", True), ("192.0.2.7", False)]
)
@pytest.mark.parametrize("paced_reads", [OFF, "auto", "on"])
def test_an_engine_for_this_machine_alone_uses_loopback_alone(
    host: str, paced_reads: str, monkeypatch: pytest.MonkeyPatch, *, only_loopback: bool
) -> None:
    """All agents do: the first, those that read over TCP, and the one that tells which do."""
    made: list[str] = []

    def make(*_: object, engine_config: str, **__: object) -> None:
        made.append(engine_config)

    monkeypatch.setattr(nixl, "NixlTransport", make)
    transport = nixl.nixl_transport(replace(Config(), host=host, paced_reads=paced_reads), "DRAM")
    if transport is not None:
        transport._make_agent("DRAM")
        detector = transport._detector
        made += [detector._engine_config] if paced_reads == "auto" else []
    assert len(made) == {OFF: 1, "on": 2, "auto": 3}[paced_reads]
    for settings in made:
        assert ("NET_DEVICES=lo" in settings.split(",")) is only_loopback


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
