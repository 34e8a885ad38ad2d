"""Pairs of engines of any shape: typical ones by name, all others drawn by hypothesis.

Pairs are (decode, prefill), that is (local, remote).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from nixl_kv.geometry.layout import ABSENT
from support.oracle import ALL_ORDERS, Blocks, CacheGroup, Cut, Layer

TPS = (1, 2, 3, 4, 6, 8)
HEADS = (1, 2, 4, 8, 12)
ENTRY_SIZES = (1, 2, 3, 4, 6, 8, 12)  # an engine's largest; its other ones divide it
ID_ORDERS = ("forwards", "backwards", "runs", "shuffled")


class Case(NamedTuple):
    """`tokens` is what decode reads. `scattered`: no two blocks are neighbours in memory."""

    model: tuple[Layer, ...]
    prefill: Cut
    decode: Cut
    tokens: range
    scattered: bool
    seed: int

    @property
    def table_tokens(self) -> int:
        """How many tokens the longest block table has."""
        return max(len(group.entries) for cut in self[1:3] for group in cut.groups)


@dataclass(frozen=True)
class Groups:
    """The cache groups of one engine, before they have block tables."""

    layers: tuple[tuple[str, ...], ...]
    windows: tuple[int, ...]
    blocks: tuple[Blocks, ...]
    stacked: bool

    @property
    def entry_sizes(self) -> list[int]:
        return [blocks.entry_size for blocks in self.blocks]

    def with_tables(
        self, rng: np.random.Generator, order: str, spare: int, present: Sequence[Sequence[bool]]
    ) -> tuple[CacheGroup, ...]:
        """Give each entry that is present an id; the ids of stacked groups are all different."""
        counts = [sum(entries) for entries in present]
        if self.stacked:
            ids, total = choose_ids(rng, order, sum(counts), spare)
            ends = list(itertools.accumulate(counts))
            chosen = [(ids[e - n : e], total) for e, n in zip(ends, counts, strict=True)]
        else:
            chosen = [choose_ids(rng, order, count, spare) for count in counts]
        groups = []
        for layers, blocks, entries, (ids, total) in zip(
            self.layers, self.blocks, present, chosen, strict=True
        ):
            remaining = iter(ids)
            table = tuple(next(remaining) if is_present else ABSENT for is_present in entries)
            groups.append(
                CacheGroup(layers, replace(blocks, count=total * blocks.per_entry), table)
            )
        return tuple(groups)


def choose_ids(
    rng: np.random.Generator, order: str, count: int, spare: int
) -> tuple[list[int], int]:
    """Ids for `count` entries, and how many entries the cache has."""
    ids = list(range(count))
    if order == "scattered":  # without the first and last block, which touch other layers' blocks
        return [2 * entry + 1 for entry in rng.permutation(ids).tolist()], 2 * count + 1
    if order == "backwards":
        ids.reverse()
    elif order == "shuffled":
        ids = rng.permutation(ids).tolist()
    elif order == "runs":
        chunks = [ids[first : first + 3] for first in range(0, count, 3)]
        ids = [entry for number in rng.permutation(len(chunks)) for entry in chunks[number]]
    shift = int(rng.integers(spare + 1))
    return [entry + shift for entry in ids], max(1, count + spare)


def entries_of_decode(groups: Groups, tokens: range) -> list[list[bool]]:
    """Which entries are present: all but those that a sliding window has passed."""
    return [
        [
            not window or (entry + 1) * size > tokens.stop - window
            for entry in range(-(-tokens.stop // size))
        ]
        for size, window in zip(groups.entry_sizes, groups.windows, strict=True)
    ]


def entries_of_prefill(
    groups: Groups,
    decode: Sequence[CacheGroup],
    tokens: range,
    prompt: int,
    rng: np.random.Generator,
) -> list[list[bool]]:
    """Which entries are present: those that decode reads, and perhaps some before them."""
    present = []
    for layers, window, size in zip(groups.layers, groups.windows, groups.entry_sizes, strict=True):
        readers = [group.present for group in decode if set(group.layers) & set(layers)]
        first = min(int(p[p >= tokens.start].min(initial=tokens.stop)) for p in readers)
        passed = int(rng.integers(min(first, prompt) // size + 1)) if window else 0
        present.append([entry >= passed for entry in range(-(-prompt // size))])
    return present


@st.composite
def models(draw: st.DrawFn, tps: tuple[int, int]) -> tuple[Layer, ...]:
    heads = [h for h in HEADS if all(h % tp == 0 or tp % h == 0 for tp in tps)]
    length, window = st.integers(1, 4), st.sampled_from((0, 0, 3, 7))
    attention = st.builds(Layer, st.just(""), st.sampled_from(heads), length, length, window)
    latent = st.builds(Layer, st.just(""), st.just(1), length, st.just(0))
    kinds = [draw(st.one_of(attention, attention, latent)) for _ in range(draw(st.integers(1, 3)))]
    layers = [draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 5)))]
    return tuple(replace(layer, name=f"layer.{number}") for number, layer in enumerate(layers))


@st.composite
def groups_of(draw: st.DrawFn, model: Sequence[Layer], tp: int, *, scattered: bool) -> Groups:
    """Layers with the same window, in up to two groups for each window.

    Where all layers of a group are copied on several ranks, these may share its tokens.
    """
    labels = draw(st.lists(st.integers(0, 1), min_size=len(model), max_size=len(model)))
    layers: dict[tuple[int, int], list[str]] = {}
    for label, layer in zip(labels, model, strict=True):
        layers.setdefault((layer.window, label), []).append(layer.name)
    stacked = len({layer.kind for layer in model}) == 1 and draw(st.booleans())
    largest = draw(st.sampled_from(ENTRY_SIZES))
    pad, gap = draw(st.sampled_from((0, 0, 1))), draw(st.sampled_from((0, 0, 3)))
    allowed = [
        Blocks(tokens=tokens, per_entry=per_entry, pad=pad, gap=gap)
        for tokens, per_entry in itertools.product(range(1, largest + 1), range(1, 5))
        if largest % (tokens * per_entry) == 0 and (per_entry == 1 or not scattered)
    ]
    blocks = [draw(st.sampled_from(allowed)) for _ in range(1 if stacked else len(layers))]
    blocks = blocks * len(layers) if stacked else blocks
    heads = {layer.name: layer.heads for layer in model}
    copies = [
        1 if window else math.gcd(*(max(1, tp // heads[name]) for name in names))
        for (window, _), names in layers.items()
    ]
    return Groups(
        tuple(map(tuple, layers.values())),
        tuple(window for window, _ in layers),
        tuple(draw(st.sampled_from(_stripes(*pair))) for pair in zip(blocks, copies, strict=True)),
        stacked,
    )


def _stripes(blocks: Blocks, copies: int) -> list[Blocks]:
    """All ways in which `copies` may share the tokens."""
    slots = blocks.tokens * blocks.per_entry
    shared = [
        replace(blocks, stripes=count, width=width)
        for count in range(2, copies + 1)
        for width in range(1, slots + 1)
        if copies % count == 0 and slots % width == 0
    ]
    return [blocks, *shared]


@st.composite
def cuts(draw: st.DrawFn, model: Sequence[Layer], tp: int) -> Cut:
    names = [layer.name for layer in model]
    count = draw(st.integers(1, min(3, len(names))))
    inner = draw(st.permutations(range(1, len(names))))[: count - 1]
    edges = [0, *sorted(inner), len(names)]
    return Cut(
        tp,
        tuple(tuple(names[first:last]) for first, last in itertools.pairwise(edges)),
        tuple(draw(st.lists(st.sampled_from(ALL_ORDERS), min_size=1, max_size=2))),
        (),
        backwards=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tps = draw(st.tuples(st.sampled_from(TPS), st.sampled_from(TPS)))
    model, scattered = draw(models(tps)), draw(st.booleans())
    mine, theirs = (draw(groups_of(model, tp, scattered=scattered)) for tp in tps)
    theirs = mine if tps[0] == tps[1] and draw(st.booleans()) else theirs
    start = math.lcm(*mine.entry_sizes) * draw(st.integers(0, 2))
    tokens = range(start, start + draw(st.integers(1, 20)))
    prompt = tokens.stop + draw(st.integers(0, 3))
    orders = ["scattered" if scattered else draw(st.sampled_from(ID_ORDERS)) for _ in tps]
    spare = [draw(st.integers(0, 3)) for _ in tps]
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    local = mine.with_tables(rng, orders[0], spare[0], entries_of_decode(mine, tokens))
    present = entries_of_prefill(theirs, local, tokens, prompt, rng)
    remote = theirs.with_tables(rng, orders[1], spare[1], present)
    decode, prefill = (draw(cuts(model, tp)) for tp in tps)
    return Case(
        model,
        replace(prefill, groups=remote, stacked=theirs.stacked),
        replace(decode, groups=local, stacked=mine.stacked),
        tokens,
        scattered,
        seed,
    )


def typical(
    *,
    tp: tuple[int, int] = (1, 1),
    pp: tuple[int, int] = (1, 1),
    block: tuple[int, int] = (4, 4),
    per_entry: tuple[int, int] = (1, 1),
    orders: tuple[str, str] = ("LBHNC", "LBHNC"),
    stripes: tuple[tuple[int, int], tuple[int, int]] = ((1, 1), (1, 1)),
    model: Sequence[Layer] = (Layer("a", 4, 3, 3), Layer("b", 4, 3, 3), Layer("c", 4, 3, 3)),
    tokens: range = range(21),
    whole: bool = False,
) -> Case:
    """Three layers in one group; pairs are (decode, prefill), stripes (how many, width)."""
    names = tuple(layer.name for layer in model)
    rng = np.random.default_rng(0)
    engines = []
    for side in (0, 1):
        count, width = stripes[side]
        sizes = {"tokens": block[side], "per_entry": per_entry[side]}
        blocks = Blocks(**sizes, stripes=count, width=width, whole=whole)
        groups = Groups((names,), (0,), (blocks,), stacked=False)
        edges = np.linspace(0, len(names), pp[side] + 1).astype(int).tolist()
        stages = tuple(names[first:last] for first, last in itertools.pairwise(edges))
        tables = groups.with_tables(rng, "scattered", 0, entries_of_decode(groups, tokens))
        engines.append(Cut(tp[side], stages, (orders[side],), tables))
    scattered = per_entry == (1, 1)
    return Case(tuple(model), engines[1], engines[0], tokens, scattered, 0)
