"""How `nixl_transport` uses paced reads, and that NIXL ignores our facts behind its metadata."""

import contextlib
from dataclasses import replace

import pytest

from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.config import Config
from nixl_kv.transport.tcp.detect import Place, make_rule, ucx_settings

nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)


@pytest.mark.parametrize(
    ("paced_reads", "backend", "is_tcp_near", "is_tcp_far"),
    [
        ("on", "UCX", True, True),
        ("on", "LIBFABRIC", True, True),
        ("off", "UCX", False, False),
        ("auto", "LIBFABRIC", False, False),
        ("auto", "UCX", False, True),
    ],
)
def test_paced_reads_overrides_the_rule(
    paced_reads: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_tcp_near: bool,
    is_tcp_far: bool,
) -> None:
    monkeypatch.setattr(nixl, "NixlTransport", lambda *_, **__: MemoryTransport(Fabric()))
    near = Place.find({"TLS": "tcp,sm"})
    far = replace(near, host="another")
    config = replace(Config(), paced_reads=paced_reads, backends=(backend,))
    transport = nixl.nixl_transport(config, "DRAM")
    assert transport._is_tcp(near.suffix()) is is_tcp_near
    assert transport._is_tcp(far.suffix()) is is_tcp_far


@pytest.mark.parametrize(("key", "only_loopback"), [(None, True), ("k", False)])
def test_further_agents_have_the_settings_of_the_first_and_tcp_only(
    key: str | None, monkeypatch: pytest.MonkeyPatch, *, only_loopback: bool
) -> None:
    made: list[list[str]] = []

    def make(*_: object, engine_config: str, **__: object) -> MemoryTransport:
        made.append(engine_config.split(","))
        return MemoryTransport(Fabric())

    monkeypatch.setattr(nixl, "NixlTransport", make)
    nixl.nixl_transport(replace(Config(), key=key), "DRAM")._make_agent()
    first, further = made
    assert further == [*first, "TLS=tcp"]
    assert ("NET_DEVICES=lo" in first) is only_loopback


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
    own = Place.find(settings)
    with contextlib.ExitStack() as stack:
        reader, owner = (nixl.NixlTransport(engine_config=engine_config) for _ in range(2))
        stack.callback(reader.close)
        stack.callback(owner.close)
        metadata = owner.metadata() + own.suffix()
        assert reader.add_peer(metadata) == owner.name
        assert make_rule(own, settings, "DRAM")(metadata) is is_tcp
