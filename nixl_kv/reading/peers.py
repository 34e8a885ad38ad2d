"""The remote engines that this rank reads: whether they fit, which of their ranks, and how.

`RemotePeers` is what the rank knows of them, whichever agent reads. `PreparedPeers` is what one
agent needs: their metadata loaded, and the lists of rows that it reads. Both belong to the transfer
thread; what takes long of a preparation runs beside it, on threads of the agent's own.
"""

import concurrent.futures
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from nixl_kv.config import AllowedHosts
from nixl_kv.errors import IncompatiblePeer, NixlKVError, PeerLost, TransportError
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.match import Route
from nixl_kv.geometry.plan import LENGTH, Plan, Share, plan
from nixl_kv.geometry.slices import KVSlice, SliceNamer
from nixl_kv.ids import Rank, endpoint_host
from nixl_kv.log_limit import get_logger
from nixl_kv.protocol import messages
from nixl_kv.protocol.events import PeerKey, StartLoad
from nixl_kv.reading.gather.base import MappedPlan, Means
from nixl_kv.reading.staged.read import (
    FreeSlots,
    StagedPlan,
    StagedRank,
    plan_staged,
    prepare_staged,
)
from nixl_kv.transport.base import ListHandle, PeerName, Rows, Transport
from nixl_kv.transport.slots import slot_rows
from nixl_kv.verify.queue import block_tables

logger = get_logger(__name__)

SHOWN_MISMATCHES: Final = 4

SAMPLE_BYTES: Final = 4096
"""Of a piece of a peer's cache that is read to warm up."""
SAMPLED_SPANS: Final = 64
ADD_END_S: Final = 2.0
"""How long the end of an agent waits for a peer that is being added to it."""


class RemotePeers:
    """The peers that fit this rank, and its own side of what they are compared with."""

    def __init__(
        self,
        layout: CacheLayout,
        rank: Rank,
        model: Mapping[str, str],
        allowed: AllowedHosts | None = None,
        *,
        extras: Mapping[str, str] | None = None,
        means: Means | None = None,
    ) -> None:
        """Start with no peer, as the only rank of this engine that is known.

        Args:
            layout: of this rank's cache.
            rank: of this engine's ranks, which this one is.
            model: this engine's facts of its model.
            allowed: the hosts that peers may be on; None for any.
            extras: facts of what this engine has besides its model, and so needs of its peers.
            means: what this rank reads with; by default NIXL alone.
        """
        self.layout = layout
        self.engine_layouts: tuple[CacheLayout, ...] = (layout,)
        self.descriptions: dict[PeerKey, messages.Description] = {}
        """Of the peers that were checked, and fit."""
        self._namers: dict[PeerKey, dict[Rank, SliceNamer]] = {}  # of their ranks that are read
        self.means = means or Means()
        staging = self.means.staging
        self.free_slots = None if staging is None else FreeSlots(staging.ring)
        """Of this rank's ring, whichever agent reads into them."""
        self._rank = rank
        self._model = model
        self._extras = extras or {}
        self._allowed = allowed or AllowedHosts()

    def check(self, description: messages.Description) -> None:
        """Check that this engine can read that one.

        Raises:
            IncompatiblePeer: names what differs, or the endpoint that is not allowed.
        """
        self._check_endpoints(description)
        mismatches = match.model_mismatches(self._model, description.model)
        mismatches += match.extra_mismatches(self._extras, description.extras)
        if not mismatches:
            remote = [rank.layout for rank in description.ranks]
            mismatches = match.layout_mismatches(self.engine_layouts, remote)
        if mismatches:
            more = len(mismatches) - SHOWN_MISMATCHES
            raise IncompatiblePeer(
                f"engine {description.engine!r} cannot be read: "
                + "; ".join(map(str, mismatches[:SHOWN_MISMATCHES]))
                + (f"; and {more} more" if more > 0 else "")
            )

    def routes(self, description: messages.Description) -> tuple[Route, ...]:
        """Which of its ranks this rank reads, and which it only releases."""
        return match.routes(
            self._rank,
            [match.holdings(layout) for layout in self.engine_layouts],
            [match.holdings(rank.layout) for rank in description.ranks],
        )

    def add(
        self, peer: PeerKey, description: messages.Description, routes: Iterable[Route]
    ) -> None:
        """A peer fits, and is read by these routes."""
        self.descriptions[peer] = description
        self._namers[peer] = {
            route.remote_rank: SliceNamer(
                self.layout,
                route.share,
                match.holdings(description.ranks[route.remote_rank].layout),
            )
            for route in routes
            if route.readers
        }

    def forget(self, peer: PeerKey) -> None:
        """It is not read any more."""
        self.descriptions.pop(peer, None)
        self._namers.pop(peer, None)

    def name_slices(self, peer: PeerKey, rank: Rank, load: StartLoad) -> tuple[KVSlice, ...]:
        """What a load reads from a rank of a peer that fits, for digests.

        Raises:
            PeerLost: if it was forgotten since, as one is that could not be joined.
            ValueError: for tables that this cache cannot have.
        """
        namers = self._namers.get(peer)
        if namers is None:
            raise PeerLost(f"engine {peer.engine!r} is gone")
        return namers[rank].name(block_tables(self.layout, load.tables))

    def _check_endpoints(self, description: messages.Description) -> None:
        """A description may lead to other hosts than the one that gave it."""
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


