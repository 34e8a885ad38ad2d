"""The remote engines that this rank reads, and their ranks as one agent reads them.

`RemotePeers` checks remote engines and finds which of their ranks this rank reads, for all agents.
`Ranks` holds one record per remote rank for one agent, with an explicit state (`TRANSITIONS`). All
of it runs on the transfer thread, except the background threads of `Ranks`.
"""

import concurrent.futures
import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final, NamedTuple

from nixl_kv.config import AllowedHosts
from nixl_kv.errors import IncompatiblePeer, LocalProtocolError, NixlKVError
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.match import Route
from nixl_kv.geometry.plan import Plan, plan
from nixl_kv.ids import Rank, endpoint_host
from nixl_kv.protocol import messages
from nixl_kv.protocol.events import PeerKey
from nixl_kv.protocol.machine import MachineState
from nixl_kv.reading.paths import Budget, DirectPath, PreparedRank, ReadPath, Source
from nixl_kv.transport.base import ListHandle, PeerName, Transport, slot_rows

SHOWN_MISMATCHES: Final = 4

# The end of a NIXL agent no longer waits for the rank that is being added to it.
ADD_END_S: Final = 2.0


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


class RankState(MachineState):
    """States of a remote rank, for one agent."""

    PREPARING = enum.auto()  # waits for the background threads, which plan it and add it
    READY = enum.auto()  # reads can start
    LEAVING = enum.auto()  # no new reads; waits for the transport, and for its last read


class RankEvent(MachineState):
    """Events that change the state of a remote rank."""

    PREPARED = enum.auto()  # it is planned and added, and its lists are made
    DROP = enum.auto()  # its engine is forgotten, or cannot be prepared; the connections stay
    LOSE = enum.auto()  # its connections broke, or its engine died
    IDLE = enum.auto()  # the transport is not busy and, after LOSE, nothing reads the rank


# For each state, the state to which an event leads; None: the record is gone. After DROP the next
# handshake uses the connections again. LOSE makes the transport forget the rank, or NIXL would
# never connect again.
TRANSITIONS: Final[Mapping[RankState, Mapping[RankEvent, RankState | None]]] = {
    RankState.PREPARING: {
        RankEvent.PREPARED: RankState.READY,
        RankEvent.DROP: RankState.LEAVING,
        RankEvent.LOSE: RankState.LEAVING,
    },
    RankState.READY: {
        RankEvent.DROP: RankState.LEAVING,
        RankEvent.LOSE: RankState.LEAVING,
    },
    RankState.LEAVING: {
        RankEvent.IDLE: None,
    },
}


@dataclass(frozen=True)
class _Planned:
    """The part of a rank's preparation that needs no transport."""

    plan: Plan
    paths: tuple[tuple[ReadPath, PreparedRank], ...]  # in the order in which an agent asks them


@dataclass(eq=False)
class RemoteRank:
    """One rank of a remote engine, for one agent."""

    peer: PeerKey
    route: Route
    description: messages.RankDescription
    state: RankState = RankState.PREPARING
    planning: Future[_Planned] | None = None
    adding: Future[None] | None = None
    name: PeerName | None = None  # set when it is added
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

    @property
    def is_outdated(self) -> bool:
        return any(prepared.is_outdated for _, prepared in self.paths)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.peer}"

    def move(self, event: RankEvent) -> None:
        moves = TRANSITIONS[self.state]
        if event not in moves:
            allowed = [each.name for each in moves]
            raise LocalProtocolError(
                f"{self}: {event.name} in state {self.state.name}; allowed: {allowed}"
            )
        self.state = moves[event] or self.state


class Ended(NamedTuple):
    """The end of an engine's preparation: all ranks are READY, or with an `error` none is."""

    peer: PeerKey
    error: str | None = None


