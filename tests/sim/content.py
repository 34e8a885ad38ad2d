"""vLLM's prefix cache of one engine: which blocks have which part of which prompt.

Freed blocks keep their KV until vLLM gives them to another request. The index is the connector's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.local.engine import HAS_CONVERSATIONS
from nixl_kv.ids import Nonce, RequestId, new_nonce
from nixl_kv.protocol import events
from sim.cache import BLOCK_TOKENS, KnownPrompt

if HAS_CONVERSATIONS:
    from nixl_kv.conversations.index import ContentIndex
    from nixl_kv.conversations.runs import new_key, seal


@dataclass(frozen=True)
class FoundRun:
    """An engine's answer to a reader, before any rank has granted it."""

    offer: Nonce
    prompt: KnownPrompt
    num_tokens: int
    sealed: bytes
    epoch: int


class PrefixCache:
    def __init__(self, num_blocks: int) -> None:
        self.prompts: dict[int, KnownPrompt] = {}  # of which it may have a block
        self._blocks: dict[bytes, int] = {}  # by hash
        self._hashes: dict[int, bytes] = {}  # by block
        self._taken: list[int] = []  # since the last step
        self._index = ContentIndex(num_blocks, self._blocks.get)
        self._key = b""

    def take(self, blocks: Sequence[int]) -> None:
        """A request gets these blocks."""
        for block in blocks:
            named = self._hashes.pop(block, None)
            if named is not None and self._blocks.get(named) == block:
                del self._blocks[named]
        self._index.on_taken(blocks)
        self._taken += blocks

    def fill(
        self, request: RequestId, prompt: KnownPrompt, table: Sequence[int], num_tokens: int
    ) -> None:
        """The step that is scheduled computes these tokens, or a load has brought them."""
        full = table[: num_tokens // BLOCK_TOKENS]
        first = next((n for n, block in enumerate(full) if block not in self._hashes), len(full))
        if first == len(full):
            return
        self.prompts[prompt.number] = prompt
        self._index.on_hashed(request, full[first:], full[first - 1] if first else None)
        for number in range(first, len(full)):
            named = _hash(prompt, number)
            self._hashes[full[number]] = named
            self._blocks[named] = full[number]

    def end_step(self) -> tuple[events.BlocksTaken, list[int]]:
        """A step's metadata is built; the blocks that it may write, besides its requests' own."""
        taken, self._taken = self._taken, []
        return self._index.end_step(), taken

    def begin_life(self) -> events.SetContentKey:
        self._key = new_key()
        return events.SetContentKey(self._key)

    def reset(self, *, forgets: bool) -> None:
        """Other weights; if it `forgets`, vLLM's own cache is reset too."""
        if forgets:
            self._blocks.clear()
            self._hashes.clear()
            self.prompts.clear()
        self._index.on_reset()

    def find(self, prompt: KnownPrompt) -> FoundRun | None:
        """The directory answers like this, on a thread of its own."""
        key, offer = self._key, new_nonce()
        run = self._index.find(_hashes(prompt), 0, "")
        if run is None:
            return None
        num_tokens = run.end_block * BLOCK_TOKENS
        return FoundRun(offer, prompt, num_tokens, seal(run, offer, key), run.epoch)


def _hashes(prompt: KnownPrompt) -> Iterable[bytes]:
    return (_hash(prompt, number) for number in range(prompt.length // BLOCK_TOKENS))


def _hash(prompt: KnownPrompt, number: int) -> bytes:
    return b"%d %d" % (prompt.number, number)
