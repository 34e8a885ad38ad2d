"""A prefill and a decode rank exchange blocks: the real threads, sockets and machines."""

from collections.abc import Callable

import numpy as np
import pytest
from caches import ORDERS
from conftest import Pair

from nixl_kv.protocol import events
from nixl_kv.transport.base import Transport


@pytest.fixture(params=["memory", pytest.param("nixl", marks=pytest.mark.nixl)])
def transport(
    request: pytest.FixtureRequest, memory: Callable[[], Transport]
) -> Callable[[], Transport]:
    if request.param == "memory":
        return memory
    nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    return nixl.NixlTransport


@pytest.mark.parametrize("orders", [(a, b) for a in ORDERS for b in ORDERS], ids="-".join)
def test_blocks_arrive_whatever_the_orders(
    transport: Callable[[], Transport], make_pair: Pair, orders: tuple[str, str]
) -> None:
    if orders[0] != orders[1] and "nixl" in transport.__qualname__ and orders[0] != "LBHNC":
        pytest.skip("one row of the table is enough over real NIXL")
    prefill, decode = make_pair(transport, orders=orders)
    before = decode.cache.view.copy()
    offered = prefill.offer("p1", [7, 3, 4], num_tokens=11)
    decode.fetch("d1", offered)
    decode.load("d1", [2, 9, 1])
    assert decode.wait_loaded("d1").reason is None
    assert prefill.wait_sent("p1").how is events.How.READ
    assert np.array_equal(decode.cache.blocks([2, 9, 1]), prefill.cache.blocks([7, 3, 4]))
    untouched = [0, 3, 4, 5, 6, 7, 8]
    assert np.array_equal(decode.cache.blocks(untouched), before[:, untouched])
