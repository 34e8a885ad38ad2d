"""The blocks of a prompt on prefill, and holds on those that a sliding window passes by.

vLLM frees a block once no token to come looks at it, and does so for the last time right before a
request is handed over: with p tokens computed, what lies before p - window + 1 is gone. But decode
computes the prompt's last token itself, so it looks back one token further, and its own blocks may
be larger than prefill's. So each block of the last `window` tokens is held by one reference more
from the step that fills it, until the offer has ended. The range begins at a whole edge of
`WINDOW_EDGE` tokens: decode fills its blocks from their first token on, and those may be larger.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nixl_kv.geometry import blocks
from nixl_kv.geometry.layout import WINDOW_EDGE
from nixl_kv.ids import RequestId

NULL_BLOCK: Final = 0
"""vLLM's placeholder in a block table, where a sliding window has passed."""


@dataclass(frozen=True)
class Paging:
    """How vLLM pages one cache group: its number, tokens per block, the window (0: all)."""

    group: int
    block_size: int
    window: int

    def wanted(self, prompt: int) -> range:
        """The entries of a block table that decode may ask for."""
        begin = max(0, prompt - self.window) // WINDOW_EDGE * WINDOW_EDGE if self.window else 0
        return blocks.entries(begin, prompt - begin, self.block_size)


class PromptBlocks:
    """Reads vLLM's block tables. Everything runs on the scheduler's thread."""

    def __init__(self, manager: Any, pagings: Sequence[Paging]) -> None:
        """`manager` is vLLM's KVCacheManager; `pagings` are the groups that are transferred."""
        self._manager = manager
        self._pagings = pagings
        self._held: dict[RequestId, dict[tuple[int, int], Any]] = {}

    def __repr__(self) -> str:
        """How many blocks are held for how many requests."""
        count = sum(map(len, self._held.values()))
        return f"<PromptBlocks: {count} held for {len(self._held)} requests>"

    def hold(self, request: RequestId, prompt: int) -> None:
        """Hold what the table has by now of the window's blocks; to be called with each step."""
        windowed = [paging for paging in self._pagings if paging.window]
        if not windowed:
            return
        held = self._held.setdefault(request, {})
        tables = self._manager.get_blocks(request).blocks
        for paging in windowed:
            table = tables[paging.group]
            for entry in paging.wanted(prompt):
                known = (paging.group, entry) in held
                if entry < len(table) and not table[entry].is_null and not known:
                    self._manager.block_pool.touch([table[entry]])
                    held[paging.group, entry] = table[entry]

    def tables(self, request: RequestId, prompt: int) -> tuple[bytes, ...]:
        """The tables to offer, in the wire's form: what is certain to stay until the offer ends."""
        found = self._manager.get_block_ids(request)
        return tuple(
            blocks.to_bytes(blocks.block_ids(self._table(request, paging, found, prompt=prompt)))
            for paging in self._pagings
        )

    def changed(self, prepared: Sequence[bytes], tables: Sequence[Sequence[int]]) -> bool:
        """Whether vLLM's tables are others by now. What is held may leave them: it stays."""
        pairs = zip(self._pagings, prepared, tables, strict=True)
        return any(
            was != blocks.to_bytes(blocks.block_ids(ids))[: len(was)]
            for paging, was, ids in pairs
            if not paging.window
        )

    def release(self, request: RequestId) -> None:
        """Let go of a request's blocks; of one that has none, do nothing."""
        held = self._held.pop(request, {})
        # The last blocks first: a prefix is of use for longer than what follows it.
        self._manager.block_pool.free_blocks(reversed(list(held.values())))

    def release_all(self, requests: Iterable[str]) -> None:
        """The same for several."""
        for request in requests:
            self.release(RequestId(request))

    def _table(
        self,
        request: RequestId,
        paging: Paging,
        tables: Sequence[Sequence[int]],
        *,
        prompt: int,
    ) -> Sequence[int]:
        wanted = paging.wanted(prompt)
        if not paging.window:
            return tables[paging.group][: wanted.stop]
        held = self._held.get(request, {})
        ids = [held.get((paging.group, entry)) for entry in wanted]
        tail = [NULL_BLOCK if block is None else int(block.block_id) for block in ids]
        return [NULL_BLOCK] * wanted.start + tail
