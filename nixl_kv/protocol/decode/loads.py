"""All loads of one decode rank: which there are, what is due, what is over.

Whatever a message names is found by key, and time costs what is due: with ten thousand loads a
message and a tick cost what they cost with ten.
"""

import math
from collections import Counter
from typing import Final, TypeAlias

import msgspec

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Endpoint, EngineId, Incarnation, RequestId
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.deadlines import Deadlines
from nixl_kv.protocol.decode.load import Load, RankRead, State
from nixl_kv.protocol.decode.read_queue import ReadQueue
from nixl_kv.protocol.events import Failure, FailureKind

MIN_RENEW_INTERVAL_S: Final = 0.025
"""However short a lease its owner grants."""

_SAME_ID: Final = Failure(FailureKind.INTERNAL, "another request came with the same id")

_Reads: TypeAlias = dict[Claim, tuple[Load, RankRead]]


class LoadBook:
    """Loads by claim, and those that the caller knows by request.

    `now` is monotonic; it and the two intervals are in seconds. `bytes_per_token` are those of all
    layers on this rank.
    """

    def __init__(
        self,
        reader: messages.Reader,
        record: events.Record,
        *,
        timeout_s: float,
        renew_interval_s: float,
        bytes_per_token: int,
    ) -> None:
        self.timeout_s = timeout_s
        self._bytes_per_token = bytes_per_token
        self._queue = ReadQueue()
        self.reader = reader
        """This rank, as prefill knows it."""
        self._record = record
        self._renew_interval_s = renew_interval_s
        self.last_number = 0  # of asks and renews alike
        self._loads: dict[Claim, Load] = {}
        self._by_request: dict[RequestId, Load] = {}
        self._waiting: dict[events.PeerKey, dict[Claim, Load]] = {}
        self._reads: dict[Endpoint, _Reads] = {}  # those that have not ended
        self._uses: Counter[events.PeerKey] = Counter()  # as many as these
        self._silent: set[Endpoint] = set()  # where a read may have its rank unreachable
        self._due = Deadlines[Claim]()
        self._renewals = Deadlines[Endpoint]()

    def set_engine(self, engine: EngineId) -> None:
        """The name that all ranks of this engine ask by; before any load."""
        self.reader = msgspec.structs.replace(self.reader, engine=engine)

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def next_due(self) -> float | None:
        """When time changes something by itself; None for never."""
        due = (self._due.next, self._renewals.next, self._queue.next_due)
        return min((when for when in due if when is not None), default=None)

    def add(self, command: events.PrepareLoad, peer: events.PeerKey, now: float) -> Load:
        """Add a load; the request must not have one, unless nobody knows that one any more."""
        load = Load(
            reader=self.reader,
            request=command.request,
            ticket=command.ticket,
            claim=command.claim,
            peer=peer,
            timeout_s=self.timeout_s,
            deadline=now + self.timeout_s,
            record=self._record,
            queue=self._queue,
        )
        self._loads[command.claim] = self._by_request[command.request] = load
        self._waiting.setdefault(peer, {})[command.claim] = load
        self._due.set(command.claim, load.next_due)
        return load

    def refuse_second(self, request: RequestId, now: float) -> list[events.Action] | None:
        """If a request has a load that its caller may still want: that one fails, too.

        Which of the two is meant cannot be told by what comes next. None: it has no such load.
        """
        load = self._by_request.get(request)
        if load is None or (load.is_cancelled and load.start is None):
            return None
        return load.cancel(_SAME_ID) + self.settle(load, now)

    def get(self, request: RequestId) -> Load | None:
        """The load of a request, until it is forgotten."""
        return self._by_request.get(request)

    def all(self) -> list[Load]:
        """Every load that is not forgotten."""
        return list(self._loads.values())

    def waiting_for(self, peer: events.PeerKey) -> list[Load]:
        """The loads that wait for this peer to be known; if they failed, to be released there."""
        return list(self._waiting.get(peer, {}).values())

    def at(self, endpoint: Endpoint) -> list[tuple[Load, RankRead]]:
        """Everything that is read from the rank at one endpoint, and has not ended."""
        return list(self._reads.get(endpoint, {}).values())

    def has_room(self, endpoint: Endpoint) -> bool:
        """Whether a renew to the rank at this endpoint can name one more claim."""
        return len(self._reads.get(endpoint, {})) < messages.MAX_CLAIMS

    def claimed(self, claim: Claim, endpoint: Endpoint) -> tuple[Load, RankRead] | None:
        """What is read under this claim from the rank at one endpoint, also if it has ended."""
        load = self._loads.get(claim)
        if load is None:
            return None
        return next(((load, read) for read in load.rank_reads if read.endpoint == endpoint), None)

    def clear(self) -> None:
        """Forget all loads."""
        self._loads.clear()
        self._by_request.clear()
        self._queue.clear()
        self._waiting.clear()
        self._reads.clear()
        self._uses.clear()
        self._silent.clear()
        self._due.clear()
        self._renewals.clear()

    def is_in_use(self, peer: events.PeerKey) -> bool:
        """Whether a read is reading the peer's memory, or may still be started on it."""
        return self._uses[peer] > 0

    def ask_all(self, load: Load, now: float) -> list[events.Action]:
        """Ask every rank that was not asked within the last while, or has not answered since."""
        return [
            load.ask(read, self._next_number(), now)
            for read in load.rank_reads
            if read.state is State.ASKING and read.ask_again_at <= now
        ]

    def ask_again(self, endpoint: Endpoint, now: float) -> list[events.Action]:
        """The link to an endpoint broke: send again all that may not have been heard there."""
        reads = self.at(endpoint)
        actions: list[events.Action] = []
        for load, read in reads:
            self.note_silence(read, now)
            if read.state is State.ASKING:
                actions.append(load.ask(read, self._next_number(), now))
            elif read.lacks_answer:
                actions += self._ask_missing(load, read, now)
            self._due.set(load.claim, load.next_due)
        return actions + (self.renew(endpoint, now) if reads else [])

    def on_chunks_wanted(
        self, load: Load, read: RankRead, event: events.ChunksWanted, now: float
    ) -> list[events.Action]:
        """A read has moved; it may want prefill to pack further chunks."""
        self._queue.note_progress((load.claim, read.rank), now)
        stop = load.on_chunks_wanted(read, event)
        return stop or load.ask_chunks(read, event.chunks, self._next_number(), now)

    def _ask_missing(self, load: Load, read: RankRead, now: float) -> list[events.Action]:
        """What a read that has begun lacks: chunks, or a digest."""
        if read.state is State.READING:
            return load.ask_chunks(read, read.chunks.values(), self._next_number(), now)
        return load.ask_digest(read, now)

    def note_silence(self, read: RankRead, now: float) -> None:
        """Its rank cannot be reached."""
        self._silent.add(read.endpoint)
        if read.unreachable_since is None:
            read.unreachable_since = now

    def note_answer(self, endpoint: Endpoint, incarnation: Incarnation) -> None:
        """The rank at an endpoint, in this life, can be reached."""
        if endpoint not in self._silent:
            return
        reads = [read for _, read in self.at(endpoint)]
        for read in reads:
            if read.incarnation == incarnation:
                read.unreachable_since = None
        if all(read.unreachable_since is None for read in reads):
            self._silent.discard(endpoint)

    def settle(self, load: Load, now: float) -> list[events.Action]:
        """After any change: one failure cancels the rest, and what is over is reported once."""
        actions: list[events.Action] = []
        if load.claim not in self._loads:
            return actions
        if load.failure is not None and not load.is_over:
            actions += load.cancel(load.failure)
        load.move_deadline(now)
        self._index(load, now)
        actions += self._start_reads(now)
        if not load.is_over or (load.start is None and not load.is_cancelled):
            self._due.set(load.claim, load.next_due)
            return actions
        report = load.end()
        self._forget(load)
        return actions if report is None else [*actions, report]

    def on_tick(self, now: float) -> list[events.Action]:
        """Give up what is out of time, ask again where no answer came, renew what is held."""
        actions: list[events.Action] = []
        for claim in self._due.pop_due(now):
            load = self._loads[claim]
            late = load.late_failure(now)
            if late is not None:
                actions += load.on_late(late, now)
            actions += self.ask_all(load, now)
            for read in load.rank_reads:
                is_due = read.lacks_answer and read.ask_again_at <= now
                if is_due and read.state is not State.ASKING:
                    actions += self._ask_missing(load, read, now)
            actions += self.settle(load, now)
        actions += self._start_reads(now)
        for endpoint in self._renewals.pop_due(now):
            actions += self.renew(endpoint, now)
        return actions

    def validate(self) -> None:
        """Check every load, and that each is found where it belongs."""
        for load in self.all():
            load.validate()
        reads = [
            (read.endpoint, load.claim)
            for load in self.all()
            for read in load.rank_reads
            if not read.has_ended
        ]
        found = [(endpoint, claim) for endpoint, at in self._reads.items() for claim in at]
        self._queue.validate()
        if sorted(reads) != sorted(found) or len(reads) != self._uses.total():
            raise LocalProtocolError(f"reads {sorted(reads)}, found by endpoint {sorted(found)}")

    def _index(self, load: Load, now: float) -> None:
        """Note whether it waits for its peer, which reads have ended, and who is to be renewed."""
        if load.reads is not None:
            self._wait_no_longer(load)
        for read in load.rank_reads:
            if not read.has_ended:
                self._keep(load, read, now)
            elif load.claim in self._reads.get(read.endpoint, {}):
                self._drop(load, read)
            self._enqueue(load, read, now)

    def _enqueue(self, load: Load, read: RankRead, now: float) -> None:
        """Note whether it waits for its turn, or has had it."""
        key = (load.claim, read.rank)
        if read.state is State.GRANTED and load.start is not None:
            if key not in self._queue:
                share = load.start.num_tokens * self._bytes_per_token // len(load.rank_reads)
                self._queue.add(key, read.endpoint, share)
        elif read.state not in (State.READING, State.DRAINING):
            self._queue.remove(key, now, has_progressed=read.state is not State.FAILED)

    def _start_reads(self, now: float) -> list[events.Action]:
        """Of whichever load: one that ends lets another begin."""
        actions: list[events.Action] = []
        for claim, rank in self._queue.pop_startable(now):
            load = self._loads[claim]
            if load.reads is not None:
                actions += load.start_read(load.reads[rank], now)
                load.move_deadline(now)
        return actions

    def _keep(self, load: Load, read: RankRead, now: float) -> None:
        reads = self._reads.setdefault(read.endpoint, {})
        if load.claim not in reads:
            reads[load.claim] = (load, read)
            self._uses[load.peer] += 1
        due = self._renewals.get(read.endpoint)
        soon = now + self._interval_s(read)
        if due is None or soon < due:
            self._renewals.set(read.endpoint, soon)

    def _drop(self, load: Load, read: RankRead) -> None:
        reads = self._reads[read.endpoint]
        del reads[load.claim]
        if not reads:
            del self._reads[read.endpoint]
            self._silent.discard(read.endpoint)
            self._renewals.set(read.endpoint, None)
        self._uses[load.peer] -= 1
        if not self._uses[load.peer]:
            del self._uses[load.peer]

    def _next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def _wait_no_longer(self, load: Load) -> None:
        waiting = self._waiting.get(load.peer, {})
        if waiting.pop(load.claim, None) is not None and not waiting:
            del self._waiting[load.peer]

    def _forget(self, load: Load) -> None:
        self._wait_no_longer(load)
        self._due.set(load.claim, None)
        del self._loads[load.claim]
        if self._by_request.get(load.request) is load:
            del self._by_request[load.request]

    def _interval_s(self, read: RankRead) -> float:
        """Between renews: five in a lease, whose length its owner's configuration decides."""
        lease_s = read.grant.lease_s if read.grant is not None else math.inf
        return max(MIN_RENEW_INTERVAL_S, min(self._renew_interval_s, lease_s / 5))

    def greet(self, endpoint: Endpoint, incarnation: Incarnation) -> list[events.Action]:
        """Say something to a rank at which nothing is held: it serves reads after any message."""
        if self.at(endpoint):
            return []
        nothing = messages.Renew(
            incarnation=incarnation,
            reader=self.reader,
            number=self._next_number(),
            claims=(),
            num_reading=0,
        )
        return [events.Send(endpoint, nothing)]

    def renew(self, endpoint: Endpoint, now: float) -> list[events.Action]:
        """Tell the rank at an endpoint all that it may hold for this side."""
        reads = self._reads[endpoint].values()
        self._renewals.set(endpoint, now + min(self._interval_s(read) for _, read in reads))
        reading: dict[Incarnation, list[Claim]] = {}
        others: dict[Incarnation, list[Claim]] = {}
        for load, read in reads:
            claims = reading if load.is_reading(read) else others
            claims.setdefault(read.incarnation, []).append(load.claim)
        return [
            events.Send(
                endpoint,
                messages.Renew(
                    incarnation=incarnation,
                    reader=self.reader,
                    number=self._next_number(),
                    claims=(*reading.get(incarnation, ()), *others.get(incarnation, ())),
                    num_reading=len(reading.get(incarnation, ())),
                ),
            )
            for incarnation in {**reading, **others}
        ]
