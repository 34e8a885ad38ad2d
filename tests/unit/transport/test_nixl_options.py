"""NIXL's threads, the interfaces on which UCX may listen, and which build of NIXL is used."""

import ipaddress
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nixl_kv.config import LOOPBACK, Config
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
    nixl.nixl_transport(Config(), memory)
    (options,) = made
    assert options["ucx_options"] == {**nixl.UCX_OPTIONS, "num_threads": str(expected)}


PEERS = (ipaddress.ip_network("10.0.0.0/8"),)


@pytest.mark.parametrize(
    ("changed", "is_decode", "only_loopback"),
    [
        pytest.param({}, True, True, id="the default"),
        pytest.param({"host": "::1"}, True, True, id="IPv6"),
        pytest.param({"key": "k"}, False, True, id="nobody else can have a ticket"),
        pytest.param({"key": "k"}, True, False, id="decode may read any host"),
        pytest.param({"peers": PEERS}, True, False, id="decode may read its peers"),
        pytest.param({"key": "k", "peers": LOOPBACK}, True, True, id="its peers are local"),
        pytest.param({"host": "192.0.2.7"}, False, False, id="others may read it"),
    ],
)
def test_an_engine_for_this_machine_alone_uses_loopback_alone(
    changed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_decode: bool,
    only_loopback: bool,
) -> None:
    made: list[str] = []

    def make(*_: object, engine_config: str, **__: object) -> None:
        made.append(engine_config)

    monkeypatch.setattr(nixl, "NixlTransport", make)
    nixl.nixl_transport(replace(Config(), **changed), "DRAM", is_decode=is_decode)
    (settings,) = made
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
