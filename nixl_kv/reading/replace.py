"""The agents with which one rank reads: the current one, and earlier ones, which drain.

Only the end of its NIXL agent stops a read. So when decode abandons a read, another agent serves
all new reads, and the old one drains. When only abandoned reads are left on the old agent, this
rank destroys it. These reads fail once the agent is proven to be gone, and only then vLLM may use
their blocks again.

Creating or destroying an agent can take a second, so both run in the background, except for the
first agent. Each has a thread of its own, so an agent that cannot be destroyed does not keep
another one from being created.

NIXL closes no connection, on either side, before the agent ends. So this rank also replaces an
agent that has collected many connections to ranks that died or were forgotten. The new agent first
connects to all engines that the old one reads, in the background, so no read waits for it.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Final

from nixl_kv.errors import LocalProtocolError, NixlKVError, TransportError, get_logger
from nixl_kv.geometry.plan import plan
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.reading.agent import (
    READING_PAUSE_S,
    Opened,
    ReadAgent,
    open_transport,
)
from nixl_kv.reading.paths import STOPPED, ExtraMemory
from nixl_kv.reading.peers import Ended, Ranks, RemotePeers
from nixl_kv.transport.base import Transport

logger = get_logger(__name__)

# Decode tries again to create or destroy a NIXL agent.
TRY_AGAIN_S: Final = 1.0
# Decode replaces an agent that has connections to ranks that left. It keeps those connections once
# or twice as long; over TCP each rank holds up to 40 descriptors.
TIDY_S: Final = 60.0
# How many ranks may be added again to drop one. Each costs 10 ms of a background thread.
READ_PER_LEFT: Final = 10
# Between two polls while an agent is created or destroyed and nothing waits for it.
CHANGING_PAUSE_S: Final = 0.002
# Threads per agent: NIXL adds a rank on one while the other plans.
PREPARING_THREADS: Final = 2


@dataclass
class _Closing:
    """An agent that is being destroyed, which stops its reads if it has any."""

    agent: ReadAgent
    closed: Future[None]
    started_at: float


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
        self.polled: list[ReadAgent] = []  # new reads use the first; the others drain
        self._counts = counts
        self._make_transport = make_transport
        self._memory = memory
        self._clock = clock
        self._open_on = make_background(1)
        self._close_on = make_background(1)
        self._make_background = make_background
        self._waiting: list[events.StartRead] = []  # for their ranks, or for an idle transport
        self._handshakes: dict[events.PeerKey, float] = {}  # since when, monotonic seconds
        self._introduce = introduce
        self._unadmitted: set[events.PeerKey] = set()  # whose ranks do not let this one connect yet
        self._closing: list[_Closing] = []
        self._opening: Future[Opened] | None = None
        self._open_again_at = 0.0
        self._successor: ReadAgent | None = None  # one of `polled`, while it connects to the peers
        # When to check for unused connections, in monotonic seconds; None for never.
        self.next_due: float | None = None

    def __repr__(self) -> str:
        return f"<Agents: {self.polled}, {len(self._closing)} closing>"

    @property
    def is_busy(self) -> bool:
        is_changing = self._handshakes or self._waiting or self._closing or self._opening
        return bool(is_changing) or any(agent.is_busy for agent in self.polled)

    @property
    def pause_s(self) -> float:
        """Seconds until the next poll, while this is busy."""
        if self._handshakes or any(closing.agent.reads for closing in self._closing):
            return READING_PAUSE_S
        pauses = (agent.pause_s for agent in self.polled if agent.is_busy)
        return min(pauses, default=CHANGING_PAUSE_S)

    def open(self) -> None:
        """Create the first agent of this process, and wait for it.

        It plans once and rehearses a read from a temporary agent. The first time in a process each
        takes ten milliseconds or more, and a load would wait for that.

        Raises:
            TransportError: if it cannot be created.
        """
        layout = self.peers.layout
        plan(layout, layout)
        opened = open_transport(self._make_transport, layout, self._memory)
        if opened.scratch is not None:
            opened.transport.rehearse(opened.scratch.span, layout.memory, layout.device)
        self.polled.append(self._make_agent(opened))

    def execute(self, action: events.DataAction) -> list[events.DataEvent]:
        match action:
            case events.StartHandshake():
                return [self._start_handshake(action)]
            case events.Connect():
                self._connect(action.peer)
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
        happened += self._replace_current()
        if self._waiting and not self.polled[0].ranks.is_adding:
            waiting, self._waiting = self._waiting, []
            for read in waiting:
                happened += self._start(read)
        for agent in self.polled:
            if not _is_settled(agent.ranks):
                agent.ranks.begin_next()
        if happened or self.next_due is not None or self.polled[0].ranks.has_left:
            self._tidy()
        return happened

    def is_read(self, request: RequestId) -> bool:
        agents = [*self.polled, *(closing.agent for closing in self._closing)]
        return any(read.request == request for agent in agents for read in agent.reads)

    def close(self) -> None:
        """Destroy all agents, even with reads in progress.

        Raises:
            TransportError: if one is not proven to be gone yet; call it again.
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
            except TransportError as error:  # noqa: PERF203 - one that fails keeps no other
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
        if not self.polled:
            raise LocalProtocolError("this rank has no agent that reads: it only prefills")
        return self.polled[0]

    def _make_agent(self, opened: Opened) -> ReadAgent:
        background = self._make_background(PREPARING_THREADS)
        return ReadAgent(opened, self.peers, background, self._counts, self._clock)

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
            self._handshakes[peer] = self._clock()
        return events.PeerFits(peer, description, routes, introductions)

    def _connect(self, peer: events.PeerKey) -> None:
        self._unadmitted.discard(peer)
        if peer in self.peers.descriptions:
            self._handshakes[peer] = self._clock()
            self._prepare(self.current, peer)

    def _on_prepared(self, ended: Ended) -> list[events.DataEvent]:
        since = self._handshakes.pop(ended.peer, None)
        if ended.error is None:
            if since is None:
                return []
            self._counts.observe("first_contact_seconds", self._clock() - since, "handshake")
            return [events.HandshakeDone(ended.peer)]
        failed = self._fail_waiting(ended.error, lambda read: read.peer == ended.peer)
        if since is not None:
            self.peers.descriptions.pop(ended.peer, None)
            failed.insert(0, events.PeerRefused(ended.peer, ended.error))
        return failed

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
        if rank is None:
            # Another agent made the handshake, or the connection broke.
            self._prepare(agent, read.peer)
            rank = agent.ranks.find(read.peer, read.rank)
        started = agent.start(read, rank)
        if started is None:
            self._waiting.append(read)
        return started or []

    def _prepare(self, agent: ReadAgent, peer: events.PeerKey) -> None:
        description = self.peers.descriptions.get(peer)
        if description is not None:
            agent.ranks.prepare(peer, description, self.peers.routes(description))

    def _fail_waiting(
        self, reason: str, is_meant: Callable[[events.StartRead], bool]
    ) -> list[events.DataEvent]:
        failed = [read for read in self._waiting if is_meant(read)]
        self._waiting = [read for read in self._waiting if not is_meant(read)]
        return [events.ReadFailed(read.load.request, read.rank, reason) for read in failed]

    # --- agents

    def _replace_current(self) -> list[events.DataEvent]:
        """Open, use and close agents.

        | the current agent            | no other agent | one is created | a successor       |
        |------------------------------|----------------|----------------|-------------------|
        | is stuck                     | create one     | wait           | use it at once    |
        | has unused connections       | create one     | wait           | use it when it    |
        | (`_tidy`)                    |                |                | knows the peers   |

        Agents besides the current one and its successor drain, and are then closed.
        """
        happened: list[events.DataEvent] = []
        is_stuck = self.current.is_stuck
        if self._opening is not None:
            if self._opening.done():
                happened += self._take_over(self._opening, is_stuck=is_stuck)
        elif is_stuck and self._successor is None and self._clock() >= self._open_again_at:
            logger.warning("a read timed out: replacing the NIXL agent")
            self._open()
        if self._successor is not None and (is_stuck or not self._successor.is_busy):
            self._promote(self._successor)
        for agent in self.polled[1:]:
            if agent is not self._successor and agent.is_drained:
                self.polled.remove(agent)
                self._close(agent)
        if self._closing:
            happened += self._poll_closing()
        return happened

    def _open(self) -> None:
        layout = self.peers.layout
        self._opening = self._open_on.submit(
            open_transport, self._make_transport, layout, self._memory
        )

    def _take_over(self, opening: Future[Opened], *, is_stuck: bool) -> list[events.DataEvent]:
        """Make the successor, and let it connect to the peers unless reads wait for it."""
        self._opening = None
        try:
            self._successor = self._make_agent(opening.result())
        except TransportError as error:
            self._open_again_at = self._clock() + TRY_AGAIN_S
            cost = "blocks" if is_stuck else "connections"
            message = "cannot create a NIXL agent: %s; %s stay held until a retry succeeds"
            logger.error(message, error, cost)  # noqa: TRY400 - the message says it all
            return []
        self.polled.append(self._successor)
        known = [] if is_stuck else self.current.ranks.known
        for peer in known:
            self._prepare(self._successor, peer)
        return [events.PeersMoved(tuple(known))] if known else []

    def _promote(self, agent: ReadAgent) -> None:
        """Let new and waiting reads use this agent from now on; the others drain."""
        self.current.ranks.give_up_all()
        self._successor = self.next_due = None
        self.polled.remove(agent)
        self.polled.insert(0, agent)
        for peer in self._handshakes:
            self._prepare(agent, peer)

    def _tidy(self) -> None:
        """Replace the agent if it has too many unused connections, which only its end closes."""
        now, current = self._clock(), self.current
        if current.ranks.is_adding or self._opening or self._successor:
            return
        if self.next_due is None:
            if current.ranks.has_left:
                self.next_due = now + TIDY_S
            return
        if now < self.next_due:
            return
        num_left = current.ranks.num_left
        self.next_due = now + TIDY_S if num_left else None
        if num_left and current.ranks.num_ready <= num_left * READ_PER_LEFT:
            logger.info(
                "replacing the NIXL agent: it has open connections to %d ranks that left", num_left
            )
            self._open()

    def _close(self, agent: ReadAgent) -> None:
        closed = self._close_on.submit(agent.close)
        self._closing.append(_Closing(agent, closed, self._clock()))

    def _poll_closing(self) -> list[events.DataEvent]:
        """Fail the reads of destroyed agents. Without proof of the end, their blocks stay held."""
        failed: list[events.DataEvent] = []
        for closing in [closing for closing in self._closing if closing.closed.done()]:
            error = closing.closed.exception()
            seconds = self._clock() - closing.started_at
            if error is None:
                self._closing.remove(closing)
                if closing.agent.reads:
                    self._counts.count("replaced_agents", label="stuck_read")
                    logger.warning(
                        "destroyed a NIXL agent in %.2f s; its reads have ended", seconds
                    )
                else:
                    self._counts.count("replaced_agents", label="departed_peers")
                    logger.info("replaced a NIXL agent; its connections are closed")
                failed += closing.agent.fail_all()
            elif seconds >= TRY_AGAIN_S:
                self._closing.remove(closing)
                logger.error(
                    "cannot destroy a NIXL agent: %s; its blocks stay held until a retry succeeds",
                    error,
                )
                self._close(closing.agent)
        return failed


def _is_of(action: events.StopRead | events.AbandonRead, read: events.StartRead) -> bool:
    return (read.load.request, read.rank) == (action.request, action.rank)


def _is_settled(ranks: Ranks) -> bool:
    """Whether `collect` and `begin_next` would do nothing: each turn asks."""
    return not (ranks.busy or ranks.ended or ranks.adding)