@dataclass(eq=False)
class PreparedRank:
    """One rank of a peer, ready to be read."""

    rank: Rank
    name: PeerName
    share: Share
    plan: Plan
    local: ListHandle
    remote_list: ListHandle
    slots: ListHandle
    sample: ListHandle
    """A piece of each of its registered regions, to warm up, `sample_lengths` long."""
    sample_lengths: tuple[int, ...]
    remote: messages.RankDescription
    mapped: MappedPlan | None
    """Where its memory is mapped here."""
    staging: Future[StagedPlan] | None = None
    """Where it is being planned how it is read where it packs."""
    staged: StagedRank | None = None
    is_packed: bool = True  # as far as it is known, what is read can be


@dataclass(frozen=True)
class _Planned:
    """What is prepared of a rank without the transport."""

    plan: Plan
    mapped: MappedPlan | None


@dataclass(eq=False)
class _Preparation:
    """A peer that is being prepared."""

    peer: PeerKey
    description: messages.Description
    routes: Sequence[Route]  # of the ranks that are read
    plans: dict[Rank, Future[_Planned]] = field(default_factory=dict)
    names: dict[Rank, PeerName] = field(default_factory=dict)  # of those that were added
    prepared: dict[Rank, PreparedRank] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.prepared) == len(self.routes)

    @property
    def next_to_add(self) -> Rank | None:
        ranks = (route.remote_rank for route in self.routes)
        return next((rank for rank in ranks if rank not in self.names), None)


@dataclass(frozen=True)
class Ended:
    """All ranks of a peer are prepared, or with an `error` none is."""

    peer: PeerKey
    error: str | None = None


