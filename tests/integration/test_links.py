"""The rule about TCP, between two real NIXL agents."""

import contextlib

import pytest

from nixl_kv.transport.tcp.detect import Place, make_rule, ucx_settings

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl


@pytest.mark.parametrize(
    ("config", "is_tcp"),
    [
        pytest.param("TLS=tcp,NET_DEVICES=lo", True, id="TCP"),
        pytest.param("TLS=^cuda,NET_DEVICES=lo", False, id="one host"),
    ],
)
def test_nixl_ignores_our_facts_and_the_rule_reads_them(config: str, *, is_tcp: bool) -> None:
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - only where NIXL is

    settings = ucx_settings({}, config)
    own = Place.find(settings)
    with contextlib.ExitStack() as stack:
        reader, owner = (NixlTransport(engine_config=config) for _ in range(2))
        stack.callback(reader.close)
        stack.callback(owner.close)
        metadata = owner.metadata() + own.suffix()
        assert reader.add_peer(metadata) == owner.name
        assert make_rule(own, settings)(metadata, "DRAM") is is_tcp
