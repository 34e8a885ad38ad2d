"""The contents of each block of a cache, if every step and every load writes as it should.

The model is that the KV of a token depends on the weights, on it and on all tokens before it. So a
hash of the tokens so far stands for the KV of the last of them, and for the state after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from fuzz.scheduler.engine import Group
from nixl_kv.geometry.layout import ABSENT, Table
from support.vllm_scheduler import BLOCK

NULL_BLOCK: Final = 0
JUNK: Final = -1


def hashes(tokens: Sequence[int], weights: int) -> list[int]:
    """For each token of a prompt and its answer, a hash of all tokens up to it."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=weights))[
        1:
    ]


def entries_of(table: Table, group: Group) -> dict[int, int]:
    """A table of the protocol's as vLLM has it: block ids by entry, without the absent ones."""
    pairs = enumerate(map(int, table.block_ids), table.first)
    size = group.block_size if group.is_state else 1  # the protocol's states are by token
    return {entry // size: block for entry, block in pairs if block not in (ABSENT, NULL_BLOCK)}


@dataclass
class _Page:
    group: int
    kv: list[int]  # of each token


def _parts(group: Group, tokens: range) -> Iterator[tuple[int, int, range]]:
    """The entries of a block table that tokens are in: where the first one is, and which ones.

    A state is that after the last token alone.
    """
    if group.is_state:
        last = tokens.stop - 1
        yield last // group.block_size, 0, range(last, tokens.stop)
        return
    for entry in range(tokens.start // BLOCK, -(-tokens.stop // BLOCK)):
        begin = max(tokens.start, entry * BLOCK)
        yield entry, begin % BLOCK, range(begin, min(tokens.stop, (entry + 1) * BLOCK))


class Memory:
    """Pages are shared: a block that another group writes holds nothing of the one before."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._pages: dict[int, _Page] = {}

    def write(self, number: int, entries: Mapping[int, int], tokens: range, kv: list[int]) -> None:
        """The KV of these tokens into a group, by its block table; `kv` is from token 0 on."""
        for entry, first, part in _parts(self._groups[number], tokens):
            block = entries.get(entry, NULL_BLOCK)
            if block == NULL_BLOCK:
                continue
            page = self._pages.get(block)
            if page is None or page.group != number:
                page = self._pages[block] = _Page(number, [JUNK] * BLOCK)
            page.kv[first : first + len(part)] = kv[part.start : part.stop]

    def content(self, block: int) -> tuple[int, ...]:
        """The group that has written a block, and all KV of it."""
        page = self._pages.get(block, _Page(-1, []))
        return page.group, *page.kv

    def half(self, block: int, number: int) -> list[int]:
        """One of the two halves of a block, of a cache with one group."""
        page = self._pages.get(block)
        size = BLOCK // 2
        return [JUNK] * size if page is None else page.kv[number * size :][:size]

    def wrong(
        self, number: int, entries: Mapping[int, int], tokens: range, kv: list[int]
    ) -> str | None:
        """Which of these tokens are not in their place; None if all are."""
        group = self._groups[number]
        for entry, first, part in _parts(group, tokens):
            block = entries.get(entry, NULL_BLOCK)
            page = self._pages.get(block, _Page(number, []))
            found = page.kv[first : first + len(part)]
            if page.group != number or found != kv[part.start : part.stop]:
                where = f"tokens {part.start} to {part.stop - 1} of group {number} ({group.kind})"
                return f"{where} are not in block {block}"
        return None
