"""Caches of many shapes to digest, the slices of a request in them, and a slow digester."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from harness.local.caches import layout_at
from harness.local.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.geometry.layout import (
    ALL_TOKENS,
    CacheLayout,
    Group,
    Memory,
    Part,
    Region,
    Span,
    Stripe,
    Table,
)
from nixl_kv.protocol.messages import KVSlice
from nixl_kv.verify.digest import Digest, Digester, Steps
from nixl_kv.verify.slices import LocalSlice, find_slices

SECRET = "ab" * 16


@dataclass(frozen=True)
class Sizes:
    """`parts` are the bytes of K and V, or of one part, of a head's token."""

    layers: int = 3
    blocks: int = 40
    heads: int = 4
    tokens: int = 16
    parts: tuple[int, ...] = (256, 256)

    @property
    def num_bytes(self) -> int:
        return self.layers * self.blocks * self.heads * self.tokens * sum(self.parts)


def layout_of(
    base: int, sizes: Sizes, order: str, *, gpu: bool = False, stripe: Stripe = ALL_TOKENS
) -> CacheLayout:
    """Layers of one size in one piece of memory, in this physical order."""
    memory: Memory = "VRAM" if gpu else "DRAM"
    (layout,) = build_layouts(
        ModelShape(sizes.layers, sizes.heads, sizes.parts, "uint8"),
        EngineShape(1, 1, sizes.tokens, sizes.blocks, order, memory=memory),
    )
    (group,) = layout.groups
    return layout_at(replace(layout, groups=(replace(group, stripe=stripe),)), base)


STATE_BLOCKS = 6
STATE_BYTES = 1 << 19
"""Bytes of a layer's block; a few stay unused."""
STATES = {
    "state": (2, 1 << 18, (Part(0, 1 << 16),)),
    "odd state": (2, 16388, (Part(1 << 17, 16388),)),
    "query": (4, 256, tuple(Part((1 << 18) + row * 1152, 256) for row in range(3))),
    "odd query": (3, 20, tuple(Part((1 << 18) + (1 << 14) + row * 60, 20) for row in range(3))),
    "pieces": (3, 2, (Part((1 << 18) + (1 << 15), 2, 7, 6),)),
}
"""Heads, head stride and parts: a temporal state, and rows of a convolution's in both orders."""


def hybrid_layout(base: int, *, gpu: bool = False) -> CacheLayout:
    """Layers with KV, and two with states, of which a block has all."""
    sizes = Sizes(layers=2, blocks=8, heads=2)
    kv = layout_of(base, sizes, "LBHNC", gpu=gpu)
    (span,) = kv.spans
    first, stride = base + span.length, 2 * STATE_BYTES
    regions = tuple(
        Region(f"layer.{layer} {name}", at, stride, head_stride, stride, 0, heads, parts)
        for layer, at in enumerate((first, first + STATE_BYTES))
        for name, (heads, head_stride, parts) in STATES.items()
    )
    states = Group(1, STATE_BLOCKS, 1, regions, window=1)
    spans = (Span(base, span.length + STATE_BLOCKS * stride),)
    return CacheLayout((*kv.groups, states), kv.memory, 0, spans)


def hybrid_slices(layout: CacheLayout, end: int) -> list[LocalSlice]:
    """All KV up to a token, and the states before it."""
    tables = [
        Table.of([5, 0, 7, 3, 1, 2, 6, 4]),
        Table.of([end % STATE_BLOCKS], end - 1),
    ]
    wanted = [
        KVSlice(region.layer, 0, region.num_heads, begin)
        for group, begin in zip(layout.groups, (0, end - 1), strict=True)
        for region in group.regions
    ]
    return find_slices(layout, wanted, tables, end=end)


WHOLE: Final = {
    "long": (256, 37376),
    "short": (256, 1168),
    "odd": (64, 8451),
    "states": (4, 32768),
}
"""The tokens of a block, and its bytes, of layers in groups of whole blocks."""


def whole_layout(base: int, *, gpu: bool = False) -> CacheLayout:
    """Groups of whole blocks, which share one pool of 12."""
    page = 40000
    groups = tuple(
        Group(
            tokens,
            12,
            1,
            tuple(
                Region(name, base + 4 * n, page, size, page, 0, 1, (Part(0, size),))
                for n, (name, (own, size)) in enumerate(WHOLE.items())
                if own == tokens
            ),
            whole=True,
        )
        for tokens in dict.fromkeys(tokens for tokens, _ in WHOLE.values())
    )
    return CacheLayout(groups, "VRAM" if gpu else "DRAM", 0, (Span(base, 12 * page),))


def whole_slices(layout: CacheLayout, end: int, begin: int = 0) -> list[LocalSlice]:
    """All layers; their blocks may be those of other groups as well."""
    ids = np.random.default_rng(1).permutation(12)
    tables = [
        Table.of(np.resize(ids, -(-end // group.block_size)).astype(np.int32))
        for group in layout.groups
    ]
    wanted = [
        KVSlice(region.layer, 0, 1, begin) for group in layout.groups for region in group.regions
    ]
    return find_slices(layout, wanted, tables, end=end)


def slices_of(
    layout: CacheLayout,
    end: int,
    begin: int = 0,
    *,
    heads: tuple[int, int] | None = None,
    other: Stripe = ALL_TOKENS,
) -> list[LocalSlice]:
    """Tokens of all layers, in blocks at random."""
    (group,) = layout.groups
    table = Table.of(np.random.default_rng(1).permutation(group.num_blocks))
    stripes = tuple(one for one in (group.stripe, other) if one != ALL_TOKENS)
    wanted = [
        KVSlice(region.layer, *(heads or region.heads), begin, stripes) for region in group.regions
    ]
    return find_slices(layout, wanted, [table], end=end)


def with_opaque_layer(layout: CacheLayout) -> CacheLayout:
    """The first layer ends with a block, so it ends at another token than the others."""
    (group,) = layout.groups
    regions = (replace(group.regions[0], opaque=True), *group.regions[1:])
    return replace(layout, groups=(replace(group, regions=regions),))


def finished(steps: Steps) -> Digest:
    """The digest at the end of these steps."""

    def to_the_end() -> Iterator[None]:
        results.append((yield from steps))

    results: list[Digest] = []
    for _ in to_the_end():
        pass
    return results[0]


def window(address: int, length: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


def noise(num_bytes: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, num_bytes + 4, dtype=np.uint8)


def reference(slices: Sequence[LocalSlice], secret: str = SECRET) -> Digest:
    """The digest by numpy, of memory of this process."""
    return finished(Digester()(secret, slices))


def is_equal(one: Digest, other: Digest) -> bool:
    return np.array_equal(one.rows, other.rows) and np.array_equal(one.columns, other.columns)


class SlowDigester(Digester):
    """A digester that takes `steps` more steps. `secrets` has the secret of each."""

    def __init__(self, steps: int, pause_s: float = 0.5) -> None:
        self.steps = steps
        self.pause_s = pause_s
        self.secrets: list[str] = []
        self.is_closed = False

    def __call__(self, secret: str, local_slices: Sequence[LocalSlice]) -> Steps:
        for _ in range(self.steps):
            self.secrets.append(secret)
            yield
        return (yield from Digester()(secret, local_slices))

    def close(self) -> None:
        self.is_closed = True
