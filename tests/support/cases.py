"""Shapes of engines: classic ones by name, and any others as hypothesis draws them.

Pairs are (decode, prefill), as everywhere (local, remote).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from caches import ORDERS
from hypothesis import strategies as st
from oracle import ABSENT, APART, TRANSPOSED, Blocks, CacheGroup, Cut, Layer

TPS = (1, 2, 3, 4, 6, 8)
HEADS = (1, 2, 4, 8, 12)
ENTRIES = (1, 2, 3, 4, 6, 8, 12)  # an engine's largest entry; its others divide it
PLACES = ("forwards", "backwards", "runs", "shuffled")


class Case(NamedTuple):
    """`tokens` is what decode wants. `scattered`: no two blocks are neighbours in memory."""

    model: tuple[Layer, ...]
    prefill: Cut
    decode: Cut
    tokens: range
    scattered: bool
    seed: int


@dataclass(frozen=True)
class Groups:
    """The cache groups of one engine, before they have block tables."""

    layers: tuple[tuple[str, ...], ...]
    windows: tuple[int, ...]
    blocks: tuple[Blocks, ...]
    stacked: bool

    @property
    def entry_sizes(self) -> list[int]:
        return [blocks.tokens * blocks.per_entry for blocks in self.blocks]

    def placed(
        self, rng: np.random.Generator, place: str, spare: int, present: Sequence[Sequence[bool]]
    ) -> tuple[CacheGroup, ...]:
        """Give each entry that is present an id; stacked groups have different ones."""
        counts = [sum(entries) for entries in present]
        if self.stacked:
            ids, total = ids_of(rng, place, sum(counts), spare)
            ends = list(itertools.accumulate(counts))
            chosen = [(ids[e - n : e], total) for e, n in zip(ends, counts, strict=True)]
        else:
            chosen = [ids_of(rng, place, count, spare) for count in counts]
        found = []
        for layers, blocks, entries, (ids, total) in zip(
            self.layers, self.blocks, present, chosen, strict=True
        ):
            left = iter(ids)
            table = tuple(next(left) if there else ABSENT for there in entries)
            cut = replace(blocks, count=total * blocks.per_entry)
            found.append(CacheGroup(layers, cut, table))
        return tuple(found)


def ids_of(rng: np.random.Generator, place: str, count: int, spare: int) -> tuple[list[int], int]:
    """Ids for so many entries, and how many entries the cache has."""
    ids = list(range(count))
    if place == "scattered":  # the first and the last block meet other layers' ones: not used
        return [2 * entry + 1 for entry in rng.permutation(ids).tolist()], 2 * count + 1
    if place == "backwards":
        ids.reverse()
    elif place == "shuffled":
        ids = rng.permutation(ids).tolist()
    elif place == "runs":
        chunks = [ids[first : first + 3] for first in range(0, count, 3)]
        ids = [entry for number in rng.permutation(len(chunks)) for entry in chunks[number]]
    shift = int(rng.integers(spare + 1))
    return [entry + shift for entry in ids], max(1, count + spare)


def looked_at(groups: Groups, tokens: range) -> list[list[bool]]:
    """Which entries decode has: all but those that its windows have passed."""
    return [
        [
            not window or (entry + 1) * size > tokens.stop - window
            for entry in range(-(-tokens.stop // size))
        ]
        for size, window in zip(groups.entry_sizes, groups.windows, strict=True)
    ]


def kept(
    groups: Groups, decode: Sequence[CacheGroup], case: tuple[range, int], rng: np.random.Generator
) -> list[list[bool]]:
    """Which entries prefill has: those that decode looks at, and perhaps some before them."""
    tokens, prompt = case
    found = []
    for layers, window, size in zip(groups.layers, groups.windows, groups.entry_sizes, strict=True):
        readers = [group.present for group in decode if set(group.layers) & set(layers)]
        first = min(int(p[p >= tokens.start].min(initial=tokens.stop)) for p in readers)
        gone = int(rng.integers(min(first, prompt) // size + 1)) if window else 0
        found.append([entry >= gone for entry in range(-(-prompt // size))])
    return found


@st.composite
def models(draw: st.DrawFn, tps: tuple[int, int]) -> tuple[Layer, ...]:
    heads = [h for h in HEADS if all(h % tp == 0 or tp % h == 0 for tp in tps)]
    length, window = st.integers(1, 4), st.sampled_from((0, 0, 3, 7))
    attention = st.builds(Layer, st.just(""), st.sampled_from(heads), length, length, window)
    latent = st.builds(Layer, st.just(""), st.just(1), length, st.just(0))
    kinds = draw(st.lists(st.one_of(attention, attention, latent), min_size=1, max_size=3))
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    return tuple(replace(layer, name=f"layer.{number}") for number, layer in enumerate(layers))


@st.composite
def groups_of(draw: st.DrawFn, model: Sequence[Layer], *, scattered: bool) -> Groups:
    """Layers with the same window, in up to two groups for each window."""
    labels = draw(st.lists(st.integers(0, 1), min_size=len(model), max_size=len(model)))
    layers: dict[tuple[int, int], list[str]] = {}
    for label, layer in zip(labels, model, strict=True):
        layers.setdefault((layer.window, label), []).append(layer.name)
    stacked = len({layer.kind for layer in model}) == 1 and draw(st.booleans())
    largest = draw(st.sampled_from(ENTRIES))
    pad, gap = draw(st.sampled_from((0, 0, 1))), draw(st.sampled_from((0, 0, 3)))
    allowed = [
        Blocks(tokens=tokens, per_entry=per_entry, pad=pad, gap=gap)
        for tokens, per_entry in itertools.product(range(1, largest + 1), range(1, 5))
        if largest % (tokens * per_entry) == 0 and (per_entry == 1 or not scattered)
    ]
    blocks = [draw(st.sampled_from(allowed)) for _ in range(1 if stacked else len(layers))]
    return Groups(
        tuple(map(tuple, layers.values())),
        tuple(window for window, _ in layers),
        tuple(blocks * len(layers) if stacked else blocks),
        stacked,
    )


@st.composite
def cuts(draw: st.DrawFn, model: Sequence[Layer], tp: int) -> Cut:
    names = [layer.name for layer in model]
    count = draw(st.integers(1, min(3, len(names))))
    inner = draw(st.permutations(range(1, len(names))))[: count - 1]
    edges = [0, *sorted(inner), len(names)]
    return Cut(
        tp,
        tuple(tuple(names[first:last]) for first, last in itertools.pairwise(edges)),
        tuple(draw(st.lists(st.sampled_from(ORDERS + APART + TRANSPOSED), min_size=1, max_size=2))),
        (),
        backwards=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tps = draw(st.tuples(st.sampled_from(TPS), st.sampled_from(TPS)))
    model, scattered = draw(models(tps)), draw(st.booleans())
    here, there = (draw(groups_of(model, scattered=scattered)) for _ in tps)
    there = here if draw(st.integers(0, 3)) == 0 else there
    start = math.lcm(*here.entry_sizes) * draw(st.integers(0, 2))
    tokens = range(start, start + draw(st.integers(1, 20)))
    prompt = tokens.stop + draw(st.integers(0, 3))
    places = [draw(st.sampled_from(PLACES)) if not scattered else "scattered" for _ in tps]
    spare = [draw(st.integers(0, 3)) for _ in tps]
    number = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(number)
    mine = here.placed(rng, places[0], spare[0], looked_at(here, tokens))
    theirs = there.placed(rng, places[1], spare[1], kept(there, mine, (tokens, prompt), rng))
    decode, prefill = (draw(cuts(model, tp)) for tp in tps)
    return Case(
        model,
        replace(prefill, groups=theirs, stacked=there.stacked),
        replace(decode, groups=mine, stacked=here.stacked),
        tokens,
        scattered,
        number,
    )


def classic(  # a table's rows are read more easily than nested records
    *,
    tp: tuple[int, int] = (1, 1),
    pp: tuple[int, int] = (1, 1),
    block: tuple[int, int] = (4, 4),
    per_entry: tuple[int, int] = (1, 1),
    orders: tuple[str, str] = ("LBHNC", "LBHNC"),
    model: Sequence[Layer] = (Layer("a", 4, 3, 3), Layer("b", 4, 3, 3), Layer("c", 4, 3, 3)),
    tokens: range = range(21),
) -> Case:
    """Three layers in one group; pairs are (decode, prefill)."""
    names = tuple(layer.name for layer in model)
    rng = np.random.default_rng(0)
    found = []
    for side in (0, 1):
        blocks = Blocks(tokens=block[side], per_entry=per_entry[side])
        groups = Groups((names,), (0,), (blocks,), stacked=False)
        edges = np.linspace(0, len(names), pp[side] + 1).astype(int).tolist()
        stages = tuple(names[first:last] for first, last in itertools.pairwise(edges))
        placed = groups.placed(rng, "scattered", 0, looked_at(groups, tokens))
        found.append(Cut(tp[side], stages, (orders[side],), placed))
    scattered = per_entry == (1, 1)
    return Case(tuple(model), found[1], found[0], tokens, scattered, 0)
