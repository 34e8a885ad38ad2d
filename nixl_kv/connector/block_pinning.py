"""The blocks of a prompt on prefill: its block tables, and pins on what a sliding window passes by.

vLLM frees a block once no token to come looks at it, and does so for the last time right before a
request is handed over: with p tokens computed, what lies before p - window + 1 is gone. But decode
computes the prompt's last token itself, so it looks back one token further, and its own blocks may
be larger than prefill's. So each block of the last `window` tokens is pinned by one reference more
from the step that fills it, until the offer has ended. The range begins at a whole edge of
`WINDOW_EDGE` tokens: decode fills its blocks from their first token on, and those may be larger.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from nixl_kv.connector.paging import NULL_BLOCK, Paging, table_of
from nixl_kv.geometry.blocks import Table
from nixl_kv.ids import RequestId


class PinnedBlocks:
    """Reads vLLM's block tables, and pins blocks. Runs on the scheduler's thread alone."""

    def __init__(self, pagings: Sequence[Paging], manager: Any = None) -> None:
        """`pagings` are the groups that are transferred.

        `manager` is vLLM's KVCacheManager, which may be set later, but before any request.
        """
        self.manager = manager
        self._pagings = pagings
        self._pinned: dict[RequestId, dict[tuple[int, int], Any]] = {}

    def __repr__(self) -> str:
        """How many blocks are pinned for how many requests."""
        count = sum(map(len, self._pinned.values()))
        return f"<PinnedBlocks: {count} for {len(self._pinned)} requests>"

    def count(self, num_tokens: int) -> int:
        """How many blocks so many tokens take, in all groups; a window may make do with fewer."""
        return sum(paging.count(num_tokens) for paging in self._pagings)

    def has_blocks(self, request: RequestId) -> bool:
        """Whether vLLM's tables of a request have any blocks."""
        return any(self.manager.get_block_ids(request))

    def pin(self, request: RequestId, num_tokens: int) -> None:
        """Pin what the table has by now of the windows' blocks; to be called with each step."""
        windowed = [paging for paging in self._pagings if paging.window]
        if not windowed:
            return
        pinned = self._pinned.setdefault(request, {})
        tables = self.manager.get_blocks(request).blocks
        for paging in windowed:
            table = tables[paging.group]
            for entry in paging.wanted(num_tokens):
                is_known = (paging.group, entry) in pinned
                if entry < len(table) and not table[entry].is_null and not is_known:
                    self.manager.block_pool.touch([table[entry]])
                    pinned[paging.group, entry] = table[entry]

    def tables(self, request: RequestId, num_tokens: int) -> tuple[Table, ...]:
        """The tables to offer: what is certain to stay until the offer ends."""
        tables = self.manager.get_block_ids(request)
        return tuple(
            self._window_table(request, paging, num_tokens)
            if paging.window
            else paging.table(tables[paging.group], range(num_tokens))
            for paging in self._pagings
        )

    def have_changed(
        self, prepared: Sequence[Table], tables: Sequence[Sequence[int]], num_tokens: int
    ) -> bool:
        """Whether vLLM's tables are others by now. What is pinned may leave them: it stays."""
        pairs = zip(self._pagings, prepared, tables, strict=True)
        return any(
            before != paging.table(ids, range(num_tokens))
            for paging, before, ids in pairs
            if not paging.window
        )

    def unpin(self, requests: Iterable[RequestId]) -> None:
        """Give the blocks of these requests back; of one that has none, do nothing."""
        for request in requests:
            pinned = self._pinned.pop(request, {})
            # The last blocks first: a prefix is of use for longer than what follows it.
            self.manager.block_pool.free_blocks(reversed(list(pinned.values())))

    def _window_table(self, request: RequestId, paging: Paging, num_tokens: int) -> Table:
        """Only what is pinned."""
        wanted = paging.wanted(num_tokens)
        pinned = self._pinned.get(request, {})
        entries = [pinned.get((paging.group, entry)) for entry in wanted]
        ids = [NULL_BLOCK if block is None else int(block.block_id) for block in entries]
        return table_of(ids, wanted.start)
