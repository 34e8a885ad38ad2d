"""How `nixl_transport` uses paced reads, and that NIXL ignores our facts behind its metadata."""

import contextlib
from dataclasses import replace

import pytest

from nixl_kv.config import Config
from nixl_kv.transport.tcp.detect import IsTcp, Place, always, make_rule, never, ucx_settings

nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)


@pytest.mark.parametrize(
    ("paced_reads", "backend", "expected"),
    [
        ("on", "UCX", always),
        ("on", "LIBFABRIC", always),
        ("off", "UCX", never),
        ("auto", "LIBFABRIC", never),
        ("auto", "UCX", None),
    ],
)
def test_paced_reads_overrides_the_rule(
    paced_reads: str, backend: str, expected: IsTcp | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "NixlTransport", lambda *_, **__: None)
    config = replace(Config(), paced_reads=paced_reads, backends=(backend,))
    is_tcp = nixl.nixl_transport(config, "DRAM")._is_tcp
    assert (is_tcp if is_tcp in (always, never) else None) is expected


@pytest.mark.parametrize(("key", "only_loopback"), [(None, True), ("k", False)])
def test_further_agents_have_the_settings_of_the_first_and_tcp_only(
    key: str | None, monkeypatch: pytest.MonkeyPatch, *, only_loopback: bool
) -> None:
    made: list[list[str]] = []

    def make(*_: object, engine_config: str, **__: object) -> None:
        made.append(engine_config.split(","))

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
