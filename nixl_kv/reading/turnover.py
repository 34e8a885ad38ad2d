"""Replaces the agent with which a rank reads, in the background.

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

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.geometry.plan import plan
from nixl_kv.protocol import events
from nixl_kv.reading.agent import ActiveRead, Opened, ReadAgent, open_transport
from nixl_kv.reading.paths import ExtraMemory
from nixl_kv.reading.peers import RemotePeers
from nixl_kv.transport.base import Transport

logger = get_logger(__name__)

# Decode tries again to create or destroy a NIXL agent.
TRY_AGAIN_S: Final = 1.0
# Decode replaces an agent that has connections to ranks that left. It keeps those connections once
# or twice as long; over TCP each rank holds up to 40 descriptors.
TIDY_S: Final = 60.0
# How many ranks may be added again to drop one. Each costs 10 ms of a background thread.
READ_PER_LEFT: Final = 10
# Threads per agent: NIXL adds a rank on one while the other plans.
PREPARING_THREADS: Final = 2


@dataclass
class _Closing:
    """An agent that is being destroyed, which stops its reads if it has any."""

    agent: ReadAgent
    closed: Future[None]
    started_at: float


class Turnover:
    """The agents of a rank, from their creation until they are proven to be gone.

    All of it runs on the transfer thread. The arguments are those of `Agents`.
    """

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        peers: RemotePeers,
        counts: events.Counts,
        memory: tuple[ExtraMemory, ...],
        clock: Callable[[], float],
        make_background: Callable[[int], Executor],
    ) -> None:
        self.polled: list[ReadAgent] = []  # new reads use the first; the others drain
        self._peers = peers
        self._counts = counts
        self._make_transport = make_transport
        self._memory = memory
        self._clock = clock
        self._open_on = make_background(1)
        self._close_on = make_background(1)
        self._make_background = make_background
        self._closing: list[_Closing] = []
        self._opening: Future[Opened] | None = None
        self._open_again_at = 0.0
        self._successor: ReadAgent | None = None  # one of `polled`, while it connects to the peers
        # When to check for unused connections, in monotonic seconds; None for never.
        self.next_due: float | None = None

    def __repr__(self) -> str:
        return f"{len(self._closing)} closing"

    @property
    def is_changing(self) -> bool:
        return bool(self._closing or self._opening)

    @property
    def is_awaited(self) -> bool:
        """Whether reads end with an agent that is being destroyed."""
        return any(closing.agent.reads for closing in self._closing)

    @property
    def reads(self) -> Iterator[ActiveRead]:
        """All reads that have not ended, also those of agents that are being destroyed."""
        for agent in (*self.polled, *(closing.agent for closing in self._closing)):
            yield from agent.reads

    def open(self) -> None:
        """Create the first agent of this process, and wait for it.

        It plans once and rehearses a read from a temporary agent. The first time in a process each
        takes ten milliseconds or more, and a load would wait for that.

        Raises:
            TransportError: if it cannot be created.
        """
        layout = self._peers.layout
        plan(layout, layout)
        opened = open_transport(self._make_transport, layout, self._memory)
        if opened.scratch is not None:
            opened.transport.rehearse(opened.scratch.span, layout.memory, layout.device)
        self.polled.append(self._make_agent(opened))

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

    def _make_agent(self, opened: Opened) -> ReadAgent:
        background = self._make_background(PREPARING_THREADS)
        return ReadAgent(opened, self._peers, background, self._counts, self._clock)

    def poll(self, handshakes: Collection[events.PeerKey]) -> list[events.DataEvent]:
        """Open, use and close agents. Call it once there is one.

        A new current agent goes on with the `handshakes` in progress.

        | the current agent            | no other agent | one is created | a successor       |
        |------------------------------|----------------|----------------|-------------------|
        | is stuck                     | create one     | wait           | use it at once    |
        | has unused connections       | create one     | wait           | use it when it    |
        | (`tidy`)                     |                |                | knows the peers   |

        Agents besides the current one and its successor drain, and are then closed.
        """
        happened: list[events.DataEvent] = []
        is_stuck = self.polled[0].is_stuck
        if self._opening is not None:
            if self._opening.done():
                happened += self._take_over(self._opening, is_stuck=is_stuck)
        elif is_stuck and self._successor is None and self._clock() >= self._open_again_at:
            logger.warning("a read timed out: replacing the NIXL agent")
            self._open()
        if self._successor is not None and (is_stuck or not self._successor.is_busy):
            self._promote(self._successor)
            for peer in handshakes:
                self.polled[0].prepare(peer)
        for agent in self.polled[1:]:
            if agent is not self._successor and agent.is_drained:
                self.polled.remove(agent)
                self._close(agent)
        if self._closing:
            happened += self._poll_closing()
        return happened

    def _open(self) -> None:
        layout = self._peers.layout
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
        known = [] if is_stuck else self.polled[0].ranks.known
        for peer in known:
            self._successor.prepare(peer)
        return [events.PeersMoved(tuple(known))] if known else []

    def _promote(self, agent: ReadAgent) -> None:
        """Let new and waiting reads use this agent from now on; the others drain."""
        self.polled[0].ranks.give_up_all()
        self._successor = self.next_due = None
        self.polled.remove(agent)
        self.polled.insert(0, agent)

    def tidy(self) -> None:
        """Replace the agent if it has too many unused connections, which only its end closes."""
        now, current = self._clock(), self.polled[0]
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