class PreparedPeers:
    """The peers' ranks that one agent can read.

    A peer is prepared when it joins, and for a later agent when it is first read with that one,
    beside the transfer thread: there one rank is planned at a time, and one is added to the
    transport. While that lasts (`is_adding`, 2 to 140 ms), any other call of that transport would
    wait until it is: none is made. Between two of them there is one turn at least.

    How a rank is read where it packs is planned when it is first wanted, beside the transfer thread
    too: reads of it wait for that.
    """

    def __init__(
        self,
        transport: Transport,
        peers: RemotePeers,
        background: Executor,
        *,
        is_reading: Callable[[PeerKey], bool],
        is_using: Callable[[MappedPlan], bool],
        on_rank: Callable[[PeerKey, PreparedRank], None],
    ) -> None:
        """Start with none.

        Args:
            transport: the agent's.
            peers: that this rank may read.
            background: two threads at least, for nothing else.
            is_reading: whether the agent reads a peer; then that is not dropped.
            is_using: whether the agent reads mapped memory; then that is not unmapped.
            on_rank: to be called when a rank can be read.
        """
        self._transport = transport
        self._peers = peers
        self._background = background
        self._is_reading = is_reading
        self._is_using = is_using
        self._on_rank = on_rank
        self._queue: deque[_Preparation] = deque()
        self._adding: tuple[_Preparation, Rank, Future[PeerName]] | None = None
        self._planning: Future[_Planned] | Future[StagedPlan] | None = None
        self._to_stage: deque[PreparedRank] = deque()
        self._prepared: dict[PeerKey, dict[Rank, PreparedRank]] = {}
        self._leaving: dict[PeerKey, set[PeerName]] = {}  # to be dropped when nothing reads them
        self._kept: set[PeerName] = set()  # of peers that were forgotten: they may come again
        self._num_dropped = 0  # names whose connections stay open until the agent ends
        self._unused: list[MappedPlan] = []  # to be unmapped when no read uses it
        self._is_closed = False

    def __repr__(self) -> str:
        counts = (f"{len(prepared)} of {key.engine}" for key, prepared in self._prepared.items())
        return f"<PreparedPeers: {', '.join(counts) or 'none'}>"

    @property
    def is_adding(self) -> bool:
        """Whether the transport is busy with a peer."""
        return self._adding is not None and not self._adding[2].done()

    @property
    def is_busy(self) -> bool:
        """Whether a peer is being prepared, or to be dropped."""
        is_leaving = any(not self._is_reading(peer) for peer in self._leaving)
        is_leaving |= any(not self._is_using(mapped) for mapped in self._unused)
        is_planning = self._planning is not None or bool(self._to_stage)
        return bool(self._queue) or self._adding is not None or is_planning or is_leaving

    @property
    def num_left(self) -> int:
        """Ranks whose connections only the end of the agent closes, and that nobody reads."""
        self._kept -= self._names_in_use()
        return len(self._kept) + self._num_dropped

    @property
    def has_left(self) -> bool:
        """Whether there may be some."""
        return bool(self._kept or self._num_dropped)

    @property
    def known(self) -> list[PeerKey]:
        """The peers of which some rank is prepared."""
        return list(self._prepared)

    @property
    def num_ranks(self) -> int:
        """Their ranks that are prepared."""
        return sum(len(ranks) for ranks in self._prepared.values())

    def is_preparing(self, peer: PeerKey) -> bool:
        """Whether this peer is, or will be in its turn."""
        return any(one.peer == peer for one in self._queue)

    def prepare(
        self, peer: PeerKey, description: messages.Description, routes: Sequence[Route]
    ) -> None:
        """Make all ranks of a peer readable that this rank reads, or none; `end_step` tells."""
        read = [route for route in routes if route.readers]
        self._queue.append(_Preparation(peer, description, read))

    def drop(self, peer: PeerKey, *, is_lost: bool = False) -> None:
        """Forget a peer, or do not prepare it.

        Its connections and its metadata stay, so that the next meeting uses them again: NIXL closes
        no connection before the agent ends, and adding the same metadata twice makes no second one.
        If its connections are lost, NIXL has to forget the metadata, or it never connects again.
        """
        for one in [one for one in self._queue if one.peer == peer]:
            self._give_up(one)
        lost = {rank.name for rank in self._prepared.get(peer, {}).values()} if is_lost else set()
        self._forget(peer, is_lost=is_lost)
        for other, prepared in list(self._prepared.items()):  # another life of it may share ranks
            if any(rank.name in lost for rank in prepared.values()):
                self._forget(other, is_lost=True)
        self._drop_left()

    def _forget(self, peer: PeerKey, *, is_lost: bool = False) -> None:
        prepared = self._prepared.pop(peer, {}).values()
        self._to_stage = deque(rank for rank in self._to_stage if rank not in prepared)
        names = {rank.name for rank in prepared}
        if is_lost:
            self._leave(peer, names)
        else:
            self._kept |= names
        for rank in prepared:
            self._put_away(rank.mapped)

    def give_up_all(self) -> None:
        """Prepare nothing any more."""
        for one in list(self._queue):
            self._give_up(one)

    def has(self, peer: PeerKey, rank: Rank) -> bool:
        """Whether this rank can be read."""
        return rank in self._prepared.get(peer, {})

    def get(self, peer: PeerKey, rank: Rank) -> PreparedRank:
        """One rank of a peer.

        Raises:
            TransportError: if it is not prepared.
        """
        prepared = self._prepared.get(peer, {}).get(rank)
        if prepared is None:
            raise TransportError(f"engine {peer.engine!r} is gone")
        return prepared

    def may_stage(self, rank: PreparedRank) -> bool:
        """Whether it can be read where it packs, as far as is known."""
        has_rings = self._peers.means.staging is not None and rank.remote.ring is not None
        return has_rings and rank.is_packed

    def is_planning(self, peer: PeerKey, rank: Rank) -> bool:
        """Whether it is being planned how this rank is read where it packs."""
        one = self._prepared.get(peer, {}).get(rank)
        if one is None:
            return False
        return one in self._to_stage or (one.staging is not None and not one.staging.done())

    def stage(self, rank: PreparedRank) -> StagedRank | None:
        """How a rank is read where it packs; None where it does not, or not so that it fits.

        None also until it is planned, which begins with the first question: see `is_planning`.
        """
        slots = self._peers.free_slots
        if rank.staged is not None or slots is None or not self.may_stage(rank):
            return rank.staged
        if rank.staging is None:
            self._to_stage.append(rank)
        elif rank.staging.done():
            planning, rank.staging = rank.staging, None
            lists = rank.local, rank.remote_list
            try:
                planned = planning.result()
                rank.staged = prepare_staged(planned, slots, self._transport, rank.name, lists)
            except TransportError as error:
                rank.is_packed = False
                endpoint = rank.remote.endpoint
                logger.info("the rank at %s is not read by chunks: %s", endpoint, error)
        return rank.staged

    def unmap_ended(self) -> bool:
        """Let the memory of processes go that have ended; False if some of it is being read."""
        gather, all_gone = self._peers.means.gather, True
        for prepared in self._prepared.values():
            for rank in prepared.values():
                if gather is None or rank.mapped is None or gather.is_mapped(rank.mapped):
                    continue
                if self._is_using(rank.mapped):
                    all_gone = False
                else:
                    gather.unmap(rank.mapped)
                    rank.mapped = None
        return all_gone

    def unmap_all(self) -> None:
        """Let all mapped memory go; nothing of it is being read."""
        for prepared in self._prepared.values():
            for rank in prepared.values():
                self._put_away(rank.mapped)
                rank.mapped = None
        self._unmap_unused(lambda _: False)

    def _put_away(self, mapped: MappedPlan | None) -> None:
        """To be unmapped when no read uses it; on any thread."""
        if mapped is not None:
            self._unused.append(mapped)
            if self._is_closed:
                self._unmap_unused(lambda _: False)

    def _unmap_unused(self, is_using: Callable[[MappedPlan], bool]) -> None:
        gather = self._peers.means.gather
        for one in list(self._unused):
            if gather is None or is_using(one):
                continue
            try:
                self._unused.remove(one)
            except ValueError:  # another thread does
                continue
            gather.unmap(one)

    def _map(self, remote: messages.RankDescription, planned: Plan) -> MappedPlan | None:
        """The rank's memory, where it can be mapped; else NIXL reads it."""
        if self._peers.means.gather is None or remote.export is None:
            return None
        try:
            return self._peers.means.gather.map(remote.export, planned)
        except TransportError as error:
            logger.info(
                "the GPU memory of the rank at %s is not mapped: %s", remote.endpoint, error
            )
            return None

    def end_step(self) -> list[Ended]:
        """Take up what was done in the background; the preparations that have ended by it."""
        if self.is_adding:
            return []
        ended: list[Ended] = []
        try:
            self._end_add()
            while self._queue and self._finish_ranks(self._queue[0]).is_complete:
                ended.append(Ended(self._queue.popleft().peer))
        except (NixlKVError, ValueError) as error:
            failed = self._queue[0]
            self._give_up(failed)
            self._forget(failed.peer)
            ended.append(Ended(failed.peer, str(error)))
        return ended

    def begin_step(self) -> None:
        """Drop what is to leave, and add the next rank in the background."""
        self._drop_left()
        if self._planning is None or self._planning.done():
            self._planning = self._plan_next()
        if self._adding is not None or not self._queue:
            return
        one = self._queue[0]
        self._leaving.pop(one.peer, None)  # still read; to add it once more is harmless
        rank = one.next_to_add
        if rank is not None:
            metadata = one.description.ranks[rank].agent
            self._adding = one, rank, self._background.submit(self._transport.add_peer, metadata)

    def _plan_next(self) -> Future[_Planned] | Future[StagedPlan] | None:
        """One at a time, so that a thread is free on which ranks are added."""
        staging = self._peers.means.staging
        if self._to_stage and staging is not None:  # reads wait for it
            rank = self._to_stage.popleft()
            rank.staging = self._background.submit(
                plan_staged, staging, self._peers.layout, rank.remote, rank.share, rank.plan
            )
            return rank.staging
        for one in self._queue:
            for route in one.routes:
                if route.remote_rank not in one.plans:
                    remote = one.description.ranks[route.remote_rank]
                    planned = self._background.submit(self._prepare_rank, remote, route)
                    one.plans[route.remote_rank] = planned
                    return planned
        return None

    def close(self) -> None:
        """Nothing is prepared any more; waits for a rank that is being added."""
        self._is_closed = True
        self.give_up_all()
        if self._adding is not None and not self._adding[2].cancel():
            concurrent.futures.wait([self._adding[2]], ADD_END_S)
        self._background.shutdown(wait=False, cancel_futures=True)

    def _prepare_rank(self, remote: messages.RankDescription, route: Route) -> _Planned:
        """What takes time and needs no transport. Runs in the background."""
        planned = plan(self._peers.layout, remote.layout, route.share)
        return _Planned(planned, self._map(remote, planned))

    def _end_add(self) -> None:
        """The name of the rank that was added, for who wanted it, or to be dropped again."""
        if self._adding is None:
            return
        (one, rank, future), self._adding = self._adding, None
        if one in self._queue:
            one.names[rank] = future.result()
        elif not future.cancelled() and future.exception() is None:
            self._kept.add(future.result())

    def _finish_ranks(self, one: _Preparation) -> _Preparation:
        """Make the lists of those ranks that were added and planned."""
        for route in one.routes:
            rank = route.remote_rank
            planned = one.plans.get(rank)
            if rank in one.prepared or rank not in one.names or planned is None:
                continue
            if planned.done():
                remote = one.description.ranks[rank]
                ready = self._make_lists(remote, route, planned.result(), one.names[rank])
                one.prepared[rank] = ready
                self._prepared.setdefault(one.peer, {})[rank] = ready
                self._on_rank(one.peer, ready)
        return one

    def _make_lists(
        self, remote: messages.RankDescription, route: Route, planned: _Planned, name: PeerName
    ) -> PreparedRank:
        """The rows of one rank, as lists of the transport: some microseconds."""
        layout, transport = self._peers.layout, self._transport
        slots = slot_rows(remote.slots.address, remote.slots.count)
        sample = sample_rows(remote.layout)
        return PreparedRank(
            route.remote_rank,
            name,
            route.share,
            planned.plan,
            transport.prepare(planned.plan.local, layout.memory, None),
            transport.prepare(planned.plan.remote, remote.layout.memory, name),
            transport.prepare(slots, "DRAM", name),
            transport.prepare(sample, remote.layout.memory, name),
            tuple(sample[:, LENGTH].tolist()),
            remote,
            planned.mapped,
        )

    def _give_up(self, one: _Preparation) -> None:
        self._queue.remove(one)
        for rank, planned in one.plans.items():
            if rank not in one.prepared and not planned.cancel():
                planned.add_done_callback(self._put_planned_away)
        self._kept.update(one.names.values())

    def _put_planned_away(self, planned: Future[_Planned]) -> None:
        if planned.exception() is None:
            self._put_away(planned.result().mapped)

    def _drop_left(self) -> None:
        self._unmap_unused(self._is_using)
        if self.is_adding:
            return
        for peer in list(self._leaving):
            if not self._is_reading(peer):
                for name in self._leaving.pop(peer) - self._names_in_use():
                    self._kept.discard(name)
                    self._num_dropped += 1
                    self._transport.drop_peer(name)

    def _names_in_use(self) -> set[PeerName]:
        """An engine that is known under two addresses has the same agents under both."""
        prepared = (rank.name for ranks in self._prepared.values() for rank in ranks.values())
        added = (name for one in self._queue for name in one.names.values())
        return {*prepared, *added, *(name for names in self._leaving.values() for name in names)}

    def _leave(self, peer: PeerKey, names: set[PeerName]) -> None:
        if names:
            self._leaving.setdefault(peer, set()).update(names)


def sample_rows(layout: CacheLayout) -> Rows:
    """A piece of each region that a rank has registered, or of the first ones: shape (n, 5)."""
    spans = layout.spans[:SAMPLED_SPANS]
    lengths = [min(SAMPLE_BYTES, span.length) for span in spans]
    rows = [
        (span.address, length, layout.device, length, 1)
        for span, length in zip(spans, lengths, strict=True)
    ]
    return np.array(rows, dtype=np.uint64)
