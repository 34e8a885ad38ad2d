"""How this rank reads each peer, and how fast it did so lately, for `nixl-kv status` and doctor."""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from nixl_kv.engine.event_log import RECENT_S
from nixl_kv.geometry.layout import Memory
from nixl_kv.protocol.events import PeerKey, ReadDone
from nixl_kv.protocol.messages import MAX_LISTED
from nixl_kv.protocol.peers import Peer
from nixl_kv.transport.ucx.detect import HostFacts, Link, link_of, ucx_settings

# Reads of a peer that count: a slow link shows after one read, and no longer after these.
MAX_READS: Final = 32
MAX_PEERS: Final = MAX_LISTED  # the latest ones

UNKNOWN: Final = Link("")


class _Sample(NamedTuple):
    at: float  # monotonic seconds
    num_bytes: int
    seconds: float
    path: str


class PeerLinks:
    """The links to all peers, and the latest reads of each.

    `memory` is that of this rank's cache. `is_ucx`: NIXL reads by UCX, whose choice of a link is
    known. `clock` is monotonic, in seconds.
    """

    def __init__(self, memory: Memory, clock: Callable[[], float], *, is_ucx: bool) -> None:
        self._memory: Memory = memory
        self._clock = clock
        self._is_ucx = is_ucx
        self._samples: OrderedDict[PeerKey, deque[_Sample]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, peer: PeerKey, reads: Sequence[ReadDone]) -> None:
        """Note the reads of a load from this peer, one per prefill rank."""
        found = [
            _Sample(self._clock(), read.num_bytes, read.seconds, read.path)
            for read in reads
            if read.num_bytes
        ]
        if not found:
            return
        self._samples.setdefault(peer, deque(maxlen=MAX_READS)).extend(found)
        self._samples.move_to_end(peer)
        if len(self._samples) > MAX_PEERS:
            self._samples.popitem(last=False)

    def links(self, peers: Iterable[Peer]) -> list[Link]:
        """How UCX should read the first rank of each peer, by this machine's devices now."""
        if not self._is_ucx:
            return [UNKNOWN for _ in peers]
        settings = ucx_settings(os.environ, "")
        own = HostFacts.find(settings)
        found = []
        for peer in peers:
            ranks = [route.remote_rank for route in peer.routes if route.readers]
            if peer.description is None or not ranks:
                found.append(UNKNOWN)
                continue
            agent = peer.description.ranks[ranks[0]].agent
            found.append(link_of(own, agent, settings, self._memory))
        return found

    def describe(self, peers: Sequence[Peer]) -> list[dict[str, Any]]:
        """Keys of the record of each peer in a `Status`. Reads count for RECENT_S."""
        links = self.links(peers)
        return [
            {**link._asdict(), **self._speed(peer.key)}
            for peer, link in zip(peers, links, strict=True)
        ]

    def _speed(self, peer: PeerKey) -> dict[str, Any]:
        """The path of the latest read, and on average bytes per second and seconds of one."""
        since = self._clock() - RECENT_S
        recent = [each for each in self._samples.get(peer, ()) if each.at > since]
        num_bytes, seconds = sum(each.num_bytes for each in recent), sum(e.seconds for e in recent)
        return {
            "path": recent[-1].path if recent else None,
            "bytes_per_second": round(num_bytes / seconds) if seconds else None,
            "read_s": seconds / len(recent) if recent else None,
        }
