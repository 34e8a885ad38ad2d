"""The scheduler's side of prefill: which requests are offered, and with which ticket."""

from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from nixl_kv.connector.block_pinning import PinnedBlocks
from nixl_kv.connector.offer_quota import OfferQuota
from nixl_kv.connector.paging import NULL_BLOCK, ids_of
from nixl_kv.connector.prompt import Prompt
from nixl_kv.errors import get_logger
from nixl_kv.ids import EngineId, Incarnation, Nonce, RequestId, new_nonce
from nixl_kv.protocol import events
from nixl_kv.protocol.ticket import Ticket

logger = get_logger(__name__)

ALL: Final = 1 << 31
"""Blocks: more than any cache has."""


@dataclass(frozen=True)
class Address:
    """What every ticket says from one reset of the engine's cache to the next."""

    engine: EngineId
    incarnation: Incarnation
    host: str
    port: int
    epoch: int = 0
    weights: str = ""


@dataclass
class _Offer:
    request: RequestId
    num_tokens: int
    prompt: Callable[[], Prompt]
    prepared: events.PrepareOffer | None = None  # in the prompt's last step


class PrefillScheduler:
    """Makes offers, from the blocks of vLLM's cache manager."""

    def __init__(
        self,
        blocks: PinnedBlocks,
        quota: OfferQuota,
        seal: Callable[[Ticket], dict[str, Any]],
        *,
        writes_late: bool = False,
    ) -> None:
        """Start with nothing on offer; `address` is set before any request.

        Args:
            blocks: of the cache.
            quota: of the blocks that offers may hold.
            seal: makes the `kv_transfer_params` of a ticket, with its MAC.
            writes_late: whether a step's output may leave before all its KV is written.
        """
        self._blocks = blocks
        self._quota = quota
        self._seal = seal
        self._writes_late = writes_late
        self._offers: dict[RequestId, _Offer] = {}
        self._commands: list[events.Command] = []
        self.address: Address | None = None

    @property
    def requests(self) -> KeysView[RequestId]:
        """Those that will be offered when they have finished."""
        return self._offers.keys()

    @property
    def num_offers(self) -> int:
        """How many hold blocks."""
        return len(self._quota)

    def on_arrival(self, request: RequestId, num_tokens: int, prompt: Callable[[], Prompt]) -> None:
        """A request asks to be decoded elsewhere.

        Args:
            request: of vLLM.
            num_tokens: the prompt's first tokens, which are computed here and offered.
            prompt: makes the record of the prompt as it arrived, each time that it is computed.
        """
        self._offers[request] = _Offer(request, num_tokens, prompt)

    def has_room(self, request: RequestId) -> bool:
        """Whether a request that will be offered may begin, as far as offers may hold blocks."""
        return self._quota.has_room(self._blocks.count(self._offers[request].num_tokens))

    def on_allocation(self, request: RequestId) -> None:
        """The request begins."""
        offer = self._offers.get(request)
        if offer is not None:
            self._quota.expect(request, self._blocks.count(offer.num_tokens))

    def reclaim(self, num_blocks: int) -> None:
        """A request has waited for so many blocks: offers that nobody reads give theirs back."""
        if self.num_offers:
            logger.info("a request waits for %d blocks: offers are taken back", num_blocks)
            self._commands.append(events.ReclaimBlocks(num_blocks))

    def reset(self) -> None:
        """The cache was reset, or the weights are others: offer nothing that was computed before.

        Offers that no reader has begun to read end. A request that still has blocks is not offered:
        they may hold KV of both before and after. One that lost them is computed anew, and offered.
        """
        for request, offer in list(self._offers.items()):
            self._withdraw(offer)
            if self._blocks.has_blocks(request):
                logger.info("request %s is not offered: the cache was reset meanwhile", request)
                del self._offers[request]
                self.on_end([request])
        if self.num_offers:
            self._commands.append(events.ReclaimBlocks(ALL))

    def on_step(self, scheduled: Iterable[tuple[RequestId, range]]) -> None:
        """Tell the workers of the requests whose prompt this step completes, with their blocks.

        `scheduled` are requests, each with the positions of the tokens that the step computes.
        """
        for request, positions in scheduled:
            offer = self._offers.get(request)
            if offer is None:
                continue
            self._blocks.pin(request, offer.num_tokens)
            if offer.num_tokens - 1 in positions:
                self._prepare(offer)

    def on_finish(
        self, request: RequestId, tables: Sequence[Sequence[int]], *, reason: str
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: pin its blocks and hand out its ticket, or withdraw the offer.

        Args:
            request: of vLLM.
            tables: its block table, for each group that is transferred.
            reason: why its KV is not complete, in words; empty if it is.
        """
        offer = self._offers.pop(request, None)
        if offer is None:
            return False, None
        reason = reason or self._reason(offer, tables)
        if reason or self.address is None or offer.prepared is None:
            logger.info("request %s is not offered: %s", request, reason)
            self._withdraw(offer)
            self.on_end([request])
            return False, None
        nonce, context = offer.prepared.nonce, offer.prepared.context
        self._commands.append(events.PublishOffer(nonce, request))
        self._enforce_quota(request, nonce, tables)
        ticket = Ticket(
            engine=self.address.engine,
            host=self.address.host,
            port=self.address.port,
            incarnation=self.address.incarnation,
            nonce=nonce,
            num_tokens=offer.num_tokens,
            context=context,
            epoch=self.address.epoch,
            weights=self.address.weights,
        )
        return True, self._seal(ticket)

    def on_free(self, request: RequestId) -> None:
        """A request loses its blocks: it is over, or preempted and will get others.

        If its prompt is computed again, the offer gets a new nonce: what the workers know under the
        old one concerns other blocks.
        """
        self.on_end([request])
        if request in self._offers:
            self._withdraw(self._offers[request])

    def on_end(self, requests: Iterable[RequestId]) -> None:
        """Offers have ended, or their blocks were taken away: nothing is held for them."""
        requests = list(requests)
        self._quota.remove(requests)
        self._blocks.unpin(requests)

    def pop_commands(self) -> list[events.Command]:
        """The commands for the next step."""
        commands, self._commands = self._commands, []
        return commands

    def _prepare(self, offer: _Offer) -> None:
        """Its prompt is complete with this step."""
        nonce, request = new_nonce(), offer.request
        offer.prepared = events.PrepareOffer(
            nonce,
            request,
            offer.prompt().context(nonce),
            offer.num_tokens,
            self._blocks.tables(request, offer.num_tokens, self._blocks.current(request)),
            is_written=not self._writes_late,
        )
        self._commands.append(offer.prepared)

    def _withdraw(self, offer: _Offer) -> None:
        if offer.prepared is not None:
            self._commands.append(events.WithdrawOffer(offer.prepared.nonce))
            offer.prepared = None

    def _enforce_quota(
        self, request: RequestId, nonce: Nonce, tables: Sequence[Sequence[int]]
    ) -> None:
        """Another offer holds blocks: older ones may have to end."""
        held = np.concatenate(list(map(ids_of, tables)))
        if len(tables) > 1:  # a table names each block once
            held = np.unique(held)
        self._quota.add(request, nonce, held[held != NULL_BLOCK])
        self._commands += map(events.RevokeOffer, self._quota.pop_excess())

    def _reason(self, offer: _Offer, tables: Sequence[Sequence[int]]) -> str:
        """Why a request whose KV is complete cannot be offered; empty if it can."""
        if self.address is None:
            return "this engine is not described yet"
        if offer.prepared is None:
            return "its prompt was not computed in a step"
        if offer.prepared.tables != self._blocks.tables(offer.request, offer.num_tokens, tables):
            return "its blocks changed since its prompt was computed"
        return ""
