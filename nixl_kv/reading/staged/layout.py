"""The layout of KV in a staging slot, for reads whose runs are too short to read one by one.

Prefill packs a part of a request into one slot of a ring of registered memory. Decode reads the
slot in one run into a slot of its own ring, and scatters it into its blocks. A slot has a layout
like a cache: one group of prefill's cache, cut to the layers and heads that are read (a `Crop`),
entry after entry without gaps. So `plan(staged, prefill's layout)` says how to pack, and
`plan(decode's layout, staged)` how to scatter, for every shape that `plan` knows.

Both sides derive that layout from prefill's layout and the crop, so it is never sent. Within an
entry the bytes stay in prefill's order as far as strides can express it: then prefill packs in long
runs. A prompt is read in chunks, each of which has one crop and fits into a slot of both rings.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Memory, Part, Region, Span, Table
from nixl_kv.geometry.plan import Heads, Share

# Slots of a ring. A slot costs about 0.2 ms besides its bytes. In that time a link carries tens of
# MiB of GPU memory, so GPUs need few large slots, but only one MiB of host memory.
NUM_SLOTS: Final[dict[Memory, int]] = {"VRAM": 4, "DRAM": 16}
# Bytes of a chunk, for the same reason, unless the whole read is not much longer.
LEAST_CHUNK: Final[dict[Memory, int]] = {"VRAM": 16 << 20, "DRAM": 1 << 20}
# Chunks of a long read: one chunk is read while others are packed and scattered.
LEAST_CHUNKS: Final = 4


@dataclass(frozen=True)
class Crop:
    """Layers and heads that a local and a remote group have in common."""

    groups: tuple[int, int]  # the numbers of the local and the remote group
    share: Share


@dataclass(frozen=True)
class Ring:
    """Memory in equal slots. A staged layout counts its entries from the ring's beginning."""

    span: Span
    num_slots: int

    @property
    def slot_bytes(self) -> int:
        return self.span.length // self.num_slots

    def first_entry(self, slot: int, entry_bytes: int) -> int:
        return -(-slot * self.slot_bytes // entry_bytes)

    def capacity(self, entry_bytes: int) -> int:
        """How many entries fit into every slot, whatever its alignment."""
        return max(0, (self.slot_bytes + 1) // entry_bytes - 1)


def crops(local: CacheLayout, remote: CacheLayout, share: Share) -> list[Crop]:
    found: dict[tuple[int, int], dict[str, Heads]] = {}
    theirs = remote.regions
    for layer, (number, _) in local.regions.items():
        heads = share.get(layer, (0, 0))
        if layer in theirs and heads[0] < heads[1]:
            found.setdefault((number, theirs[layer][0]), {})[layer] = heads
    return [Crop(pair, layers) for pair, layers in found.items()]


def entry_bytes(staged: CacheLayout) -> int:
    """Bytes of one entry of a staged layout's only group."""
    group = staged.groups[0]
    return group.regions[0].block_stride * group.blocks_per_entry


def staged_layout(
    source: Group, share: Share, ring: Span, *, memory: Memory, device: int
) -> CacheLayout:
    """Cut a group of prefill's cache to a share, without gaps, with as many entries as fit.

    Raises:
        ValueError: if the group lacks a layer or head of the share, or no entry fits.
    """
    regions = {region.layer: region for region in source.regions}
    for layer, heads in share.items():
        if layer not in regions:
            raise ValueError(f"layer {layer!r} is not in the group")
        first, end = regions[layer].heads
        if not first <= heads[0] < heads[1] <= end:
            raise ValueError(
                f"heads of {layer!r} are {heads[0]} to {heads[1]}; allowed: within {first} to {end}"
            )
    wanted = sorted((regions[layer] for layer in share), key=lambda region: region.base)
    cut, size = _cut(wanted, share, source.units_per_block)
    num_entries = ring.length // (size * source.blocks_per_entry)
    if not cut or not num_entries:
        raise ValueError(f"a block has {size} bytes; allowed: at most {ring.length}, the ring's")
    group = replace(
        source,
        num_blocks=num_entries * source.blocks_per_entry,
        regions=tuple(replace(r, base=ring.address - 1 + r.base, block_stride=size) for r in cut),
    )
    return CacheLayout((group,), memory, device, (ring,))


def staged_entries(table: Table, group: Group, tokens: range) -> range:
    """The entries of prefill's block table that hold a chunk's tokens."""
    size = group.entry_size
    first = max(tokens.start // size, table.first)
    return range(first, max(first, min(-(-tokens.stop // size), table.first + table.num_ids)))


def staged_table(table: Table, entries: range, first: int) -> Table:
    """The block table of a slot, whose first entry is block `first`; ABSENT stays absent."""
    start = entries.start - table.first
    theirs = table.block_ids[start : start + len(entries)]
    ids = np.arange(first, first + len(entries), dtype=np.int32)
    ids[theirs == ABSENT] = ABSENT
    return Table.of(ids, entries.start)


def split_tokens(
    groups: tuple[Group, Group], table: Table, tokens: range, max_entries: int
) -> Iterator[range]:
    """Cut a read of a group into chunks of at most `max_entries` of prefill's entries.

    Absent entries at the beginning of the local block table are not read. The tokens begin at the
    edge of a local entry.

    Raises:
        ValueError: if one local entry does not fit.
    """
    mine, theirs = (group.entry_size for group in groups)
    both = math.lcm(mine, theirs)
    start = max(tokens.start // mine, table.first) * mine
    stop = min(tokens.stop, (table.first + table.num_ids) * mine)
    while start < stop:
        limit = (start // theirs + max_entries) * theirs
        edge = limit // both * both
        if edge <= start:
            edge = limit // mine * mine
        if limit >= stop:
            edge = stop
        if edge <= start:
            raise ValueError("a block does not fit into a slot of the ring")
        yield range(start, edge)
        start = edge


def _cut(regions: Sequence[Region], share: Share, block_size: int) -> tuple[list[Region], int]:
    """The dense regions of a block at address 1 (0 is not an address), and the block's bytes."""
    cut: list[Region] = []
    size = 0
    for region in regions:
        dense = _dense(region, share[region.layer], block_size)
        cut.append(replace(dense, base=1 + size))
        size += dense.content * block_size * dense.num_heads
    shapes = {replace(region, layer="", base=1, scales=()) for region in regions}
    if len(regions) > 1 and len(shapes) == 1 and len({r.heads for r in cut}) == 1:
        head_stride = cut[0].head_stride
        outside = head_stride * cut[0].num_heads == size // len(cut)
        if outside and regions[-1].base - regions[0].base < regions[0].head_stride:
            # In prefill's cache, all layers of one head come before the next head.
            return [
                replace(region, base=1 + number * head_stride, head_stride=head_stride * len(cut))
                for number, region in enumerate(cut)
            ], size
    return cut, size


def _dense(region: Region, heads: Heads, block_size: int) -> Region:
    num_heads = heads[1] - heads[0]
    region = replace(region, base=1, first_head=heads[0], num_heads=num_heads, scales=())
    strides = [region.token_stride_of(part) for part in region.parts]
    has_heads_inside = min(strides) > region.head_stride
    if _is_in_one_piece(region):
        first = min(part.offset for part in region.parts)
        each = region.content
        inner = (each, num_heads * each) if has_heads_inside else (each * block_size, each)
        return replace(
            region,
            head_stride=inner[0],
            token_stride=inner[1],
            parts=tuple(Part(part.offset - first, part.length) for part in region.parts),
        )
    each = region.parts[0].content
    is_equal = all(part.content == each for part in region.parts)
    part_bytes = each * block_size * num_heads
    equal_offsets = range(0, len(region.parts) * part_bytes, part_bytes)
    if is_equal and has_heads_inside and all(part.count == 1 for part in region.parts):
        parts = tuple(Part(offset, each) for offset in equal_offsets)
        return replace(region, head_stride=each, token_stride=num_heads * each, parts=parts)
    apart = min(np.diff(sorted(part.offset for part in region.parts)), default=region.head_stride)
    if is_equal and not has_heads_inside and apart >= region.head_stride:
        offsets, head_stride = list(equal_offsets), each * block_size
    else:  # all parts of one head come before the next head
        offsets = np.cumsum([0, *(part.content * block_size for part in region.parts)]).tolist()
        head_stride = region.content * block_size
    parts = tuple(
        _dense_part(part, offset, stride, block_size)
        for part, offset, stride in zip(region.parts, offsets, strides, strict=False)
    )
    return replace(region, head_stride=head_stride, token_stride=each, parts=parts)


def _dense_part(part: Part, offset: int, token_stride: int, block_size: int) -> Part:
    if part.count > 1 and token_stride < part.stride:
        return Part(offset, part.length, part.count, part.length * block_size, part.length)
    stride = part.length if part.count > 1 else 0
    return Part(offset, part.length, part.count, stride, part.content)


def _is_in_one_piece(region: Region) -> bool:
    """Whether the content of one head and token is contiguous."""
    ordered = sorted(region.parts, key=lambda part: part.offset)
    edges = [part.offset + part.length for part in ordered[:-1]]
    return (
        edges == [part.offset for part in ordered[1:]]
        and all(part.count == 1 for part in ordered)
        and len({region.token_stride_of(part) for part in ordered}) == 1
    )
