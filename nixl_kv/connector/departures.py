"""Agents that are being destroyed, and the reads that end with them."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

from nixl_kv.connector.reading import ReadAgent
from nixl_kv.protocol import events

logger = logging.getLogger(__name__)

TRY_AGAIN_S: Final = 1.0


@dataclass
class _Departure:
    agent: ReadAgent
    gone: Future[None]
    begun_at: float


class Departures:
    """Destroys agents in the background; without a proof that one is gone, its blocks stay held."""

    def __init__(self, background: Executor, clock: Callable[[], float]) -> None:
        """Begin with none. `clock` is in monotonic seconds."""
        self._background = background
        self._clock = clock
        self._leaving: list[_Departure] = []
        self._recycled = 0

    def __repr__(self) -> str:
        """How many."""
        return f"<Departures: {len(self)}>"

    def __len__(self) -> int:
        """How many agents are not proven to be gone."""
        return len(self._leaving)

    def __iter__(self) -> Iterator[ReadAgent]:
        """These agents."""
        return (departure.agent for departure in self._leaving)

    def begin(self, agent: ReadAgent) -> None:
        """Destroy an agent; nothing else uses it any more."""
        gone = self._background.submit(agent.transport.close)
        self._leaving.append(_Departure(agent, gone, self._clock()))

    def poll(self) -> list[events.DataEvent]:
        """The ends of the reads of agents that are gone."""
        failed: list[events.DataEvent] = []
        for departure in [departure for departure in self._leaving if departure.gone.done()]:
            error = departure.gone.exception()
            seconds = self._clock() - departure.begun_at
            if error is None:
                self._leaving.remove(departure)
                self._recycled += 1
                logger.warning("a NIXL agent was destroyed in %.2f s; its reads stopped", seconds)
                failed += departure.agent.stopped()
            elif seconds >= TRY_AGAIN_S:
                self._leaving.remove(departure)
                logger.error("a NIXL agent is not gone: %s; blocks stay held", error)
                self.begin(departure.agent)
        return failed

    def take_recycled(self) -> int:
        """How many agents were destroyed to stop their reads, since the last call."""
        recycled, self._recycled = self._recycled, 0
        return recycled
