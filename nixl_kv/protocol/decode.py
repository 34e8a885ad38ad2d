"""The decode side of the protocol: commands, messages and events in, actions out.

A decode rank has one `DecodeMachine`. It keeps the rank's loads, passes each its events, and
decides when to ask again, which claims a heartbeat lists, and which reads begin.

Handlers change loads and return actions. At its end, `handle` settles each load that a handler
touched, once: it cancels reads that a failure makes useless, queues reads that can begin, and
reports loads that have ended.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Endpoint, EngineId, Incarnation, Rank, RequestId
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.events import Actions, Failure, FailureKind
from nixl_kv.protocol.load import (
    ENDED,
    HANDLERS,
    OVER,
    PEER_UNKNOWN,
    POSTED,
    Load,
    LoadPart,
    LoadState,
    Numbers,
    RankRead,
    ReadState,
)
from nixl_kv.protocol.machine import Deadlines
from nixl_kv.protocol.peers import MAX_FAILURES, Peer, PeerBook, PeerState
from nixl_kv.protocol.read_queue import Key, ReadQueue

MIN_HEARTBEAT_INTERVAL_S: Final = 0.025  # bounds the heartbeats that a very short lease can cause

CANNOT_VERIFY: Final = Failure(FailureKind.INTERNAL, "this rank cannot verify loads")
NOT_PREPARED: Final = Failure(FailureKind.INTERNAL, "it was not prepared, or has ended since")
SAME_ID: Final = Failure(FailureKind.INTERNAL, "another request has the same id")
TOO_MANY: Final = Failure(
    FailureKind.INTERNAL,
    f"too many loads from one prefill rank; allowed: {messages.MAX_CLAIMS}; "
    "lower max_num_seqs, or add prefill engines",
)

_Claims: TypeAlias = Sequence[Claim]


class DecodeMachine:
    """All loads of one decode rank. Only `handle` changes their state. Times are monotonic."""

    def __init__(  # noqa: PLR0913 - the limits of one rank
        self,
        reader: messages.Reader,  # this rank as prefill knows it
        record: events.Record,
        *,
        timeout_s: float,
        wait_for_prefill_s: float = math.inf,
        heartbeat_interval_s: float,
        bytes_per_token: int,  # of all layers on this rank
        entry_size: int = 1,  # in tokens; the least common multiple of all cache groups
        parts: Sequence[LoadPart] = (),  # of features
    ) -> None:
        self.reader = reader
        self.peers = PeerBook(record, lambda: self.reader)
        self.numbers = Numbers()
        self._record = record
        self._parts = tuple(parts)
        self._handlers = dict(HANDLERS)
        for part in self._parts:
            part.find = self._find
            self._handlers |= part.handlers
        self._timeout_s = timeout_s
        self._wait_for_prefill_s = wait_for_prefill_s
        self._heartbeat_interval_s = heartbeat_interval_s
        self._bytes_per_token = bytes_per_token
        self._entry_size = entry_size
        self._queue = ReadQueue()
        self._loads: dict[Claim, Load] = {}
        self._touched: dict[Claim, Load] = {}  # by the event that is being handled
        self._by_request: dict[RequestId, Load] = {}
        self._by_peer: dict[events.PeerKey, dict[Claim, Load]] = {}
        self._unfinished: dict[Endpoint, dict[Key, tuple[Load, RankRead]]] = {}
        # The latest peer at the endpoint of each id of a router. It may be gone.
        self._directory: Endpoint | None = None  # of this engine; see `SetEngine`
        self._finds_at: Endpoint | None = None  # likewise
        self._due = Deadlines[Claim]()
        self._heartbeats = Deadlines[Endpoint]()

    def handle(self, event: events.DecodeEvent, now: float) -> Actions:
        handler = self._HANDLERS.get(type(event), DecodeMachine._on_read_event)
        return handler(self, event, now) + self._settle(now)

    @property
    def loads(self) -> list[Load]:
        return list(self._loads.values())

    @property
    def next_due(self) -> float | None:
        own, stalls = min(self._due.next, self._heartbeats.next), self._queue.stalls.next
        due = min(own, stalls, self.peers.deadlines.next)
        return None if due == math.inf else due

    def is_using(self, endpoint: Endpoint) -> bool:
        return endpoint in self._unfinished or self.peers.is_asked(endpoint)

    def _find(self, claim: Claim, rank: Rank) -> RankRead | None:
        load = self._loads.get(claim)
        return None if load is None else load.reads.get(rank)

    def set_engine(
        self,
        engine: EngineId,
        directory: Endpoint | None = None,
        finds_at: Endpoint | None = None,
    ) -> None:
        """Call this before the first load."""
        self.reader = msgspec.structs.replace(self.reader, engine=engine)
        self._directory, self._finds_at = directory, finds_at

    def clear(self) -> None:
        for table in (self._loads, self._touched, self._by_request, self._by_peer):
            table.clear()
        for each in (self._unfinished, self._queue, self._due, self._heartbeats, self.peers):
            each.clear()

    def check(self) -> None:
        """Check the loads, the tables that find them, and the read queue, between two events.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        self._queue.check()
        reads: list[tuple[Endpoint, Key]] = []
        for load in self._loads.values():
            load.check()
            unfinished = [read for read in load.reads.values() if read.state not in ENDED]
            reads += [(read.endpoint, (load.claim, read.rank)) for read in unfinished]
        found = [(endpoint, key) for endpoint, keys in self._unfinished.items() for key in keys]
        if sorted(reads) != sorted(found):
            raise LocalProtocolError(f"reads {sorted(reads)}, found by endpoint {sorted(found)}")
        by_peer = [claim for loads in self._by_peer.values() for claim in loads]
        if sorted(by_peer) != sorted(self._loads):
            raise LocalProtocolError(f"loads {sorted(self._loads)}, by peer {sorted(by_peer)}")

    # --- the loads that an event concerns; `handle` settles all that these return

    def _of_request(self, request: RequestId) -> Load | None:
        load = self._by_request.get(request)
        if load is not None:
            self._touched[load.claim] = load
        return load

    def _of_peer(self, peer: events.PeerKey) -> list[Load]:
        loads = self._by_peer.get(peer, {})
        self._touched |= loads
        return list(loads.values())

    def _at(self, endpoint: Endpoint) -> list[tuple[Load, RankRead]]:
        found = list(self._unfinished.get(endpoint, {}).values())
        self._touched |= {load.claim: load for load, _ in found}
        return found

    def _claimed(self, claim: Claim, endpoint: Endpoint) -> tuple[Load | None, RankRead | None]:
        """The read under a claim of the rank at one endpoint, even if it has ended."""
        load = self._loads.get(claim)
        if load is None:
            return None, None
        self._touched[claim] = load
        at = (read for read in load.reads.values() if read.endpoint == endpoint)
        return load, next(at, None)

    # --- commands

    def _prepare(self, command: events.PrepareLoad, now: float) -> Actions:
        ticket = command.ticket
        key = events.PeerKey(ticket.engine, ticket.incarnation, ticket.endpoint)
        known = self._of_request(command.request)
        if known is not None and known.state is not LoadState.RELEASING:
            # Later commands name only the request, so this rank loads neither of the two.
            known.fail(SAME_ID)
            return [events.LoadReady(command.request)] if command.ticket.is_early else []
        load = Load(
            reader=self.reader,
            request=command.request,
            ticket=ticket,
            claim=command.claim,
            peer=key,
            hint_key=command.hint_key,
            found=command.found,
            finds_at=self._finds_at,
            timeout_s=self._timeout_s,
            wait_for_prefill_s=self._wait_for_prefill_s,
            since=now,
            entry_size=self._entry_size,
            record=self._record,
            queue=self._queue,
            numbers=self.numbers,
            tell=self._hint,
            parts=self._parts,
        )
        self._loads[load.claim] = self._by_request[load.request] = load
        self._touched[load.claim] = load
        return self._meet(load, command, now)

    def _meet(self, load: Load, event: events.PrepareLoad, now: float) -> Actions:
        """Open the load if its peer is known; else ask for the peer's description."""
        key = load.peer
        self._by_peer.setdefault(key, {})[load.claim] = load
        peer, actions = self.peers.want(key, event, now, is_sealed=not load.ticket.is_early)
        if peer.failure is not None and self._is_hopeless(peer):
            load.fail(msgspec.structs.replace(peer.failure, is_known=True))
        elif peer.description is not None:
            fits = events.PeerFits(key, peer.description, peer.routes)
            actions += self._open(load, fits, event, now)
        return actions

    def _is_hopeless(self, peer: Peer) -> bool:
        """Whether another load fails at once, because the peer has failed before."""
        if peer.state is PeerState.UNUSABLE:
            return True
        if peer.failures < MAX_FAILURES:
            return False
        # One load at a time finds out whether the ranks answer; none waits for the description.
        loads = self._by_peer[peer.key].values()
        return peer.description is None or any(load.is_unheard for load in loads)

    def _start(self, command: events.StartLoad, now: float) -> Actions:
        load = self._of_request(command.request)
        if load is None or load.state is LoadState.RELEASING:
            return [events.LoadEnded(command.request, command.num_tokens, NOT_PREPARED)]
        if load.start is not None:  # a second request with its id
            return []
        actions = load.on_blocks(command, now)
        if command.verify and not load.is_compared:
            load.fail(CANNOT_VERIFY)
        return actions

    def _cancel(self, command: events.CancelLoad, now: float) -> Actions:
        load = self._of_request(command.request)
        return [] if load is None else load.drop(command, now)

    # --- peers

    def _on_fits(self, event: events.PeerFits, now: float) -> Actions:
        """The peer's ranks are known: ask them while its memory is made readable."""
        actions = self.peers.on_fits(event, now)
        if actions is None:
            return [events.DropPeer(event.peer)]
        for load in self._of_peer(event.peer):
            if load.state in PEER_UNKNOWN:
                actions += self._open(load, event, event, now)
        return actions

    def _open(self, load: Load, fits: events.PeerFits, event: object, now: float) -> Actions:
        actions = load.open(fits.description, fits.routes, event)
        for read in load.reads.values():
            others = self._unfinished.setdefault(read.endpoint, {})
            if len(others) >= messages.MAX_CLAIMS:  # a heartbeat cannot name more
                load.fail(TOO_MANY)
            others[load.claim, read.rank] = load, read
            self._hurry_heartbeat(read, now)
        for read in load.reads.values() if load.failure is None else ():
            actions += load.ask(read, now)
        return actions + (load.tell_parts(now) if load.failure is None else [])

    def _on_moved(self, event: events.PeersMoved, _now: float) -> Actions:
        # NIXL's first read of a rank needs that rank's progress, which it makes after any message.
        actions: Actions = []
        for peer in filter(None, map(self.peers.known.get, event.peers)):
            ranks = peer.description.ranks if peer.description is not None else ()
            actions += self._greet(
                [ranks[each.remote_rank] for each in peer.routes if each.readers]
            )
        return actions

    def _greet(self, ranks: Sequence[messages.RankDescription]) -> Actions:
        """Send a heartbeat to each rank that holds nothing for this one.

        Ranks with claims get their periodic heartbeat. One without claims would release them.
        """
        return [
            self._heartbeat(rank.endpoint, rank.incarnation)
            for rank in ranks
            if rank.endpoint not in self._unfinished
        ]

    # --- links

    def _on_link_broken(self, event: events.LinkBroken, now: float) -> Actions:
        """Repeat all messages over the next connection, because they may be lost."""
        actions = self.peers.ask_again(event.endpoint)
        reads = self._at(event.endpoint)
        for load, read in reads:
            read.unreachable_since = min(now, read.unreachable_since)
            if load.lacks_answer(read):
                actions += load.ask(read, now)
        return actions + (self._send_heartbeat(event.endpoint, now) if reads else [])

    def _on_endpoint_lost(self, event: events.EndpointLost, now: float) -> Actions:
        failed = set[events.PeerKey]()
        for load, read in self._at(event.endpoint):
            read.unreachable_since = min(now, read.unreachable_since)
            load.on_refusal(read, event, now)
            if load.failure is not None and load.failure.kind is FailureKind.UNREACHABLE:
                failed.add(load.peer)
        return self.peers.on_endpoint_lost(event, failed, now)

    # --- messages

    def _on_answer(self, event: events.Answered, now: float) -> Actions:
        match event.message:
            case messages.Description() as description:
                return self.peers.on_description(description, event.endpoint, now)
            case messages.Refusal(engine=engine, incarnation=incarnation) as refusal:
                peer = events.PeerKey(EngineId(engine), Incarnation(incarnation), event.endpoint)
                return self.peers.on_refused(peer, refusal, now)
            case messages.VersionRefusal() as refusal:
                lost = events.EndpointLost(event.endpoint, str(refusal))
                return self._on_endpoint_lost(lost, now)
            case messages.KeyRefusal():
                return []  # only tools get one
            case message if message.reader != self.reader:
                return []
            case messages.Admitted() as admitted:
                return self.peers.on_admitted(admitted, event.endpoint, now)
            case messages.HeartbeatReply() as reply:
                return self._on_heartbeat_reply(reply, event.endpoint, now)
            case answer:
                return self._on_claim_answer(answer, event.endpoint, now)

    def _on_claim_answer(
        self, message: messages.ClaimAnswer, endpoint: Endpoint, now: float
    ) -> Actions:
        load, read = self._claimed(message.claim, endpoint)
        if load is None or read is None:
            # This rank forgot the claim. Without a release, prefill waits for its lease to expire.
            if not isinstance(message, messages.Grant | messages.Recall):
                return []
            release = messages.Release(
                incarnation=message.incarnation,
                nonce=message.nonce,
                claim=message.claim,
                reader=message.reader,
                complete=False,
            )
            return [events.Send(endpoint, release)]
        if isinstance(message, messages.Recall) and load.is_reading(read):
            return self._send_heartbeat(endpoint, now)  # it lists the claims that are being read
        actions = self._pass_on(load, read, message, now)
        failure = load.failure
        if isinstance(message, messages.Pending) and failure and message.state == "stalled":
            actions += self.peers.on_stalled(load.peer, message, failure, now)
        if isinstance(message, messages.Grant):
            self._hurry_heartbeat(read, now)
        return actions

    def _on_heartbeat_reply(
        self, message: messages.HeartbeatReply, endpoint: Endpoint, now: float
    ) -> Actions:
        for load, read in self._unfinished.get(endpoint, {}).values():
            # An answer of another incarnation says nothing about this one.
            if read.unreachable_since < math.inf and read.incarnation == message.incarnation:
                read.unreachable_since = math.inf
                self._touched[load.claim] = load
        actions: Actions = []
        for claim in message.lost:
            one, held = self._claimed(Claim(claim), endpoint)
            # A heartbeat may overtake an ask, so prefill may have granted the claim since.
            if one and held and held.grant is not None and held.granted_at < message.number:
                actions += one.on_refusal(held, message, now)
        return actions

    # --- reads

    def _on_read_event(self, event: events.ReadEvent, now: float) -> Actions:
        load = self._of_request(event.request)
        read = load.reads.get(event.rank) if load is not None else None
        if load is None or read is None:
            return []
        actions: Actions = []
        if isinstance(event, events.ReadDone):
            actions = self.peers.on_read(load.peer)
        return actions + self._pass_on(load, read, event, now)

    def _pass_on(self, load: Load, read: RankRead, event: object, now: float) -> Actions:
        """Let the load or a part handle it; one for a part that is not here changes nothing."""
        handler = self._handlers.get(type(event))
        return [] if handler is None else handler(load, read, event, now)

    # --- time

    def _on_tick(self, tick: events.Tick, now: float) -> Actions:
        actions = self.peers.on_tick(tick, self._is_in_use, now)
        self._fail_loads()
        for load in [self._loads[claim] for claim in self._due.pop_due(now)]:
            self._touched[load.claim] = load
            actions += load.on_tick(tick, now)
            for read in load.reads.values() if load.failure is None else ():
                if load.lacks_answer(read) and read.ask_again_at <= now:
                    actions += load.ask(read, now)
        # First, so that no heartbeat names a claim that has just ended.
        actions += self._settle(now)
        return actions + [
            a for at in self._heartbeats.pop_due(now) for a in self._send_heartbeat(at, now)
        ]

    def _is_in_use(self, peer: events.PeerKey) -> bool:
        """Whether a read is reading the peer's memory, or may still be started on it."""
        loads = self._by_peer.get(peer, {}).values()
        return any(load.state not in PEER_UNKNOWN and not load.has_settled for load in loads)

    # --- heartbeats

    def _send_heartbeat(self, endpoint: Endpoint, now: float) -> Actions:
        """Send a heartbeat to each incarnation of which this rank may hold claims."""
        found = self._unfinished[endpoint].values()
        self._heartbeats.set(
            endpoint, now + min(self._heartbeat_after_s(read) for _, read in found)
        )
        lives: dict[Incarnation, tuple[list[Claim], list[Claim]]] = {}
        for load, read in found:
            reading, others = lives.setdefault(read.incarnation, ([], []))
            (reading if load.is_reading(read) else others).append(load.claim)
        return [self._heartbeat(endpoint, life, *claims) for life, claims in lives.items()]

    def _heartbeat(
        self, at: Endpoint, life: Incarnation, reading: _Claims = (), others: _Claims = ()
    ) -> events.Action:
        heartbeat = messages.Heartbeat(
            incarnation=life,
            reader=self.reader,
            number=self.numbers.next(),
            claims=(*reading, *others),
            num_reading=len(reading),
        )
        return events.Send(at, heartbeat)

    def _heartbeat_after_s(self, read: RankRead) -> float:
        # Five per lease, whose length prefill's configuration decides.
        lease_s = read.grant.lease_s if read.grant is not None else math.inf
        return max(MIN_HEARTBEAT_INTERVAL_S, min(self._heartbeat_interval_s, lease_s / 5))

    def _hurry_heartbeat(self, read: RankRead, now: float) -> None:
        """Send the next heartbeat earlier if a new read or its lease needs that."""
        soon = now + self._heartbeat_after_s(read)
        if read.state not in ENDED and soon < self._heartbeats.get(read.endpoint):
            self._heartbeats.set(read.endpoint, soon)

    # --- the end of an event

    def _fail_loads(self) -> None:
        failed, self.peers.failed = self.peers.failed, []
        for peer in failed:
            for load in self._of_peer(peer.key):
                if not load.has_settled and peer.failure is not None:
                    load.fail(peer.failure)

    def _settle(self, now: float) -> Actions:
        """Settle the loads that the event touched, then start the reads that have room."""
        if self.peers.failed:
            self._fail_loads()
        actions: Actions = []
        for load in self._touched.values():
            if load.failure is not None:
                actions += load.cancel(load.failure, now)
            for read in load.reads.values():
                self._requeue(load, read, now)
            if load.outbox:
                actions += load.pop_outbox()
            has_settled = load.has_settled
            is_awaited = load.start is not None or load.state is LoadState.RELEASING
            if has_settled and is_awaited:
                actions += load.end(now)
            if load.state in OVER:
                self._forget(load)
            else:
                self._due.set(load.claim, math.inf if has_settled else load.next_due)
        self._touched.clear()
        if self._queue.where:
            for claim, rank in self._queue.pop_startable(now):
                load = self._loads[claim]
                actions += load.start_read(load.reads[rank], now)
        return actions

    def _hint(self, hint: messages.Hint) -> Actions:
        """Tell the scheduler between its steps. The caller has the result by then."""
        return [] if self._directory is None else [events.Send(self._directory, hint)]

    def _requeue(self, load: Load, read: RankRead, now: float) -> None:
        """Queue a read, or take it out once it has ended."""
        key = (load.claim, read.rank)
        part = load.next_part(read) if read.state is ReadState.GRANTED else None
        if part is not None:
            if key not in self._queue.where:
                share = part.num_tokens * self._bytes_per_token // len(load.reads)
                self._queue.add(key, read.endpoint, share)
        elif key in self._queue.where and read.state not in POSTED:
            self._queue.remove(key, now, has_landed=read.state is not ReadState.FAILED)
        if read.state in ENDED:
            others = self._unfinished.get(read.endpoint, {})
            if others.pop(key, None) is not None and not others:
                del self._unfinished[read.endpoint]
                self._heartbeats.set(read.endpoint, math.inf)

    def _forget(self, load: Load) -> None:
        self._due.set(load.claim, math.inf)
        del self._loads[load.claim]
        of_peer = self._by_peer[load.peer]
        del of_peer[load.claim]
        if not of_peer:
            del self._by_peer[load.peer]
        if self._by_request.get(load.request) is load:  # not another one with the same id
            del self._by_request[load.request]

    # --- the handler of each event, except those of a read

    _HANDLERS: ClassVar[Mapping[type, Callable[["DecodeMachine", Any, float], Actions]]] = {
        events.PrepareLoad: _prepare,
        events.StartLoad: _start,
        events.CancelLoad: _cancel,
        events.Answered: _on_answer,
        events.LinkBroken: _on_link_broken,
        events.EndpointLost: _on_endpoint_lost,
        events.MeetPeer: lambda self, event, now: self.peers.meet(event, now),
        events.PeerFits: _on_fits,
        events.HandshakeDone: lambda self, event, now: self.peers.on_handshake_done(event, now),
        events.PeerRefused: lambda self, event, now: self.peers.on_refused(event.peer, event, now),
        events.PeerBroken: lambda self, event, now: self.peers.on_broken(event, now),
        events.PeersMoved: _on_moved,
        events.Tick: _on_tick,
    }
