"""The remote engines that this rank reads, and their ranks as one agent reads them.

`RemotePeers` checks remote engines and finds which of their ranks this rank reads, for all agents.
`Ranks` holds one record per remote rank for one agent, with an explicit state (`TRANSITIONS`); a
read waits at the record of its rank. All of it runs on the transfer thread, except the background
threads of `Ranks`.
"""

import concurrent.futures
import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from nixl_kv.config import AllowedHosts
from nixl_kv.errors import IncompatiblePeer, LocalProtocolError, NixlKVError
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.match import Route
from nixl_kv.geometry.plan import Plan, plan
from nixl_kv.ids import Rank, RequestId, endpoint_host
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import PeerKey
from nixl_kv.reading.paths import Budget, DirectPath, PreparedRank, ReadPath, Source
from nixl_kv.transport.base import ListHandle, PeerName, Transport, slot_rows

SHOWN_MISMATCHES: Final = 4

# How long the end of an agent waits for a rank that is being added to it.
ADD_END_S: Final = 2.0

WaitingRead: TypeAlias = events.StartRead | events.ReadSlot


def request_of(read: WaitingRead) -> RequestId:
    return read.load.request if isinstance(read, events.StartRead) else read.request


class RemotePeers:
    """The compatible engines, and the local facts with which they are compared.

    `allowed` are the hosts on which peers may be; None for any. `extras` are facts besides the
    model that this engine needs its peers to share. `paths` are the ways to read besides direct
    reads, in the order in which an agent asks them.
    """

    def __init__(
        self,
        layout: CacheLayout,
        rank: Rank,
        model: Mapping[str, str],
        allowed: AllowedHosts | None = None,
        *,
        extras: Mapping[str, str] | None = None,
        paths: Sequence[ReadPath] = (),
    ) -> None:
        self.layout = layout
        self.descriptions: dict[PeerKey, messages.Description] = {}  # of the compatible engines
        self.paths: tuple[ReadPath, ...] = (*paths, DirectPath(layout.memory))
        self._rank = rank
        self._model = model
        self._extras = extras or {}
        self._allowed = allowed or AllowedHosts()
        self.set_layouts((layout,))  # this rank alone, until the caller names its engine

    def set_layouts(self, layouts: tuple[CacheLayout, ...]) -> None:
        """Set the layouts of this engine's ranks, in rank order."""
        self.engine_layouts = layouts
        self._pieces = match.pieces(layouts)
        self._holdings = [match.holdings(layout) for layout in layouts]

    def check(self, description: messages.Description) -> None:
        """Check that this engine can read another one.

        Raises:
            IncompatiblePeer: names what differs, or the endpoint that is not allowed.
        """
        self._check_endpoints(description)
        mismatches = match.model_mismatches(self._model, description.model)
        mismatches += match.extra_mismatches(self._extras, description.extras)
        if not mismatches:
            remote = [rank.layout for rank in description.ranks]
            mismatches = match.layout_mismatches(
                self.engine_layouts, remote, local_pieces=self._pieces
            )
        if mismatches:
            more = len(mismatches) - SHOWN_MISMATCHES
            raise IncompatiblePeer(
                f"engine {description.engine!r} cannot be read: "
                + "; ".join(map(str, mismatches[:SHOWN_MISMATCHES]))
                + (f"; and {more} more" if more > 0 else "")
            )

    def routes(self, description: messages.Description) -> tuple[Route, ...]:
        """Which ranks of an engine this rank reads, and which it only releases."""
        return match.routes(
            self._rank,
            self._holdings,
            [match.holdings(rank.layout) for rank in description.ranks],
        )

    def _check_endpoints(self, description: messages.Description) -> None:
        # A description may name other hosts than its sender's.
        if len({rank.endpoint for rank in description.ranks}) < len(description.ranks):
            raise IncompatiblePeer(
                f"engine {description.engine!r} has several ranks at one endpoint; allowed: one"
            )
        for rank in description.ranks:
            if not self._allowed.allows(endpoint_host(rank.endpoint)):
                raise IncompatiblePeer(
                    f"engine {description.engine!r} has a rank at {rank.endpoint}; "
                    f"allowed by 'peers': {self._allowed}"
                )


