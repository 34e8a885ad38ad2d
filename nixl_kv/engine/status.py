"""What a rank is doing, for `nixl-kv status`: put together on the transfer thread, when asked."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TypeVar

from nixl_kv.engine.loop import Parts
from nixl_kv.ids import Rank, short
from nixl_kv.protocol import messages

_Item = TypeVar("_Item")


class StatusReporter:
    """Answers a tool from what the machines hold. Nothing of it changes them."""

    def __init__(self, parts: Parts, rank: Rank, roles: str, clock: Callable[[], float]) -> None:
        """`roles` is for people; `clock` is in monotonic seconds."""
        self._parts = parts
        self._rank = rank
        self._roles = roles
        self._clock = clock
        self._started_at = clock()

    def report(self, request: messages.StatusRequest) -> messages.Status:
        """The answer."""
        now, parts = self._clock(), self._parts
        peers, links = parts.decode.peers.all(), parts.control.links()
        offers, loads = parts.prefill.offers.all(), parts.decode.loads.all()
        return messages.Status(
            incarnation=parts.description.incarnation,
            engine=parts.decode.loads.reader.engine,
            rank=self._rank,
            roles=self._roles,
            uptime_s=now - self._started_at,
            totals={
                "peers": len(peers),
                "links": len(links),
                "offers": len(offers),
                "loads": len(loads),
                "reads": sum(len(agent.reads) for agent in parts.agents.polled),
                "digests": len(parts.digests),
                "packs": len(parts.packs or ()),
                "events": len(parts.event_log),
            },
            peers=tuple(
                messages.PeerStatus(
                    engine=peer.key.engine,
                    incarnation=short(peer.key.incarnation),
                    endpoint=peer.key.endpoint,
                    state=peer.state.name,
                    detail="" if peer.failure is None else peer.failure.detail,
                )
                for peer in _first(peers)
            ),
            links=tuple(messages.LinkStatus(**asdict(link)) for link in _first(links)),
            offers=tuple(
                messages.OfferStatus(
                    request=offer.request,
                    nonce=short(offer.nonce),
                    state=offer.state.name,
                    num_tokens=offer.prepared.num_tokens,
                    waits_for=offer.waits_for,
                    ends_in_s=None if offer.expires_at is None else offer.expires_at - now,
                )
                for offer in _first(offers)
            ),
            loads=tuple(
                messages.LoadStatus(
                    request=load.request,
                    nonce=short(load.ticket.nonce),
                    peer=str(load.peer),
                    reads=tuple((read.rank, read.state.name) for read in load.rank_reads),
                    waits_for=load.waits_for,
                    late_in_s=None if load.lacks_only_blocks else load.deadline - now,
                )
                for load in _first(loads)
            ),
            events_since=parts.event_log.since,
            story=tuple(parts.event_log.story(request.request)),
        )


def _first(items: Iterable[_Item]) -> Iterable[_Item]:
    return itertools.islice(items, messages.MAX_LISTED)
