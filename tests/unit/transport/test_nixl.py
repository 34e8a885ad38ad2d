"""NIXL's threads, UCX's interfaces, paced reads, and which build of NIXL is used."""

import contextlib
import importlib.util
import ipaddress
import os
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.config import LOOPBACK, Config
from nixl_kv.geometry.layout import Memory
from nixl_kv.transport.ucx.detect import HostFacts, make_rule, ucx_settings

nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Called for each transport, with its options."""
    make = Mock(side_effect=lambda *_, **__: MemoryTransport(Fabric()))
    monkeypatch.setattr(nixl, "NixlTransport", make)
    return make


def settings_of(call: Any) -> list[str]:
    settings: str = call.kwargs["engine_config"]
    return settings.split(",")


@pytest.mark.parametrize(
    ("memory", "num_cores", "expected"),
    [("DRAM", 1, 2), ("DRAM", 2, 2), ("DRAM", 3, 3), ("DRAM", 64, 4), ("VRAM", 64, 2)],
)
def test_cores_copy_together_if_a_read_is_a_copy(
    memory: Memory,
    num_cores: int,
    expected: int,
    make: Mock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    nixl.nixl_transport(Config(), memory)
    options = {**nixl.UCX_OPTIONS, "num_threads": str(expected)}
    assert make.call_args.kwargs["ucx_options"] == options


PEERS = (ipaddress.ip_network("10.0.0.0/8"),)


@pytest.mark.parametrize(
    ("changed", "is_decode", "only_loopback"),
    [
        pytest.param({}, True, True, id="the default"),
        pytest.param({"host": "::1"}, True, True, id="IPv6"),
        pytest.param({"key": "k"}, False, True, id="no other process can have a ticket"),
        pytest.param({"key": "k"}, True, False, id="decode may read any host"),
        pytest.param({"peers": PEERS}, True, False, id="decode may read its peers"),
        pytest.param({"key": "k", "peers": LOOPBACK}, True, True, id="its peers are local"),
        pytest.param({"host": "192.0.2.7"}, False, False, id="others may read it"),
    ],
)
def test_an_engine_for_this_machine_alone_uses_loopback_alone(
    changed: dict[str, Any], make: Mock, *, is_decode: bool, only_loopback: bool
) -> None:
    nixl.nixl_transport(replace(Config(), **changed), "DRAM", is_decode=is_decode)
    assert ("NET_DEVICES=lo" in settings_of(make.call_args)) is only_loopback


def test_amds_build_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, like in (("", None), ("._api", nixl.api), ("._bindings", nixl.bindings)):
        fake = ModuleType(f"nixl_rocm{name}")
        vars(fake).update(vars(like) if like else {}, __name__=fake.__name__)
        fake.__spec__ = ModuleSpec(fake.__name__, None)
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    spec = importlib.util.spec_from_file_location("as_with_rocm", nixl.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "as_with_rocm", module)
    spec.loader.exec_module(module)
    names = [module.api.__name__, module.bindings.__name__]
    assert names == ["nixl_rocm._api", "nixl_rocm._bindings"]


# Paced reads


@pytest.mark.usefixtures("make")
@pytest.mark.parametrize(
    ("backend", "tls", "are_tcp"),
    [
        ("UCX", "", (False, True)),
        ("UCX", "tcp", (True, True)),
        ("LIBFABRIC", "tcp", (False, False)),
    ],
)
def test_ucx_alone_is_paced_and_its_variables_count(
    backend: str, tls: str, are_tcp: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a peer of the same host, and for one of another host."""
    monkeypatch.setenv("UCX_TLS", tls or "tcp,sm")
    near = HostFacts.find({"TLS": "tcp,sm"})
    config = replace(Config(), backends=(backend,))
    is_tcp = nixl.nixl_transport(config, "DRAM")._is_tcp
    assert (is_tcp(near.suffix()), is_tcp(replace(near, host="another").suffix())) == are_tcp


@pytest.mark.parametrize("key", [None, "k"])
def test_further_agents_have_the_settings_of_the_first_and_tcp_only(
    key: str | None, make: Mock
) -> None:
    nixl.nixl_transport(replace(Config(), key=key), "DRAM")._make_agent()
    first, further = map(settings_of, make.call_args_list)
    assert further == [*first, "TLS=tcp"]


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("engine_config", "is_tcp"),
    [
        pytest.param("TLS=tcp,NET_DEVICES=lo", True, id="TCP"),
        pytest.param("TLS=^cuda,NET_DEVICES=lo", False, id="one host"),
    ],
)
def test_nixl_ignores_our_facts_and_the_rule_reads_them(
    engine_config: str, *, is_tcp: bool
) -> None:
    settings = ucx_settings({}, engine_config)
    own = HostFacts.find(settings)
    with contextlib.ExitStack() as stack:
        reader, owner = (nixl.NixlTransport(engine_config=engine_config) for _ in range(2))
        stack.callback(reader.close)
        stack.callback(owner.close)
        metadata = owner.metadata() + own.suffix()
        assert reader.add_peer(metadata) == owner.name
        assert make_rule(own, settings, "DRAM")(metadata) is is_tcp