class RankState(enum.Enum):
    """States of a remote rank, for one agent."""

    QUEUED = enum.auto()  # waits for a background thread
    PREPARING = enum.auto()  # is being planned, and added to the transport
    READY = enum.auto()  # reads can start
    LEAVING = enum.auto()  # no new reads; waits for the transport, and for its last read

    __hash__ = object.__hash__  # Enum's own is Python code


class RankEvent(enum.Enum):
    """Events that change the state of a remote rank."""

    BEGIN = enum.auto()  # a background thread is free
    PREPARED = enum.auto()  # it is planned and added, and its lists are made
    FAIL = enum.auto()  # it, or another rank of its engine, cannot be prepared
    DROP = enum.auto()  # its engine is forgotten; the connections stay for the next handshake
    LOSE = enum.auto()  # its connections broke, or its engine died
    IDLE = enum.auto()  # nothing reads it, and the transport is not busy

    __hash__ = object.__hash__


# For each state, the states to which an event may lead; None: the record is gone. A PREPARING rank
# that is dropped stays in LEAVING until `add_peer` has returned. FAIL and DROP keep the
# connections, so that the next handshake uses them again. LOSE makes the transport forget the rank,
# or NIXL would never connect again.
TRANSITIONS: Final[Mapping[RankState, Mapping[RankEvent, tuple[RankState | None, ...]]]] = {
    RankState.QUEUED: {
        RankEvent.BEGIN: (RankState.PREPARING,),
        RankEvent.FAIL: (None,),
        RankEvent.DROP: (None,),
        RankEvent.LOSE: (None,),
    },
    RankState.PREPARING: {
        RankEvent.PREPARED: (RankState.READY,),
        RankEvent.FAIL: (None, RankState.LEAVING),
        RankEvent.DROP: (None, RankState.LEAVING),
        RankEvent.LOSE: (RankState.LEAVING, None),
    },
    RankState.READY: {
        RankEvent.FAIL: (None,),
        RankEvent.DROP: (None,),
        RankEvent.LOSE: (RankState.LEAVING,),
    },
    RankState.LEAVING: {
        RankEvent.IDLE: (None,),
    },
}


@dataclass(frozen=True)
class _Planned:
    """The part of a rank's preparation that needs no transport."""

    plan: Plan
    paths: tuple[tuple[ReadPath, PreparedRank], ...]  # in the order in which an agent asks them

    def release(self) -> None:
        for _, prepared in self.paths:
            prepared.release()


@dataclass(eq=False)
class RemoteRank:
    """One rank of a remote engine, for one agent."""

    peer: PeerKey
    route: Route
    description: messages.RankDescription
    state: RankState = RankState.QUEUED
    waiting: list[WaitingRead] = field(default_factory=list)  # for READY, and an idle transport
    planning: Future[_Planned] | None = None
    adding: Future[PeerName] | None = None
    name: PeerName | None = None
    is_lost: bool = False  # the transport must forget it
    source: Source | None = None  # set in READY
    slots: ListHandle = None  # set in READY: the fence slots
    paths: tuple[tuple[ReadPath, PreparedRank], ...] = ()  # set in READY

    @property
    def rank(self) -> Rank:
        return self.route.remote_rank

    @property
    def is_ready(self) -> bool:
        return self.state is RankState.READY

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.peer}"

    def move(self, event: RankEvent, after: RankState | None) -> None:
        """Change the state; nothing else does."""
        allowed = TRANSITIONS[self.state].get(event, ())
        if after not in allowed:
            raise LocalProtocolError(
                f"{self}: {event.name} leads from {self.state.name} to {after}; allowed: {allowed}"
            )
        if after is not None:
            self.state = after


