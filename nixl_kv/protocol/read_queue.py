"""Limits the bytes in flight: enough to keep a link busy, few enough that a late read is stuck.

Each prefill rank has a lane, first come first served, and the lanes take turns. At most MAX_BYTES
are in flight per lane and in all lanes together, or one load if that is larger: its reads from
several ranks start together, so that the link is not idle between them. A queued read has not
begun, so it costs nothing to cancel.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Endpoint, Rank
from nixl_kv.protocol.machine import Deadlines

MAX_BYTES: Final = 1 << 30  # 10 ms of a 100 GB/s link, and 8.6 s of one of 1 Gbit/s
MAX_READS: Final = 2048  # in all lanes together: each read needs local memory for its fence slot
# A prefill rank whose reads do not move no longer delays the reads of other ranks. Its lane no
# longer counts toward the total.
STALL_S: Final = 2.0

Key: TypeAlias = tuple[Claim, Rank]  # one load's read of one prefill rank


@dataclass
class _Lane:
    moved_at: float = 0.0  # when bytes landed here, or a read began with no other under way
    waiting: OrderedDict[Key, int] = field(default_factory=OrderedDict)  # bytes
    under_way: dict[Key, int] = field(default_factory=dict)
    num_bytes: int = 0  # under way
    is_stalled: bool = False


class ReadQueue:
    """Queued and posted reads of one decode rank. `now` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._lanes: dict[Endpoint, _Lane] = {}
        self.where: dict[Key, Endpoint] = {}
        self._turns: deque[Endpoint] = deque()  # the lanes in which something waits
        self.stalls = Deadlines[Endpoint]()
        self._num_bytes = 0  # under way, but for stalled lanes
        self._num_reads = 0
        self._moved_at = 0.0

    def check(self) -> None:
        """Check the sums of all lanes, and the turns of those that wait.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        lanes = self._lanes
        moving = [lane for lane in lanes.values() if not lane.is_stalled]
        waiting = sorted(endpoint for endpoint, lane in lanes.items() if lane.waiting)
        if any(lane.num_bytes != sum(lane.under_way.values()) for lane in lanes.values()):
            raise LocalProtocolError("the bytes of a lane are not those under way in it")
        if self._num_bytes != sum(lane.num_bytes for lane in moving):
            raise LocalProtocolError(f"{self._num_bytes} bytes are not those of the lanes")
        if self._num_reads != sum(len(lane.under_way) for lane in lanes.values()):
            raise LocalProtocolError(f"{self._num_reads} reads are not those of the lanes")
        if sorted(self._turns) != waiting:
            raise LocalProtocolError(f"lanes {waiting} wait, the turns are {self._turns}")

    def add(self, key: Key, endpoint: Endpoint, num_bytes: int) -> None:
        lane = self._lanes.setdefault(endpoint, _Lane())
        if not lane.waiting:
            self._turns.append(endpoint)
        lane.waiting[key] = num_bytes
        self.where[key] = endpoint

    def pop_startable(self, now: float) -> list[Key]:
        """The reads that may start now; they count as under way."""
        startable: list[Key] = []
        for endpoint in self.stalls.pop_due(now) if self.stalls.next <= now else ():
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
            startable.append(key)
            del lane.waiting[key]
            self._turns.popleft()
            if lane.waiting:
                self._turns.append(endpoint)
            if not lane.under_way:
                self._advance(endpoint, lane, now)
            lane.under_way[key] = num_bytes
            self._count(lane, num_bytes, 1)
        return startable

    def remove(self, key: Key, now: float, *, has_landed: bool) -> None:
        endpoint = self.where.pop(key)
        lane = self._lanes[endpoint]
        if lane.waiting.pop(key, None) is not None:
            if not lane.waiting:
                self._turns.remove(endpoint)
        else:
            if has_landed:
                self._advance(endpoint, lane, now)
            self._count(lane, -lane.under_way.pop(key), -1)
            if not lane.under_way:
                self.stalls.set(endpoint, math.inf)
        if not lane.waiting and not lane.under_way:
            del self._lanes[endpoint]

    def note_progress(self, key: Key, now: float) -> None:
        # This does not end a stall: a slow lane that counted would block the others.
        endpoint = self.where.get(key)
        if endpoint is not None:
            self._lanes[endpoint].moved_at = self._moved_at = now

    def moved_at(self, key: Key) -> float:
        """When something last moved in this read's lane, or in any lane if its own is idle."""
        lane = self._lanes[self.where[key]]
        return lane.moved_at if lane.under_way else self._moved_at

    def clear(self) -> None:
        for table in (self._lanes, self.where, self._turns, self.stalls):
            table.clear()
        self._num_bytes = self._num_reads = 0

    def _is_alone(self, key: Key) -> bool:
        """Whether only reads of the same load are under way in lanes that are not stalled."""
        lanes = (lane for lane in self._lanes.values() if not lane.is_stalled)
        return all(claim == key[0] for lane in lanes for claim, _ in lane.under_way)

    def _count(self, lane: _Lane, num_bytes: int, num_reads: int) -> None:
        lane.num_bytes += num_bytes
        self._num_reads += num_reads
        if not lane.is_stalled:
            self._num_bytes += num_bytes

    def _advance(self, endpoint: Endpoint, lane: _Lane, now: float) -> None:
        lane.moved_at = self._moved_at = now
        self.stalls.set(endpoint, now + STALL_S)
        if lane.is_stalled:
            lane.is_stalled = False
            self._num_bytes += lane.num_bytes


def _fits(num_bytes: int, under_way: int) -> bool:
    return not under_way or under_way + num_bytes <= MAX_BYTES
