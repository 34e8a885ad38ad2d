"""How fast a rank has read its peers."""

from typing import Any

import pytest
from msgspec.structs import replace

from nixl_kv.engine.event_log import RECENT_S
from nixl_kv.engine.speeds import MAX_PEERS, MAX_READS, Speeds
from nixl_kv.ids import Endpoint, Rank
from nixl_kv.protocol.events import ReadDone
from support.records import D1, PEER
from support.stepped import Clock

NOTHING = {"path": None, "bytes_per_second": None, "read_s": None}
MB = 1_000_000


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
    speeds = Speeds(Clock())
    speeds.add(PEER, reads)
    assert speeds.of(PEER) == expected


def test_old_reads_do_not_count() -> None:
    clock = Clock()
    speeds = Speeds(clock)
    speeds.add(PEER, [read(MB, 10.0)])
    for _ in range(MAX_READS):
        assert speeds.of(PEER)["bytes_per_second"] < 100 * MB
        speeds.add(PEER, [read(MB, 0.01)])
    assert speeds.of(PEER)["bytes_per_second"] == 100 * MB
    clock.now += RECENT_S
    assert speeds.of(PEER) == NOTHING


def test_the_peers_that_were_read_last_are_kept() -> None:
    speeds = Speeds(Clock())
    peers = [replace(PEER, endpoint=Endpoint(f"tcp://10.0.0.1:{n}")) for n in range(MAX_PEERS + 1)]
    for peer in (*peers[:-1], peers[0], peers[-1]):
        speeds.add(peer, [read(MB, 1.0)])
    assert len(speeds) == MAX_PEERS
    assert speeds.of(peers[1]) == NOTHING
    assert speeds.of(peers[0])["path"] == "direct"
