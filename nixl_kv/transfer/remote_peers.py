"""The remote engines that this rank reads: whether they fit, which of their ranks, and how.

`RemotePeers` is what the rank knows of them, whichever agent reads. `PreparedPeers` is what one
agent needs: their metadata loaded, and the lists of rows that it reads. All of it runs on the
transfer thread.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from nixl_kv.config import AllowedHosts
from nixl_kv.errors import IncompatiblePeer, TransportError
from nixl_kv.geometry import compat, ranks
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.plan import Plan, Share, plan
from nixl_kv.geometry.ranks import Holdings, Route
from nixl_kv.ids import Rank, endpoint_host
from nixl_kv.protocol import messages
from nixl_kv.protocol.events import PeerKey
from nixl_kv.transport.base import ListHandle, PeerName, Transport
from nixl_kv.transport.slots import slot_rows

SHOWN_MISMATCHES: Final = 4


class RemotePeers:
    """The peers that fit this rank, and its own side of what they are compared with."""

    def __init__(
        self,
        layout: CacheLayout,
        rank: Rank,
        model: Mapping[str, str],
        allowed: AllowedHosts | None = None,
        *,
        extras: Mapping[str, str] | None = None,
    ) -> None:
        """Start with no peer, as the only rank of this engine that is known.

        Args:
            layout: of this rank's cache.
            rank: of this engine's ranks, which this one is.
            model: this engine's facts of its model.
            allowed: the hosts that peers may be on; None for any.
            extras: facts of what this engine has besides its model, and so needs of its peers.
        """
        self.layout = layout
        self.engine_layouts: tuple[CacheLayout, ...] = (layout,)
        self.descriptions: dict[PeerKey, messages.Description] = {}
        """Of the peers that were checked, and fit."""
        self._rank = rank
        self._model = model
        self._extras = extras or {}
        self._allowed = allowed or AllowedHosts()

    def check(self, description: messages.Description) -> None:
        """Check that this engine can read that one.

        Raises:
            IncompatiblePeer: names what differs, or the endpoint that is not allowed.
        """
        self._check_endpoints(description)
        mismatches = compat.model_mismatches(self._model, description.model)
        mismatches += compat.extra_mismatches(self._extras, description.extras)
        if not mismatches:
            remote = [rank.layout for rank in description.ranks]
            mismatches = compat.layout_mismatches(self.engine_layouts, remote)
        if mismatches:
            more = len(mismatches) - SHOWN_MISMATCHES
            raise IncompatiblePeer(
                f"engine {description.engine!r} cannot be read: "
                + "; ".join(map(str, mismatches[:SHOWN_MISMATCHES]))
                + (f"; and {more} more" if more > 0 else "")
            )

    def routes(self, description: messages.Description) -> tuple[Route, ...]:
        """Which of its ranks this rank reads, and which it only releases."""
        return ranks.routes(
            self._rank,
            [ranks.holdings(layout) for layout in self.engine_layouts],
            [ranks.holdings(rank.layout) for rank in description.ranks],
        )

    def _check_endpoints(self, description: messages.Description) -> None:
        """A description may lead to other hosts than the one that gave it."""
        if len({rank.endpoint for rank in description.ranks}) < len(description.ranks):
            raise IncompatiblePeer(
                f"engine {description.engine!r} has several ranks at one endpoint; allowed: one"
            )
        for rank in description.ranks:
            if not self._allowed.allows(endpoint_host(rank.endpoint)):
                raise IncompatiblePeer(
                    f"engine {description.engine!r} has a rank at {rank.endpoint}; "
                    f"allowed by 'peers': {self._allowed}"
                )


@dataclass(frozen=True)
class PreparedRank:
    """One rank of a peer, ready to be read."""

    name: PeerName
    share: Share
    holdings: Holdings
    plan: Plan
    local: ListHandle
    remote: ListHandle
    slots: ListHandle


class PreparedPeers:
    """The peers' ranks that one agent can read.

    A peer is prepared when it joins, and for a later agent when it is first read with that one.
    """

    def __init__(self, transport: Transport, peers: RemotePeers) -> None:
        self._transport = transport
        self._peers = peers
        self._prepared: dict[PeerKey, dict[Rank, PreparedRank]] = {}

    def __repr__(self) -> str:
        counts = (f"{len(prepared)} of {key.engine}" for key, prepared in self._prepared.items())
        return f"<PreparedPeers: {', '.join(counts) or 'none'}>"

    def prepare(self, peer: PeerKey, description: messages.Description) -> Iterator[None]:
        """Make all ranks of a peer readable that this rank reads, or none.

        Each step is one of them: 10 to 140 ms.

        Raises:
            NixlKVError: if its metadata cannot be loaded, or its layout not be planned.
            ValueError: if no rank of it has some of the heads that are needed.
        """
        prepared: dict[Rank, PreparedRank] = {}
        try:
            for route in self._peers.routes(description):
                if route.readers:
                    if prepared:
                        yield
                    remote = description.ranks[route.remote_rank]
                    prepared[route.remote_rank] = self._prepare_rank(remote, route)
        except BaseException:  # also where nobody wants the next step
            self._drop(prepared)
            raise
        self._prepared[peer] = prepared

    def drop(self, peer: PeerKey) -> None:
        """Forget a peer that nothing reads any more."""
        self._drop(self._prepared.pop(peer, {}))

    def get(self, peer: PeerKey, rank: Rank) -> PreparedRank:
        """One rank of a peer.

        Raises:
            TransportError: if the peer was dropped, or cannot be prepared for this agent.
        """
        description = self._peers.descriptions.get(peer)
        if description is None:
            raise TransportError(f"engine {peer.engine!r} is gone")
        if peer not in self._prepared:
            for _ in self.prepare(peer, description):
                pass
        return self._prepared[peer][rank]

    def _drop(self, prepared: Mapping[Rank, PreparedRank]) -> None:
        for rank in prepared.values():
            self._transport.drop_peer(rank.name)

    def _prepare_rank(self, remote: messages.RankDescription, route: Route) -> PreparedRank:
        """Load one rank's metadata, plan, and prepare the lists."""
        layout = self._peers.layout
        planned = plan(layout, remote.layout, route.share)
        local = self._transport.prepare(planned.local, layout.memory, None)
        name = self._transport.add_peer(remote.agent)
        slots = slot_rows(remote.slots.address, remote.slots.count)
        try:
            return PreparedRank(
                name,
                route.share,
                ranks.holdings(remote.layout),
                planned,
                local,
                self._transport.prepare(planned.remote, remote.layout.memory, name),
                self._transport.prepare(slots, "DRAM", name),
            )
        except TransportError:
            self._transport.drop_peer(name)
            raise
