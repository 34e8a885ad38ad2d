"""Which reads may be under way: as many bytes as keep a link busy, and not more.

What is read from one prefill rank is its lane. The lanes take turns, first come first served in
each. Of one lane, and of all together, at most MAX_BYTES are under way, or one load if that is
larger: its reads from several ranks go together, so that the link is not idle between them. So a
read that is under way gets a fair part of the link, and one that is late is stuck, not one of very
many. What has not begun costs nothing to cancel.

A lane in which nothing has ended for STALL_S does not count for the others: a prefill rank that
hangs holds up nobody else.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Endpoint, Rank
from nixl_kv.protocol.deadlines import Deadlines

MAX_BYTES: Final = 1 << 30
MAX_READS: Final = 2048
"""Of all lanes together, however short: each also needs a slot to read into."""
STALL_S: Final = 2.0

Key: TypeAlias = tuple[Claim, Rank]
"""What one load reads from one prefill rank."""


@dataclass
class _Lane:
    progressed_at: float = 0.0  # when a read ended here, or began with no other under way
    waiting: OrderedDict[Key, int] = field(default_factory=OrderedDict)  # bytes
    under_way: dict[Key, int] = field(default_factory=dict)
    num_bytes: int = 0  # under way
    is_stalled: bool = False


class ReadQueue:
    """Reads by key. `now` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._lanes: dict[Endpoint, _Lane] = {}
        self._where: dict[Key, Endpoint] = {}
        self._turns: deque[Endpoint] = deque()  # the lanes in which something waits
        self._stalls = Deadlines[Endpoint]()
        self._num_bytes = 0  # under way, but for stalled lanes
        self._num_reads = 0
        self._progressed_at = 0.0

    @property
    def next_due(self) -> float | None:
        """When time may let another read begin; None for never."""
        return self._stalls.next if self._turns else None

    def __contains__(self, key: Key) -> bool:
        return key in self._where

    def add(self, key: Key, endpoint: Endpoint, num_bytes: int) -> None:
        """A read waits for its turn."""
        lane = self._lanes.setdefault(endpoint, _Lane())
        if not lane.waiting:
            self._turns.append(endpoint)
        lane.waiting[key] = num_bytes
        self._where[key] = endpoint

    def pop_startable(self, now: float) -> list[Key]:
        """Those whose turn it is; they count as under way from now on."""
        startable: list[Key] = []
        for endpoint in self._stalls.pop_due(now):
            lane = self._lanes[endpoint]
            lane.is_stalled = True
            self._num_bytes -= lane.num_bytes
        passed = 0  # lanes in a row that are full
        while self._turns and passed < len(self._turns):
            endpoint = self._turns[0]
            lane = self._lanes[endpoint]
            key, num_bytes = next(iter(lane.waiting.items()))
            if not _fits(num_bytes, lane.num_bytes):
                self._turns.rotate(-1)
                passed += 1
                continue
            has_room = _fits(num_bytes, self._num_bytes) or self._is_alone(key)
            if not has_room or self._num_reads >= MAX_READS:
                break
            passed = 0
            del lane.waiting[key]
            self._turns.popleft()
            if lane.waiting:
                self._turns.append(endpoint)
            self._start(endpoint, lane, key, num_bytes, now=now)
            startable.append(key)
        return startable

    def remove(self, key: Key, now: float, *, has_progressed: bool) -> None:
        """It has ended, or is not wanted any more; one that is not known is ignored.

        `has_progressed`: it was read.
        """
        endpoint = self._where.pop(key, None)
        if endpoint is None:
            return
        lane = self._lanes[endpoint]
        if lane.waiting.pop(key, None) is not None:
            if not lane.waiting:
                self._turns.remove(endpoint)
        else:
            self._end(endpoint, lane, key, now=now, has_progressed=has_progressed)
        if not lane.waiting and not lane.under_way:
            del self._lanes[endpoint]

    def note_progress(self, key: Key, now: float) -> None:
        """Bytes of a read have landed. An unknown read is ignored.

        This does not end a stall: a slow lane that counted toward the total would block the others.
        """
        endpoint = self._where.get(key)
        if endpoint is not None:
            self._lanes[endpoint].progressed_at = self._progressed_at = now

    def progressed_at(self, key: Key) -> float:
        """When something last moved that this read waits for, or is."""
        lane = self._lanes[self._where[key]]
        return lane.progressed_at if lane.under_way else self._progressed_at

    def clear(self) -> None:
        """Forget all reads."""
        self._lanes.clear()
        self._where.clear()
        self._turns.clear()
        self._stalls.clear()
        self._num_bytes = self._num_reads = 0

    def validate(self) -> None:
        """Check the sums."""
        moving = [lane for lane in self._lanes.values() if not lane.is_stalled]
        waiting = sorted(endpoint for endpoint, lane in self._lanes.items() if lane.waiting)
        if any(lane.num_bytes != sum(lane.under_way.values()) for lane in self._lanes.values()):
            raise LocalProtocolError("the bytes of a lane are not those under way in it")
        if self._num_bytes != sum(lane.num_bytes for lane in moving):
            raise LocalProtocolError(f"{self._num_bytes} bytes are not those of the lanes")
        if self._num_reads != sum(len(lane.under_way) for lane in self._lanes.values()):
            raise LocalProtocolError(f"{self._num_reads} reads are not those of the lanes")
        if sorted(self._turns) != waiting:
            raise LocalProtocolError(f"lanes {waiting} wait, the turns are {self._turns}")

    def _is_alone(self, key: Key) -> bool:
        """Whether all that is under way is of the same load, but in lanes that are stalled."""
        lanes = (lane for lane in self._lanes.values() if not lane.is_stalled)
        return all(claim == key[0] for lane in lanes for claim, _ in lane.under_way)

    def _start(
        self, endpoint: Endpoint, lane: _Lane, key: Key, num_bytes: int, *, now: float
    ) -> None:
        if not lane.under_way:
            self._progress(endpoint, lane, now)
        lane.under_way[key] = num_bytes
        lane.num_bytes += num_bytes
        self._num_reads += 1
        if not lane.is_stalled:
            self._num_bytes += num_bytes

    def _end(
        self, endpoint: Endpoint, lane: _Lane, key: Key, *, now: float, has_progressed: bool
    ) -> None:
        num_bytes = lane.under_way.pop(key)
        if has_progressed:
            self._progress(endpoint, lane, now)
        lane.num_bytes -= num_bytes
        self._num_reads -= 1
        if not lane.is_stalled:
            self._num_bytes -= num_bytes
        if not lane.under_way:
            self._stalls.set(endpoint, None)

    def _progress(self, endpoint: Endpoint, lane: _Lane, now: float) -> None:
        lane.progressed_at = self._progressed_at = now
        self._stalls.set(endpoint, now + STALL_S)
        if lane.is_stalled:
            lane.is_stalled = False
            self._num_bytes += lane.num_bytes


def _fits(num_bytes: int, under_way: int) -> bool:
    return not under_way or under_way + num_bytes <= MAX_BYTES
