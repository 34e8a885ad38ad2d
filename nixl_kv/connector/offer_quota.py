"""How many blocks the offers that nobody has claimed may hold, and which end when it is too many.

An offer that nobody has claimed may be revoked at any time: nobody can be reading it. So a router
that loses tickets, decode engines that died, or a client that asks for prefills alone cannot fill
the cache. What is claimed is not revoked; it slows prefill down until it has been read.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

from nixl_kv.ids import Nonce, RequestId


class OfferQuota:
    """Offers by age. The scheduler does not know which are claimed: each worker decides."""

    def __init__(self, num_blocks: int, share: float) -> None:
        """Allow offers this share of a cache of `num_blocks` blocks."""
        self._allowed = int(num_blocks * share)
        self._offers: OrderedDict[RequestId, tuple[Nonce, Collection[int]]] = OrderedDict()
        self._requests: dict[Nonce, RequestId] = {}
        self._blocks: Counter[int] = Counter()  # block id to number of offers: prefixes are shared

    def __repr__(self) -> str:
        return f"<OfferQuota: {len(self._blocks)} of {self._allowed} blocks>"

    def add(self, request: RequestId, nonce: Nonce, blocks: Collection[int]) -> None:
        """A ticket went out for these blocks."""
        self._offers[request] = (nonce, blocks)
        self._requests[nonce] = request
        self._blocks.update(blocks)

    def remove(self, requests: Iterable[RequestId]) -> None:
        """These offers hold nothing any more."""
        for request in requests:
            if request not in self._offers:
                continue
            nonce, blocks = self._offers.pop(request)
            del self._requests[nonce]
            for block in blocks:
                self._blocks[block] -= 1
                if not self._blocks[block]:
                    del self._blocks[block]

    def pop_excess(self) -> list[Nonce]:
        """The oldest offers that have to be revoked, each once.

        One that is claimed stays, and is not counted any longer. The latest one is never revoked: a
        prompt may be longer than all that is allowed.
        """
        nonces: list[Nonce] = []
        while len(self._blocks) > self._allowed and len(self._offers) > 1:
            oldest = next(iter(self._offers))
            nonces.append(self._offers[oldest][0])
            self.remove([oldest])
        return nonces

    def pop_offers(self, nonces: Iterable[Nonce]) -> list[Nonce]:
        """Those of these nonces that are of offers here, each once. They are no longer counted.

        An offer that was popped before is none of them: it has been revoked, or is claimed.
        """
        known: list[Nonce] = []
        for nonce in nonces:
            request = self._requests.get(nonce)
            if request is not None:
                known.append(nonce)
                self.remove([request])
        return known
