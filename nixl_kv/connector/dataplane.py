"""Reads of one rank, by whichever of its agents. Runs on the transfer thread alone."""

from nixl_kv.connector.agents import Agents
from nixl_kv.connector.results import Transferred
from nixl_kv.connector.sources import Household
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import PeerKey


class DataPlane:
    """See the module's head."""

    def __init__(self, agents: Agents, household: Household) -> None:
        """Begin with what the agents can read."""
        self.agents = agents
        self._household = household

    def meet(self, siblings: tuple[CacheLayout, ...]) -> None:
        """Take the caches of all ranks of this engine, in rank order."""
        self._household.siblings = siblings

    def add(self, action: events.AddPeer) -> events.DataEvent:
        """See `Sources.add`."""
        return self.agents.current.sources.add(action)

    def drop(self, peer: PeerKey) -> None:
        """Forget a peer that nothing reads any more."""
        self._household.peers.pop(peer, None)
        for agent in self.agents.alive():
            agent.sources.drop(peer)

    def start(self, action: events.StartRead) -> events.DataEvent | None:
        """Post the data read of one request from one rank; an event if it has ended at once."""
        return self.agents.current.start(action)

    def check(self, action: events.CheckSlot) -> events.DataEvent | None:
        """Post the read of a generation slot; an event if it has ended at once."""
        return self.agents.current.check(action)

    def abandon(self, request: RequestId, source: Rank | None = None) -> None:
        """Nobody waits for these reads any longer; they will fail when they have been stopped."""
        for agent in self.agents.alive():
            for read in agent.running:
                if read.request == request and source in (None, read.source):
                    read.abandoned = True

    def finished(self, request: RequestId) -> list[Transferred]:
        """The figures of a request's reads; told once."""
        return [figures for agent in self.agents.alive() for figures in agent.finished(request)]
