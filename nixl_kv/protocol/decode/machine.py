"""The decode side of the protocol: the caller's commands and prefill's answers in, actions out."""

from collections.abc import Callable
from typing import Final, TypeAlias

from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.match import Route
from nixl_kv.ids import Endpoint, EngineId, Incarnation, Rank
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode.load import DROPPED, Load
from nixl_kv.protocol.decode.loads import LoadBook
from nixl_kv.protocol.events import Failure, FailureKind
from nixl_kv.protocol.peers import PeerBook
from nixl_kv.protocol.peers import State as PeerState

NO_DESCRIPTION: Final = Failure(FailureKind.UNREACHABLE, "no description in time")

SliceNames: TypeAlias = Callable[
    [events.PeerKey, Route, CacheLayout, events.StartLoad], tuple[messages.KVSlice, ...]
]

TOO_MANY: Final = Failure(
    FailureKind.INTERNAL, f"{messages.MAX_CLAIMS} loads from one prefill rank; allowed: no more"
)


class DecodeMachine:
    """One decode rank. `handle` alone changes its state; nothing here waits."""

    def __init__(
        self, loads: LoadBook, peers: PeerBook, name_slices: SliceNames | None = None
    ) -> None:
        """Start with no load and no peer.

        `name_slices` names what a load reads from one rank, so that it can be verified; it raises
        ValueError for block tables that do not fit this cache. Without it no load can be verified.
        """
        self.loads = loads
        self.peers = peers
        self._name_slices = name_slices

    @property
    def next_due(self) -> float | None:
        """When a `Tick` will do something, in monotonic seconds; None for never."""
        due = (self.loads.next_due, self.peers.next_due)
        return min((when for when in due if when is not None), default=None)

    def handle(self, event: events.DecodeEvent, now: float) -> list[events.Action]:
        """All commands, messages and events go through here. `now` is monotonic, in seconds."""
        if isinstance(event, events.PeerEvent):
            return self._on_peer(event, now)
        match event:
            case events.PrepareLoad():
                return self._prepare(event, now)
            case events.StartLoad():
                return self._start(event, now)
            case events.CancelLoad():
                return self._cancel(event, now)
            case events.DeclineOffer():
                return self._decline(event)
            case events.Answered():
                return self._on_answer(event.message, event.endpoint, now)
            case events.LinkBroken() | events.EndpointLost():
                return self._on_link(event, now)
            case events.Tick():
                return self._on_tick(event, now)
            case _:
                return self._on_read_event(event, now)

    def is_using(self, endpoint: Endpoint) -> bool:
        """Whether something is held over the link to an endpoint, or asked for and not answered."""
        return bool(self.loads.at(endpoint)) or self.peers.is_describing(endpoint)

    def clear(self) -> None:
        """Forget everything, whatever state it is in."""
        self.loads.clear()
        self.peers.clear()

    # --- commands

    def _prepare(self, command: events.PrepareLoad, now: float) -> list[events.Action]:
        ticket = command.ticket
        key = events.PeerKey(ticket.engine, ticket.incarnation, ticket.endpoint)
        refused = self.loads.refuse_second(command.request, now)
        if refused is not None:
            return refused
        load = self.loads.add(command, key, now)
        peer, actions = self.peers.get_or_connect(key, now)
        if peer.state in (PeerState.JOINING, PeerState.READY) and peer.description is not None:
            fits = events.PeerFits(key, peer.description, peer.routes)
            return actions + self._open(load, fits, command, now=now)
        if peer.failure is not None:
            load.fail(peer.failure)
        return actions + self.loads.settle(load, now)

    def _start(self, command: events.StartLoad, now: float) -> list[events.Action]:
        """The request has blocks. Its time runs anew from here."""
        load = self.loads.get(command.request)
        if load is None:
            failure = Failure(FailureKind.INTERNAL, "it was not prepared, or forgotten since")
            return [events.LoadEnded(command.request, command.num_tokens, failure)]
        if load.start is not None:  # a second request with its id: see `refuse_second`
            return []
        load.on_blocks(command, now)
        return self._ask_digests(load, now) + self.loads.settle(load, now)

    def _ask_digests(self, load: Load, now: float) -> list[events.Action]:
        """Who is read is known, and what: prefill digests while it is asked, and read."""
        actions: list[events.Action] = []
        for read in load.rank_reads:
            if load.start is not None and load.start.verify and not read.has_ended:
                try:
                    read.slices = self._slices_of(load.peer, read.rank, load.start)
                except ValueError as error:
                    load.fail(Failure(FailureKind.INTERNAL, str(error)))
                actions += load.ask_digest(read, now)
        return actions

    def _slices_of(
        self, key: events.PeerKey, rank: Rank, start: events.StartLoad
    ) -> tuple[messages.KVSlice, ...]:
        peer = self.peers.get(key)
        if self._name_slices is None or peer is None or peer.description is None:
            raise ValueError("this rank cannot verify loads, or no longer knows its peer")
        route = next(route for route in peer.routes if route.remote_rank == rank)
        return self._name_slices(key, route, peer.description.ranks[rank].layout, start)

    def _cancel(self, command: events.CancelLoad, now: float) -> list[events.Action]:
        load = self.loads.get(command.request)
        return [] if load is None else load.on_cancel() + self.loads.settle(load, now)

    def _decline(self, command: events.DeclineOffer) -> list[events.Action]:
        """Once for the whole engine."""
        if self.loads.reader.rank != 0:
            return []
        return [events.Send(command.endpoint, messages.Decline(nonce=command.nonce))]

    # --- peers

    def _on_peer(self, event: events.PeerEvent, now: float) -> list[events.Action]:
        match event:
            case events.PeerFits():
                return self._on_fits(event, now)
            case events.PeerRefused():
                return self._on_refused(event, now)
            case events.PeerBroken():
                return self._on_broken(event, now)
            case events.PeersMoved():
                return [each for peer in event.peers for each in self._greet(peer)]
            case events.PeerJoined() if self.peers.is_joining(event.peer):
                self.peers.on_joined(event, now)
                peer = self.peers.get(event.peer)
                return self._greet(event.peer) if peer is not None and peer.is_warm else []
        return []

    def _greet(self, key: events.PeerKey) -> list[events.Action]:
        """The ranks of one that is not asked: they serve first reads after any message."""
        peer = self.peers.get(key)
        if peer is None or peer.description is None:
            return []
        ranks = peer.description.ranks
        read = [ranks[route.remote_rank] for route in peer.routes if route.readers]
        return [a for rank in read for a in self.loads.greet(rank.endpoint, rank.incarnation)]

    def _on_fits(self, event: events.PeerFits, now: float) -> list[events.Action]:
        """Who reads what is known: ask while its memory is being made readable."""
        if not self.peers.is_connecting(event.peer):
            return [events.DropPeer(event.peer)]
        self.peers.on_fits(event)
        loads = self.loads.waiting_for(event.peer)
        return [action for load in loads for action in self._open(load, event, event, now=now)]

    def _on_refused(self, event: events.PeerRefused, now: float) -> list[events.Action]:
        """It does not fit, or cannot be read, which costs also what was asked meanwhile."""
        failure = Failure(FailureKind.INCOMPATIBLE, event.reason)
        if not self.peers.is_joining(event.peer):
            return self._on_unusable(event.peer, event, failure, now=now)
        actions = self.peers.on_unusable(event.peer, event, failure, now)
        return actions + self._fail_loads(event.peer, failure, now)

    def _on_broken(self, event: events.PeerBroken, now: float) -> list[events.Action]:
        """Its connections break again and again: what is asked there would fail as well."""
        actions = self.peers.on_broken(event, now)
        peer = self.peers.get(event.peer)
        if peer is None or peer.state is not PeerState.UNREADABLE or peer.failure is None:
            return actions
        return actions + self._fail_loads(event.peer, peer.failure, now)

    def _fail_loads(self, key: events.PeerKey, failure: Failure, now: float) -> list[events.Action]:
        """All loads fail that have asked this peer. Reads under way end by themselves."""
        peer, actions = self.peers.get(key), list[events.Action]()
        endpoints = [] if peer is None else peer.endpoints
        for load, _ in [each for endpoint in endpoints for each in self.loads.at(endpoint)]:
            if load.peer == key:
                load.fail(failure)
                actions += self.loads.settle(load, now)
        return actions

    def _open(
        self,
        load: Load,
        fits: events.PeerFits,
        event: events.PrepareLoad | events.PeerFits,
        *,
        now: float,
    ) -> list[events.Action]:
        """The peer is known, at the latest by this event: ask its ranks."""
        actions = load.open(fits.description, fits.routes, event)
        if load.is_cancelled or load.failure is not None:
            actions += load.cancel(DROPPED)
        elif not all(self.loads.has_room(read.endpoint) for read in load.rank_reads):
            actions += load.cancel(TOO_MANY)
        else:
            actions += self.loads.ask_all(load, now) + self._ask_digests(load, now)
        return actions + self.loads.settle(load, now)

    def _on_unusable(
        self,
        peer: events.PeerKey,
        event: events.PeerRefused | messages.Refusal | events.EndpointLost | events.Tick,
        failure: Failure,
        *,
        now: float,
    ) -> list[events.Action]:
        if not self.peers.is_connecting(peer):
            return []
        actions = self.peers.on_unusable(peer, event, failure, now)
        for load in self.loads.waiting_for(peer):
            load.fail(failure)
            actions += self.loads.settle(load, now)
        return actions

    def _on_link(
        self, event: events.LinkBroken | events.EndpointLost, now: float
    ) -> list[events.Action]:
        """One that broke is tried again; what is lost costs what was asked there."""
        if isinstance(event, events.LinkBroken):
            asks = self.loads.ask_again(event.endpoint, now)
            return [*self.peers.ask_again(event.endpoint), *asks]
        actions: list[events.Action] = []
        for load, read in self.loads.at(event.endpoint):
            detail = f"prefill rank {read.rank} is unreachable: {event.reason}"
            self.loads.note_silence(read, now)
            load.on_refusal(read, event, Failure(FailureKind.UNREACHABLE, detail))
            actions += self.loads.settle(load, now)
        failure = Failure(FailureKind.UNREACHABLE, f"{event.endpoint}: {event.reason}")
        for peer in self.peers.on_endpoint_lost(event, now):
            actions += self._on_unusable(peer, event, failure, now=now)
        return actions

    # --- messages

    def _on_answer(
        self, message: messages.Answer, endpoint: Endpoint, now: float
    ) -> list[events.Action]:
        match message:
            case messages.Description():
                return self.peers.on_description(message, endpoint, now)
            case messages.Refusal():
                peer = events.PeerKey(
                    EngineId(message.engine), Incarnation(message.incarnation), endpoint
                )
                failure = Failure(FailureKind.UNREACHABLE, message.reason)
                return self._on_unusable(peer, message, failure, now=now)
            case messages.VersionRefusal():
                return self._on_link(events.EndpointLost(endpoint, str(message)), now)
            case messages.Renewed():
                return self._on_renewed(message, endpoint, now)
            case _:
                return self._on_claim_answer(message, endpoint, now)

    def _on_claim_answer(
        self,
        message: messages.ClaimAnswer,
        endpoint: Endpoint,
        now: float,
    ) -> list[events.Action]:
        """A grant for a claim that this side does not hold is released: nobody waits for us."""
        if message.reader != self.loads.reader:
            return []
        claimed = self.loads.claimed(message.claim, endpoint)
        if claimed is None:
            holds = isinstance(message, messages.Grant | messages.Recall)
            return [_release_unknown(message, endpoint)] if holds else []
        load, read = claimed
        actions: list[events.Action] = []
        match message:
            case messages.Grant():
                actions = load.on_grant(read, message, self.loads.last_number)
            case messages.DigestReply():
                actions = load.on_digest(read, message)
            case messages.PackReply():
                actions = load.on_packed(read, message)
            case messages.Recall() if load.is_reading(read):
                actions = self.loads.renew(endpoint, now)
            case messages.Recall():
                actions = load.on_recall(read, message)
            case messages.Deny():
                detail = f"prefill rank {read.rank} denied"
                load.on_refusal(read, message, Failure(FailureKind.DENIED, detail))
        return actions + self.loads.settle(load, now)

    def _on_renewed(
        self, message: messages.Renewed, endpoint: Endpoint, now: float
    ) -> list[events.Action]:
        """A read that is under way ends by the slot.

        An ask on its way is not lost, and a renew may have overtaken it: what prefill did not hold
        then, it may have granted since.
        """
        if message.reader != self.loads.reader:
            return []
        self.loads.note_answer(endpoint, Incarnation(message.incarnation))
        actions: list[events.Action] = []
        for load, read in self.loads.at(endpoint) if message.lost else ():
            is_granted = read.grant is not None and read.granted_at < message.number
            if is_granted and load.claim in message.lost:
                detail = f"prefill rank {read.rank} let the lease run out"
                load.on_refusal(read, message, Failure(FailureKind.LEASE_LOST, detail))
                actions += self.loads.settle(load, now)
        return actions

    # --- reads

    def _on_read_event(self, event: events.ReadEvent, now: float) -> list[events.Action]:
        load = self.loads.get(event.request)
        read = load.reads.get(event.rank) if load is not None and load.reads else None
        if load is None or read is None:
            return []
        actions: list[events.Action]
        match event:
            case events.ChunksWanted():
                actions = self.loads.on_chunks_wanted(load, read, event, now)
            case events.ReadDone():
                actions = load.on_read_done(read, event)
            case events.SlotRead():
                actions = self.peers.on_read(load.peer) + load.on_slot(read, event)
            case events.DigestCompared():
                actions = load.on_compared(read, event)
            case events.ReadFailed():
                actions = load.on_read_failed(read, event)
        return actions + self.loads.settle(load, now)

    # --- time

    def is_digest_wanted(self, action: events.CompareDigest) -> bool:
        """Whether a load still waits for this comparison, or will."""
        load = self.loads.get(action.load.request)
        return load is not None and load.is_digest_wanted(action)

    def _on_tick(self, tick: events.Tick, now: float) -> list[events.Action]:
        overdue, actions = self.peers.on_tick(tick, self.loads.is_in_use, now)
        for peer in overdue:
            actions += self._on_unusable(peer, tick, NO_DESCRIPTION, now=now)
        return actions + self.loads.on_tick(now)


def _release_unknown(
    message: messages.ClaimAnswer,
    endpoint: Endpoint,
) -> events.Action:
    return events.Send(
        endpoint,
        messages.Release(
            incarnation=message.incarnation,
            nonce=message.nonce,
            claim=message.claim,
            reader=message.reader,
            complete=False,
        ),
    )
