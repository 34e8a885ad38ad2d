"""One request on a decode rank: its sources, its blocks, and the one report that it owes vLLM.

A request begins on arrival, before it has blocks, so that the answer of prefill is there when the
blocks are. It is over when no read can write any more and none will be begun; then it is reported
(`Loaded`) if it was ever given blocks, and forgotten silently if it was dropped before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Incarnation, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import Load, PeerKey
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


@dataclass
class Request:
    """`deadline` is in monotonic seconds; `sources` is empty until the peer is known."""

    reader: Reader
    request: RequestId
    ticket: Ticket
    claim: Claim
    peer: PeerKey
    deadline: float
    sources: dict[Rank, Source] = field(default_factory=dict)
    load: Load | None = None
    dropped: bool = False
    reason: str | None = None  # why it failed: the first reason, the others follow from it

    @property
    def over(self) -> bool:
        """Whether no read can write any more, and none will be begun."""
        if not self.sources:
            return self.reason is not None
        return all(source.ended for source in self.sources.values())

    @property
    def patient(self) -> bool:
        """Whether it waits for vLLM alone, which may take any time: granted, without blocks."""
        states = {source.state for source in self.sources.values()}
        return self.load is None and states == {State.GRANTED}

    def fail(self, reason: str) -> None:
        """Note why, if nothing failed before."""
        if self.reason is None:
            self.reason = reason

    def open(self, description: Description, ranks: Iterable[Rank]) -> None:
        """The peer is known: these of its ranks are to be read."""
        for rank in ranks:
            there = description.ranks[rank]
            self.sources[rank] = Source(rank, Incarnation(there.incarnation), there.endpoint)

    def ask(
        self, source: Source, number: int, readers: Iterable[Rank], *, now: float
    ) -> events.Send:
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
            tuple(readers),
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
        return [self._hint(Abort, source)] if source.state is State.FAILED else []

    def refused(self, source: Source, reason: str) -> None:
        """The rank has not granted, or no longer. Reads under way go on: the slot decides."""
        if source.state in HOLDING - POSTED:
            self.fail(reason)
            source.move(Cause.REFUSED)

    def landed(self, source: Source) -> list[events.Action]:
        """All data is here; the slot tells whether the blocks were held until now."""
        source.move(Cause.LANDED)
        if source.state is State.CHECKING and source.grant is not None:
            return [events.CheckSlot(self.peer, source.rank, self.request, source.grant.slot)]
        return [self._hint(Abort, source)]

    def checked(self, source: Source, generation: bytes) -> list[events.Action]:
        """The slot was read."""
        stands = source.grant is not None and generation == source.grant.generation
        if not stands:
            self.fail(f"prefill rank {source.rank} took its blocks back while they were read")
        source.move(Cause.STANDS if stands else Cause.FELL)
        return [self._hint(Done if source.state is State.DONE else Abort, source)]

    def broken(self, source: Source, reason: str) -> list[events.Action]:
        """The read ended in an error."""
        self.fail(f"reading prefill rank {source.rank} failed: {reason}")
        source.move(Cause.BROKEN)
        return [self._hint(Abort, source)]

    def cancel(self, reason: str) -> list[events.Action]:
        """Nobody wants it any more. What was asked is aborted now, what is read when drained."""
        self.fail(reason)
        actions: list[events.Action] = []
        for source in self.sources.values():
            if source.state in HOLDING - POSTED:
                actions.append(self._hint(Abort, source))
            source.move(Cause.UNWANTED)
        return actions

    def drop(self) -> list[events.Action]:
        """The request is over for vLLM. While nobody is known to send it to, the abort waits."""
        self.dropped = True
        return self.cancel("dropped") if self.sources else []

    def validate(self) -> None:
        """Check what must hold between any two events.

        Raises:
            LocalProtocolError: says what does not.
        """
        for source in self.sources.values():
            if source.state in POSTED and (self.load is None or source.grant is None):
                raise LocalProtocolError(f"{source.state.name} without blocks or grant")
            if source.state is State.FAILED and self.reason is None:
                raise LocalProtocolError("FAILED without a reason")

    def _hint(self, kind: type[Done | Abort], source: Source) -> events.Send:
        """Done and abort are hints: a lost one costs prefill a lease."""
        message = kind(WIRE_VERSION, source.incarnation, self.ticket.nonce, self.claim, self.reader)
        return events.Send(source.endpoint, message)
