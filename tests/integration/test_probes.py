"""How fast a host is read is measured when it is met, over real NIXL, beside its first load."""

from dataclasses import replace

import pytest

from lab.local.caches import Cache, Sizes
from support.pair import CONFIG, SmallEngine, exchange

SIZES = Sizes(layers=4, blocks=600, heads=8, key=128, value=128)


@pytest.mark.nixl
def test_a_host_that_is_met_is_measured() -> None:
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
        decode.wait(lambda: "staged" in link._estimates)
        assert link.is_probed
        costs = link.estimate("direct").first
        print(costs)  # noqa: T201 - what -s is for
        assert 0 < costs[0] < 1
        assert 0 < costs[1] < 0.01
        assert 0 < costs[2] < 1e-6
        assert link.estimate("staged").first[2] >= costs[2]
        exchange((prefill, decode), "2")
    finally:
        decode.close()
        prefill.close()
