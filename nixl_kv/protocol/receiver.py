"""The decode side of the protocol: vLLM's commands and prefill's answers in, actions out."""

from typing import Final

from nixl_kv.ids import EngineId, Incarnation
from nixl_kv.protocol import events, proving
from nixl_kv.protocol.directory import Directory
from nixl_kv.protocol.events import Failure, PeerKey, Why
from nixl_kv.protocol.messages import (
    WIRE_VERSION,
    Abort,
    Deny,
    Description,
    FromEngine,
    FromRank,
    Grant,
    Proof,
    Reader,
    Refusal,
    Renewed,
)
from nixl_kv.protocol.peers import State as PeerState
from nixl_kv.protocol.proofs import ReadBegun, Verified
from nixl_kv.protocol.request import DROPPED, Request
from nixl_kv.protocol.requests import Requests

GONE: Final = Failure(Why.UNREACHABLE, "its engine has gone")
LATE: Final = Failure(Why.UNREACHABLE, "no description in time")


class Receiver:
    """One decode rank. `handle` and `answered` alone change its state; nothing here waits."""

    def __init__(self, reader: Reader, requests: Requests) -> None:
        """Begin knowing no engine."""
        self._reader = reader
        self.requests = requests
        self.directory = Directory()

    @property
    def busy(self) -> bool:
        """Whether timers run."""
        return bool(len(self.requests)) or self.directory.busy

    def handle(
        self,
        event: events.DecodeCommand | events.DataEvent | events.EndpointLost | events.Tick,
        now: float,
    ) -> list[events.Action]:
        """All commands and events go through here. `now` is monotonic, in seconds."""
        match event:
            case events.Fetch() | events.Load() | events.Drop():
                return self._command(event, now)
            case events.PeerJoined():
                return self._joined(event, now)
            case events.PeerRefused():
                return self._unusable(event.peer, Failure(Why.INCOMPATIBLE, event.reason), now)
            case events.EndpointLost():
                return self._lost(event, now)
            case events.Tick():
                return self._tick(now)
            case _:
                return self._read(event, now)

    def answered(
        self, message: FromEngine | FromRank, endpoint: str, now: float
    ) -> list[events.Action]:
        """All messages of prefill go through here; `endpoint` is where they came from."""
        match message:
            case Description():
                return self.directory.described(message, endpoint)
            case Refusal():
                key = PeerKey(EngineId(message.engine), Incarnation(message.incarnation), endpoint)
                return self._unusable(key, Failure(Why.UNREACHABLE, message.reason), now)
            case Renewed():
                return self._renewed(message, endpoint)
            case Grant() | Deny() | Proof():
                return self._decided(message, endpoint)

    def _command(self, command: events.DecodeCommand, now: float) -> list[events.Action]:
        if isinstance(command, events.Fetch):
            return self._fetch(command, now)
        request = self.requests.get(command.request)
        if isinstance(command, events.Load):
            return self._load(command, request, now)
        return [] if request is None else request.drop() + self.requests.settle(request)

    def _fetch(self, command: events.Fetch, now: float) -> list[events.Action]:
        ticket = command.ticket
        key = PeerKey(
            EngineId(ticket.remote_engine_id), Incarnation(ticket.incarnation), ticket.endpoint
        )
        peer, actions = self.directory.want(key, now)
        request = self.requests.add(command, key, now)
        if peer.state is PeerState.READY and peer.description is not None:
            return self._open(events.PeerJoined(key, peer.description, peer.routes), now)
        if peer.state is not PeerState.CONNECTING:
            request.fail(peer.failure or GONE)
        return actions

    def _load(
        self, command: events.Load, request: Request | None, now: float
    ) -> list[events.Action]:
        """The request has blocks: read what is granted. Its time runs anew from here."""
        if request is None:
            tokens = command.end - command.begin
            failure = Failure(Why.INTERNAL, "it was not asked for, or forgotten since")
            return [events.Loaded(command.request, tokens, failure)]
        request.load = command
        request.time.deadline = now + self.requests.timeout_s
        return request.begin() + self.requests.settle(request)

    def _joined(self, event: events.PeerJoined, now: float) -> list[events.Action]:
        if not self.directory.is_asked(event.peer):
            return [events.DropPeer(event.peer)]
        self.directory.joined(event)
        return self._open(event, now)

    def _open(self, joined: events.PeerJoined, now: float) -> list[events.Action]:
        """The peer is known: ask for all requests that wait for it."""
        actions: list[events.Action] = []
        for request in self.requests.waiting(joined.peer):
            actions += request.open(joined.description, joined.routes)
            if request.dropped or request.failure is not None:
                actions += request.cancel(DROPPED)
            else:
                actions += self.requests.ask(request, request.sources.values(), now)
            actions += self.requests.settle(request)
        return actions

    def _unusable(self, peer: PeerKey, failure: Failure, now: float) -> list[events.Action]:
        if not self.directory.is_asked(peer):
            return []
        actions = self.directory.unusable(peer, failure, now)
        for request in self.requests.waiting(peer):
            request.fail(failure)
            actions += self.requests.settle(request)
        return actions

    def _lost(self, event: events.EndpointLost, now: float) -> list[events.Action]:
        actions: list[events.Action] = []
        for request, source in self.requests.at(event.endpoint):
            told = f"prefill rank {source.rank} is unreachable: {event.reason}"
            source.silent(now)
            request.refused(source, Failure(Why.UNREACHABLE, told))
            actions += self.requests.settle(request)
        lost = Failure(Why.UNREACHABLE, f"{event.endpoint}: {event.reason}")
        for peer in self.directory.lost(event.endpoint, lost):
            actions += self._unusable(peer, lost, now)
        return actions

    def _decided(self, message: Grant | Deny | Proof, endpoint: str) -> list[events.Action]:
        """A claim that we do not hold is answered with abort, so that nobody waits for us."""
        if message.reader != self._reader:
            return []
        held = self.requests.at(endpoint)
        found = next(((r, source) for r, source in held if r.claim == message.claim), None)
        if found is None:
            abort = Abort(
                WIRE_VERSION, message.incarnation, message.nonce, message.claim, message.reader
            )
            return [events.Send(endpoint, abort)] if isinstance(message, Grant) else []
        request, source = found
        actions: list[events.Action] = []
        match message:
            case Grant():
                actions = request.granted(source, message)
            case Proof():
                actions = proving.proved(request, source, message)
            case Deny():
                told = f"prefill rank {source.rank} denied: {message.reason}"
                request.refused(source, Failure(Why.DENIED, told))
        return actions + self.requests.settle(request)

    def _renewed(self, message: Renewed, endpoint: str) -> list[events.Action]:
        """An ask on its way is not lost; a read that is under way ends by the slot."""
        if message.reader != self._reader:
            return []
        actions: list[events.Action] = []
        for request, source in self.requests.at(endpoint):
            if source.incarnation == message.incarnation:
                source.silent_since = None
            if request.claim in message.lost and source.grant is not None:
                told = f"prefill rank {source.rank} let the lease run out"
                request.refused(source, Failure(Why.LEASE_LOST, told))
                actions += self.requests.settle(request)
        return actions

    def _read(
        self,
        event: ReadBegun | events.ReadDone | events.ReadFailed | events.SlotRead | Verified,
        now: float,
    ) -> list[events.Action]:
        request = self.requests.get(event.request)
        source = request.sources.get(event.source) if request is not None else None
        if request is None or source is None:
            return []
        match event:
            case events.ReadDone():
                actions = request.landed(source)
            case events.SlotRead():
                actions = request.checked(source, event.generation)
                actions += proving.compare(request, source)
            case ReadBegun() | Verified():
                actions = proving.handle(request, source, event, now=now)
            case events.ReadFailed():
                actions = request.broken(source, event.reason)
        return actions + self.requests.settle(request)

    def _tick(self, now: float) -> list[events.Action]:
        actions: list[events.Action] = []
        for peer in self.directory.late(now):
            actions += self._unusable(peer, LATE, now)
        return actions + self.requests.due(now) + self.directory.forget(self.requests.in_use(), now)
