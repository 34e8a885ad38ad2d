"""The peers of one rank: whether they fit, which of their ranks are read, and how.

Runs on the transfer thread alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nixl_kv.errors import IncompatiblePeer, NixlKVError, TransportError
from nixl_kv.geometry import compat, ranks
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.plan import Plan, plan
from nixl_kv.geometry.ranks import Route
from nixl_kv.ids import Rank
from nixl_kv.protocol import events
from nixl_kv.protocol.events import PeerKey
from nixl_kv.protocol.messages import Description, RankDescription
from nixl_kv.transport.base import ListHandle, PeerName, Transport
from nixl_kv.transport.slots import slot_rows

SHOWN_MISMATCHES: Final = 4


@dataclass(frozen=True)
class Identity:
    """What this engine is: its model's facts, and which of its ranks this one is."""

    model: Mapping[str, str]
    rank: Rank


@dataclass(frozen=True)
class Source:
    """One peer rank, ready to be read."""

    peer: PeerName
    plan: Plan
    local: ListHandle
    remote: ListHandle
    slots: ListHandle


class Sources:
    """All peers' ranks that this rank can read."""

    def __init__(self, transport: Transport, layout: CacheLayout, identity: Identity) -> None:
        """Begin without peers, and as the only rank of this engine."""
        self._transport = transport
        self._layout = layout
        self._identity = identity
        self._siblings: tuple[CacheLayout, ...] = (layout,)
        self._peers: dict[PeerKey, dict[Rank, Source]] = {}

    def __repr__(self) -> str:
        """How many ranks of each peer."""
        shown = ", ".join(f"{len(found)} of {key.engine}" for key, found in self._peers.items())
        return f"<Sources: {shown or 'none'}>"

    def meet(self, siblings: tuple[CacheLayout, ...]) -> None:
        """Take the caches of all ranks of this engine, in rank order."""
        self._siblings = siblings

    def add(self, action: events.AddPeer) -> events.DataEvent:
        """Check a description, load the peer's metadata, plan, and prepare the lists."""
        description = action.description
        joined = self._peers.setdefault(action.peer, {})
        try:
            self._check_fit(description)
            routes = self._routes(description)
            for route in routes:
                if route.readers:
                    joined[route.source] = self._join(description.ranks[route.source], route)
        except (NixlKVError, ValueError) as error:
            self.drop(action.peer)
            return events.PeerRefused(action.peer, str(error))
        return events.PeerJoined(action.peer, description, routes)

    def drop(self, peer: PeerKey) -> None:
        """Forget a peer that nothing reads any more."""
        for source in self._peers.pop(peer, {}).values():
            self._transport.drop_peer(source.peer)

    def get(self, peer: PeerKey, rank: Rank) -> Source:
        """One rank of a peer.

        Raises:
            TransportError: if the peer was dropped.
        """
        if peer not in self._peers:
            raise TransportError(f"engine {peer.engine!r} is gone")
        return self._peers[peer][rank]

    def _check_fit(self, description: Description) -> None:
        found = compat.model_mismatches(self._identity.model, description.model)
        if not found:
            found = compat.mismatches(self._siblings, [rank.layout for rank in description.ranks])
        if found:
            more = len(found) - SHOWN_MISMATCHES
            shown = "; ".join(map(str, found[:SHOWN_MISMATCHES]))
            raise IncompatiblePeer(
                f"engine {description.engine!r} cannot be read: {shown}"
                + (f"; and {more} more" if more > 0 else "")
            )

    def _routes(self, description: Description) -> tuple[Route, ...]:
        return ranks.routes(
            self._identity.rank,
            [ranks.holding(layout) for layout in self._siblings],
            [ranks.holding(rank.layout) for rank in description.ranks],
        )

    def _join(self, there: RankDescription, route: Route) -> Source:
        """Load one rank's metadata, plan, and prepare the lists."""
        planned = plan(self._layout, there.layout, route.share)
        local = self._transport.prepare(planned.local, self._layout.memory, None)
        peer = self._transport.add_peer(there.agent)
        slots = slot_rows(there.slots.address, there.slots.count)
        try:
            return Source(
                peer,
                planned,
                local,
                self._transport.prepare(planned.remote, there.layout.memory, peer),
                self._transport.prepare(slots, "DRAM", peer),
            )
        except TransportError:
            self._transport.drop_peer(peer)
            raise
