"""Where the tokens of a load are in a rank's memory.

This is worked out here, and not by the product's code for slices and plans, so that a mistake there
is seen.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Region, Table, extent

Content = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Field:
    """Tokens of some heads of one layer in a rank's memory; heads are counted over the region."""

    region: Region
    group: Group
    heads: range
    tokens: range
    blocks: npt.NDArray[np.int64]
    """For each token the number of the region's block."""

    @property
    def num_parts(self) -> int:
        """2 for K and V, 1 where they are one piece."""
        return len(self.region.parts)

    def read(self, part: int) -> Content:
        """A copy of K or V, shape (heads, tokens, bytes)."""
        content = self._view(part)[:, self.blocks, self._slots]
        return content.reshape(len(self.heads), len(self.tokens), -1)

    def write(self, part: int, content: Content) -> None:
        """Replace K or V."""
        view = self._view(part)
        shape = (len(self.heads), len(self.tokens), *view.shape[3:])
        view[:, self.blocks, self._slots] = content.reshape(shape)

    def first_address(self, head: int) -> int:
        """Where the first token of one of the region's heads is."""
        region, part = self.region, self.region.parts[0]
        block = int(self.blocks[0]) * region.block_stride
        slot = int(self._slots[0]) * region.token_stride_of(part)
        return region.base + part.offset + head * region.head_stride + block + slot

    @property
    def _slots(self) -> npt.NDArray[np.int64]:
        return np.arange(self.tokens.start, self.tokens.stop) % self.group.block_size

    def _view(self, number: int) -> Content:
        """All blocks of these heads, shape (heads, blocks, tokens, pieces, bytes)."""
        region, group, part = self.region, self.group, self.region.parts[number]
        whole = (ctypes.c_uint8 * extent(region, group)).from_address(region.base)
        memory = np.ctypeslib.as_array(whole)[part.offset + self.heads[0] * region.head_stride :]
        shape = (len(self.heads), group.num_blocks, group.block_size, part.count, part.length)
        token_stride = region.token_stride_of(part)
        strides = (region.head_stride, region.block_stride, token_stride, part.stride, 1)
        return np.lib.stride_tricks.as_strided(memory, shape, strides)


def fields_of(layout: CacheLayout, tables: Sequence[Table], tokens: range) -> Iterator[Field]:
    """What a load fills on a rank, layer by layer: after the last absent block, all heads."""
    for group, table in zip(layout.groups, tables, strict=True):
        ids = table.block_ids
        absent = np.flatnonzero(ids == ABSENT)
        first = table.first + (int(absent[-1]) + 1 if len(absent) else 0)
        begin = max(tokens.start, first * group.entry_size)
        if begin >= tokens.stop:
            continue
        present = np.arange(begin, tokens.stop)
        entries = ids[present // group.entry_size - table.first].astype(np.int64)
        blocks = entries * group.blocks_per_entry + present % group.entry_size // group.block_size
        for region in group.regions:
            heads = range(region.num_heads)
            yield Field(region, group, heads, range(begin, tokens.stop), blocks)
