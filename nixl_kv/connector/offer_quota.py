"""How many blocks offers may hold, and which of them end when it is too many.

An offer that nobody has claimed may be revoked at any time: nobody can be reading it. So a router
that loses tickets, decode engines that died, or a client that asks for prefills alone cannot fill
the cache. What is claimed is not revoked; it slows prefill down until it has been read. On an
engine that also decodes it must not fill the cache either: what the engine decodes needs blocks,
and whoever decodes what it offers may wait for it in turn.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import BlockIds
from nixl_kv.ids import Nonce, RequestId

_Indices: TypeAlias = npt.NDArray[np.intp]

NONE: Final = np.zeros(0, dtype=np.intp)


class _DistinctBlocks:
    """Blocks of the cache, each of which may belong to several offers: prefixes are shared."""

    def __init__(self, num_blocks: int) -> None:
        self._counts = np.zeros(num_blocks, dtype=np.int32)  # of offers, by block
        self._num_used = 0

    def __len__(self) -> int:
        return self._num_used

    def add(self, blocks: _Indices) -> None:
        self._num_used += int(np.count_nonzero(self._counts[blocks] == 0))
        self._counts[blocks] += 1

    def remove(self, blocks: _Indices) -> None:
        self._counts[blocks] -= 1
        self._num_used -= int(np.count_nonzero(self._counts[blocks] == 0))


class OfferQuota:
    """Offers by age. The scheduler does not know which are claimed: each worker decides."""

    def __init__(self, num_blocks: int, share: float) -> None:
        """Allow offers this share of a cache of `num_blocks` blocks."""
        self._allowed = int(num_blocks * share)
        self._offers: dict[RequestId, _Indices] = {}
        self._held = _DistinctBlocks(num_blocks)
        self._expected: dict[RequestId, int] = {}  # of prefills that will be offered
        self._num_expected = 0
        self._revocable: OrderedDict[RequestId, Nonce] = OrderedDict()
        self._requests: dict[Nonce, RequestId] = {}  # of those that are revocable
        self._unclaimed = _DistinctBlocks(num_blocks)  # as far as is known

    def __repr__(self) -> str:
        return f"<OfferQuota: {len(self._held)} of {self._allowed} blocks>"

    def __len__(self) -> int:
        """How many offers hold blocks."""
        return len(self._offers)

    def has_room(self, num_blocks: int) -> bool:
        """Whether a prefill of so many blocks may begin; one that is alone always may."""
        held = len(self._held) + self._num_expected
        return not held or held + num_blocks <= self._allowed

    def expect(self, request: RequestId, num_blocks: int) -> None:
        """A prefill begins that will be offered."""
        self._num_expected += num_blocks - self._expected.get(request, 0)
        self._expected[request] = num_blocks

    def add(self, request: RequestId, nonce: Nonce, blocks: BlockIds) -> None:
        """A ticket went out for these blocks, each of which is named once."""
        self._num_expected -= self._expected.pop(request, 0)
        held = blocks.astype(np.intp)  # numpy converts other indices each time
        self._offers[request] = held
        self._held.add(held)
        self._revocable[request] = nonce
        self._requests[nonce] = request
        self._unclaimed.add(held)

    def remove(self, requests: Iterable[RequestId]) -> None:
        """These prefills and offers hold nothing any more."""
        for request in requests:
            self._num_expected -= self._expected.pop(request, 0)
            if request in self._revocable:
                self._pop_revocable(request)
            self._held.remove(self._offers.pop(request, NONE))

    def pop_excess(self) -> list[Nonce]:
        """The oldest offers that have to be revoked, each once.

        One that is claimed stays, and does not count as unclaimed any longer. The latest one is
        never revoked: a prompt may be longer than all that is allowed.
        """
        nonces: list[Nonce] = []
        while len(self._unclaimed) > self._allowed and len(self._revocable) > 1:
            nonces.append(self._pop_revocable(next(iter(self._revocable))))
        return nonces

    def pop_offers(self, nonces: Iterable[Nonce]) -> list[Nonce]:
        """Those of these nonces that are of offers here, each once, to be revoked.

        An offer that was popped before is none of them: it has been revoked, or is claimed.
        """
        requests = [
            self._requests[nonce] for nonce in dict.fromkeys(nonces) if nonce in self._requests
        ]
        return [self._pop_revocable(request) for request in requests]

    def _pop_revocable(self, request: RequestId) -> Nonce:
        """It counts as unclaimed no longer; its blocks are held until it has ended."""
        nonce = self._revocable.pop(request)
        del self._requests[nonce]
        self._unclaimed.remove(self._offers[request])
        return nonce
