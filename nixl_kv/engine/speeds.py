"""How fast this rank has read each peer lately, for `nixl-kv status` and `doctor`."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from nixl_kv.engine.event_log import RECENT_S
from nixl_kv.protocol.events import PeerKey, ReadDone
from nixl_kv.protocol.messages import MAX_LISTED

MAX_READS: Final = 32  # of a peer that count: a slow link shows after one, and is over after these
MAX_PEERS: Final = MAX_LISTED  # the latest ones


class _Sample(NamedTuple):
    at: float  # monotonic seconds
    num_bytes: int
    seconds: float
    path: str


class Speeds:
    """The latest reads of each peer. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
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

    def of(self, peer: PeerKey) -> dict[str, Any]:
        """Of the last RECENT_S: path of the latest read, bytes per second and seconds of one."""
        since = self._clock() - RECENT_S
        recent = [each for each in self._samples.get(peer, ()) if each.at > since]
        num_bytes, seconds = sum(each.num_bytes for each in recent), sum(e.seconds for e in recent)
        return {
            "path": recent[-1].path if recent else None,
            "bytes_per_second": round(num_bytes / seconds) if seconds else None,
            "read_s": seconds / len(recent) if recent else None,  # on average
        }
