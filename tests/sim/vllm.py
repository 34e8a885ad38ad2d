"""The parts of vLLM that connectors see: blocks, requests, and the union of all ranks' reports.

A freed block is the next to be given out, the worst case; a request that gets all of its blocks
back has them in another order.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nixl_kv.connector.decode import Prompt
from nixl_kv.ids import RequestId
from sim.cache import BLOCK_TOKENS, NULL_BLOCK, KnownPrompt
from sim.content import PrefixCache
from sim.repeatable import Violation


@dataclass(eq=False)
class Block:
    """vLLM's KVCacheBlock, with its owner."""

    block_id: int
    ref_cnt: int = 0
    owner: RequestId | None = None

    @property
    def is_null(self) -> bool:
        return self.block_id == NULL_BLOCK


class BlockPool:
    """vLLM's. `on_free` is called with the blocks that have no reference left."""

    def __init__(
        self,
        count: int,
        on_free: Callable[[list[int]], None],
        on_taken: Callable[[list[int]], None] = lambda _: None,
    ) -> None:
        self.on_taken = on_taken
        self.blocks = [Block(number) for number in range(count)]
        self.free = self.blocks[:NULL_BLOCK:-1]
        self._on_free = on_free

    @property
    def num_used(self) -> int:
        return len(self.blocks) - 1 - len(self.free)

    def get_new_block(self, owner: RequestId) -> Block:
        block = self.free.pop()
        block.owner, block.ref_cnt = owner, 1
        self.on_taken([block.block_id])
        return block

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        unused = []
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                raise Violation("freed twice", f"block {block.block_id}")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                block.owner = None
                unused.append(block)
        self.free += reversed(unused)
        self._on_free([block.block_id for block in unused])


class Blocks(NamedTuple):
    blocks: tuple[list[Block], ...]


@dataclass
class BlockManager:
    """vLLM's KVCacheManager, with one group. Its requests find nothing in the prefix cache."""

    block_pool: BlockPool
    window: int = 0
    on_free: Callable[[RequestId], None] = lambda _request: None
    prefix_cache: PrefixCache | None = None
    _tables: dict[RequestId, list[Block]] = field(default_factory=dict)

    def allocate(self, request: RequestId, computed: int, total: int) -> bool:
        """Allocate blocks for `total` tokens; False if there are too few.

        Blocks outside the window of the tokens after `computed` are freed, or never allocated.
        """
        table = self._tables.setdefault(request, [])
        skipped = max(0, computed - self.window + 1) // BLOCK_TOKENS if self.window else 0
        self._skip(table, skipped)
        entries = range(len(table), -(-total // BLOCK_TOKENS))
        if sum(entry >= skipped for entry in entries) > len(self.block_pool.free):
            return False
        null = self.block_pool.blocks[NULL_BLOCK]
        for entry in entries:
            table.append(self.block_pool.get_new_block(request) if entry >= skipped else null)
        return True

    def fits(self, total: int) -> bool:
        """Whether there are blocks for `total` tokens: only then vLLM begins a request."""
        return -(-total // BLOCK_TOKENS) <= len(self.block_pool.free)

    def free(self, request: RequestId) -> None:
        """Free a request's blocks, the last ones first. `RequestBlocks.bind` adds `on_free`."""
        self.on_free(request)
        self.block_pool.free_blocks(reversed(self._tables.pop(request, [])))

    def fill(self, request: RequestId, prompt: KnownPrompt, num_tokens: int) -> None:
        """These tokens of a request are computed in the next step, or loaded."""
        if self.prefix_cache is not None:
            count = min(num_tokens, prompt.length)
            self.prefix_cache.fill(request, prompt, self.table(request), count)

    def get_blocks(self, request: RequestId) -> Blocks:
        return Blocks((self._tables.get(request, []),))

    def get_block_ids(self, request: RequestId) -> tuple[list[int], ...]:
        return (self.table(request),)

    def table(self, request: RequestId) -> list[int]:
        return [block.block_id for block in self._tables.get(request, [])]

    def _skip(self, table: list[Block], skipped: int) -> None:
        gone = [block for block in table[:skipped] if not block.is_null]
        table[:skipped] = [self.block_pool.blocks[NULL_BLOCK]] * len(table[:skipped])
        self.block_pool.free_blocks(reversed(gone))


class Status(enum.Enum):
    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()


@dataclass(eq=False)
class Request:
    request_id: RequestId
    prompt: KnownPrompt
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    local: int = 0  # tokens that decode has in its own cache
    steps_left: int = 1
    is_early: bool = False  # its ticket was out before it arrived

    @property
    def is_finished(self) -> bool:
        return self.status in (Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_ABORTED)

    @property
    def connector_prompt(self) -> Prompt:
        return Prompt(self.request_id, self.prompt.length, self.prompt.token_ids)


@dataclass(frozen=True)
class IssuedTicket:
    """The response of a prefill engine, as the router has it."""

    params: dict[str, Any]
    prompt: KnownPrompt
    engine: str


@dataclass(frozen=True)
class Forward:
    prompt: KnownPrompt
    table: list[int]
    tokens: range


@dataclass
class Aggregator:
    """vLLM's KVOutputAggregator: an id is complete when all ranks have reported it."""

    num_ranks: int
    _left: dict[RequestId, int] = field(default_factory=dict)
    _reported: set[tuple[int, RequestId]] = field(default_factory=set)
    _complete: list[RequestId] = field(default_factory=list)

    def add(
        self, rank: int, requests: Iterable[RequestId], is_expected: Callable[[RequestId], bool]
    ) -> None:
        for request in sorted(requests):
            if (rank, request) in self._reported:
                raise Violation("reported twice", f"rank {rank}: {request}")
            if not is_expected(request):
                raise Violation("unexpected report", f"rank {rank}: {request}")
            self._reported.add((rank, request))
            self._left[request] = self._left.get(request, self.num_ranks) - 1
            if not self._left[request]:
                del self._left[request]
                self._complete.append(request)

    def pop_complete(self) -> list[RequestId]:
        complete, self._complete = self._complete, []
        return complete
