"""vLLM's book of blocks, as far as connectors see it: who has which, by reference count.

A freed block is the next to be given out, which is the worst that may happen to it; and whoever
gets all of its blocks back has them in another order.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from nixl_kv.connector.holds import NULL_BLOCK
from sim.memory import TOKENS
from sim.violations import Violation


@dataclass(eq=False)
class Block:
    """One of vLLM's."""

    block_id: int
    ref_cnt: int = 0
    owner: str | None = None

    @property
    def is_null(self) -> bool:
        """Whether it only fills gaps of a table."""
        return self.block_id == NULL_BLOCK


class Pool:
    """All blocks of an engine. `freed` is told of those that nobody refers to any more."""

    def __init__(self, count: int, freed: Callable[[list[int]], None]) -> None:
        """Begin with all free, but the null block."""
        self.blocks = [Block(number) for number in range(count)]
        self._free = self.blocks[:NULL_BLOCK:-1]
        self._freed = freed

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self, owner: str) -> Block:
        """Give out the block that was freed last."""
        block = self._free.pop()
        block.owner, block.ref_cnt = owner, 1
        return block

    def touch(self, blocks: Iterable[Block]) -> None:
        """One reference more."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """One reference less."""
        gone = []
        for block in blocks:
            if block.ref_cnt == 0:
                raise Violation("freed twice", f"block {block.block_id}")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                block.owner = None
                gone.append(block)
        self._free += reversed(gone)
        self._freed([block.block_id for block in gone])


class Tables(NamedTuple):
    """As vLLM's KVCacheBlocks: the blocks of each group."""

    blocks: tuple[list[Block], ...]


@dataclass
class Book:
    """As vLLM's KVCacheManager, with one group and no prefix cache."""

    block_pool: Pool
    _tables: dict[str, list[Block]] = field(default_factory=dict)

    def allocate(self, request: str, tokens: int) -> bool:
        """Let a request have blocks for so many tokens in all; False if there are too few."""
        table = self._tables.get(request, [])
        missing = -(-tokens // TOKENS) - len(table)
        if missing > self.block_pool.free:
            return False
        taken = [self.block_pool.take(request) for _ in range(missing)]
        self._tables[request] = table + taken
        return True

    def free(self, request: str) -> None:
        """The request needs its blocks no more; the last ones go first."""
        self.block_pool.free_blocks(reversed(self._tables.pop(request, [])))

    def get_blocks(self, request: str) -> Tables:
        """As vLLM's."""
        return Tables((self._tables.get(request, []),))

    def get_block_ids(self, request: str) -> tuple[list[int], ...]:
        """As vLLM's."""
        return ([block.block_id for block in self._tables.get(request, [])],)

    def table(self, request: str) -> list[int]:
        """Of the one group."""
        return self.get_block_ids(request)[0]
