"""Where each byte of KV is on one rank, as base addresses and strides, and which block has it.

Every layout that vLLM uses is one formula with different numbers, so nothing here knows a backend
or a model. An element of KV is (layer, part, head, token). A part is K or V, or both where they are
never apart, as in a latent cache. The element is at

    region.base + part.offset + block * block_stride + head * head_stride + slot * token_stride

`block` is the entry of the request's block table at `token // block_size`, `slot` is
`token % block_size`, and `head` counts from the region's first head. There are `part.length`
contiguous bytes. If the part has more pieces, each is `part.stride` bytes after the one before.
If ranks divide the tokens, `Stripe.position(token)` replaces `token`. Examples:

    vLLM's packed view [B, H, N, K+V] in any physical order   V's offset is K's length
    separate K and V, [2, B, H, N, D]                         V's offset is half of the tensor
    K and V of a block side by side, [B, 2, H, N, D]          V's offset is half of the block stride
    one latent head [B, 1, N, C]                              one part, one head on every rank
    K transposed within the block, [B, H, D, N]               K has D pieces of one element, and a
                                                              token_stride of its own

A block table has one entry (a block id) for every `entry_size` tokens. All ranges are half-open:

    tokens   0 ............ local ............ local + load ... prompt
             |-- cached here --|-- to be read ----|-- computed --|
    entries  [local // entry_size, ceil((local + load) / entry_size))

`local` is a multiple of the entry size, because vLLM reports only whole blocks as cached. If the
two sides have different block sizes, tokens are cut into segments at the block edges of both sides,
so that each segment lies in one block on either side. The cuts repeat after the least common
multiple of the block sizes, the period:

    local    |       48       |       48       |
    remote   |    32    |    32    |    32    |      segments of 32, 16, 16, 32 tokens

If a rank keeps only a stripe of the tokens, a segment has tokens that both sides keep and that are
neighbours on both sides; there may be other tokens between them.

In a group that is `whole`, bytes belong to a block, not to a token: `slot` is 0, and a part is that
of a whole block. So one block may store any number of states, each for several tokens. Both sides
have the same block size then.

Peers send these records too, so each checks its own numbers and raises ValueError.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

MAX_ADDRESS = 2**63
MAX_COUNT = 2**31
MAX_TEXT = 256

# A block table's entry without a block, as before a sliding window.
ABSENT: Final = -1
# Entries of a block table, from its first present one to the last one.
MAX_ENTRIES: Final = 1 << 20
# Above this many units per period, `num_token_segments` gives an upper bound.
MAX_UNITS: Final = 1 << 17
# Prefill keeps the tokens of a sliding window from a multiple of this number on.
WINDOW_EDGE = 256
# Between spans at invented addresses.
SHOWN_GAP: Final = 1 << 21
# The window of a recurrent state: only the last state is useful.
STATE_WINDOW = 1

Memory = Literal["VRAM", "DRAM"]

# Shape (n,), int32: NIXL takes this element type without a conversion.
BlockIds = npt.NDArray[np.int32]

# One token's position in the prompt, or an array of them.
Tokens = TypeVar("Tokens", int, npt.NDArray[np.int64])


def check_range(name: str, value: int, *, low: int = 1, high: int) -> None:
    if not low <= value < high:
        raise ValueError(f"{name} is {value}; allowed: {low} to {high - 1}")


@dataclass(frozen=True)
class Part:
    """Pieces of one head and token: `count` pieces of `length` bytes, `stride` bytes apart."""

    offset: int  # of the first piece
    length: int
    count: int = 1
    stride: int = 0
    token_stride: int = 0  # 0 means the region's

    def __post_init__(self) -> None:
        check_range("part length", self.length, high=MAX_COUNT)
        check_range("part count", self.count, high=1 << 16)
        for name in ("offset", "stride", "token_stride"):
            check_range(f"part {name}", getattr(self, name), low=0, high=MAX_ADDRESS)

    @property
    def content(self) -> int:
        return self.count * self.length


@dataclass(frozen=True)
class Region:
    """One layer's KV on one rank. All strides are bytes; heads are counted over the whole model.

    In an `opaque` region, only the layer's kernel knows which bytes of a block belong to which
    token, so blocks are read and compared as a whole. `element` names the stored type. `scales`
    are the quantisation scales, as one text for all heads or one per head; none without scaling.
    """

    layer: str
    base: int
    block_stride: int
    head_stride: int
    token_stride: int
    first_head: int
    num_heads: int
    parts: tuple[Part, ...]
    opaque: bool = False
    element: str = "uint8"
    scales: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range("base", self.base, high=MAX_ADDRESS)
        for name in ("block_stride", "head_stride", "token_stride"):
            check_range(name, getattr(self, name), high=MAX_ADDRESS)
        check_range("first_head", self.first_head, low=0, high=1 << 16)
        check_range("num_heads", self.num_heads, high=1 << 16)
        check_range("number of parts", len(self.parts), high=9)
        for text in (self.element, *self.scales):
            check_range("length of element or scales", len(text), low=0, high=MAX_TEXT + 1)
        if len(self.scales) not in (0, 1, self.num_heads):
            raise ValueError(
                f"number of scales is {len(self.scales)}; allowed: 0, 1 or {self.num_heads}"
            )

    @property
    def heads(self) -> tuple[int, int]:
        return self.first_head, self.first_head + self.num_heads

    @property
    def content(self) -> int:
        """Bytes of one head of one token, all parts together."""
        return sum(part.content for part in self.parts)

    def head_offset(self, head: int) -> int:
        return (head - self.first_head) * self.head_stride

    def token_stride_of(self, part: Part) -> int:
        return part.token_stride or self.token_stride


@dataclass(frozen=True)
class Stripe:
    """A rank's tokens: `width` of every `count * width` tokens, from number `place * width` on.

    This is decode context parallelism of `count` ranks with an interleave of `width`. The rank
    stores its tokens without gaps, at positions 0, 1, 2, ... By default it keeps all tokens.
    """

    count: int = 1
    place: int = 0
    width: int = 1

    def __post_init__(self) -> None:
        check_range("stripe count", self.count, high=1 << 10)
        check_range("stripe place", self.place, low=0, high=self.count)
        check_range("stripe width", self.width, high=1 << 20 if self.count > 1 else 2)

    @property
    def period(self) -> int:
        """Tokens after which the pattern repeats."""
        return self.count * self.width

    def holds(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if self.count == 1:
            return np.ones(tokens.shape, np.bool_)
        kept: npt.NDArray[np.bool_] = tokens // self.width % self.count == self.place
        return kept

    def position(self, token: Tokens) -> Tokens:
        """The position of a kept token among all kept tokens."""
        if self.count == 1:
            return token
        return token // self.period * self.width + token % self.width

    def token(self, position: Tokens) -> Tokens:
        if self.count == 1:
            return position
        place = position // self.width * self.count + self.place
        return place * self.width + position % self.width

    def num_before(self, token: int) -> int:
        rest = token % self.period - self.place * self.width
        return token // self.period * self.width + min(max(rest, 0), self.width)

    def meets(self, other: "Stripe") -> bool:
        # The distances between their beginnings are all numbers congruent modulo the gcd.
        step = math.gcd(self.period, other.period)
        distance = (other.place * other.width - self.place * self.width) % step
        return distance < self.width or step - distance < other.width


ALL_TOKENS: Final = Stripe()


@dataclass(frozen=True)
class Group:
    """Layers that share one block table; a pipeline stage may have none of them.

    `block_size` (in tokens) and `num_blocks` are those of the regions. An entry of vLLM's block
    table is `blocks_per_entry` consecutive blocks, and stands for the same tokens on all ranks.
    Tokens that are `window` or more before the prompt's last one are dropped; 0 keeps all. This
    rank has the kept tokens of its `stripe`. `whole` blocks are read and compared in one piece.
    """

    block_size: int
    num_blocks: int
    blocks_per_entry: int
    regions: tuple[Region, ...]
    window: int = 0
    stripe: Stripe = ALL_TOKENS
    whole: bool = False

    def __post_init__(self) -> None:
        check_range("block_size", self.block_size, high=1 << 20)
        check_range("num_blocks", self.num_blocks, high=MAX_COUNT)
        check_range("blocks_per_entry", self.blocks_per_entry, high=1 << 16)
        check_range("number of regions", len(self.regions), low=0, high=1 << 14)
        check_range("window", self.window, low=0, high=MAX_COUNT if self.stripe.count == 1 else 1)
        if self.whole and self.stripe != ALL_TOKENS:
            raise ValueError(f"ranks have {self.stripe.count} stripes of whole blocks; allowed: 1")
        if self.slots_per_entry % self.stripe.width:
            raise ValueError(
                f"stripe width is {self.stripe.width}; "
                f"allowed: a divisor of the {self.slots_per_entry} slots of an entry"
            )

    @property
    def num_entries(self) -> int:
        return self.num_blocks // self.blocks_per_entry

    @property
    def slots_per_entry(self) -> int:
        """Tokens of this rank per entry of the block table."""
        return self.block_size * self.blocks_per_entry

    @property
    def entry_size(self) -> int:
        """Tokens of the prompt per entry of the block table."""
        return self.slots_per_entry * self.stripe.count

    @property
    def unit(self) -> int:
        """The number of tokens whose bytes have one place: 1, or those of a whole block."""
        return self.block_size if self.whole else 1

    @property
    def units_per_block(self) -> int:
        return self.block_size // self.unit

    @property
    def keeps_states(self) -> bool:
        return self.window == STATE_WINDOW


@dataclass(frozen=True)
class Span:
    """`length` bytes at `address`, registered in one piece."""

    address: int
    length: int

    def __post_init__(self) -> None:
        check_range("span address", self.address, high=MAX_ADDRESS)
        check_range("span length", self.length, high=MAX_ADDRESS)


@dataclass(frozen=True)
class CacheLayout:
    """The whole KV cache of one rank."""

    groups: tuple[Group, ...]
    memory: Memory
    device: int  # ordinal of the GPU, 0 for DRAM
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        check_range("number of groups", len(self.groups), high=65)
        check_range("device", self.device, low=0, high=1 << 10)
        num_regions = sum(len(group.regions) for group in self.groups)
        # The check below compares each region with all spans; a peer must not make that expensive.
        check_range("regions times spans", (num_regions + 1) * len(self.spans), low=0, high=1 << 20)
        names: set[str] = set()
        for group in self.groups:
            for region in group.regions:
                if region.layer in names:
                    raise ValueError(f"layer {region.layer!r} occurs twice; allowed: once")
                names.add(region.layer)
                begin, end = region.base, region.base + extent(region, group)
                if not any(s.address <= begin and end <= s.address + s.length for s in self.spans):
                    raise ValueError(
                        f"region of layer {region.layer!r} reaches from {begin:#x} to {end:#x}; "
                        "allowed: inside one of the layout's spans"
                    )

    @property
    def regions(self) -> "dict[str, tuple[int, Region]]":
        return {r.layer: (number, r) for number, g in enumerate(self.groups) for r in g.regions}

    @property
    def bytes_per_token(self) -> int:
        """The average over the prompt's tokens, for all layers and heads of this rank."""
        return sum(
            -(-region.num_heads * region.content // (group.stripe.count * group.unit))
            for group in self.groups
            for region in group.regions
        )


def without_addresses(layout: CacheLayout) -> CacheLayout:
    """The same layout at invented addresses, which tell nothing of the process's memory."""
    spans: list[Span] = []
    begin = SHOWN_GAP
    for span in layout.spans:
        spans.append(Span(begin, span.length))
        begin += -(-span.length // SHOWN_GAP) * SHOWN_GAP + SHOWN_GAP  # no two are neighbours

    def moved(region: Region, group: Group) -> Region:
        end = region.base + extent(region, group)
        for old, new in zip(layout.spans, spans, strict=True):
            if old.address <= region.base and end <= old.address + old.length:
                return replace(region, base=new.address + region.base - old.address)
        raise ValueError(f"layer {region.layer!r} lies in no span")  # a layout checks that

    groups = tuple(
        replace(group, regions=tuple(moved(each, group) for each in group.regions))
        for group in layout.groups
    )
    return replace(layout, groups=groups, spans=tuple(spans))


def extent(region: Region, group: Group) -> int:
    """Bytes from the region's base to the end of its last element."""
    return (
        (group.num_blocks - 1) * region.block_stride
        + (region.num_heads - 1) * region.head_stride
        + max(
            part.offset
            + part.length
            + (part.count - 1) * part.stride
            + (group.units_per_block - 1) * region.token_stride_of(part)
            for part in region.parts
        )
    )


def entries(local: int, load: int, entry_size: int) -> range:
    return range(local // entry_size, -(-(local + load) // entry_size))


def block_ids(ids: Sequence[int]) -> BlockIds:
    return np.asarray(ids, dtype=np.int32)


@dataclass(frozen=True)
class Table:
    """A request's block table as it is kept and sent: the entries from number `first` on.

    Entries are counted from the prompt's first token. Those before `first` are ABSENT, so the
    blocks before a sliding window, or the states before the last one, cost nothing.
    """

    first: int
    ids: bytes  # little-endian int32, one per entry

    def __post_init__(self) -> None:
        if len(self.ids) % 4 or len(self.ids) > 4 * MAX_ENTRIES:
            raise ValueError(
                f"ids of a block table are {len(self.ids)} bytes; "
                f"allowed: 4 for each of at most {MAX_ENTRIES} entries"
            )
        check_range("first of a block table", self.first, low=0, high=MAX_COUNT - self.num_ids)

    @classmethod
    def of(cls, ids: npt.ArrayLike, first: int = 0) -> "Table":
        """The table of entries `first`, `first + 1`, ...; absent ones in front are dropped."""
        array = np.asarray(ids, dtype="<i4")
        present = np.flatnonzero(array != ABSENT)
        num_absent = int(present[0]) if len(present) else len(array)
        return cls(first + num_absent, array[num_absent:].tobytes())

    @property
    def block_ids(self) -> BlockIds:
        return np.frombuffer(self.ids, dtype="<i4")

    @property
    def num_ids(self) -> int:
        return len(self.ids) // 4

    @property
    def num_present(self) -> int:
        return int(np.count_nonzero(self.block_ids != ABSENT))

    def piece_numbers(self, group: Group, tokens: range, per_block: int) -> BlockIds:
        """For each token, the number of the piece that holds it; negative if its entry is absent.

        Each block of the group has `per_block` pieces, numbered through all blocks of the cache. A
        ValueError names a token behind the table's end, or an id that the cache does not have.
        """
        ids = self._ids_of(tokens, group.entry_size)
        if ids.size and not (ids.min() >= ABSENT and ids.max() < group.num_entries):
            wrong = ids[(ids < ABSENT) | (ids >= group.num_entries)][0]
            raise ValueError(f"block id {wrong}; allowed: 0 to {group.num_entries - 1}")
        per_entry = group.blocks_per_entry * per_block
        if per_entry == 1:
            return ids
        piece_size = group.slots_per_entry // per_entry
        positions = group.stripe.position(np.arange(tokens.start, tokens.stop, tokens.step))
        within = positions % group.slots_per_entry // piece_size
        return ids * np.int32(per_entry) + within.astype(np.int32)

    def _ids_of(self, tokens: range, entry_size: int) -> BlockIds:
        ids = self.block_ids
        if not tokens:
            return ids[:0]
        first, last = tokens[0] // entry_size - self.first, tokens[-1] // entry_size - self.first
        if last >= len(ids):
            raise ValueError(
                f"block table has {self.first + len(ids)} entries; needed: {last + self.first + 1}"
            )
        if first >= 0 and tokens.step % entry_size == 0:
            return ids[first : last + 1 : tokens.step // entry_size]
        entries = np.arange(tokens.start, tokens.stop, tokens.step) // entry_size - self.first
        if first < 0:  # an appended ABSENT stands for all entries before `self.first`
            ids = np.append(ids, np.int32(ABSENT))
            entries = np.maximum(entries, -1)
        found: BlockIds = ids[entries]
        return found


@dataclass(frozen=True)
class TokenSegment:
    """`length` tokens of a rank, the first of which is token `start` of every period."""

    start: int
    length: int
    period: int

    def starts(self, tokens: range) -> range:
        first = tokens.start + (self.start - tokens.start) % self.period
        return range(first, tokens.stop, self.period)


def token_segments(local: Group, remote: Group) -> list[TokenSegment]:
    """Cut one period of the tokens that both sides keep at the block edges of both."""
    unit, period = _unit_and_period(local, remote)
    tokens = np.arange(0, period, unit)
    tokens = tokens[local.stripe.holds(tokens) & remote.stripe.holds(tokens)]
    is_cut = np.zeros(len(tokens), dtype=bool)
    for group in (local, remote):
        positions = group.stripe.position(tokens)
        is_cut |= positions % group.block_size == 0
        is_cut |= np.diff(positions, prepend=-unit) != unit
    first = np.flatnonzero(is_cut)
    lengths = np.diff(first, append=len(tokens)) * unit
    return [
        TokenSegment(start, length, period)
        for start, length in zip(tokens[first].tolist(), lengths.tolist(), strict=True)
    ]


def num_token_segments(local: Group, remote: Group) -> int:
    """The number of segments in one period, or an upper bound if counting them is expensive."""
    unit, period = _unit_and_period(local, remote)
    units = period // unit
    return units if units > MAX_UNITS else len(token_segments(local, remote))


def _unit_and_period(local: Group, remote: Group) -> tuple[int, int]:
    """The tokens between two possible cuts, and the tokens after which all cuts repeat."""
    sizes, periods = [], []
    for group in (local, remote):
        widths = [group.stripe.width] if group.stripe.count > 1 else []
        sizes += [group.block_size, *widths]
        periods.append(math.lcm(group.block_size, *widths) * group.stripe.count)
    return math.gcd(*sizes), math.lcm(*periods)
