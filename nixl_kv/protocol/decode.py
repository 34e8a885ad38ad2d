"""The decode side of the protocol: commands, messages and events in, actions out.

A decode rank has one `DecodeMachine`. It keeps the rank's loads, passes each its events, and
decides when to ask again, which claims to renew, and which reads begin. Messages find their load by
key and a tick looks only at due deadlines, so neither costs more when there are more loads.

Handlers change loads and return actions. At its end, `handle` settles each load that a handler
touched, once: it cancels reads that a failure makes useless, queues reads that can begin, and
reports loads that have ended.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import msgspec

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.match import Route
from nixl_kv.ids import Claim, Endpoint, EngineId, Incarnation, RequestId
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Failure, FailureKind
from nixl_kv.protocol.load import DROPPED, Actions, Load, Numbers, RankRead, State
from nixl_kv.protocol.machine import Deadlines
from nixl_kv.protocol.peers import PeerBook
from nixl_kv.protocol.peers import State as PeerState
from nixl_kv.protocol.read_queue import Key, ReadQueue

MIN_RENEW_INTERVAL_S: Final = 0.025  # bounds the heartbeats that a very short lease can cause

NO_DESCRIPTION: Final = Failure(FailureKind.UNREACHABLE, "no description in time")
NOT_PREPARED: Final = Failure(FailureKind.INTERNAL, "it was not prepared, or has ended since")
CANNOT_VERIFY: Final = Failure(
    FailureKind.INTERNAL, "this rank cannot verify loads, or no longer knows its peer"
)
SAME_ID: Final = Failure(FailureKind.INTERNAL, "another request has the same id")
TOO_MANY: Final = Failure(
    FailureKind.INTERNAL,
    f"too many loads from one prefill rank; allowed: {messages.MAX_CLAIMS}; "
    "lower max_num_seqs, or add prefill engines",
)

NameSlices: TypeAlias = Callable[
    [Route, CacheLayout, events.StartLoad], tuple[messages.KVSlice, ...]
]
"""Names the slices that a load reads from one rank, to verify them.

