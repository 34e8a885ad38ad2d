"""What UCX says of its links is what it takes: real NIXL."""

import pytest

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
pytestmark = pytest.mark.nixl


@pytest.mark.parametrize(
    ("settings", "is_tcp"),
    [pytest.param("TLS=tcp", True, id="TCP"), pytest.param("TLS=^cuda", False, id="one host")],
)
def test_ucx_is_asked_what_it_takes_to_a_peer(settings: str, *, is_tcp: bool) -> None:
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - only where NIXL is
    from nixl_kv.transport.tcp.ucx import UcxTcpDetector  # noqa: PLC0415 - only where NIXL is

    agent = NixlTransport(engine_config=settings)
    links = UcxTcpDetector(settings)
    for _ in range(2):
        transports = links.transports(agent.metadata())
        assert "tcp" in transports or not is_tcp
        assert links.is_tcp(agent.metadata(), "DRAM") is is_tcp, transports
    links.close()
    agent.close()