class Ended(NamedTuple):
    """The end of an engine's preparation: all of its ranks are READY, or with an `error` none is.

    The reads in `waiting` fail with the error.
    """

    peer: PeerKey
    error: str | None = None
    waiting: tuple[WaitingRead, ...] = ()


class Ranks:
    """The remote ranks of one agent.

    Two background threads prepare them: one plans, one adds ranks to the transport. `add_peer`
    takes 2 to 140 ms, and any other call of the transport would wait for it. So while `is_adding`,
    the agent does not call its transport, and reads wait at their ranks. At least one turn of the
    transfer thread lies between two calls of `add_peer`, and the waiting reads start in it.

    `background` has at least two threads that nothing else uses. `is_reading` tells whether the
    agent reads the rank with this name. `on_ready` is called with each rank that becomes READY.
    """

    def __init__(
        self,
        transport: Transport,
        peers: RemotePeers,
        background: Executor,
        *,
        is_reading: Callable[[PeerName], bool],
        on_ready: Callable[[RemoteRank], None],
    ) -> None:
        self.budget = Budget()
        self._transport = transport
        self._peers = peers
        self._background = background
        self._is_reading = is_reading
        self._on_ready = on_ready
        self._ranks: dict[PeerKey, dict[Rank, RemoteRank]] = {}
        self._busy: dict[RemoteRank, None] = {}  # in order: not READY, or with reads that wait
        self._adding: RemoteRank | None = None
        self._planning: Future[_Planned] | None = None
        self._ended: list[Ended] = []  # to be reported
        self._kept: set[PeerName] = set()  # names whose connections stay, without a record
        self._num_dropped = 0  # likewise, which the transport has forgotten

    def __repr__(self) -> str:
        states = Counter(rank.state.name for rank in self._all())
        return f"<Ranks: {', '.join(f'{n} {state}' for state, n in states.items()) or 'none'}>"

    @property
    def is_adding(self) -> bool:
        """Whether the transport is busy because it adds a rank."""
        rank = self._adding
        return rank is not None and rank.adding is not None and not rank.adding.done()

    @property
    def is_busy(self) -> bool:
        """Whether a background thread or the next turn changes something here."""
        return self._adding is not None or bool(self._ended) or any(map(self._is_due, self._busy))

    @property
    def num_left(self) -> int:
        """The number of ranks without a record whose connections are still open.

        Only the end of the agent closes them.
        """
        self._kept -= self._names()
        return len(self._kept) + self._num_dropped

    @property
    def has_left(self) -> bool:
        """Whether `num_left` may exceed 0; much cheaper to ask."""
        return bool(self._kept or self._num_dropped)

    @property
    def known(self) -> list[PeerKey]:
        """The engines with a READY rank."""
        return list(dict.fromkeys(rank.peer for rank in self._all() if rank.is_ready))

    @property
    def num_ready(self) -> int:
        return sum(rank.is_ready for rank in self._all())

    def is_preparing(self, peer: PeerKey) -> bool:
        """Whether a rank of this engine is not READY yet."""
        return not all(rank.is_ready for rank in self._ranks.get(peer, {}).values())

    def find(self, peer: PeerKey, rank: Rank) -> RemoteRank | None:
        return self._ranks.get(peer, {}).get(rank)

    def prepare(
        self, peer: PeerKey, description: messages.Description, routes: Sequence[Route]
    ) -> None:
        """Make the ranks of an engine that this rank reads READY: all or none. See `collect`."""
        ranks = self._ranks.setdefault(peer, {})
        for route in routes:
            if route.readers and route.remote_rank not in ranks:
                rank = RemoteRank(peer, route, description.ranks[route.remote_rank])
                ranks[rank.rank] = rank
                self._busy[rank] = None
        if not self.is_preparing(peer):
            self._ended.append(Ended(peer))

    def wait(self, rank: RemoteRank, read: WaitingRead) -> None:
        rank.waiting.append(read)
        self._busy[rank] = None

    def pop_startable(self) -> list[WaitingRead]:
        """Remove and return the reads that can start now."""
        if self.is_adding:
            return []
        startable = []
        for rank in [rank for rank in self._busy if rank.is_ready]:
            startable += rank.waiting
            rank.waiting = []
            del self._busy[rank]
        return startable

    def pop_waiting(
        self, is_meant: Callable[[WaitingRead], bool] = lambda _: True
    ) -> list[WaitingRead]:
        """Remove and return waiting reads."""
        popped: list[WaitingRead] = []
        for rank in self._busy:
            popped += [read for read in rank.waiting if is_meant(read)]
            rank.waiting = [read for read in rank.waiting if not is_meant(read)]
        return popped

    def drop(self, peer: PeerKey, *, is_lost: bool = False) -> list[WaitingRead]:
        """Forget an engine, or give up preparing it; return the reads that waited for it.

        If its connections are lost, other records of the same ranks are lost with them.
        """
        ranks = list(self._ranks.get(peer, {}).values())
        event = RankEvent.LOSE if is_lost else RankEvent.DROP
        names = {rank.name for rank in ranks if is_lost and rank.name is not None}
        waiting = [read for rank in ranks for read in self._remove(rank, event)]
        shared = {rank.peer: None for rank in self._all() if rank.name in names}
        for other in shared:
            waiting += self.drop(other, is_lost=True)
        return waiting

    def give_up_all(self) -> None:
        for peer in [peer for peer in self._ranks if self.is_preparing(peer)]:
            self.drop(peer)

    def collect(self) -> list[Ended]:
        """Take over the background threads' results; return the preparations that have ended."""
        if not self.is_adding:
            self._end_adding()
            for rank in [rank for rank in self._busy if rank.state is RankState.PREPARING]:
                if rank in self._busy:  # else another rank of its engine has just failed
                    self._finish(rank)
        ended, self._ended = self._ended, []
        return ended

    def begin_next(self) -> None:
        """End the records of LEAVING ranks, and give the background threads work."""
        if not self.is_adding:
            for rank in [rank for rank in self._busy if rank.state is RankState.LEAVING]:
                self._leave(rank)
        pending = [r for r in self._busy if r.state in (RankState.QUEUED, RankState.PREPARING)]
        unplanned = next((rank for rank in pending if rank.planning is None), None)
        if unplanned is not None and (self._planning is None or self._planning.done()):
            self._begin(unplanned)
            self._planning = self._background.submit(self._plan, unplanned)
            unplanned.planning = self._planning
        unadded = next((rank for rank in pending if rank.adding is None), None)
        if unadded is not None and self._adding is None:
            self._begin(unadded)
            metadata = unadded.description.agent
            unadded.adding = self._background.submit(self._transport.add_peer, metadata)
            self._adding = unadded

    def close(self) -> None:
        """Give up all preparations and free all ranks; waits for `add_peer`, up to ADD_END_S."""
        for peer in list(self._ranks):
            self.drop(peer)
        adding = self._adding.adding if self._adding is not None else None
        if adding is not None and not adding.cancel():
            concurrent.futures.wait([adding], ADD_END_S)
        self._background.shutdown(wait=False, cancel_futures=True)

    def _all(self) -> Iterator[RemoteRank]:
        return (rank for ranks in self._ranks.values() for rank in ranks.values())

    def _names(self) -> set[PeerName]:
        """Names that a record has. An engine at two addresses has the same names under both."""
        leaving = (rank for rank in self._busy if rank.state is RankState.LEAVING)
        ranks = (*self._all(), *leaving)
        return {rank.name for rank in ranks if rank.name is not None}

    def _is_due(self, rank: RemoteRank) -> bool:
        """Whether the next turn or a background thread has something to do for a rank."""
        is_held = rank.name is not None and self._is_reading(rank.name)
        return rank.state is not RankState.LEAVING or not is_held

    def _begin(self, rank: RemoteRank) -> None:
        if rank.state is RankState.QUEUED:
            rank.move(RankEvent.BEGIN, RankState.PREPARING)

    def _plan(self, rank: RemoteRank) -> _Planned:
        """Plan a rank, and prepare its paths; on a background thread."""
        planned = plan(self._peers.layout, rank.description.layout, rank.route.share)
        paths = []
        for path in self._peers.paths:
            prepared = path.prepare(rank.description, rank.route.share, planned)
            if prepared is not None:
                paths.append((path, prepared))
        return _Planned(planned, tuple(paths))

    def _end_adding(self) -> None:
        rank, self._adding = self._adding, None
        if rank is None or rank.adding is None:
            return
        has_name = not rank.adding.cancelled() and rank.adding.exception() is None
        rank.name = rank.adding.result() if has_name else None

    def _finish(self, rank: RemoteRank) -> None:
        """Make a rank READY that is planned and added. If that fails, fail its engine."""
        planning, adding = rank.planning, rank.adding
        try:
            if adding is not None and adding.done():
                adding.result()
            if planning is None or not planning.done():
                return
            planned = planning.result()
            if rank.name is None:
                return
            self._make_lists(rank, planned, rank.name)
        except (NixlKVError, ValueError) as error:
            failed = list(self._ranks[rank.peer].values())
            reads = [read for each in failed for read in self._remove(each, RankEvent.FAIL)]
            self._ended.append(Ended(rank.peer, str(error), tuple(reads)))
            return
        rank.move(RankEvent.PREPARED, RankState.READY)
        if not rank.waiting:
            del self._busy[rank]
        self._on_ready(rank)
        if not self.is_preparing(rank.peer):
            self._ended.append(Ended(rank.peer))

    def _make_lists(self, rank: RemoteRank, planned: _Planned, name: PeerName) -> None:
        transport, remote = self._transport, rank.description
        rank.source = Source(
            transport=transport,
            name=name,
            description=remote,
            plan=planned.plan,
            local=transport.prepare(planned.plan.local, self._peers.layout.memory, None),
            remote=transport.prepare(planned.plan.remote, remote.layout.memory, name),
            is_tcp=transport.warm_up_pieces(name) == 0,
            budget=self.budget,
        )
        slots = slot_rows(remote.slots.address, remote.slots.count)
        rank.slots = transport.prepare(slots, "DRAM", name)
        rank.paths = planned.paths

    def _remove(self, rank: RemoteRank, event: RankEvent) -> list[WaitingRead]:
        """End a record, at once or when the transport is free; return the reads that waited."""
        ranks = self._ranks[rank.peer]
        del ranks[rank.rank]
        if not ranks:
            del self._ranks[rank.peer]
        waiting, rank.waiting = rank.waiting, []
        if rank.planning is not None and not rank.planning.cancel():
            rank.planning.add_done_callback(_release_planned)
        rank.is_lost = event is RankEvent.LOSE and rank.name is not None
        if rank is self._adding or rank.is_lost:
            rank.move(event, RankState.LEAVING)
            self._busy[rank] = None
            return waiting
        rank.move(event, None)
        self._busy.pop(rank, None)
        if rank.name is not None:
            self._kept.add(rank.name)
        return waiting

    def _leave(self, rank: RemoteRank) -> None:
        """End a LEAVING record, unless a read still needs it. The transport is not busy."""
        if rank.name is not None and self._is_reading(rank.name):
            return
        rank.move(RankEvent.IDLE, None)
        del self._busy[rank]
        if rank.name is None or rank.name in self._names():
            return
        if rank.is_lost:
            self._kept.discard(rank.name)
            self._num_dropped += 1
            self._transport.drop_peer(rank.name)
        else:
            self._kept.add(rank.name)


def _release_planned(planning: "Future[_Planned]") -> None:
    if not planning.cancelled() and planning.exception() is None:
        planning.result().release()
