"""What one rank does with bytes: reads, by whichever of its agents, and digests.

Runs on the transfer thread alone.
"""

from typing import TypeAlias

from nixl_kv.connector.agents import Agents
from nixl_kv.connector.digests import Digests, Ended, block_tables
from nixl_kv.connector.results import Transferred
from nixl_kv.connector.sources import Household
from nixl_kv.geometry.excerpts import excerpts
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.events import PeerKey
from nixl_kv.protocol.proofs import Digest, ReadBegun, Verify

Action: TypeAlias = (
    events.AddPeer
    | events.DropPeer
    | events.StartRead
    | events.Abandon
    | events.CheckSlot
    | Digest
    | Verify
)


class DataPlane:
    """See the module's head."""

    def __init__(
        self, agents: Agents, household: Household, digests: Digests | None = None
    ) -> None:
        """Begin with what the agents can read; by default digests are made on the host."""
        self.agents = agents
        self.digests = digests or Digests(household.layout)
        self._household = household

    def meet(self, siblings: tuple[CacheLayout, ...]) -> None:
        """Take the caches of all ranks of this engine, in rank order."""
        self._household.siblings = siblings

    def carry_out(self, action: Action, route: bytes) -> events.DataEvent | Ended | None:
        """Do what the machines decided; an event if it has ended at once.

        `route` leads to whom a digest is for; it comes back with the digest.
        """
        match action:
            case events.AddPeer():
                return self.add(action)
            case events.DropPeer():
                self.drop(action.peer)
            case events.StartRead():
                return self.start(action)
            case events.Abandon():
                self.abandon(action.request, action.source)
            case events.CheckSlot():
                return self.check(action)
            case Digest() | Verify():
                return self.digests.begin(action, route)
        return None

    def add(self, action: events.AddPeer) -> events.DataEvent:
        """See `Sources.add`."""
        return self.agents.current.sources.add(action)

    def drop(self, peer: PeerKey) -> None:
        """Forget a peer that nothing reads any more."""
        self._household.peers.pop(peer, None)
        for agent in self.agents.alive():
            agent.sources.drop(peer)

    def start(self, action: events.StartRead) -> events.DataEvent | None:
        """Post the data read of one request from one rank; an event if it has ended at once.

        Or if its bytes are to be verified: then what it reads.
        """
        event = self.agents.current.start(action)
        load = action.load
        if event is not None or not load.verify:
            return event
        share = self.agents.current.sources.get(action.peer, action.source).share
        tables = block_tables(self._household.layout, load.tables, load.begin)
        found = excerpts(self._household.layout, share, tables)
        return ReadBegun(load.request, action.source, found)

    def check(self, action: events.CheckSlot) -> events.DataEvent | None:
        """Post the read of a generation slot; an event if it has ended at once."""
        return self.agents.current.check(action)

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        recycled = self.agents.departures.take_recycled()
        counts = self.digests.take_counts()
        return counts | ({"agents_recycled": recycled} if recycled else {})

    def abandon(self, request: RequestId, source: Rank | None = None) -> None:
        """Nobody waits for these reads any longer; they will fail when they have been stopped."""
        for agent in self.agents.alive():
            for read in agent.running:
                if read.request == request and source in (None, read.source):
                    read.abandoned = True

    def finished(self, request: RequestId) -> list[Transferred]:
        """The figures of a request's reads; told once."""
        return [figures for agent in self.agents.alive() for figures in agent.finished(request)]