It raises ValueError for block tables that do not fit this rank's cache.
"""


class DecodeMachine:
    """All loads of one decode rank. Only `handle` changes their state, and it never waits.

    `reader` is this rank as prefill knows it, and `bytes_per_token` counts all layers on this rank.
    Without `name_slices` it verifies no load. Times are monotonic, in seconds.
    """

    def __init__(  # noqa: PLR0913 - a rank's facts and settings
        self,
        reader: messages.Reader,
        record: events.Record,
        peers: PeerBook,
        name_slices: NameSlices | None,
        *,
        timeout_s: float,
        renew_interval_s: float,
        bytes_per_token: int,
    ) -> None:
        self.reader = reader
        self.peers = peers
        self.numbers = Numbers()
        self._record = record
        self._name_slices = name_slices
        self._timeout_s = timeout_s
        self._renew_interval_s = renew_interval_s
        self._bytes_per_token = bytes_per_token
        self._queue = ReadQueue()
        self._loads: dict[Claim, Load] = {}
        self._touched: dict[Claim, Load] = {}  # by the event that is being handled
        self._by_request: dict[RequestId, Load] = {}
        self._by_peer: dict[events.PeerKey, dict[Claim, Load]] = {}
        self._unfinished: dict[Endpoint, dict[Key, tuple[Load, RankRead]]] = {}
        self._due = Deadlines[Claim]()
        self._renewals = Deadlines[Endpoint]()

    def handle(self, event: events.DecodeEvent, now: float) -> Actions:
        return self._dispatch(event, now) + self._settle(now)

    def _dispatch(  # noqa: C901, PLR0911, PLR0912 - one case for each type of event
        self, event: events.DecodeEvent, now: float
    ) -> Actions:
        match event:
            case events.PrepareLoad():
                return self._prepare(event, now)
            case events.StartLoad():
                return self._start(event, now)
            case events.CancelLoad():
                load = self._of_request(event.request)
                if load is not None:
                    load.is_cancelled = True
                    if load.reads is not None:  # else it waits for the ranks, to release them
                        load.fail(DROPPED)
            case events.Answered():
                return self._on_answer(event.message, event.endpoint, now)
            case events.LinkBroken():
                return self._on_link_broken(event, now)
            case events.EndpointLost():
                return self._on_endpoint_lost(event, now)
            case events.PeerFits():
                return self._on_fits(event, now)
            case events.PeerJoined():
                self.peers.on_joined(event, now)
            case events.PeerRefused():
                failure = Failure(FailureKind.INCOMPATIBLE, event.reason)
                return self._on_unusable(event.peer, event, failure, now)
            case events.PeerBroken():
                return self._on_broken(event, now)
            case events.PeersMoved():
                return [each for peer in event.peers for each in self._greet(peer)]
            case events.Tick():
                return self._on_tick(event, now)
            case _:
                return self._on_read_event(event, now)
        return []

    @property
    def loads(self) -> list[Load]:
        return list(self._loads.values())

    def load_of(self, request: RequestId) -> Load | None:
        return self._by_request.get(request)

    @property
    def next_due(self) -> float | None:
        """When a `Tick` will do something; None for never."""
        due = (self._due.next, self._renewals.next, self._queue.next_due, self.peers.next_due)
        return min((when for when in due if when is not None), default=None)

    def is_using(self, endpoint: Endpoint) -> bool:
        """Whether this rank holds blocks over the link to an endpoint, or awaits an answer."""
        return endpoint in self._unfinished or self.peers.is_describing(endpoint)

    def is_digest_wanted(self, action: events.CompareDigest) -> bool:
        load = self.load_of(action.load.request)
        return load is not None and load.is_digest_wanted(action)

    def set_engine(self, engine: EngineId) -> None:
        """Call this before the first load."""
        self.reader = msgspec.structs.replace(self.reader, engine=engine)

    def clear(self) -> None:
        for table in (self._loads, self._touched, self._by_request, self._by_peer):
            table.clear()
        for each in (self._unfinished, self._queue, self._due, self._renewals):
            each.clear()
        self.peers.clear()

    def validate(self) -> None:
        self._queue.validate()
        reads = []
        for load in self.loads:
            load.validate()
            reads += [
                (read.endpoint, (load.claim, read.rank))
                for read in load.rank_reads
                if not read.has_ended
            ]
        found = [(endpoint, key) for endpoint, keys in self._unfinished.items() for key in keys]
        if sorted(reads) != sorted(found):
            raise LocalProtocolError(f"reads {sorted(reads)}, found by endpoint {sorted(found)}")
        by_peer = [claim for loads in self._by_peer.values() for claim in loads]
        if sorted(by_peer) != sorted(self._loads):
            raise LocalProtocolError(f"loads {sorted(self._loads)}, by peer {sorted(by_peer)}")

    # --- the loads that an event concerns; `handle` settles all that these return

    def _touch(self, loads: Iterable[Load]) -> list[Load]:
        touched = {load.claim: load for load in loads}
        self._touched |= touched
        return list(touched.values())

    def _of_request(self, request: RequestId) -> Load | None:
        load = self._by_request.get(request)
        return None if load is None else self._touch([load])[0]

    def _of_peer(self, peer: events.PeerKey) -> list[Load]:
        return self._touch(self._by_peer.get(peer, {}).values())

    def _at(self, endpoint: Endpoint) -> list[tuple[Load, RankRead]]:
        """The unfinished reads of the rank at one endpoint."""
        found = list(self._unfinished.get(endpoint, {}).values())
        self._touch(load for load, _ in found)
        return found

    def _claimed(self, claim: Claim, endpoint: Endpoint) -> tuple[Load, RankRead] | None:
        """The read under a claim of the rank at one endpoint, even if it has ended."""
        load = self._loads.get(claim)
        if load is not None:
            for read in load.rank_reads:
                if read.endpoint == endpoint:
                    self._touch([load])
                    return load, read
        return None

    # --- commands

    def _prepare(self, command: events.PrepareLoad, now: float) -> Actions:
        ticket = command.ticket
        key = events.PeerKey(ticket.engine, ticket.incarnation, ticket.endpoint)
        known = self._of_request(command.request)
        if known is not None and not (known.is_cancelled and known.start is None):
            # Later commands name only the request, so this rank loads neither of the two.
            known.fail(SAME_ID)
            return []
        load = Load(
            reader=self.reader,
            request=command.request,
            ticket=ticket,
            claim=command.claim,
            peer=key,
            timeout_s=self._timeout_s,
            since=now,
            record=self._record,
            queue=self._queue,
            numbers=self.numbers,
        )
        self._loads[load.claim] = self._by_request[load.request] = load
        self._by_peer.setdefault(key, {})[load.claim] = load
        self._touch([load])
        peer, actions = self.peers.get_or_connect(key, now)
        if peer.failure is not None:
            load.fail(peer.failure)
        elif peer.description is not None:
            fits = events.PeerFits(key, peer.description, peer.routes)
            actions += self._open(load, fits, type(command).__name__, now)
        return actions

    def _start(self, command: events.StartLoad, now: float) -> Actions:
        load = self._of_request(command.request)
        if load is None:
            return [events.LoadEnded(command.request, command.num_tokens, NOT_PREPARED)]
        if load.start is not None:  # a second request with its id
            return []
        load.on_blocks(command, now)
        return self._ask_digests(load, now)

    def _ask_digests(self, load: Load, now: float) -> Actions:
        """Name the slices that are read from each rank; prefill digests them meanwhile."""
        start, peer = load.start, self.peers.get(load.peer)
        if start is None or not start.verify:
            return []
        actions: Actions = []
        for read in load.rank_reads:
            if read.has_ended:
                continue
            if self._name_slices is None or peer is None or peer.description is None:
                load.fail(CANNOT_VERIFY)
                continue
            route = next(route for route in peer.routes if route.remote_rank == read.rank)
            layout = peer.description.ranks[read.rank].layout
            try:
                read.slices = self._name_slices(route, layout, start)
            except ValueError as error:
                load.fail(Failure(FailureKind.INTERNAL, str(error)))
            actions += load.ask_digest(read, now)
        return actions

    # --- peers

    def _on_fits(self, event: events.PeerFits, now: float) -> Actions:
        """The peer's ranks are known: ask them while its memory is made readable."""
        if self.peers.state_of(event.peer) is not PeerState.CONNECTING:
            return [events.DropPeer(event.peer)]
        self.peers.on_fits(event)
        actions: Actions = []
        for load in self._of_peer(event.peer):
            if load.reads is None:
                actions += self._open(load, event, type(event).__name__, now)
        return actions

    def _open(self, load: Load, fits: events.PeerFits, cause: str, now: float) -> Actions:
        actions = load.open(fits.description, fits.routes, cause)
        if load.is_cancelled:
            load.fail(DROPPED)
        for read in load.rank_reads:
            others = self._unfinished.setdefault(read.endpoint, {})
            if len(others) >= messages.MAX_CLAIMS:  # a heartbeat cannot name more
                load.fail(TOO_MANY)
            others[load.claim, read.rank] = load, read
            self._hurry_renewal(read, now)
        if load.failure is not None:
            return actions
        for read in load.rank_reads:
            actions += load.ask(read, now)
        return actions + self._ask_digests(load, now)

    def _greet(self, key: events.PeerKey) -> Actions:
        """Send a heartbeat to each rank of a peer that holds nothing for this rank yet."""
        peer = self.peers.get(key)
        if peer is None or peer.description is None:
            return []
        # NIXL's first read of a rank needs that rank's progress, which it makes after any message.
        ranks = peer.description.ranks
        return [
            self._renew_message(rank.endpoint, rank.incarnation)
            for rank in (ranks[route.remote_rank] for route in peer.routes if route.readers)
            if rank.endpoint not in self._unfinished
        ]

    def _on_broken(self, event: events.PeerBroken, now: float) -> Actions:
        actions = self.peers.on_broken(event, now)
        peer = self.peers.get(event.peer)
        if peer is not None and peer.state is PeerState.UNREADABLE and peer.failure is not None:
            self._fail_loads(event.peer, peer.failure)
        return actions

    def _fail_loads(self, key: events.PeerKey, failure: Failure) -> None:
        for load in self._of_peer(key):
            if not load.is_over:
                load.fail(failure)

    def _on_unusable(
        self,
        peer: events.PeerKey,
        event: events.PeerRefused | messages.Refusal | events.EndpointLost | events.Tick,
        failure: Failure,
        now: float,
    ) -> Actions:
        state = self.peers.state_of(peer)
        is_refused = state is PeerState.JOINING and isinstance(event, events.PeerRefused)
        if state is not PeerState.CONNECTING and not is_refused:
            return []
        self._fail_loads(peer, failure)
        return self.peers.on_unusable(peer, event, failure, now)

    # --- links

    def _on_link_broken(self, event: events.LinkBroken, now: float) -> Actions:
        """Repeat all messages over the next connection, because they may be lost."""
        actions = self.peers.ask_again(event.endpoint)
        reads = self._at(event.endpoint)
        for load, read in reads:
            read.note_silence(now)
            if read.lacks_answer:
                actions += load.ask(read, now)
        return actions + (self._renew(event.endpoint, now) if reads else [])

    def _on_endpoint_lost(self, event: events.EndpointLost, now: float) -> Actions:
        for load, read in self._at(event.endpoint):
            detail = f"prefill rank {read.rank} is unreachable: {event.reason}"
            read.note_silence(now)
            load.on_refusal(read, event, Failure(FailureKind.UNREACHABLE, detail), now)
        failure = Failure(FailureKind.UNREACHABLE, f"{event.endpoint}: {event.reason}")
        peers = self.peers.on_endpoint_lost(event, now)
        return [a for peer in peers for a in self._on_unusable(peer, event, failure, now)]

    def _note_answer(self, endpoint: Endpoint, incarnation: Incarnation) -> None:
        for load, read in self._unfinished.get(endpoint, {}).values():
            # An answer of another incarnation says nothing about this one.
            if read.unreachable_since is not None and read.incarnation == incarnation:
                read.unreachable_since = None
                self._touch([load])

    # --- messages

    def _on_answer(self, message: messages.Answer, endpoint: Endpoint, now: float) -> Actions:
        match message:
            case messages.Description():
                return self.peers.on_description(message, endpoint)
            case messages.Refusal():
                engine, incarnation = EngineId(message.engine), Incarnation(message.incarnation)
                peer = events.PeerKey(engine, incarnation, endpoint)
                failure = Failure(FailureKind.UNREACHABLE, message.reason)
                return self._on_unusable(peer, message, failure, now)
            case messages.VersionRefusal():
                return self._on_endpoint_lost(events.EndpointLost(endpoint, str(message)), now)
            case messages.Renewed():
                self._on_renewed(message, endpoint, now)
                return []
            case _:
                return self._on_claim_answer(message, endpoint, now)

    def _on_claim_answer(
        self, message: messages.ClaimAnswer, endpoint: Endpoint, now: float
    ) -> Actions:
        if message.reader != self.reader:
            return []
        claimed = self._claimed(message.claim, endpoint)
        if claimed is None:
            # This rank forgot the claim. Without a release, prefill waits for its lease to expire.
            holds = isinstance(message, messages.Grant | messages.Recall)
            return [_release_unknown(message, endpoint)] if holds else []
        load, read = claimed
        match message:
            case messages.Grant():
                actions = load.on_grant(read, message, now)
                self._hurry_renewal(read, now)
                return actions
            case messages.DigestReply():
                return load.on_digest(read, message)
            case messages.PackReply():
                return load.on_packed(read, message, now)
            case messages.Recall() if load.is_reading(read):
                return self._renew(endpoint, now)  # it lists the claims that are being read
            case messages.Recall():
                detail = f"prefill rank {read.rank} recalled its blocks before decode had its own"
                load.on_refusal(read, message, Failure(FailureKind.RECALLED, detail), now)
                return [load.release(read)]
            case messages.Deny():
                failure = Failure(FailureKind.DENIED, f"prefill rank {read.rank} denied")
                load.on_refusal(read, message, failure, now)
        return []

    def _on_renewed(self, message: messages.Renewed, endpoint: Endpoint, now: float) -> None:
        if message.reader != self.reader:
            return
        self._note_answer(endpoint, Incarnation(message.incarnation))
        for claim in message.lost:
            load, read = self._claimed(Claim(claim), endpoint) or (None, None)
            # A renew may overtake an ask, so prefill may have granted the claim since.
            if load and read and read.grant is not None and read.granted_at < message.number:
                detail = f"prefill rank {read.rank} let the lease run out"
                load.on_refusal(read, message, Failure(FailureKind.LEASE_LOST, detail), now)

    # --- reads

    def _on_read_event(self, event: events.ReadEvent, now: float) -> Actions:
        load = self._of_request(event.request)
        read = load.reads.get(event.rank) if load is not None and load.reads else None
        if load is None or read is None:
            return []
        match event:
            case events.ChunksWanted():
                return load.on_progress(read, event, now)
            case events.ReadDone():
                return load.on_read_done(read, event, now)
            case events.SlotRead():
                return self.peers.on_read(load.peer) + load.on_slot(read, event, now)
            case events.DigestCompared():
                return load.on_compared(read, event, now)
            case events.ReadFailed():
                return load.on_read_failed(read, event, now)

    # --- time

    def _on_tick(self, tick: events.Tick, now: float) -> Actions:
        overdue, actions = self.peers.on_tick(tick, self._is_in_use, now)
        for peer in overdue:
            actions += self._on_unusable(peer, tick, NO_DESCRIPTION, now)
        for load in self._touch([self._loads[claim] for claim in self._due.pop_due(now)]):
            actions += load.on_tick(now)
            for read in load.rank_reads if load.failure is None else ():
                if read.lacks_answer and read.ask_again_at <= now:
                    actions += load.ask(read, now)
        actions += self._settle(now)  # first, so that no renew names a claim that has just ended
        return actions + [a for at in self._renewals.pop_due(now) for a in self._renew(at, now)]

    def _is_in_use(self, peer: events.PeerKey) -> bool:
        """Whether a read is reading the peer's memory, or may still be started on it."""
        loads = self._by_peer.get(peer, {}).values()
        return any(load.reads is not None and not load.is_over for load in loads)

    # --- renewals

    def _renew(self, endpoint: Endpoint, now: float) -> Actions:
        """Send a heartbeat to each incarnation of which this rank may hold claims."""
        found = self._unfinished[endpoint].values()
        self._renewals.set(endpoint, now + min(self._renew_after_s(read) for _, read in found))
        lives: dict[Incarnation, tuple[list[Claim], list[Claim]]] = {}
        for load, read in found:
            reading, others = lives.setdefault(read.incarnation, ([], []))
            (reading if load.is_reading(read) else others).append(load.claim)
        return [
            self._renew_message(endpoint, life, (*reading, *others), len(reading))
            for life, (reading, others) in lives.items()
        ]

    def _renew_message(
        self,
        endpoint: Endpoint,
        incarnation: Incarnation,
        claims: tuple[Claim, ...] = (),
        num_reading: int = 0,
    ) -> events.Action:
        return events.Send(
            endpoint,
            messages.Renew(
                incarnation=incarnation,
                reader=self.reader,
                number=self.numbers.next(),
                claims=claims,
                num_reading=num_reading,
            ),
        )

    def _renew_after_s(self, read: RankRead) -> float:
        # Five per lease, whose length prefill's configuration decides.
        lease_s = read.grant.lease_s if read.grant is not None else math.inf
        return max(MIN_RENEW_INTERVAL_S, min(self._renew_interval_s, lease_s / 5))

    def _hurry_renewal(self, read: RankRead, now: float) -> None:
        """Send the next heartbeat earlier if a new read or its lease needs that."""
        due = self._renewals.get(read.endpoint)
        soon = now + self._renew_after_s(read)
        if not read.has_ended and (due is None or soon < due):
            self._renewals.set(read.endpoint, soon)

    # --- the end of an event

    def _settle(self, now: float) -> Actions:
        """Settle the loads that the event touched, then start the reads that have room."""
        actions: Actions = []
        for load in self._touched.values():
            if load.failure is not None and not load.is_over:
                actions += load.cancel(load.failure, now)
            for read in load.rank_reads:
                self._requeue(load, read, now)
            if load.is_over and (load.start is not None or load.is_cancelled):
                actions += load.end()
                self._forget(load)
            else:
                self._due.set(load.claim, load.next_due)
        self._touched.clear()
        for claim, rank in self._queue.pop_startable(now):
            load = self._loads[claim]
            if load.reads is not None:
                actions += load.start_read(load.reads[rank], now)
        return actions

    def _requeue(self, load: Load, read: RankRead, now: float) -> None:
        """Queue a read, or take it out once it has ended."""
        key = (load.claim, read.rank)
        if read.state is State.GRANTED and load.start is not None:
            if key not in self._queue:
                share = load.start.num_tokens * self._bytes_per_token // len(load.rank_reads)
                self._queue.add(key, read.endpoint, share)
        elif read.state not in (State.READING, State.DRAINING):
            self._queue.remove(key, now, has_landed=read.state is not State.FAILED)
        if not read.has_ended:
            return
        others = self._unfinished.get(read.endpoint, {})
        if others.pop(key, None) is not None and not others:
            del self._unfinished[read.endpoint]
            self._renewals.set(read.endpoint, None)

    def _forget(self, load: Load) -> None:
        self._due.set(load.claim, None)
        del self._loads[load.claim]
        of_peer = self._by_peer[load.peer]
        del of_peer[load.claim]
        if not of_peer:
            del self._by_peer[load.peer]
        if self._by_request.get(load.request) is load:  # not another one with the same id
            del self._by_request[load.request]


def _release_unknown(message: messages.ClaimAnswer, endpoint: Endpoint) -> events.Action:
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
