"""KV caches as numpy arrays, in any of vLLM's physical orders, with a dense array as the truth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's cache: `tokens` per block, bytes of K and of V per head and token."""

    layers: int = 3
    blocks: int = 10
    heads: int = 2
    tokens: int = 4
    key: int = 6
    value: int = 6

    def by_letter(self) -> dict[str, int]:
        lengths = self.layers, self.blocks, self.heads, self.tokens, self.key + self.value
        return dict(zip("LBHNC", lengths, strict=True))


class Cache:
    """One rank's cache. `view` has the logical shape [L, B, H, N, C], uint8, whatever the order."""

    def __init__(self, sizes: Sizes, order: str = "LBHNC", first_head: int = 0) -> None:
        """Make a cache of zeros. `first_head` is the model's number of the first head here."""
        by_letter = sizes.by_letter()
        self.sizes = sizes
        self.order = order
        self.memory = np.zeros([by_letter[letter] for letter in order], dtype=np.uint8)
        self.view = self.memory.transpose([order.index(letter) for letter in "LBHNC"])
        self.first_head = first_head

    def layout(self, blocks_per_entry: int = 1) -> CacheLayout:
        sizes, strides = self.sizes, self.view.strides
        address = self.memory.ctypes.data
        regions = tuple(
            Region(
                layer=f"layer.{layer}",
                base=address + layer * strides[0],
                block_stride=strides[1],
                head_stride=strides[2],
                token_stride=strides[3],
                first_head=self.first_head,
                num_heads=sizes.heads,
                parts=(Part(0, sizes.key), Part(sizes.key, sizes.value)),
            )
            for layer in range(sizes.layers)
        )
        group = Group(sizes.tokens, sizes.blocks, blocks_per_entry, regions)
        span = Span(address, self.memory.nbytes)
        return CacheLayout((group,), "DRAM", 0, (span,))

    def fill(self, seed: int) -> "Cache":
        """Fill it with noise that has no zeros; returns itself."""
        rng = np.random.default_rng(seed)
        self.memory[...] = rng.integers(1, 256, self.memory.shape, dtype=np.uint8)
        return self

    def blocks(self, ids: Sequence[int]) -> Bytes:
        """A copy of some blocks, shape [L, len(ids), H, N, C]."""
        return self.view[:, list(ids)]


def layout_at(layout: CacheLayout, address: int) -> CacheLayout:
    """The same cache, with its first span at this address."""
    offset = address - layout.spans[0].address
    groups = tuple(
        replace(group, regions=tuple(replace(r, base=r.base + offset) for r in group.regions))
        for group in layout.groups
    )
    spans = tuple(replace(span, address=span.address + offset) for span in layout.spans)
    return replace(layout, groups=groups, spans=spans)
