"""How fast a host is read is measured when it is met, over real NIXL, beside its first load."""

import logging
from dataclasses import replace

import pytest

from lab.local.caches import Cache, Sizes
from support.pair import CONFIG, SmallEngine, exchange

SIZES = Sizes(layers=4, blocks=600, heads=8, key=128, value=128)


@pytest.mark.nixl
def test_a_host_that_is_met_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nixl_kv")
    nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    config = replace(CONFIG, staging_mib=32)
    prefill, decode = (
        SmallEngine(name, Cache(SIZES).fill(number), nixl.NixlTransport, config=config, roles=name)
        for number, name in enumerate(("prefill", "decode"))
    )
    try:
        exchange((prefill, decode))
        (link,) = decode.parts.agents.peers.links.values()
        # The load does not wait for what is read beside it.
        decode.wait(lambda: link.is_probed and not decode.parts.agents.is_busy)
        assert link.is_probed, "it was given up"
        direct = link.estimate("direct")
        assert "1 s for" in caplog.text
        start, run, byte = costs = (
            direct.seconds(0, 0),
            direct.seconds(1, 0) - direct.seconds(0, 0),
            direct.seconds(0, 1 << 30) / (1 << 30),
        )
        print(costs)  # noqa: T201 - what -s is for
        assert 1e-6 < start < 1
        assert 1e-9 < run < 0.01
        assert 1e-12 < byte < 1e-6
        exchange((prefill, decode), "2")
    finally:
        decode.close()
        prefill.close()
