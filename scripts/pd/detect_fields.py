"""Where the tokens of a load stand in a rank's memory."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nixl_kv.connector.digests import mark_absent
from nixl_kv.geometry.blocks import ABSENT, block_ids
from nixl_kv.geometry.layout import CacheLayout, Group, Region, extent
from nixl_kv.protocol.events import Load

Content = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Field:
    """Tokens of some heads of one layer in a rank's memory; heads are counted over the region."""

    region: Region
    group: Group
    heads: range
    tokens: range
    blocks: npt.NDArray[np.int64]
    """Of each token: the region's block."""

    def get(self, part: int) -> Content:
        """A copy of K or V, shape (heads, tokens, bytes)."""
        found = self._view(part)[:, self.blocks, self._slots]
        return found.reshape(len(self.heads), len(self.tokens), -1)

    def put(self, part: int, content: Content) -> None:
        """Write the same."""
        view = self._view(part)
        shape = (len(self.heads), len(self.tokens), *view.shape[3:])
        view[:, self.blocks, self._slots] = content.reshape(shape)

    def first_address(self, head: int) -> int:
        """Of the first token of one of the region's heads."""
        region, part = self.region, self.region.parts[0]
        stride = part.token_stride or region.token_stride
        block, slot = int(self.blocks[0]) * region.block_stride, int(self._slots[0]) * stride
        return region.base + part.offset + head * region.head_stride + block + slot

    @property
    def _slots(self) -> npt.NDArray[np.int64]:
        return np.arange(self.tokens.start, self.tokens.stop) % self.group.block_size

    def _view(self, number: int) -> Content:
        """All blocks of these heads, shape (heads, blocks, tokens, pieces, bytes)."""
        region, group, part = self.region, self.group, self.region.parts[number]
        whole = (ctypes.c_uint8 * extent(region, group)).from_address(region.base)
        memory = np.ctypeslib.as_array(whole)[part.offset + self.heads[0] * region.head_stride :]
        token = part.token_stride or region.token_stride
        shape = (len(self.heads), group.num_blocks, group.block_size, part.count, part.length)
        strides = (region.head_stride, region.block_stride, token, part.stride, 1)
        return np.lib.stride_tricks.as_strided(memory, shape, strides)


def fields_of(layout: CacheLayout, load: Load) -> Iterator[Field]:
    """What a load fills on a rank, layer by layer: behind the last absent block, all heads."""
    for group, table in zip(layout.groups, load.tables, strict=True):
        ids = mark_absent(block_ids(table))
        absent = np.flatnonzero(ids == ABSENT)
        first = load.begin // group.entry_size
        begin = (first + (int(absent[-1]) + 1 if len(absent) else 0)) * group.entry_size
        if begin >= load.end:
            continue
        tokens = np.arange(begin, load.end)
        entries = ids[tokens // group.entry_size - first].astype(np.int64)
        blocks = entries * group.blocks_per_entry + tokens % group.entry_size // group.block_size
        for region in group.regions:
            yield Field(region, group, range(region.num_heads), range(begin, load.end), blocks)
