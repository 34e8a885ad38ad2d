"""One request on a decode rank: its sources, its blocks, and the one report that it owes vLLM.

A request begins on arrival, before it has blocks, so that the answer of prefill is there when the
blocks are. It is over when no read can write any more and none will be begun; then it is reported
(`Loaded`) if it was ever given blocks, and forgotten silently if it was dropped before.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.ranks import Route
from nixl_kv.ids import Claim, Incarnation, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import Failure, Load, PeerKey, Why
from nixl_kv.protocol.messages import (
    WIRE_VERSION,
    Abort,
    Ask,
    Description,
    Done,
    Grant,
    Reader,
)
from nixl_kv.protocol.receiving import HOLDING, POSTED, Cause, Source, State
from nixl_kv.protocol.ticket import Ticket

ASK_AGAIN_S: Final = 1.0
DROPPED: Final = Failure(Why.DROPPED, "dropped")


@dataclass
class Time:
    """Of one request, in monotonic seconds: when it ends, and since when it has been over."""

    deadline: float
    over_since: float | None = None


@dataclass
class Request:
    """`opened` is None until the peer is known."""

    reader: Reader
    request: RequestId
    ticket: Ticket
    claim: Claim
    peer: PeerKey
    time: Time
    opened: dict[Rank, Source] | None = None
    load: Load | None = None
    dropped: bool = False
    failure: Failure | None = None  # the first one, the others follow from it

    @property
    def sources(self) -> dict[Rank, Source]:
        """The ranks that it reads from; none before the peer is known."""
        return self.opened or {}

    @property
    def over(self) -> bool:
        """Whether no read can write any more, and none will be begun."""
        if self.opened is None:
            return self.failure is not None
        return all(source.ended for source in self.opened.values())

    def fail(self, failure: Failure) -> None:
        """Note why, if nothing failed before."""
        if self.failure is None:
            self.failure = failure

    def open(self, description: Description, routes: Iterable[Route]) -> list[events.Action]:
        """The peer is known: some of its ranks are to be read, others nobody needs."""
        self.opened = {}
        unread: list[events.Action] = []
        for route in routes:
            there = description.ranks[route.source]
            source = Source(
                route.source, Incarnation(there.incarnation), there.endpoint, route.readers
            )
            if route.readers:
                self.opened[route.source] = source
            else:
                unread.append(hint(Done, self, source))
        return unread

    def ask(self, source: Source, number: int, *, now: float) -> events.Send:
        """Ask one rank, or ask it again."""
        source.ask_again_at = now + ASK_AGAIN_S
        message = Ask(
            WIRE_VERSION,
            source.incarnation,
            self.ticket.nonce,
            self.claim,
            self.ticket.context,
            self.reader,
            number,
            source.readers,
        )
        return events.Send(source.endpoint, message)

    def begin(self) -> list[events.Action]:
        """Read from every rank that has granted, if there are blocks to read into."""
        actions: list[events.Action] = []
        for source in self.sources.values():
            if self.load and source.grant and source.state is State.GRANTED:
                source.move(Cause.BLOCKS)
                actions.append(events.StartRead(self.peer, source.rank, source.grant, self.load))
        return actions

    def granted(self, source: Source, grant: Grant) -> list[events.Action]:
        """A grant; one that comes twice, or too late, changes nothing."""
        if source.state is State.ASKING:
            source.grant = grant
            source.move(Cause.GRANT)
            return self.begin()
        return [hint(Abort, self, source)] if source.state is State.FAILED else []

    def refused(self, source: Source, failure: Failure) -> None:
        """The rank has not granted, or no longer. Reads under way go on: the slot decides.

        So does a comparison: what it compares was held, and is here.
        """
        if source.state in HOLDING - POSTED and not source.compares:
            self.fail(failure)
            source.move(Cause.REFUSED)

    def landed(self, source: Source) -> list[events.Action]:
        """All data is here; the slot tells whether the blocks were held until now."""
        source.move(Cause.LANDED)
        if source.state is State.CHECKING and source.grant is not None:
            return [events.CheckSlot(self.peer, source.rank, self.request, source.grant.slot)]
        return [hint(Abort, self, source)]

    def checked(self, source: Source, generation: bytes) -> list[events.Action]:
        """The slot was read."""
        stands = source.grant is not None and generation == source.grant.generation
        if not stands:
            told = f"prefill rank {source.rank} took its blocks back while they were read"
            self.fail(Failure(Why.FENCED, told))
        if stands and source.proving is not None and source.state is State.CHECKING:
            source.move(Cause.UNPROVEN)
            return []
        source.move(Cause.STANDS if stands else Cause.FELL)
        return [hint(Done if source.state is State.DONE else Abort, self, source)]

    def broken(self, source: Source, reason: str) -> list[events.Action]:
        """The read ended in an error."""
        told = f"reading prefill rank {source.rank} failed: {reason}"
        self.fail(Failure(Why.BROKEN, told))
        source.move(Cause.BROKEN)
        return [hint(Abort, self, source)]

    def cancel(self, failure: Failure) -> list[events.Action]:
        """Nobody wants it any more. What was asked is aborted now, what is read when drained."""
        self.fail(failure)
        actions: list[events.Action] = []
        for source in self.sources.values():
            if source.state in HOLDING - POSTED:
                actions.append(hint(Abort, self, source))
            source.move(Cause.UNWANTED)
        return actions

    def drop(self) -> list[events.Action]:
        """The request is over for vLLM. While nobody is known to send it to, the abort waits."""
        self.dropped = True
        return [] if self.opened is None else self.cancel(DROPPED)

    def validate(self) -> None:
        """Check what must hold between any two events.

        Raises:
            LocalProtocolError: says what does not.
        """
        for source in self.sources.values():
            if source.state in POSTED and (self.load is None or source.grant is None):
                raise LocalProtocolError(f"{source.state.name} without blocks or grant")
            if source.state is State.FAILED and self.failure is None:
                raise LocalProtocolError("FAILED without a reason")


def hint(kind: type[Done | Abort], request: Request, source: Source) -> events.Send:
    """Tell prefill that this reader has ended. A lost hint costs prefill a lease."""
    nonce, claim = request.ticket.nonce, request.claim
    message = kind(WIRE_VERSION, source.incarnation, nonce, claim, request.reader)
    return events.Send(source.endpoint, message)
