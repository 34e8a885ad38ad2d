"""The agents of one rank that read: one that all new reads use, and those before it, which drain.

Nothing stops a read but the end of the agent that posted it. So when a read is abandoned, a new
agent is made, which all reads use from then on, and the old one drains. As soon as nothing is left
on it but abandoned reads it is destroyed, and only then, on the proof that it is gone, these are
said to have failed: their blocks may be used again. Reads from other peers go on all the while.

Agents are made and destroyed in the background, since either may take a second. All else runs on
the transfer thread alone.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from nixl_kv.connector.departures import TRY_AGAIN_S, Departures
from nixl_kv.connector.reading import ReadAgent
from nixl_kv.connector.registering import Opened, open_transport
from nixl_kv.connector.sources import Household, Sources
from nixl_kv.errors import LocalProtocolError, TransportError
from nixl_kv.ids import RequestId
from nixl_kv.protocol import events
from nixl_kv.transport.base import Transport

logger = logging.getLogger(__name__)


class Agents:
    """See the module's head."""

    def __init__(
        self,
        make: Callable[[], Transport],
        household: Household,
        *,
        clock: Callable[[], float] = time.monotonic,
        background: Executor | None = None,
    ) -> None:
        """Begin without an agent: an engine that only prefills never needs one.

        Args:
            make: a new transport, with nothing registered.
            household: this rank's cache and its peers.
            clock: monotonic seconds.
            background: where agents are made and destroyed; by default a thread.
        """
        self._make = make
        self._household = household
        self._clock = clock
        self._background = background or ThreadPoolExecutor(1, "nixl-kv-agents")
        self._current: ReadAgent | None = None
        self._retired: list[ReadAgent] = []
        self.departures = Departures(self._background, clock)
        self._coming: Future[Opened] | None = None
        self._make_at = 0.0

    def __repr__(self) -> str:
        """The agents."""
        return f"<Agents: {self._current!r}, {self._retired}, {self.departures!r}>"

    @property
    def busy(self) -> bool:
        """Whether a read is under way, or an agent on its way in or out."""
        return bool(len(self.departures) or self._coming) or any(
            agent.running for agent in self.alive()
        )

    def open(self) -> None:
        """Make the first agent, and wait for it.

        Raises:
            TransportError: if it cannot be made.
        """
        self._current = self._agent(open_transport(self._make, self._household.layout))

    def poll(self) -> list[events.DataEvent]:
        """Look after all reads and agents; reads that ended become events."""
        ended = [event for agent in self.alive() for event in agent.poll()]
        self._replace()
        self._retire()
        return ended + self.departures.poll()

    def reading(self, request: RequestId) -> bool:
        """Whether a read may still write into the blocks of a request."""
        agents = [*self.alive(), *self.departures]
        return any(read.request == request for agent in agents for read in agent.running)

    def close(self) -> None:
        """Destroy all agents, whatever they read."""
        self._background.shutdown(wait=False)
        for agent in self.alive():
            agent.transport.close()

    def alive(self) -> Iterator[ReadAgent]:
        """All agents whose reads are looked after."""
        if self._current is not None:
            yield self._current
        yield from list(self._retired)

    @property
    def current(self) -> ReadAgent:
        """The agent that all new reads use.

        Raises:
            LocalProtocolError: if there is none: this engine only prefills.
        """
        if self._current is None:
            raise LocalProtocolError("this rank has no agent to read with")
        return self._current

    def _agent(self, opened: Opened) -> ReadAgent:
        return ReadAgent(opened, Sources(opened.transport, self._household), self._clock)

    def _replace(self) -> None:
        """Make another agent when a read of the current one is abandoned."""
        if self._coming is None:
            stuck = self._current is not None and self._current.stuck
            if stuck and self._clock() >= self._make_at:
                logger.warning("a read does not end: making another NIXL agent")
                layout = self._household.layout
                self._coming = self._background.submit(open_transport, self._make, layout)
        elif self._coming.done():
            coming, self._coming = self._coming, None
            self._switch(coming)

    def _switch(self, coming: Future[Opened]) -> None:
        try:
            agent = self._agent(coming.result())
        except TransportError as error:
            self._make_at = self._clock() + TRY_AGAIN_S
            logger.error("no other NIXL agent: %s; blocks stay held, trying again", error)  # noqa: TRY400 - it says all
            return
        self._retired.append(self.current)
        self._current = agent

    def _retire(self) -> None:
        """Destroy each agent on which nobody waits for anything."""
        for agent in [agent for agent in self._retired if agent.hopeless]:
            self._retired.remove(agent)
            self.departures.begin(agent)
