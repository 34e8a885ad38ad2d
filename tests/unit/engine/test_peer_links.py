"""How fast a rank has read its peers, and over which link."""

import os
from typing import Any

import pytest
from msgspec.structs import replace

from nixl_kv.engine.event_log import RECENT_S
from nixl_kv.engine.peer_links import MAX_PEERS, MAX_READS, PeerLinks
from nixl_kv.geometry.match import Route
from nixl_kv.ids import Endpoint, Rank
from nixl_kv.protocol.events import PeerKey, ReadDone
from nixl_kv.protocol.peers import Peer
from nixl_kv.transport.ucx.detect import HostFacts, ucx_settings
from support.records import D1, PEER, description
from support.stepped import Clock

NOTHING = {"path": None, "bytes_per_second": None, "read_s": None}
MB = 1_000_000


def links_of(clock: Clock, *, is_ucx: bool = True) -> PeerLinks:
    return PeerLinks("DRAM", clock, is_ucx=is_ucx)


def speed(links: PeerLinks, key: PeerKey) -> dict[str, Any]:
    (record,) = links.describe([Peer(key, 0.0)])
    return {name: record[name] for name in NOTHING}


def read(num_bytes: int, seconds: float, path: str = "direct") -> ReadDone:
    return ReadDone(D1, Rank(0), num_bytes, 1, seconds, path, 0, 0.0, None)


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([], NOTHING),
        ([read(0, 0.0)], NOTHING),  # the fence slot alone
        ([read(8 * MB, 2.0)], {"path": "direct", "bytes_per_second": 4 * MB, "read_s": 2.0}),
        (
            [read(8 * MB, 2.0), read(8 * MB, 6.0, "staged")],
            {"path": "staged", "bytes_per_second": 2 * MB, "read_s": 4.0},
        ),
    ],
)
def test_the_speed_of_a_peer(reads: list[ReadDone], expected: dict[str, Any]) -> None:
    links = links_of(Clock())
    links.add(PEER, reads)
    assert speed(links, PEER) == expected


def test_old_reads_do_not_count() -> None:
    clock = Clock()
    links = links_of(clock)
    links.add(PEER, [read(MB, 10.0)])
    for _ in range(MAX_READS):
        assert speed(links, PEER)["bytes_per_second"] < 100 * MB
        links.add(PEER, [read(MB, 0.01)])
    assert speed(links, PEER)["bytes_per_second"] == 100 * MB
    clock.now += RECENT_S
    assert speed(links, PEER) == NOTHING


def test_the_peers_that_were_read_last_are_kept() -> None:
    links = links_of(Clock())
    peers = [replace(PEER, endpoint=Endpoint(f"tcp://10.0.0.1:{n}")) for n in range(MAX_PEERS + 1)]
    for peer in (*peers[:-1], peers[0], peers[-1]):
        links.add(peer, [read(MB, 1.0)])
    assert len(links) == MAX_PEERS
    assert speed(links, peers[1]) == NOTHING
    assert speed(links, peers[0])["path"] == "direct"


@pytest.mark.parametrize("is_ucx", [False, True])
def test_the_link_is_known_if_ucx_reads_a_described_peer(*, is_ucx: bool) -> None:
    """The first rank that is read counts."""
    own = HostFacts.find(ucx_settings(os.environ, ""))
    first, second = description(2).ranks
    described = replace(
        description(2), ranks=(first, replace(second, agent=b"metadata" + own.suffix()))
    )
    links = links_of(Clock(), is_ucx=is_ucx)
    routes = (Route(Rank(0), (), {}), Route(Rank(1), (Rank(0),), {}))
    known = Peer(PEER, 0.0, description=described, routes=routes)
    near, undescribed, unread = links.describe(
        [known, Peer(PEER, 0.0, routes=routes), Peer(PEER, 0.0, description=described)]
    )
    assert near["link"] == ("shared memory" if is_ucx else "")
    assert undescribed["link"] == unread["link"] == ""
