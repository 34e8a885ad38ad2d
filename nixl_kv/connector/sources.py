"""The peers of one rank: whether they fit, which of their ranks are read, and how.

Runs on the transfer thread alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from nixl_kv.config import Peers
from nixl_kv.errors import IncompatiblePeer, NixlKVError, TransportError
from nixl_kv.geometry import compat, ranks
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.plan import Plan, Share, plan
from nixl_kv.geometry.ranks import Route
from nixl_kv.ids import Rank
from nixl_kv.protocol import events
from nixl_kv.protocol.events import PeerKey
from nixl_kv.protocol.messages import Description, RankDescription
from nixl_kv.protocol.ticket import endpoint_host
from nixl_kv.transport.base import ListHandle, PeerName, Transport
from nixl_kv.transport.slots import slot_rows

SHOWN_MISMATCHES: Final = 4


@dataclass(frozen=True)
class Identity:
    """What this engine is: its model's facts, which of its ranks this one is, whom it talks to."""

    model: Mapping[str, str]
    rank: Rank
    allowed: Peers = field(default_factory=Peers)


@dataclass
class Household:
    """What all agents of one rank share: its cache, its engine, and the peers that fit."""

    layout: CacheLayout
    identity: Identity
    siblings: tuple[CacheLayout, ...]  # of all ranks of this engine, in rank order
    peers: dict[PeerKey, Description] = field(default_factory=dict)

    @classmethod
    def alone(cls, layout: CacheLayout, identity: Identity) -> "Household":
        """Of an engine that has one rank, as far as is known yet."""
        return cls(layout, identity, (layout,))


@dataclass(frozen=True)
class Source:
    """One peer rank, ready to be read."""

    peer: PeerName
    share: Share
    plan: Plan
    local: ListHandle
    remote: ListHandle
    slots: ListHandle


class Sources:
    """All peers' ranks that this rank can read, with one agent."""

    def __init__(self, transport: Transport, household: Household) -> None:
        """Begin without lists; the peers that fit are added when they are first read."""
        self._transport = transport
        self._home = household
        self._peers: dict[PeerKey, dict[Rank, Source]] = {}

    def __repr__(self) -> str:
        """How many ranks of each peer."""
        shown = ", ".join(f"{len(found)} of {key.engine}" for key, found in self._peers.items())
        return f"<Sources: {shown or 'none'}>"

    def add(self, action: events.AddPeer) -> events.DataEvent:
        """Check a description, load the peer's metadata, plan, and prepare the lists."""
        peer, description = action.peer, action.description
        try:
            self._check_fit(description)
            self._join(peer, description)
        except (NixlKVError, ValueError) as error:
            return events.PeerRefused(peer, str(error))
        self._home.peers[peer] = description
        return events.PeerJoined(peer, description, self._routes(description))

    def drop(self, peer: PeerKey) -> None:
        """Forget a peer that nothing reads any more."""
        for source in self._peers.pop(peer, {}).values():
            self._transport.drop_peer(source.peer)

    def get(self, peer: PeerKey, rank: Rank) -> Source:
        """One rank of a peer.

        Raises:
            TransportError: if the peer was dropped, or cannot be added to this agent.
        """
        if peer not in self._home.peers:
            raise TransportError(f"engine {peer.engine!r} is gone")
        if peer not in self._peers:
            self._join(peer, self._home.peers[peer])
        return self._peers[peer][rank]

    def _check_fit(self, description: Description) -> None:
        _check_endpoints(description, self._home.identity.allowed)
        found = compat.model_mismatches(self._home.identity.model, description.model)
        if not found:
            found = compat.mismatches(
                self._home.siblings, [rank.layout for rank in description.ranks]
            )
        if found:
            more = len(found) - SHOWN_MISMATCHES
            shown = "; ".join(map(str, found[:SHOWN_MISMATCHES]))
            raise IncompatiblePeer(
                f"engine {description.engine!r} cannot be read: {shown}"
                + (f"; and {more} more" if more > 0 else "")
            )

    def _routes(self, description: Description) -> tuple[Route, ...]:
        return ranks.routes(
            self._home.identity.rank,
            [ranks.holding(layout) for layout in self._home.siblings],
            [ranks.holding(rank.layout) for rank in description.ranks],
        )

    def _join(self, peer: PeerKey, description: Description) -> None:
        """Make all ranks of a peer readable that this rank reads, or none."""
        joined = self._peers.setdefault(peer, {})
        try:
            for route in self._routes(description):
                if route.readers:
                    joined[route.source] = self._source(description.ranks[route.source], route)
        except (NixlKVError, ValueError):
            self.drop(peer)
            raise

    def _source(self, there: RankDescription, route: Route) -> Source:
        """Load one rank's metadata, plan, and prepare the lists."""
        home = self._home.layout
        planned = plan(home, there.layout, route.share)
        local = self._transport.prepare(planned.local, home.memory, None)
        peer = self._transport.add_peer(there.agent)
        slots = slot_rows(there.slots.address, there.slots.count)
        try:
            return Source(
                peer,
                route.share,
                planned,
                local,
                self._transport.prepare(planned.remote, there.layout.memory, peer),
                self._transport.prepare(slots, "DRAM", peer),
            )
        except TransportError:
            self._transport.drop_peer(peer)
            raise


def _check_endpoints(description: Description, allowed: Peers) -> None:
    """A description may lead to other hosts than the one that gave it.

    Raises:
        IncompatiblePeer: names the endpoint, and what is allowed.
    """
    for rank in description.ranks:
        if rank.endpoint and not allowed.allows(endpoint_host(rank.endpoint)):
            raise IncompatiblePeer(
                f"engine {description.engine!r} has a rank at {rank.endpoint}; "
                f"allowed by 'peers': {allowed}"
            )
