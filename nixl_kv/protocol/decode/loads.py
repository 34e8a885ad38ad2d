"""All loads of one decode rank: which there are, what is due, what is over.

Whatever a message names is found by key, and time costs what is due: with ten thousand loads a
message and a tick cost what they cost with ten.
"""

import math
from collections import Counter
from typing import Final, TypeAlias

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Endpoint, Incarnation, RequestId
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.deadlines import Deadlines
from nixl_kv.protocol.decode.load import Load, RankRead, State

MIN_RENEW_INTERVAL_S: Final = 0.025
"""However short a lease its owner grants."""

_Reads: TypeAlias = dict[RequestId, tuple[Load, RankRead]]


class LoadBook:
    """Loads by request. `now` is monotonic; it and the two intervals are in seconds."""

    def __init__(
        self,
        reader: messages.Reader,
        record: events.Record,
        *,
        timeout_s: float,
        renew_interval_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self._reader = reader
        self._record = record
        self._renew_interval_s = renew_interval_s
        self.last_number = 0  # of asks and renews alike
        self._loads: dict[RequestId, Load] = {}
        self._by_claim: dict[Claim, Load] = {}
        self._waiting: dict[events.PeerKey, dict[RequestId, Load]] = {}
        self._reads: dict[Endpoint, _Reads] = {}  # those that have not ended
        self._uses: Counter[events.PeerKey] = Counter()  # as many as these
        self._due = Deadlines[RequestId]()
        self._renewals = Deadlines[Endpoint]()

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def next_due(self) -> float | None:
        """When time changes something by itself; None for never."""
        return min(
            (due for due in (self._due.next, self._renewals.next) if due is not None),
            default=None,
        )

    def add(self, command: events.PrepareLoad, peer: events.PeerKey, now: float) -> Load:
        """Add a load."""
        if command.request in self._loads:
            raise LocalProtocolError(f"request {command.request!r} has a load already")
        load = Load(
            reader=self._reader,
            request=command.request,
            ticket=command.ticket,
            claim=command.claim,
            peer=peer,
            deadline=now + self.timeout_s,
            record=self._record,
        )
        self._loads[command.request] = self._by_claim[command.claim] = load
        self._waiting.setdefault(peer, {})[command.request] = load
        self._due.set(command.request, load.next_due)
        return load

    def get(self, request: RequestId) -> Load | None:
        """The load of a request, until it is forgotten."""
        return self._loads.get(request)

    def all(self) -> list[Load]:
        """Every load that is not forgotten."""
        return list(self._loads.values())

    def waiting_for(self, peer: events.PeerKey) -> list[Load]:
        """The loads that wait for this peer to be known; if they failed, to be released there."""
        return list(self._waiting.get(peer, {}).values())

    def at(self, endpoint: Endpoint) -> list[tuple[Load, RankRead]]:
        """Everything that is read from the rank at one endpoint, and has not ended."""
        return list(self._reads.get(endpoint, {}).values())

    def claimed(self, claim: Claim, endpoint: Endpoint) -> tuple[Load, RankRead] | None:
        """What is read under this claim from the rank at one endpoint, also if it has ended."""
        load = self._by_claim.get(claim)
        if load is None:
            return None
        return next(((load, read) for read in load.rank_reads if read.endpoint == endpoint), None)

    def clear(self) -> None:
        """Forget all loads."""
        self._loads.clear()
        self._by_claim.clear()
        self._waiting.clear()
        self._reads.clear()
        self._uses.clear()
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
            if read.unreachable_since is None:
                read.unreachable_since = now
            if read.state is State.ASKING:
                actions.append(load.ask(read, self._next_number(), now))
            elif read.lacks_answer:
                actions += load.ask_digest(read, now)
            self._due.set(load.request, load.next_due)
        return actions + (self._renew(endpoint, now) if reads else [])

    def settle(self, load: Load, now: float) -> list[events.Action]:
        """After any change: one failure cancels the rest, and what is over is reported once."""
        actions: list[events.Action] = []
        if self._loads.get(load.request) is not load:
            return actions
        if load.failure is not None and not load.is_over:
            actions += load.cancel(load.failure)
        self._index(load, now)
        if not load.is_over or (load.start is None and not load.is_cancelled):
            self._due.set(load.request, load.next_due)
            return actions
        report = load.end()
        self._forget(load)
        return actions if report is None else [*actions, report]

    def on_tick(self, now: float) -> list[events.Action]:
        """Give up what is out of time, ask again where no answer came, renew what is held."""
        actions: list[events.Action] = []
        for request in self._due.pop_due(now):
            load = self._loads[request]
            late = load.late_failure(now, self.timeout_s)
            if late is not None:
                actions += load.on_late(late, now)
            actions += self.ask_all(load, now)
            for read in load.rank_reads:
                if read.state is State.VERIFYING and read.lacks_answer and read.ask_again_at <= now:
                    actions += load.ask_digest(read, now)
            actions += self.settle(load, now)
        for endpoint in self._renewals.pop_due(now):
            actions += self._renew(endpoint, now)
        return actions

    def validate(self) -> None:
        """Check every load, and that each is found where it belongs."""
        for load in self.all():
            load.validate()
        reads = [
            (read.endpoint, load.request)
            for load in self.all()
            for read in load.rank_reads
            if not read.has_ended
        ]
        found = [(endpoint, request) for endpoint, at in self._reads.items() for request in at]
        if sorted(reads) != sorted(found) or len(reads) != self._uses.total():
            raise LocalProtocolError(f"reads {sorted(reads)}, found by endpoint {sorted(found)}")

    def _index(self, load: Load, now: float) -> None:
        """Note whether it waits for its peer, which reads have ended, and who is to be renewed."""
        if load.reads is not None:
            self._wait_no_longer(load)
        for read in load.rank_reads:
            if not read.has_ended:
                self._keep(load, read, now)
            elif load.request in self._reads.get(read.endpoint, {}):
                self._drop(load, read)

    def _keep(self, load: Load, read: RankRead, now: float) -> None:
        reads = self._reads.setdefault(read.endpoint, {})
        if load.request not in reads:
            reads[load.request] = (load, read)
            self._uses[load.peer] += 1
        due = self._renewals.get(read.endpoint)
        soon = now + self._interval_s(read)
        if due is None or soon < due:
            self._renewals.set(read.endpoint, soon)

    def _drop(self, load: Load, read: RankRead) -> None:
        reads = self._reads[read.endpoint]
        del reads[load.request]
        if not reads:
            del self._reads[read.endpoint]
            self._renewals.set(read.endpoint, None)
        self._uses[load.peer] -= 1
        if not self._uses[load.peer]:
            del self._uses[load.peer]

    def _next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def _wait_no_longer(self, load: Load) -> None:
        waiting = self._waiting.get(load.peer, {})
        if waiting.pop(load.request, None) is not None and not waiting:
            del self._waiting[load.peer]

    def _forget(self, load: Load) -> None:
        self._wait_no_longer(load)
        self._due.set(load.request, None)
        del self._loads[load.request], self._by_claim[load.claim]

    def _interval_s(self, read: RankRead) -> float:
        """Between renews: five in a lease, whose length its owner's configuration decides."""
        lease_s = read.grant.lease_s if read.grant is not None else math.inf
        return max(MIN_RENEW_INTERVAL_S, min(self._renew_interval_s, lease_s / 5))

    def _renew(self, endpoint: Endpoint, now: float) -> list[events.Action]:
        """Tell the rank at an endpoint all that it may hold for this side."""
        reads = self._reads[endpoint].values()
        self._renewals.set(endpoint, now + min(self._interval_s(read) for _, read in reads))
        claims: dict[Incarnation, list[Claim]] = {}
        for load, read in reads:
            claims.setdefault(read.incarnation, []).append(load.claim)
        return [
            events.Send(
                endpoint,
                messages.Renew(
                    incarnation=incarnation,
                    reader=self._reader,
                    number=self._next_number(),
                    claims=tuple(held),
                ),
            )
            for incarnation, held in claims.items()
        ]
