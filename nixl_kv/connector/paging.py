"""vLLM's block tables of a request, and the part of them that a transfer names.

On prefill this also pins blocks of sliding windows. vLLM frees a block once no later token attends
to it. Decode computes the prompt's last token itself, so it attends to one token more, and its
blocks may be larger. So the connector holds a reference to each block of the last `window` tokens,
until the offer ends or vLLM frees the request.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import numpy as np

from nixl_kv.geometry.layout import ABSENT, MAX_COUNT, WINDOW_EDGE, BlockIds, Table, entries
from nixl_kv.ids import RequestId

# vLLM's placeholder in a block table, where a sliding window has moved on.
NULL_BLOCK: Final = 0

# vLLM's blocks that a request has pinned, by cache group and entry of the block table.
Pins: TypeAlias = dict[tuple[int, int], Any]


@dataclass(frozen=True)
class Paging:
    """How vLLM pages a cache group that keeps something for each token."""

    group: int
    block_size: int  # in tokens
    window: int  # in tokens; 0 for full attention

    # Decode fills its blocks, which may be larger, from their first token on.
    edge: ClassVar = WINDOW_EDGE

    def wanted(self, num_tokens: int) -> range:
        """The block table entries that decode may read, of a prompt of `num_tokens`."""
        start = num_tokens - self.window if self.window else 0
        begin = max(0, start) // self.edge * self.edge
        return entries(begin, num_tokens - begin, self.block_size)

    def count(self, num_tokens: int) -> int:
        """An upper bound of the blocks that `num_tokens` take; a window may take fewer."""
        return -(-num_tokens // self.block_size)

    def table(self, ids: Sequence[int], tokens: range) -> Table:
        """Cut the entries for `tokens` out of vLLM's whole block table."""
        span = entries(tokens.start, len(tokens), self.block_size)
        return table_of(ids[span.start : span.stop], span.start)


@dataclass(frozen=True)
class WholePaging(Paging):
    """How vLLM pages a cache group of whole blocks (`Group.whole`), which are as large on decode.

    A window's blocks may have as few as 4 tokens, and each takes a block of the pool that all
    groups share. So no block before the window is pinned.
    """

    most: int = MAX_COUNT  # blocks that a request has at a time, at the most
    edge = 1

    def count(self, num_tokens: int) -> int:
        return min(super().count(num_tokens), self.most)


@dataclass(frozen=True)
class StatePaging(Paging):
    """How vLLM pages a cache group that keeps one recurrent state for all tokens so far.

    The entry of token t - 1 holds the state after t tokens. The other entries are empty, or hold
    older states, which decode cannot use. In the `CacheLayout` a block of such a group is one
    token, and so is its window.
    """

    window: int = 0  # pin nothing: vLLM keeps the last state until it frees the request's blocks

    def wanted(self, num_tokens: int) -> range:
        last = (num_tokens - 1) // self.block_size
        return range(last, last + 1)

    def count(self, num_tokens: int) -> int:
        return min(num_tokens, 1)

    def table(self, ids: Sequence[int], tokens: range) -> Table:
        # Without the state the table is empty, so no reader accepts it.
        states = [ids[entry] for entry in self.wanted(tokens.stop) if entry < len(ids)]
        return table_of([state for state in states if state], tokens.stop - 1)


class CacheManager(Protocol):
    """The part of vLLM's KVCacheManager that `RequestBlocks` uses."""

    block_pool: Any

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...
    def get_blocks(self, request_id: str) -> Any: ...
    def free(self, request: Any) -> None: ...
    def pop_blocks_for_free(self, request: Any) -> Any: ...


