"""The used part of vLLM's cache manager, in plain Python."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Block:
    """0 is the null block."""

    block_id: int

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


@dataclass
class BlockPool:
    """How often each block is referred to by others than its request, and the order of returns."""

    touched: Counter[int] = field(default_factory=Counter)
    freed: list[int] = field(default_factory=list)

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert not block.is_null, "no request owns the null block"
            self.touched[block.block_id] += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.touched[block.block_id] -= 1
            assert self.touched[block.block_id] >= 0, f"block {block.block_id} was freed twice"
            self.freed.append(block.block_id)

    @property
    def pinned(self) -> set[int]:
        return {block for block, count in self.touched.items() if count}


@dataclass
class CacheManager:
    """Block tables by request, one for each group."""

    tables: dict[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    block_pool: BlockPool = field(default_factory=BlockPool)

    def get_block_ids(self, request: str) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self.tables.get(request, ()))

    def free(self, request: Any) -> None:
        self.tables.pop(request.request_id, None)

    pop_blocks_for_free = free

    def get_blocks(self, request: str) -> Any:
        tables = self.tables[request]
        return SimpleNamespace(blocks=tuple([Block(block) for block in ids] for ids in tables))
