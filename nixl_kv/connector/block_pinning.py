"""The blocks of a prompt on prefill: its block tables, and pins on what a sliding window passes by.

vLLM frees a block once no token to come looks at it, and does so for the last time right before a
request is handed over: with p tokens computed, what lies before p - window + 1 is gone. But decode
computes the prompt's last token itself, so it looks back one token further, and its own blocks may
be larger than prefill's. So each block of the last `window` tokens is pinned by one reference more
from the step that fills it, until the offer has ended or vLLM frees the request's blocks. The range
begins at a whole edge of `WINDOW_EDGE` tokens: decode fills its blocks from their first token on,
and those may be larger.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from nixl_kv.connector.paging import NULL_BLOCK, Paging, table_of
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import RequestId


class PinnedBlocks:
    """Reads vLLM's block tables, and pins blocks. Runs on the scheduler's thread alone."""

    def __init__(self, pagings: Sequence[Paging], manager: Any = None) -> None:
        """`pagings` are the groups that are transferred; see `bind` for the manager."""
        self.manager = manager
        self._pagings = pagings
        self._pinned: dict[RequestId, dict[tuple[int, int], Any]] = {}

    def __repr__(self) -> str:
        """How many blocks are pinned for how many requests."""
        count = sum(map(len, self._pinned.values()))
        return f"<PinnedBlocks: {count} for {len(self._pinned)} requests>"

    def bind(self, manager: Any, on_free: Callable[[RequestId], None]) -> None:
        """Use vLLM's KVCacheManager, and hear when it frees the blocks of a request.

        No hook reports a preemption before the next step, and a paused engine makes no step. vLLM
        calls `pop_blocks_for_free` where a step under way may still write the blocks.
        """
        self.manager = manager
        for name in ("free", "pop_blocks_for_free"):
            setattr(manager, name, _watched(getattr(manager, name), on_free))

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

    def current(self, request: RequestId) -> list[Sequence[int]]:
        """The block tables that vLLM has of a request, for each group that is transferred."""
        tables = self.manager.get_block_ids(request)
        return [tables[paging.group] for paging in self._pagings]

    def tables(
        self, request: RequestId, num_tokens: int, current: Sequence[Sequence[int]]
    ) -> tuple[Table, ...]:
        """The tables to offer: vLLM's current ones, and of a window what is pinned."""
        return tuple(
            self._window_table(request, paging, num_tokens)
            if paging.window
            else paging.table(ids, range(num_tokens))
            for paging, ids in zip(self._pagings, current, strict=True)
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


def _watched(free: Callable[..., Any], on_free: Callable[[RequestId], None]) -> Callable[..., Any]:
    @wraps(free)
    def call(request: Any) -> Any:
        on_free(RequestId(request.request_id))
        return free(request)

    return call
