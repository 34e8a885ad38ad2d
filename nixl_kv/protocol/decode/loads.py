"""All loads of one decode rank: which there are, what is due, what is over."""

import itertools
from collections.abc import Iterator

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Endpoint, Incarnation, RequestId
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.decode.load import HOLDING, Load, RankRead, State


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
        self._renewed_at = 0.0
        self._numbers: Iterator[int] = itertools.count(1)  # of asks and renews alike
        self._loads: dict[RequestId, Load] = {}

    def __len__(self) -> int:
        return len(self._loads)

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
        self._loads[command.request] = load
        return load

    def get(self, request: RequestId) -> Load | None:
        """The load of a request, until it is forgotten."""
        return self._loads.get(request)

    def all(self) -> list[Load]:
        """Every load that is not forgotten."""
        return list(self._loads.values())

    def waiting_for(self, peer: events.PeerKey) -> list[Load]:
        """The loads that wait for this peer to be known."""
        return [load for load in self.all() if load.peer == peer and load.reads is None]

    def at(self, endpoint: Endpoint) -> list[tuple[Load, RankRead]]:
        """Everything that is read from the rank at one endpoint."""
        return [(load, read) for load, read in self._rank_reads() if read.endpoint == endpoint]

    def claimed(self, claim: Claim, endpoint: Endpoint) -> tuple[Load, RankRead] | None:
        """What is read under this claim from the rank at one endpoint."""
        for load in self._loads.values():
            if load.claim == claim:
                return next(((load, rd) for rd in load.rank_reads if rd.endpoint == endpoint), None)
        return None

    def clear(self) -> None:
        """Forget all loads."""
        self._loads.clear()

    def peers_in_use(self) -> set[events.PeerKey]:
        """The peers whose memory a read is reading, or may still be started on."""
        return {load.peer for load, read in self._rank_reads() if not read.has_ended}

    def ask_all(self, load: Load, now: float) -> list[events.Action]:
        """Ask every rank that was not asked within the last while, or has not answered since."""
        return [
            load.ask(read, next(self._numbers), now)
            for read in load.rank_reads
            if read.state is State.ASKING and read.ask_again_at <= now
        ]

    def settle(self, load: Load) -> list[events.Action]:
        """After any change: one failure cancels the rest, and what is over is reported once."""
        actions: list[events.Action] = []
        if self._loads.get(load.request) is not load:
            return actions
        if load.failure is not None and not load.is_over:
            actions += load.cancel(load.failure)
        if not load.is_over or (load.start is None and not load.is_cancelled):
            return actions
        report = load.end()
        del self._loads[load.request]
        return actions if report is None else [*actions, report]

    def on_tick(self, now: float) -> list[events.Action]:
        """Give up what is out of time, ask again where no answer came, renew what is held."""
        actions: list[events.Action] = []
        for load in self.all():
            late = load.late_failure(now, self.timeout_s)
            if late is not None:
                actions += load.on_late(late, now)
            actions += self.ask_all(load, now)
            for read in load.rank_reads:
                if load.is_digest_overdue(read, now):
                    actions += load.ask_digest(read, now)
            actions += self.settle(load)
        return actions + self._renewals(now)

    def validate(self) -> None:
        """Check every load."""
        for load in self.all():
            load.validate()

    def _rank_reads(self) -> Iterator[tuple[Load, RankRead]]:
        for load in self.all():
            for read in load.rank_reads:
                yield load, read

    def _renewals(self, now: float) -> list[events.Action]:
        """One renew per rank that may hold something for this side, with all that it may hold.

        Five times in the shortest lease that was granted: its owner's configuration counts.
        """
        leases = [read.grant.lease_s for _, read in self._rank_reads() if read.grant]
        if now < self._renewed_at + min([self._renew_interval_s, *(s / 5 for s in leases)]):
            return []
        self._renewed_at = now
        claims: dict[tuple[Endpoint, Incarnation], list[Claim]] = {}
        for load, read in self._rank_reads():
            if read.state in HOLDING:
                claims.setdefault((read.endpoint, read.incarnation), []).append(load.claim)
        return [
            events.Send(
                endpoint,
                messages.Renew(
                    incarnation=incarnation,
                    reader=self._reader,
                    number=next(self._numbers),
                    claims=tuple(held),
                ),
            )
            for (endpoint, incarnation), held in claims.items()
        ]
