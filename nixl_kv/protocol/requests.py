"""The book of all requests of one decode rank: which there are, what is due, what is over."""

import itertools
from collections.abc import Iterable, Iterator

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Incarnation, RequestId
from nixl_kv.protocol import events, lateness, proving
from nixl_kv.protocol.events import PeerKey
from nixl_kv.protocol.messages import WIRE_VERSION, Reader, Renew
from nixl_kv.protocol.receiving import HOLDING, Source, State
from nixl_kv.protocol.request import Request, Time


class Requests:
    """Requests by id. `now` is monotonic; it and the two intervals are in seconds."""

    def __init__(self, reader: Reader, *, timeout_s: float, renew_interval_s: float) -> None:
        """Begin with no request."""
        self.timeout_s = timeout_s
        self._reader = reader
        self._renew_interval_s = renew_interval_s
        self._renewed_at = 0.0
        self._numbers: Iterator[int] = itertools.count(1)  # of asks and renews alike
        self._requests: dict[RequestId, Request] = {}

    def __repr__(self) -> str:
        """How many requests, and how many sources are in which state."""
        states = [source.state.name for _, source in self._sources()]
        counts = ", ".join(f"{states.count(name)} {name}" for name in sorted(set(states)))
        return f"<Requests: {len(self)}; sources: {counts or 'none'}>"

    def __len__(self) -> int:
        """How many requests are not forgotten."""
        return len(self._requests)

    def add(self, command: events.Fetch, peer: PeerKey, now: float) -> Request:
        """Note a request that arrived.

        Raises:
            LocalProtocolError: if its id is known: another one's reads would be forgotten.
        """
        if command.request in self._requests:
            raise LocalProtocolError(f"request {command.request!r} was fetched before")
        request = Request(
            self._reader,
            command.request,
            command.ticket,
            command.claim,
            peer,
            Time(now + self.timeout_s),
        )
        self._requests[command.request] = request
        return request

    def get(self, request: RequestId) -> Request | None:
        """The request, until it is forgotten."""
        return self._requests.get(request)

    def waiting(self, peer: PeerKey) -> list[Request]:
        """The requests that wait for this peer to be known."""
        return [r for r in self._requests.values() if r.peer == peer and r.opened is None]

    def at(self, endpoint: str) -> list[tuple[Request, Source]]:
        """All sources that one endpoint serves, with their requests."""
        return [(r, source) for r, source in self._sources() if source.endpoint == endpoint]

    def clear(self) -> None:
        """Forget all of them."""
        self._requests.clear()

    def in_use(self) -> set[PeerKey]:
        """The peers whose memory a read is reading, or may still be begun on."""
        return {request.peer for request, source in self._sources() if not source.ended}

    def ask(self, request: Request, sources: Iterable[Source], now: float) -> list[events.Action]:
        """Ask these ranks for the request's blocks."""
        return [request.ask(source, next(self._numbers), now=now) for source in sources]

    def settle(self, request: Request) -> list[events.Action]:
        """After any change: one failure cancels the rest, and what is over is reported once."""
        actions: list[events.Action] = []
        if request.failure is not None and not request.over:
            actions += request.cancel(request.failure)
        if not request.over:
            return actions
        if request.load is not None:
            tokens = request.load.end - request.load.begin
            verified = request.load.verify and request.failure is None
            actions.append(
                events.Loaded(request.request, tokens, request.failure, request.peer, verified)
            )
        if request.load is not None or request.dropped:
            del self._requests[request.request]
        return actions

    def due(self, now: float) -> list[events.Action]:
        """Give up what is out of time, ask again where no answer came, renew what is held."""
        actions: list[events.Action] = []
        for request in list(self._requests.values()):
            over = lateness.failure(request, now, self.timeout_s)
            if over is not None:
                actions += lateness.give_up(request, over, now)
            unanswered = [
                source
                for source in request.sources.values()
                if source.state is State.ASKING and source.ask_again_at <= now
            ]
            actions += self.ask(request, unanswered, now)
            for source in request.sources.values():
                if proving.is_overdue(source, now):
                    actions += proving.ask(request, source, now)
            actions += self.settle(request)
        return actions + self._renewals(now)

    def validate(self) -> None:
        """Check every request.

        Raises:
            LocalProtocolError: says what does not hold.
        """
        for request in self._requests.values():
            request.validate()

    def _sources(self) -> Iterator[tuple[Request, Source]]:
        for request in list(self._requests.values()):
            for source in list(request.sources.values()):
                yield request, source

    def _renewals(self, now: float) -> list[events.Action]:
        """One renew per rank that may hold something for us, with all that it may hold.

        Five times in the shortest lease that was granted: its owner's configuration counts.
        """
        leases = [source.grant.lease_s for _, source in self._sources() if source.grant]
        if now < self._renewed_at + min([self._renew_interval_s, *(s / 5 for s in leases)]):
            return []
        self._renewed_at = now
        held: dict[tuple[str, Incarnation], list[Claim]] = {}
        for request, source in self._sources():
            if source.state in HOLDING:
                held.setdefault((source.endpoint, source.incarnation), []).append(request.claim)
        return [
            events.Send(
                endpoint,
                Renew(WIRE_VERSION, incarnation, self._reader, next(self._numbers), tuple(claims)),
            )
            for (endpoint, incarnation), claims in held.items()
        ]
