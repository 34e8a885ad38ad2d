"""Which waiting request may have blocks, and when offers have to give theirs back.

On an engine that also decodes, a prefill that will be offered waits while offers hold enough: two
engines that prefill for each other must not fill each other's cache. While one waits, those behind
it wait too. So a long prompt begins once the offers before it have ended, whatever comes meanwhile.
"""

from collections.abc import Collection

from nixl_kv.connector.block_pinning import PinnedBlocks
from nixl_kv.connector.block_shortage import BlockShortage
from nixl_kv.connector.decode import DecodeScheduler
from nixl_kv.connector.prefill import PrefillScheduler
from nixl_kv.ids import RequestId


class Admission:
    """Between the scheduler's two halves; hears what it asks and allocates, step by step."""

    def __init__(
        self,
        blocks: PinnedBlocks,
        prefill: PrefillScheduler,
        decode: DecodeScheduler,
        shortage: BlockShortage,
    ) -> None:
        """Start with nobody waiting."""
        self._blocks = blocks
        self._prefill = prefill
        self._decode = decode
        self._shortage = shortage
        self._is_full = False  # in this step, for prefills that will be offered

    def may_begin(self, request: RequestId, num_tokens: int) -> bool:
        """Whether a request of so many tokens may have blocks now, if there are enough.

        vLLM asks for its waiting requests in order, in each step.
        """
        if self._decode.is_in_use and request in self._prefill.requests:
            self._is_full = self._is_full or not self._prefill.has_room(request)
            if self._is_full:
                return False
        self._shortage.on_question(self._blocks.count(num_tokens))
        return True

    def on_begin(self, request: RequestId) -> None:
        """It has its blocks."""
        self._shortage.on_progress()
        self._prefill.on_allocation(request)

    def on_offers_ended(self, requests: Collection[RequestId]) -> None:
        """Their blocks are free."""
        self._prefill.on_end(requests)
        if requests:
            self._shortage.on_progress()

    def on_step(self) -> None:
        """Whoever has waited for long, while nothing moved, gets the blocks of offers."""
        self._is_full = False
        needed = self._shortage.pop_needed()
        if needed:
            self._prefill.reclaim(needed)
