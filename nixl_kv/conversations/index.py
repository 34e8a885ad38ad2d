"""Which cached blocks another engine may read, by content. vLLM's prefix-cache map is the index.

vLLM's map says which block has which hash, but not whether the KV is in that block already: vLLM
inserts a hash when it schedules the step that computes the block. So the index adds the number of
that step to each block. It also lists, for each step, the blocks that the step may overwrite.

Nothing is pinned. A run names S, the number of steps that were built when it was found, and `need`,
the latest step that fills one of its blocks. A rank grants the run after step `need`, unless a step
after S reuses one of the blocks.

The scheduler's thread changes the index while the directory's thread finds runs, without a lock.
Two orders make that safe. A block has its step before vLLM inserts its hash. `find` reads S before
it looks up any hash, so a step after S names each block that is reused meanwhile.
"""

import struct
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

from nixl_kv.conversations.runs import Run
from nixl_kv.protocol.events import BlocksTaken

NEVER: Final = 1 << 62
"""The step of a block whose KV may be wrong, until vLLM hands the block out again."""

TAKEN: Final = NEVER - 1
"""The step of a block that a request got in this epoch, before vLLM inserts the block's hash."""


class Epoch(NamedTuple):
    """The time between two resets. `find` compares its identity, so a reset makes a new one."""

    number: int
    weights: str  # the label of the weights that computed the KV
    born: "array[int]"  # the step that fills each block; NEVER and TAKEN are later than any step


class ContentIndex:
    """All methods but `find` belong to the scheduler's thread."""

    def __init__(
        self,
        num_blocks: int,
        lookup: Callable[[bytes], int | None],
        *,
        weights: str = "",
        drops_last: bool = False,
    ) -> None:
        """`lookup` returns the block that has a hash, on any thread; None: no block has it.

        `drops_last`: a draft model's KV in a block depends on the token after the block, which the
        block's hash does not cover. So a run ends one block earlier.
        """
        self._num_blocks = num_blocks
        self._lookup = lookup
        self._drops_last = drops_last
        self._epoch = Epoch(0, weights, self._nothing())
        self._built = 0  # steps; also the number of the latest one
        # Since then. These are lists of the same length, because Python's garbage collector would
        # follow a record for each block, and run more often.
        self._taken: list[int] = []
        self._hashed: list[int] = []
        self._parents: list[int | None] = []  # the block before each hashed one
        self._requests: list[str] = []  # to which each hashed one belongs

    def _nothing(self) -> "array[int]":
        return array("q", [NEVER]) * self._num_blocks

    # --- the scheduler's thread

    def on_taken(self, block_ids: Sequence[int]) -> None:
        """A request gets these blocks, and may write them from the next step on."""
        born = self._epoch.born
        for block in block_ids:
            born[block] = TAKEN
        self._taken += block_ids

    def on_hashed(self, request: str, block_ids: Sequence[int], parent: int | None) -> None:
        """VLLM is about to insert the hashes of consecutive blocks, which the next step fills.

        `parent` is the block before them; None: they begin the prompt.
        """
        born, step = self._epoch.born, self._built + 1
        # KV that is computed on a block is as doubtful as that block.
        is_good = parent is None or born[parent] <= step
        for block in block_ids:
            # A block from before a reset may hold some KV from before it.
            is_good = is_good and born[block] == TAKEN
            born[block] = step if is_good else NEVER
            self._hashed.append(block)
            self._parents.append(parent)
            self._requests.append(request)
            parent = block

    def end_step(
        self, preempted: Collection[str] = (), *, is_doubtful: bool = False
    ) -> BlocksTaken:
        """A step's metadata is built; empty steps count too.

        Args:
            preempted: requests that lost their blocks since the last step. vLLM may preempt a
                request in the `schedule()` that has just scheduled it. It keeps the hashes that it
                has inserted then, but no step fills these blocks.
            is_doubtful: another connector loads KV within this step. If such a load fails, vLLM
                discards the step. It may keep the hashes, and write the blocks again in place.
        """
        if preempted or is_doubtful:
            self._disown(preempted, are_all=is_doubtful)
        self._built += 1
        ids = struct.pack(f"<{len(self._taken)}i", *self._taken)
        for since in (self._taken, self._hashed, self._parents, self._requests):
            since.clear()
        return BlocksTaken(self._built, ids, self._epoch.number)

    def _disown(self, requests: Collection[str], *, are_all: bool) -> None:
        born = self._epoch.born
        if are_all:
            for block in self._taken:  # some are full, and have a hash, after a later step only
                born[block] = NEVER
        hashed = zip(self._requests, self._hashed, self._parents, strict=True)
        for request, block, parent in hashed:
            is_computed_on_bad = parent is not None and born[parent] == NEVER
            if are_all or request in requests or is_computed_on_bad:
                born[block] = NEVER

    def on_reset(self, weights: str | None = None) -> None:
        """Find no block any longer that was taken before this call.

        `weights` is their label from now on; None: the same.
        """
        number, label, _ = self._epoch
        label = label if weights is None else weights
        self._epoch = Epoch(number + 1, label, self._nothing())

    # --- any thread

    def find(self, hashes: Iterable[bytes], first_block: int, weights: str) -> Run | None:
        """The longest run from the first hash on, if these weights have computed it.

        `first_block` is the place of the first hash in its prompt, as another engine says. At a
        place that no block of this cache can have, it finds nothing.
        """
        epoch, built = self._epoch, self._built
        if weights != epoch.weights:
            return None
        born, lookup = epoch.born, self._lookup
        block_ids, filled_by = list[int](), list[int]()
        for each in hashes:
            block = lookup(each)
            if block is None:
                break
            step = born[block]
            if step > built:
                break
            filled_by.append(step)
            block_ids.append(block)
        if self._drops_last:
            del block_ids[-1:]
        # The request that computed these blocks had all blocks before them too.
        is_possible = first_block + len(block_ids) <= self._num_blocks
        if not block_ids or not is_possible or epoch is not self._epoch:
            return None
        ids = struct.pack(f"<{len(block_ids)}i", *block_ids)
        return Run(
            first_block=first_block, ids=ids, steps=built, need=max(filled_by), epoch=epoch.number
        )
