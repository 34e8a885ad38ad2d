"""What each block of a cache holds, if every step and every load writes what it should.

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
    """Of a prompt and its answer: for each token that of all tokens up to it."""
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


def _parts(tokens: range) -> Iterator[tuple[int, range]]:
    """The entries of a block table that tokens are in, each with its own tokens."""
    for entry in range(tokens.start // BLOCK, -(-tokens.stop // BLOCK)):
        begin = entry * BLOCK
        yield entry, range(max(tokens.start, begin), min(tokens.stop, begin + BLOCK))


class Memory:
    """Pages are shared: a block that another group writes holds nothing of the one before."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._pages: dict[int, _Page] = {}

    def write(self, number: int, entries: Mapping[int, int], tokens: range, kv: list[int]) -> None:
        """The KV of these tokens into a group, by its block table; `kv` is from token 0 on."""
        group = self._groups[number]
        if group.is_state:
            last = tokens.stop - 1
            block = entries.get(last // group.block_size, NULL_BLOCK)
            if block != NULL_BLOCK:
                self._pages[block] = _Page(number, [kv[last]] * BLOCK)
            return
        for entry, part in _parts(tokens):
            block = entries.get(entry, NULL_BLOCK)
            if block == NULL_BLOCK:
                continue
            page = self._pages.get(block)
            if page is None or page.group != number:
                page = self._pages[block] = _Page(number, [JUNK] * BLOCK)
            first = part.start % BLOCK
            page.kv[first : first + len(part)] = kv[part.start : part.stop]

    def wrong(
        self, number: int, entries: Mapping[int, int], tokens: range, kv: list[int]
    ) -> str | None:
        """What of these tokens is not in its place, in words; None if all is."""
        group = self._groups[number]
        if group.is_state:
            last = tokens.stop - 1
            block = entries.get(last // group.block_size, NULL_BLOCK)
            is_right = self._pages.get(block) == _Page(number, [kv[last]] * BLOCK)
            return None if is_right else f"the state after token {last} is not in block {block}"
        for entry, part in _parts(tokens):
            block = entries.get(entry, NULL_BLOCK)
            page, first = self._pages.get(block), part.start % BLOCK
            expected = kv[part.start : part.stop]
            if (
                page is None
                or page.group != number
                or page.kv[first : first + len(part)] != expected
            ):
                where = f"tokens {part.start} to {part.stop - 1} of group {number} ({group.kind})"
                return f"{where} are not in block {block}"
        return None