class Ranks:
    """The remote ranks of one agent.

    Two background threads prepare them: one plans, one adds ranks to the transport. `add_peer`
    takes 2 to 140 ms, and any other call of the transport would wait for it. So while `is_adding`,
    the agent does not call its transport, and reads wait. At least one turn of the transfer thread
    lies between two calls of `add_peer`, and the waiting reads start in it.

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
        self.busy: dict[RemoteRank, None] = {}  # in order: those that are not READY
        self.adding: Future[None] | None = None  # the call in progress; `collect` clears it
        self.ended: list[Ended] = []  # to be reported
        self._kept: set[PeerName] = set()  # names whose connections stay, without a record
        self._num_dropped = 0  # ranks whose connections NIXL still holds

    def __repr__(self) -> str:
        states = Counter(rank.state.name for rank in self._all())
        return f"<Ranks: {', '.join(f'{n} {state}' for state, n in states.items()) or 'none'}>"

    @property
    def is_adding(self) -> bool:
        return self.adding is not None and not self.adding.done()

    @property
    def is_busy(self) -> bool:
        """Whether a background thread or the next turn changes something here."""
        is_due = self.adding is not None or bool(self.ended)
        return is_due or not all(map(self._is_held, self.busy))

    @property
    def num_left(self) -> int:
        """The number of ranks without a record whose connections are still open.

        Only the end of the agent closes them.
        """
        self._kept -= {rank.name for rank in self._all() if rank.name is not None}
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

    def has(self, peer: PeerKey) -> bool:
        """Whether its ranks have records, READY or not."""
        return peer in self._ranks

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
                self.busy[rank] = None
        if not self.is_preparing(peer):
            self.ended.append(Ended(peer))

    def drop(self, peer: PeerKey, *, is_lost: bool = False) -> None:
        """Forget an engine, or give up preparing it.

        If its connections are lost, other records of the same ranks are lost with them.
        """
        ranks = self._ranks.pop(peer, {}).values()
        for rank in ranks:
            if rank.planning is not None and not rank.planning.cancel():
                rank.planning.add_done_callback(_release_planned)
            rank.move(RankEvent.LOSE if is_lost else RankEvent.DROP)
            rank.is_lost = is_lost
            self.busy[rank] = None
        names = {rank.name for rank in ranks if is_lost and rank.name is not None}
        for other in {rank.peer for rank in self._all() if names and rank.name in names}:
            self.drop(other, is_lost=True)

    def give_up_all(self) -> None:
        for peer in [peer for peer in self._ranks if self.is_preparing(peer)]:
            self.drop(peer)

    def collect(self) -> list[Ended]:
        if not self.is_adding:
            self.adding = None
            for rank in list(self.busy):
                if rank.state is RankState.PREPARING:  # its engine may have failed in this loop
                    self._finish(rank)
        ended, self.ended = self.ended, []
        return ended

    def begin_next(self) -> None:
        """End the records of LEAVING ranks, and give the background threads work."""
        if self.adding is None:
            self._leave()
        preparing = [rank for rank in self.busy if rank.state is RankState.PREPARING]
        is_planning = any(rank.planning and not rank.planning.done() for rank in preparing)
        for rank in preparing:
            if rank.planning is None and not is_planning:
                rank.planning, is_planning = self._background.submit(self._plan, rank), True
            if rank.adding is None and self.adding is None:
                rank.adding = self.adding = self._background.submit(self._add, rank)

    def close(self) -> None:
        """Give up all preparations and free all ranks; waits for `add_peer`, up to ADD_END_S."""
        for peer in list(self._ranks):
            self.drop(peer)
        if self.adding is not None and not self.adding.cancel():
            concurrent.futures.wait([self.adding], ADD_END_S)
        self._background.shutdown(wait=False, cancel_futures=True)

    def _all(self) -> Iterator[RemoteRank]:
        return (rank for ranks in self._ranks.values() for rank in ranks.values())

    def _is_held(self, rank: RemoteRank) -> bool:
        """Whether a record only waits for the end of a read."""
        is_lost = rank.state is RankState.LEAVING and rank.is_lost
        return is_lost and rank.name is not None and self._is_reading(rank.name)

    def _plan(self, rank: RemoteRank) -> _Planned:
        """Plan a rank, and prepare its paths; on a background thread."""
        planned = plan(self._peers.layout, rank.description.layout, rank.route.share)
        paths = []
        for path in self._peers.paths:
            prepared = path.prepare(rank.description, rank.route.share, planned)
            if prepared is not None:
                paths.append((path, prepared))
        return _Planned(planned, tuple(paths))

    def _add(self, rank: RemoteRank) -> None:
        """Add a rank to the transport; on a background thread."""
        rank.name = self._transport.add_peer(rank.description.agent)

    def _finish(self, rank: RemoteRank) -> None:
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
            self.drop(rank.peer)
            self.ended.append(Ended(rank.peer, str(error)))
            return
        rank.move(RankEvent.PREPARED)
        del self.busy[rank]
        self._on_ready(rank)
        if not self.is_preparing(rank.peer):
            self.ended.append(Ended(rank.peer))

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

    def _leave(self) -> None:
        """End LEAVING records, unless a read still needs them. The transport is not busy."""
        leaving = [rank for rank in self.busy if rank.state is RankState.LEAVING]
        if not leaving:
            return
        # An engine at two addresses has the same names under both.
        num_records = Counter(rank.name for rank in (*self._all(), *leaving))
        for rank in leaving:
            if self._is_held(rank):
                continue
            rank.move(RankEvent.IDLE)
            del self.busy[rank]
            num_records[rank.name] -= 1
            if rank.name is None or num_records[rank.name]:
                continue
            if rank.is_lost:
                self._kept.discard(rank.name)
                self._num_dropped += 1
                self._transport.drop_peer(rank.name)
            else:
                self._kept.add(rank.name)


def _release_planned(planning: "Future[_Planned]") -> None:
    if not planning.cancelled() and planning.exception() is None:
        for _, prepared in planning.result().paths:
            prepared.release()
