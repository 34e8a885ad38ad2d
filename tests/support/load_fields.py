"""Finds the tokens of a load in the memory of a rank, without our slices and plans."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Region
from nixl_kv.protocol.events import StartLoad

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Field:
    """The tokens that a load fills in one layer: where each byte is, in the memory of a rank."""

    group: Group
    region: Region
    tokens: Places
    parts: tuple[Places, ...]  # shape (heads, tokens, bytes) each

    @property
    def whole_blocks(self) -> range:
        """The first token of each block that has all of its tokens here; not for stripes."""
        size, first, end = self.group.block_size, int(self.tokens[0]), int(self.tokens[-1]) + 1
        return range(-(-first // size) * size, end - size + 1, size)

    def can_have(self, fault: str) -> bool:
        several = {"blocks": self.whole_blocks, "head": range(self.region.num_heads)}
        return len({**several, "parts": self.parts}.get(fault, range(2))) > 1


def memory_of(layout: CacheLayout) -> Bytes:
    """A rank's memory, from its first span to the last."""
    begin = min(span.address for span in layout.spans)
    end = max(span.address + span.length for span in layout.spans)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))


def fields_of(layout: CacheLayout, load: StartLoad) -> Iterator[Field]:
    """All that a load fills on a rank: in each table, the part after the last absent block."""
    start = min(span.address for span in layout.spans)
    for group, table in zip(layout.groups, load.tables, strict=True):
        absent = np.flatnonzero(table.block_ids == ABSENT)
        skipped = int(absent[-1]) + 1 if len(absent) else 0
        tokens = np.arange(max(load.begin, (table.first + skipped) * group.entry_size), load.end)
        count, place, width = group.stripe.count, group.stripe.place, group.stripe.width
        tokens = tokens[tokens // width % count == place]
        if not len(tokens):
            continue
        entries = table.block_ids[tokens // group.entry_size - table.first].astype(np.int64)
        within = tokens % group.entry_size
        within = within // (width * count) * width + within % width
        within, slots = np.divmod(within, group.block_size)
        blocks = entries * group.blocks_per_entry + within
        for region in group.regions:
            heads = np.arange(region.num_heads)[:, None, None] * region.head_stride
            parts = []
            for part in region.parts:
                token_places = blocks * region.block_stride + slots * region.token_stride_of(part)
                pieces = np.arange(part.count)[:, None] * part.stride + np.arange(part.length)
                places = heads + token_places[:, None] + pieces.ravel()
                parts.append(places + region.base + part.offset - start)
            yield Field(group, region, tokens, tuple(parts))
