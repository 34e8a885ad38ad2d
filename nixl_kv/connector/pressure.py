"""How many blocks the offers that nobody has claimed may hold, and which go when it is too many.

An offer that nobody has claimed may be taken back at any time: nobody can be reading it. So a
router that loses tickets, decode engines that died, or a client that asks for prefills alone cannot
fill the cache. What is claimed is not taken back; it slows prefill down until it has been read.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

from nixl_kv.ids import Nonce, RequestId


class Pressure:
    """Offers by age. The scheduler does not know which are claimed: each worker decides."""

    def __init__(self, num_blocks: int, share: float) -> None:
        """Allow offers this share of a cache of `num_blocks` blocks."""
        self._allowed = int(num_blocks * share)
        self._offers: OrderedDict[RequestId, tuple[Nonce, Collection[int]]] = OrderedDict()
        self._held: Counter[int] = Counter()  # block id to number of offers: prefixes are shared

    def __repr__(self) -> str:
        """How full it is."""
        return f"<Pressure: {len(self._held)} of {self._allowed} blocks>"

    def offer(self, request: RequestId, nonce: Nonce, blocks: Collection[int]) -> None:
        """A ticket went out for these blocks."""
        self._offers[request] = (nonce, blocks)
        self._held.update(blocks)

    def ended(self, requests: Iterable[str]) -> None:
        """These offers hold nothing any more."""
        for request in requests:
            self._forget(RequestId(request))

    def revocable(self) -> list[Nonce]:
        """The oldest offers that have to go, each told once.

        One that is claimed stays, and is not counted any longer. The latest is never told: a prompt
        may be longer than all that is allowed.
        """
        nonces: list[Nonce] = []
        while len(self._held) > self._allowed and len(self._offers) > 1:
            oldest = next(iter(self._offers))
            nonces.append(self._offers[oldest][0])
            self._forget(oldest)
        return nonces

    def _forget(self, request: RequestId) -> None:
        _, blocks = self._offers.pop(request, (None, ()))
        for block in blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
