"""The agents of one rank: their handshakes with peers, and their reads.

New reads use the current agent. `turnover` replaces it, and has the others.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final

from nixl_kv.errors import LocalProtocolError, NixlKVError
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events, messages
from nixl_kv.reading.agent import READING_PAUSE_S, ReadAgent
from nixl_kv.reading.paths import STOPPED, ExtraMemory
from nixl_kv.reading.peers import Ended, Ranks, RemotePeers
from nixl_kv.reading.turnover import Turnover
from nixl_kv.transport.base import Transport

# Between two polls while an agent is created or destroyed and nothing waits for it.
CHANGING_PAUSE_S: Final = 0.002
# Decode gives up the first read of a peer. Over TCP, UCX reports a host that does not answer after
# 4 s; on a busy machine prefill may take seconds to serve the read.
FIRST_READ_S: Final = 30.0
# Between two heartbeats to a peer's ranks while its first read takes long. Each lets prefill serve
# the read for another LINGER_S.
GREET_S: Final = 1.0


@dataclass
class _Handshake:
    """A peer whose memory is made readable and then read once, to prove that it can be read."""

    since: float  # monotonic seconds
    # When all of its ranks were prepared, and their first reads had begun; None: not yet.
    prepared_at: float | None = None
    greeted_at: float = 0.0


class Agents:
    """All of it runs on the transfer thread. An engine that only prefills has no agents.

    `make_transport` makes a transport with nothing registered, and every agent registers `memory`
    besides the cache. `make_background` makes an executor with a number of threads: one creates
    agents, one destroys them, and each agent has PREPARING_THREADS. `counts` receives the numbers
    of replaced agents and handshakes.
    """

    def __init__(  # noqa: PLR0913 - the parts of a rank that it uses
        self,
        make_transport: Callable[[], Transport],
        peers: RemotePeers,
        counts: events.Counts,
        *,
        memory: tuple[ExtraMemory, ...] = (),
        clock: Callable[[], float],
        make_background: Callable[[int], Executor],
        introduce: events.Introduce = events.no_introduction,
    ) -> None:
        self.peers = peers
        self.turnover = Turnover(make_transport, peers, counts, memory, clock, make_background)
        # New reads use the first; the others drain, or connect to the peers.
        self.polled = self.turnover.polled
        self._counts = counts
        self._clock = clock
        self._waiting: list[events.StartRead] = []  # for their ranks, or for an idle transport
        self._handshakes: dict[events.PeerKey, _Handshake] = {}
        self._introduce = introduce
        self._unadmitted: set[events.PeerKey] = set()  # whose ranks do not let this one connect yet

    def __repr__(self) -> str:
        return f"<Agents: {self.polled}, {self.turnover}>"

    @property
    def next_due(self) -> float | None:
        """When to check for unused connections, in monotonic seconds; None for never."""
        return self.turnover.next_due

    @property
    def is_busy(self) -> bool:
        is_changing = self._handshakes or self._waiting or self.turnover.is_changing
        return bool(is_changing) or any(agent.is_busy for agent in self.polled)

    @property
    def pause_s(self) -> float:
        """Seconds until the next poll, while this is busy."""
        is_preparing = any(
            handshake.prepared_at is None and peer not in self.current.broken
            for peer, handshake in self._handshakes.items()
        )
        if is_preparing or self.turnover.is_awaited:
            return READING_PAUSE_S
        pauses = (agent.pause_s for agent in self.polled if agent.is_busy)
        return min(pauses, default=CHANGING_PAUSE_S)

    def open(self) -> None:
        """Create the first agent; see `Turnover.open`."""
        self.turnover.open()

    def execute(self, action: events.DataAction) -> list[events.DataEvent]:
        match action:
            case events.StartHandshake():
                return [self._start_handshake(action)]
            case events.Connect():
                self._connect(action)
            case events.DropPeer():
                self._drop(action.peer, is_dead=action.is_dead)
            case events.StartRead():
                if self.current.broken:
                    self.current.drop_broken()
                return self._start(action)
            case events.TellRead():
                return [event for agent in self.polled for event in agent.tell(action)]
            case events.StopRead():
                for agent in self.polled:
                    agent.stop(action)
                return self._fail_waiting(STOPPED, partial(_is_of, action))
            case events.AbandonRead():
                self.abandon(action.request, action.rank)
                return self._fail_waiting("it could not begin in time", partial(_is_of, action))
        return []

    def abandon(self, request: RequestId, rank: Rank | None = None) -> None:
        """Give up reads that do not end. They fail when the end of their agent has stopped them."""
        for agent in self.polled:
            for read in agent.reads:
                if read.request == request and rank in (None, read.rank):
                    agent.abandon(read)

    def forget_peers(self) -> None:
        """Forget all peers and the reads that wait. Reads in progress stay."""
        self._waiting.clear()
        for peer in list(self.peers.descriptions):
            self._drop(peer)

    def poll(self) -> list[events.DataEvent]:
        """Continue all reads and agents; return the events since the last call."""
        if not self.polled:  # this rank only prefills
            return []
        current, happened = self.polled[0], list[events.DataEvent]()
        for agent in self.polled:
            if agent.broken or not _is_settled(agent.ranks):
                for preparation in agent.collect():
                    happened += self._on_prepared(preparation) if agent is current else ()
            happened += agent.poll()
        happened += self.turnover.poll(self._handshakes)
        happened += self._prove(happened)
        if self._waiting and not self.polled[0].ranks.is_adding:
            waiting, self._waiting = self._waiting, []
            for read in waiting:
                happened += self._start(read)
        for agent in self.polled:
            if not _is_settled(agent.ranks):
                agent.ranks.begin_next()
        if happened or self.next_due is not None or self.polled[0].ranks.has_left:
            self.turnover.tidy()
        return happened

    def is_read(self, request: RequestId) -> bool:
        return any(read.request == request for read in self.turnover.reads)

    def close(self) -> None:
        """Destroy all agents, even with reads in progress.

        Raises:
            TransportError: if one is not proven to be gone yet; call it again.
        """
        self.turnover.close()
        for path in self.peers.paths:
            path.close()

    @property
    def current(self) -> ReadAgent:
        if not self.polled:
            raise LocalProtocolError("this rank has no agent that reads: it only prefills")
        return self.polled[0]

    # --- peers

    def _start_handshake(self, action: events.StartHandshake) -> events.DataEvent:
        peer, description = action.peer, action.description
        try:
            self.peers.check(description)
            routes = self.peers.routes(description)
            read = [route.remote_rank for route in routes if route.readers]
            found = (self._introduce(rank, description.ranks[rank]) for rank in read)
            introductions = tuple(one for one in found if one is not None)
            if not introductions:
                self.current.ranks.prepare(peer, description, routes)
        except (NixlKVError, ValueError) as error:
            return events.PeerRefused(peer, str(error))
        self.peers.descriptions[peer] = description
        if introductions:
            self._unadmitted.add(peer)
        else:
            self._handshakes[peer] = _Handshake(self._clock())
        return events.PeerFits(peer, description, routes, introductions)

    def _connect(self, action: events.Connect) -> None:
        peer, descriptions = action.peer, self.peers.descriptions
        self._unadmitted.discard(peer)
        if peer in descriptions:
            descriptions[peer] = messages.with_tokens(descriptions[peer], action.tokens)
            self._handshakes[peer] = _Handshake(self._clock())
            self._begin_again(peer)

    def _begin_again(self, peer: events.PeerKey) -> None:
        """Add the ranks of a peer, once those of a broken connection are dropped."""
        if peer not in self.current.broken and not self.current.ranks.has(peer):
            self.current.prepare(peer)

    def _on_prepared(self, ended: Ended) -> list[events.DataEvent]:
        handshake = self._handshakes.get(ended.peer)
        if ended.error is None:
            if handshake is not None and handshake.prepared_at is None:
                now = handshake.prepared_at = handshake.greeted_at = self._clock()
                seconds = now - handshake.since
                self._counts.observe("first_contact_seconds", seconds, "handshake")
            return []
        failed = self._fail_waiting(ended.error, lambda read: read.peer == ended.peer)
        if handshake is not None:
            del self._handshakes[ended.peer]
            self.peers.descriptions.pop(ended.peer, None)
            failed.insert(0, events.PeerRefused(ended.peer, ended.error))
        return failed

    def _prove(self, happened: list[events.DataEvent]) -> list[events.DataEvent]:
        """End the handshakes whose first reads have ended; `happened` says which have broken."""
        if not self._handshakes:
            return []
        for event in happened:
            if isinstance(event, events.PeerBroken):
                self._handshakes.pop(event.peer, None)
        now, greeted = self._clock(), list[events.PeerKey]()
        ended: list[events.DataEvent] = []
        for peer, handshake in list(self._handshakes.items()):
            if handshake.prepared_at is None:
                self._begin_again(peer)
                continue
            if not (self.current.ranks.is_preparing(peer) or self.current.is_warming_up(peer)):
                ended.append(events.HandshakeDone(peer))
            elif now - handshake.prepared_at >= FIRST_READ_S:
                reason = f"its first read has not ended in {FIRST_READ_S:g} s"
                ended.append(events.PeerBroken(peer, reason))
            else:
                if now - handshake.greeted_at >= GREET_S:
                    handshake.greeted_at = now
                    greeted.append(peer)
                continue
            del self._handshakes[peer]
        return [*ended, events.PeersMoved(tuple(greeted))] if greeted else ended

    def _drop(self, peer: events.PeerKey, *, is_dead: bool = False) -> None:
        self.peers.descriptions.pop(peer, None)
        self._handshakes.pop(peer, None)
        self._unadmitted.discard(peer)
        for agent in self.polled:
            agent.ranks.drop(peer, is_lost=is_dead)

    # --- reads

    def _start(self, read: events.StartRead) -> list[events.DataEvent]:
        """Start a read with the current agent, or let it wait. It may have to add the engine."""
        agent = self.current
        if read.peer in self._unadmitted:
            self._waiting.append(read)
            return []
        rank = agent.ranks.find(read.peer, read.rank)
        if rank is not None and rank.is_outdated and read.peer not in agent.broken:
            agent.ranks.drop(read.peer)  # its connections stay
            rank = None
        if rank is None:
            # Another agent made the handshake, the connection broke, or it was outdated.
            agent.prepare(read.peer)
            rank = agent.ranks.find(read.peer, read.rank)
        started = agent.start(read, rank)
        if started is None:
            self._waiting.append(read)
        return started or []

    def _fail_waiting(
        self, reason: str, is_meant: Callable[[events.StartRead], bool]
    ) -> list[events.DataEvent]:
        failed = [read for read in self._waiting if is_meant(read)]
        self._waiting = [read for read in self._waiting if not is_meant(read)]
        return [events.ReadFailed(read.load.request, read.rank, reason) for read in failed]


def _is_of(action: events.StopRead | events.AbandonRead, read: events.StartRead) -> bool:
    return (read.load.request, read.rank) == (action.request, action.rank)


def _is_settled(ranks: Ranks) -> bool:
    """True if there is nothing to collect or begin. Called in every turn."""
    return not (ranks.busy or ranks.ended or ranks.adding)
