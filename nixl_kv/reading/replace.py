"""The agents of one rank that read: the current one, and those before it, which drain.

Nothing stops a read except the end of its agent. So when a read is abandoned, another agent is made
for all new reads, and the old one drains. Once only abandoned reads are left on it, it is
destroyed. These reads have failed when the agent is proven to be gone: then their blocks may be
used again.

All agents but the first are made, and all are destroyed, in the background: either may take a
second. Each of the two has a thread, so that an agent that cannot be destroyed does not keep
another one from being made.

NIXL closes no connection before the agent ends, at either end. So an agent is also replaced once it
has collected enough connections to ranks that died or were forgotten. Then the new one first meets
all engines that the old one reads, in the background: no read waits for it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import LocalProtocolError, NixlKVError, TransportError
from nixl_kv.geometry.plan import plan
from nixl_kv.ids import Rank, RequestId
from nixl_kv.log_limit import get_logger
from nixl_kv.protocol import events
from nixl_kv.reading.agent import (
    READING_PAUSE_S,
    Opened,
    ReadAgent,
    open_transport,
    request_of,
)
from nixl_kv.reading.paths.base import STOPPED, ExtraMemory
from nixl_kv.reading.peers import Ended, RemotePeers, WaitingRead
from nixl_kv.transport.base import Transport

logger = get_logger(__name__)

TRY_AGAIN_S: Final = 1.0

TIDY_S: Final = 30.0
"""Between two looks for connections that nobody uses, as long as there are some."""
LEFT_S: Final = 60.0
"""How long an agent keeps the connections to a rank that died or was forgotten."""
MAX_LEFT: Final = 16
"""Such ranks that an agent may have before that: over TCP each is up to 40 descriptors."""
READ_PER_LEFT: Final = 10
"""Ranks that are met again, at most, to be rid of one: each costs 10 ms, on another thread."""
CHANGING_PAUSE_S: Final = 0.002
"""Between two looks at an agent that is being made or destroyed, and that nothing waits for."""

PREPARING_THREADS: Final = 2
"""Of an agent: NIXL adds a peer on one while ranks are planned on the other."""


@dataclass
class _Closing:
    """An agent that is being destroyed."""

    agent: ReadAgent
    closed: Future[None]
    started_at: float

    @property
    def stops_reads(self) -> bool:
        """Whether reads that did not end are what it is destroyed for."""
        return bool(self.agent.reads)


class Agents:
    """See the module's docstring. On the transfer thread alone."""

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        peers: RemotePeers,
        counts: defaultdict[str, float],
        *,
        memory: tuple[ExtraMemory, ...] = (),
        clock: Callable[[], float],
        make_background: Callable[[int], Executor],
    ) -> None:
        """Start without an agent: an engine that only prefills never needs one.

        Args:
            make_transport: makes one with nothing registered.
            peers: that this rank may read, and its own cache.
            counts: agents that were destroyed to stop a read are added to them, and peers joined.
            memory: what every agent registers besides the cache.
            clock: monotonic seconds.
            make_background: makes so many threads: one on which agents are made, one on which they
                are destroyed, and for each agent some on which its peers are prepared.
        """
        self.peers = peers
        self.polled: list[ReadAgent] = []
        """The agents whose reads are polled: all new reads use the first, the others drain."""
        self._counts = counts
        self._make_transport = make_transport
        self._memory = memory
        self._clock = clock
        self._open_on = make_background(1)
        self._close_on = make_background(1)
        self._make_background = make_background
        self._joining: dict[events.PeerKey, float] = {}  # since when
        self._closing: list[_Closing] = []
        self._opening: Future[Opened] | None = None
        self._open_again_at = 0.0
        self._is_worn = False  # and therefore another agent is being made
        self._successor: ReadAgent | None = None  # one of `polled`, which meets the peers
        self._introduced: set[events.PeerKey] = set()  # that it has met, or could not
        self._tidy_at: float | None = None
        self._left_since: float | None = None

    def __repr__(self) -> str:
        return f"<Agents: {self.polled}, {len(self._closing)} closing>"

    @property
    def is_busy(self) -> bool:
        """Whether a peer is being joined, a read is under way, or an agent is made or destroyed."""
        return self._is_changing or any(agent.is_busy for agent in self.polled)

    @property
    def pause_s(self) -> float:
        """How long they need not be looked at, in seconds, while they are busy."""
        awaited = any(closing.stops_reads for closing in self._closing)
        if self._joining or awaited or (self._opening and not self._is_worn):
            return READING_PAUSE_S
        pauses = (agent.pause_s for agent in self.polled if agent.is_busy)
        return min(pauses, default=CHANGING_PAUSE_S)

    @property
    def _is_changing(self) -> bool:
        return bool(self._joining or self._closing or self._opening)

    @property
    def next_due(self) -> float | None:
        """When time changes something by itself, in monotonic seconds; None for never."""
        return self._tidy_at

    def open(self) -> None:
        """Make the first agent of this process, and wait for it.

        It meets one that is gone then, and something is planned: the first time in a process either
        takes ten milliseconds or more, for which a load would wait.

        Raises:
            TransportError: if it cannot be made.
        """
        layout = self.peers.layout
        plan(layout, layout)
        opened = open_transport(self._make_transport, layout, self._memory)
        if opened.scratch is not None:
            opened.transport.rehearse(opened.scratch.span, layout.memory, layout.device)
        self.polled.append(self._make_agent(opened))

    def execute(self, action: events.DataAction) -> list[events.DataEvent]:
        """Do what the decode machine decided; the events that are known at once."""
        match action:
            case events.JoinPeer():
                return [self._join(action)]
            case events.DropPeer():
                return self._drop(action.peer, is_dead=action.is_dead)
            case events.StartRead() | events.ReadSlot():
                return [*self._drop_broken(), *self._start(action)]
            case events.ReadChunk():
                return [event for agent in self.polled for event in agent.on_chunk(action)]
            case events.StopRead():
                for agent in self.polled:
                    agent.stop(action)
                return self._fail_waiting(action.request, action.rank, STOPPED)
            case events.AbandonRead():
                self.abandon(action.request, action.rank)
                reason = "it could not begin in time"
                return self._fail_waiting(action.request, action.rank, reason)
        return []

    def abandon(self, request: RequestId, rank: Rank | None = None) -> None:
        """Nobody waits for these reads any longer; they will fail when they have been stopped."""
        for agent in self.polled:
            for read in agent.reads:
                if read.request == request and rank in (None, read.rank):
                    read.is_abandoned = True

    def forget_peers(self) -> None:
        """Forget all peers, and the reads that wait; where a read goes on, it ends its agent."""
        for peer in list(self.peers.descriptions):
            self._drop(peer)

    def poll(self) -> list[events.DataEvent]:
        """Look after all reads and agents; reads that ended become events."""
        ended: list[events.DataEvent] = []
        for agent in self.polled:
            for preparation in agent.ranks.collect():
                if agent is self.current:
                    ended += self._on_prepared(preparation)
            ended += [*agent.poll(), *agent.pop_breaks()]
        self._tidy(has_read=bool(ended))
        ended += self._replace_current()
        ended += self._introduce()
        self._close_drained()
        ended += self._poll_closing()
        if self.polled:
            for read in self.current.ranks.pop_startable():
                ended += self._start(read)
        for agent in self.polled:
            agent.ranks.begin_next()
        return ended

    def is_read(self, request: RequestId) -> bool:
        """Whether a read may still write into the blocks of a request."""
        agents = [*self.polled, *(closing.agent for closing in self._closing)]
        return any(read.request == request for agent in agents for read in agent.reads)

    def close(self) -> None:
        """Destroy all agents, whatever they read; those that are being made or destroyed as well.

        Raises:
            TransportError: if one is not proven to be gone yet; it may be called again.
        """
        if self._opening is not None and self._opening.cancel():
            self._opening = None
        elif self._opening is not None and self._opening.done():
            opening, self._opening = self._opening, None
            if opening.exception() is None:
                self.polled.append(self._make_agent(opening.result()))
        left = [] if self._opening is None else ["a NIXL agent is being created"]
        for agent in list(self.polled):
            try:
                agent.close()
                self.polled.remove(agent)
            except TransportError as error:  # noqa: PERF203 - each for itself
                left.append(str(error))
        self._poll_closing()
        for closing in self._closing:
            num_reads = len(closing.agent.reads)
            left.append(f"a NIXL agent is being destroyed; {num_reads} of its reads may go on")
        if left:
            raise TransportError("; ".join(left))
        self._open_on.shutdown(wait=False)
        self._close_on.shutdown(wait=False)
        for path in self.peers.paths:
            path.close()

    @property
    def current(self) -> ReadAgent:
        """The agent that all new reads use."""
        if not self.polled:
            raise LocalProtocolError("this rank has no agent to read with")
        return self.polled[0]

    def _make_agent(self, opened: Opened) -> ReadAgent:
        background = self._make_background(PREPARING_THREADS)
        return ReadAgent(opened, self.peers, background, self._counts, self._clock)

    # --- peers

    def _join(self, action: events.JoinPeer) -> events.DataEvent:
        """Check a description, and let its peer be prepared."""
        peer, description = action.peer, action.description
        try:
            self.peers.check(description)
            routes = self.peers.routes(description)
            self.current.ranks.prepare(peer, description, routes)
        except (NixlKVError, ValueError) as error:
            return events.PeerRefused(peer, str(error))
        self.peers.add(peer, description, routes)
        self._joining[peer] = self._clock()
        return events.PeerFits(peer, description, routes)

    def _on_prepared(self, ended: Ended) -> list[events.DataEvent]:
        """An engine can be read, or its reads that waited fail."""
        since = self._joining.pop(ended.peer, None)
        if ended.error is None:
            if since is None:
                return []
            self._counts["joins"] += 1
            self._counts["join_seconds"] += self._clock() - since
            return [events.PeerJoined(ended.peer)]
        failed = _failed(ended.waiting, ended.error)
        if since is not None:
            self.peers.forget(ended.peer)
            failed.insert(0, events.PeerRefused(ended.peer, ended.error))
        return failed

    def _drop(self, peer: events.PeerKey, *, is_dead: bool = False) -> list[events.DataEvent]:
        """Forget an engine; reads that waited for it fail, or begin when it is added again."""
        self.peers.forget(peer)
        self._joining.pop(peer, None)
        waiting = [r for a in self.polled for r in a.ranks.drop(peer, is_lost=is_dead)]
        return [event for read in waiting for event in self._start(read)]

    def _drop_broken(self) -> list[events.DataEvent]:
        """Let the current agent add engines again whose connection broke."""
        if self.current.ranks.is_adding:
            return []
        waiting = self.current.drop_broken()
        return [event for read in waiting for event in self._start(read)]

    # --- reads

    def _start(self, read: WaitingRead) -> list[events.DataEvent]:
        """Start a read with the current agent, which may have to add its engine first."""
        agent, description = self.current, self.peers.descriptions.get(read.peer)
        if description is not None and agent.ranks.find(read.peer, read.rank) is None:
            # Another agent has joined the engine, or its connection broke.
            agent.ranks.prepare(read.peer, description, self.peers.routes(description))
        return agent.start(read)

    def _fail_waiting(self, request: RequestId, rank: Rank, reason: str) -> list[events.DataEvent]:
        """A read that waits writes nothing."""
        waiting = [
            read
            for agent in self.polled
            for read in agent.ranks.pop_waiting(
                lambda read: (request_of(read), read.rank) == (request, rank)
            )
        ]
        return _failed(waiting, reason)

    # --- agents

    def _replace_current(self) -> list[events.DataEvent]:
        """Make another agent when a read of the current one is abandoned, or it is worn."""
        abandoned = bool(self.polled) and any(read.is_abandoned for read in self.current.reads)
        if self._opening is None:
            if abandoned and self._successor is not None:
                return self._promote(self._successor)
            if abandoned and self._clock() >= self._open_again_at:
                logger.warning("a read timed out: replacing the NIXL agent")
                self._open(is_worn=False)
        elif self._opening.done():
            opening, self._opening = self._opening, None
            try:
                agent = self._make_agent(opening.result())
            except TransportError as error:
                self._open_again_at = self._clock() + TRY_AGAIN_S
                cost = "connections" if self._is_worn and not abandoned else "blocks"
                message = "cannot create a NIXL agent: %s; %s stay held until a retry succeeds"
                logger.error(message, error, cost)  # noqa: TRY400 - it says all
                return []
            if abandoned or not self._is_worn:
                return self._promote(agent)
            self._successor, self._introduced = agent, set()
            self.polled.append(agent)
            return [events.PeersMoved(tuple(self.current.ranks.known))]
        return []

    def _open(self, *, is_worn: bool) -> None:
        self._is_worn = is_worn
        self._opening = self._open_on.submit(
            open_transport, self._make_transport, self.peers.layout, self._memory
        )

    def _promote(self, agent: ReadAgent) -> list[events.DataEvent]:
        """All new reads use this agent from now on, also those that wait; the others drain."""
        waiting = self.current.ranks.pop_waiting()
        self.current.ranks.give_up_all()
        if agent is self._successor:
            self.polled.remove(agent)
            self._successor = None
        self.polled.insert(0, agent)
        self._left_since = None
        for peer in self._joining:
            description = self.peers.descriptions[peer]
            agent.ranks.prepare(peer, description, self.peers.routes(description))
        return [event for read in waiting for event in self._start(read)]

    def _introduce(self) -> list[events.DataEvent]:
        """Let the successor meet all that the current agent reads, and then take its place."""
        if self._successor is None:
            return []
        new = [peer for peer in self.current.ranks.known if peer not in self._introduced]
        self._introduced.update(new)
        for peer in new:
            description = self.peers.descriptions.get(peer)
            if description is not None:
                routes = self.peers.routes(description)
                self._successor.ranks.prepare(peer, description, routes)
        return [] if self._successor.is_busy else self._promote(self._successor)

    def _tidy(self, *, has_read: bool) -> None:
        """Look for connections that nobody uses; only the end of their agent closes them."""
        now = self._clock()
        if self._tidy_at is None and self.polled and not self.current.ranks.is_adding:
            is_wanted = self.current.ranks.has_left
            if is_wanted or (has_read and self.current.transport.tidy()):
                self._tidy_at = now + TIDY_S
        if self._tidy_at is None or now < self._tidy_at or not self.polled:
            return
        ranks = self.current.ranks
        if ranks.is_adding or self._opening is not None or self._successor is not None:
            self._tidy_at = now + TRY_AGAIN_S
            return
        self._drop_broken()
        has_spares, num_left = self.current.transport.tidy(), ranks.num_left
        self._tidy_at = now + TIDY_S if has_spares or num_left else None
        if not num_left:
            self._left_since = None
            return
        self._left_since = now if self._left_since is None else self._left_since
        is_due = num_left >= MAX_LEFT or now >= self._left_since + LEFT_S
        if is_due and ranks.num_ready <= num_left * READ_PER_LEFT:
            logger.info(
                "replacing the NIXL agent: %d ranks left, their connections are open", num_left
            )
            self._open(is_worn=True)

    def _close_drained(self) -> None:
        """Destroy each agent on which nobody waits for anything."""
        for agent in self.polled[1:]:
            if agent is not self._successor and agent.is_drained:
                self.polled.remove(agent)
                self._close(agent)

    def _close(self, agent: ReadAgent) -> None:
        """Destroy an agent; nothing else uses it any more."""
        closed = self._close_on.submit(agent.close)
        self._closing.append(_Closing(agent, closed, self._clock()))

    def _poll_closing(self) -> list[events.DataEvent]:
        """The ends of the reads of agents that are gone. Without proof their blocks stay held."""
        failed: list[events.DataEvent] = []
        for closing in [closing for closing in self._closing if closing.closed.done()]:
            error = closing.closed.exception()
            seconds = self._clock() - closing.started_at
            if error is None:
                self._closing.remove(closing)
                if closing.stops_reads:
                    self._counts["agents_recycled"] += 1
                    logger.warning(
                        "a NIXL agent was destroyed in %.2f s; its reads have ended", seconds
                    )
                else:
                    self._counts["agents_replaced"] += 1
                    logger.info("a NIXL agent was replaced; its connections are closed")
                failed += closing.agent.fail_all()
            elif seconds >= TRY_AGAIN_S:
                self._closing.remove(closing)
                logger.error("a NIXL agent does not end: %s; its blocks stay held", error)
                self._close(closing.agent)
        return failed


def _failed(reads: Iterable[WaitingRead], reason: str) -> list[events.DataEvent]:
    return [events.ReadFailed(request_of(read), read.rank, reason) for read in reads]