class RequestBlocks:
    """The blocks that vLLM's cache manager holds for requests. Scheduler thread only."""

    def __init__(self, pagings: Sequence[Paging], num_blocks: int, manager: Any = None) -> None:
        self.num_blocks = num_blocks
        self.manager = manager
        self._pagings = pagings

    def bind(self, manager: CacheManager, on_free: Callable[[RequestId], None]) -> None:
        """Use vLLM's KVCacheManager, and report when it frees a request's blocks."""
        self.manager = manager
        # No hook reports a preemption before the next step, and a paused engine makes no step. So
        # this wraps the manager's two methods that free. vLLM calls the second while a step in
        # progress may still write the blocks.
        for name in ("free", "pop_blocks_for_free"):
            setattr(manager, name, _reporting(getattr(manager, name), on_free))

    @property
    def are_kept(self) -> bool:
        """Whether a request's blocks stay its own until it ends: full attention alone."""
        return all(type(paging) is Paging and not paging.window for paging in self._pagings)

    def count(self, num_tokens: int) -> int:
        return sum(paging.count(num_tokens) for paging in self._pagings)

    def has_blocks(self, request: RequestId) -> bool:
        return any(self.manager.get_block_ids(request))

    def current(self, request: RequestId) -> list[Sequence[int]]:
        tables = self.manager.get_block_ids(request)
        return [tables[paging.group] for paging in self._pagings]

    def filled(self, num_tokens: int, current: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The blocks of the first `num_tokens` tokens, if `are_kept`."""
        pairs = zip(self._pagings, current, strict=True)
        return [ids[: paging.count(num_tokens)] for paging, ids in pairs]

    def has_still(self, request: RequestId, filled: Sequence[Sequence[int]]) -> bool:
        """Whether the request's table begins with these blocks."""
        tables = self.manager.get_block_ids(request)
        return bool(tables) and all(
            tables[paging.group][: len(ids)] == ids
            for paging, ids in zip(self._pagings, filled, strict=True)
        )

    def tables(
        self, num_tokens: int, current: Sequence[Sequence[int]], pins: Pins
    ) -> tuple[Table, ...]:
        """The block tables to offer: `current`, but for a sliding window the pinned blocks."""
        tables = []
        for paging, ids in zip(self._pagings, current, strict=True):
            if paging.window:
                wanted = paging.wanted(num_tokens)
                blocks = [pins.get((paging.group, entry)) for entry in wanted]
                pinned = [NULL_BLOCK if block is None else block.block_id for block in blocks]
                tables.append(table_of(pinned, wanted.start))
            else:
                tables.append(paging.table(ids, range(num_tokens)))
        return tuple(tables)

    def pin(self, request: RequestId, num_tokens: int, pins: Pins) -> None:
        """Pin the window blocks that the table has by now. Call it in each step of the prompt."""
        for paging in self._pagings:
            if not paging.window:
                continue
            table = self.manager.get_blocks(request).blocks[paging.group]
            # vLLM frees these blocks right before a connector may take them over, so take the
            # reference in the step that fills the block.
            for entry in paging.wanted(num_tokens):
                is_known = (paging.group, entry) in pins
                if entry < len(table) and not table[entry].is_null and not is_known:
                    self.manager.block_pool.touch([table[entry]])
                    pins[paging.group, entry] = table[entry]

    def unpin(self, pins: Pins) -> None:
        # The last blocks first: vLLM evicts in this order, and a prefix is reused more often.
        self.manager.block_pool.free_blocks(reversed(list(pins.values())))
        pins.clear()


def _reporting(
    free: Callable[..., Any], on_free: Callable[[RequestId], None]
) -> Callable[..., Any]:
    @wraps(free)
    def call(request: Any) -> Any:
        on_free(RequestId(request.request_id))
        return free(request)

    return call


def table_of(ids: Sequence[int], first: int) -> Table:
    """Convert entries of vLLM's block table, starting at entry `first`; ABSENT for null blocks."""
    entries = ids_of(ids)
    if (entries != NULL_BLOCK).all():
        return Table(first, entries.tobytes())
    return Table.of(np.where(entries == NULL_BLOCK, ABSENT, entries), first)


def distinct_ids(tables: Iterable[Sequence[int]]) -> BlockIds:
    """All blocks in a request's tables, each once, without the null block."""
    each = list(map(ids_of, tables))
    ids: BlockIds = np.concatenate(each)
    if len(each) > 1:  # one table has no duplicates
        ids = np.unique(ids)
    return np.compress(ids != NULL_BLOCK, ids)


def ids_of(ids: Sequence[int]) -> BlockIds:
    packed = struct.pack(f"<{len(ids)}i", *ids)  # np.array(ids) takes four times as long
    return np.frombuffer(packed, dtype="<i4")
