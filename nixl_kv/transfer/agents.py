"""The agents of one rank that read: one that all new reads use, and those before it, which drain.

Nothing stops a read but the end of the agent that posted it. So when a read is abandoned, a new
agent is made, which all reads use from then on, and the old one drains. As soon as nothing is left
on it but abandoned reads it is destroyed, and only on the proof that it is gone these are said to
have failed: their blocks may be used again. Reads from other peers go on all the while.

All agents but the first are made, and all are destroyed, in the background, since either may take
a second; each on a thread of its own, so that one that cannot be destroyed keeps none from being
made. All else runs on the transfer thread alone.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import LocalProtocolError, NixlKVError, TransportError
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.transfer.read_agent import ReadAgent, open_transport
from nixl_kv.transfer.remote_peers import RemotePeers
from nixl_kv.transport.base import Transport
from nixl_kv.transport.slots import SlotPage

logger = logging.getLogger(__name__)

TRY_AGAIN_S: Final = 1.0


@dataclass
class _Closing:
    """An agent that is being destroyed."""

    agent: ReadAgent
    closed: Future[None]
    started_at: float


@dataclass
class _Join:
    """A peer that is being joined, step by step; the last one tells what came of it."""

    peer: events.PeerKey
    steps: Generator[None, None, events.DataEvent]


class Agents:
    """See the module's head."""

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        peers: RemotePeers,
        counts: defaultdict[str, float],
        *,
        clock: Callable[[], float],
        opening: Executor,
        closing: Executor,
    ) -> None:
        """Start without an agent: an engine that only prefills never needs one.

        Args:
            make_transport: makes one with nothing registered.
            peers: that this rank may read, and its own cache.
            counts: agents that were destroyed to stop a read are added to them.
            clock: monotonic seconds.
            opening: where agents are made.
            closing: where they are destroyed.
        """
        self.peers = peers
        self.polled: list[ReadAgent] = []
        """The agents whose reads are polled: all new reads use the first, the others drain."""
        self._counts = counts
        self._make_transport = make_transport
        self._clock = clock
        self._open_on = opening
        self._close_on = closing
        self._joins: deque[_Join] = deque()
        self._closing: list[_Closing] = []
        self._opening: Future[tuple[Transport, SlotPage]] | None = None
        self._open_again_at = 0.0

    def __repr__(self) -> str:
        return f"<Agents: {self.polled}, {len(self._closing)} closing>"

    @property
    def is_busy(self) -> bool:
        """Whether a read is under way, or an agent is being made or destroyed."""
        return bool(self._closing or self._opening) or any(a.reads for a in self.polled)

    @property
    def is_joining(self) -> bool:
        """Whether a peer is to be joined: each turn does one step of that."""
        return bool(self._joins)

    def open(self) -> None:
        """Make the first agent, and wait for it.

        Raises:
            TransportError: if it cannot be made.
        """
        opened = open_transport(self._make_transport, self.peers.layout)
        self.polled.append(ReadAgent(*opened, self.peers, self._clock))

    def execute(self, action: events.DataAction) -> list[events.DataEvent]:
        """Do what the decode machine decided; the events that are known at once."""
        match action:
            case events.JoinPeer():
                self._joins.append(_Join(action.peer, self._join(action)))
            case events.DropPeer():
                self._drop(action.peer)
            case events.StartRead():
                return self.current.start_read(action)
            case events.ReadSlot():
                return self.current.read_slot(action)
            case events.AbandonRead():
                self.abandon(action.request, action.rank)
        return []

    def abandon(self, request: RequestId, rank: Rank | None = None) -> None:
        """Nobody waits for these reads any longer; they will fail when they have been stopped."""
        for agent in self.polled:
            for read in agent.reads:
                if read.request == request and rank in (None, read.rank):
                    read.is_abandoned = True

    def forget_peers(self) -> None:
        """Forget all peers, but where a read goes on."""
        for peer in [*self.peers.descriptions, *(join.peer for join in self._joins)]:
            self._drop(peer)

    def poll(self) -> list[events.DataEvent]:
        """Look after all reads and agents; reads that ended become events."""
        ended = [event for agent in self.polled for event in agent.poll()]
        self._replace_current()
        self._close_drained()
        return ended + self._poll_closing() + self._step_join()

    def is_read(self, request: RequestId) -> bool:
        """Whether a read may still write into the blocks of a request."""
        agents = [*self.polled, *(closing.agent for closing in self._closing)]
        return any(read.request == request for agent in agents for read in agent.reads)

    def close(self) -> None:
        """Destroy all agents, whatever they read."""
        self._open_on.shutdown(wait=False)
        self._close_on.shutdown(wait=False)
        while self.polled:
            self.polled[-1].transport.close()
            self.polled.pop()

    @property
    def current(self) -> ReadAgent:
        """The agent that all new reads use."""
        if not self.polled:
            raise LocalProtocolError("this rank has no agent to read with")
        return self.polled[0]

    def _step_join(self) -> list[events.DataEvent]:
        """One rank of one peer: between two of them renewals go out, and all else goes on."""
        if not self._joins:
            return []
        try:
            next(self._joins[0].steps)
        except StopIteration as end:
            self._joins.popleft()
            event: events.DataEvent = end.value
            return [event]
        return []

    def _join(self, action: events.JoinPeer) -> Generator[None, None, events.DataEvent]:
        """Check a description, load the peer's metadata, plan, and prepare the lists."""
        peer, description = action.peer, action.description
        try:
            self.peers.check(description)
            yield from self.current.peers.prepare(peer, description)
            routes = self.peers.routes(description)
        except (NixlKVError, ValueError) as error:
            return events.PeerRefused(peer, str(error))
        self.peers.descriptions[peer] = description
        return events.PeerJoined(peer, description, routes)

    def _drop(self, peer: events.PeerKey) -> None:
        """Forget a peer, but where a read that a restart has orphaned goes on: its agent ends."""
        for join in [join for join in self._joins if join.peer == peer]:
            self._joins.remove(join)
            join.steps.close()
        self.peers.descriptions.pop(peer, None)
        for agent in self.polled:
            if not agent.is_reading(peer):
                agent.peers.drop(peer)

    def _replace_current(self) -> None:
        """Make another agent when a read of the current one is abandoned."""
        if self._opening is None:
            abandoned = self.polled and any(read.is_abandoned for read in self.current.reads)
            if abandoned and self._clock() >= self._open_again_at:
                logger.warning("a read does not end: making another NIXL agent")
                self._opening = self._open_on.submit(
                    open_transport, self._make_transport, self.peers.layout
                )
        elif self._opening.done():
            opening, self._opening = self._opening, None
            try:
                agent = ReadAgent(*opening.result(), self.peers, self._clock)
            except TransportError as error:
                self._open_again_at = self._clock() + TRY_AGAIN_S
                logger.error("no other NIXL agent: %s; blocks stay held, trying again", error)  # noqa: TRY400 - it says all
                return
            self.polled.insert(0, agent)

    def _close_drained(self) -> None:
        """Destroy each agent on which nobody waits for anything."""
        for agent in self.polled[1:]:
            if all(read.is_abandoned for read in agent.reads):
                self.polled.remove(agent)
                self._close(agent)

    def _close(self, agent: ReadAgent) -> None:
        """Destroy an agent; nothing else uses it any more."""
        closed = self._close_on.submit(agent.transport.close)
        self._closing.append(_Closing(agent, closed, self._clock()))

    def _poll_closing(self) -> list[events.DataEvent]:
        """The ends of the reads of agents that are gone. Without proof their blocks stay held."""
        failed: list[events.DataEvent] = []
        for closing in [closing for closing in self._closing if closing.closed.done()]:
            error = closing.closed.exception()
            seconds = self._clock() - closing.started_at
            if error is None:
                self._closing.remove(closing)
                self._counts["agents_recycled"] += 1
                logger.warning("a NIXL agent was destroyed in %.2f s; its reads stopped", seconds)
                failed += closing.agent.fail_all()
            elif seconds >= TRY_AGAIN_S:
                self._closing.remove(closing)
                logger.error("a NIXL agent is not gone: %s; blocks stay held", error)
                self._close(closing.agent)
        return failed
