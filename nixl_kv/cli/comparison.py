"""Compares two engines: what a transfer from one to the other consists of.

Every figure is taken from a plan of the planner that the connector uses, or from the reads that it
plans for an example request. Nothing of what the planner does is computed a second time here.

Pairs are (decode, prefill).
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from nixl_kv.cli.engines import Engine, kv_groups, split_name
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import ABSENT, BlockIds, CacheLayout, Group, Region, Table, entries
from nixl_kv.geometry.match import Mismatch
from nixl_kv.geometry.plan import COUNT, LENGTH, STRIDE, Heads, Ints, Plan, Reads, plan
from nixl_kv.ids import Rank

TOKENS: Final = 16_384


@dataclass(frozen=True)
class StateFigures:
    """A part of layers' states, and the heads of it that are read, once for each request."""

    part: str
    layers: tuple[str, ...]
    heads: Heads
    num_bytes: int


@dataclass(frozen=True)
class Figures:
    """What one decode rank reads from one prefill rank.

    `entry_sizes` are tokens per entry of the block table, each once, on decode and on prefill.
    `period` is in tokens: after that many, block edges of both sides coincide again. The runs of a
    period are counted where no two blocks are neighbours and no window has passed. All of these,
    `heads` and `bytes_per_token` are of KV alone; the figures of a request have states in them.
    """

    layers: int
    heads: tuple[Heads, ...]
    spans: tuple[int, int]
    rows: tuple[int, int]
    entry_sizes: tuple[tuple[int, ...], tuple[int, ...]]
    period: int
    runs_per_period: int
    run_bytes: tuple[int, float, int]  # least, median, most
    bytes_per_token: float
    request_bytes: int
    index_bytes: int
    descriptors: int
    descriptors_in_a_row: int
    state: tuple[StateFigures, ...] = ()
    state_runs: int = 0


@dataclass(frozen=True)
class RankPair:
    """One decode rank reads one prefill rank."""

    decode_rank: Rank
    prefill_rank: Rank
    share: Mapping[str, Heads]
    plan: Plan
    figures: Figures


@dataclass(frozen=True)
class Comparison:
    """What decode reads from prefill; or why it cannot.

    `unread` are the prefill ranks that no rank reads, each with the decode rank that releases it.
    """

    tokens: int
    mismatches: tuple[Mismatch, ...]
    pairs: tuple[RankPair, ...] = ()
    unread: tuple[tuple[Rank, Rank], ...] = ()


def compare(decode: Engine, prefill: Engine, tokens: int | None) -> Comparison:
    """What every decode rank reads from the prefill ranks.

    Args:
        decode: the engine that reads.
        prefill: the engine that is read.
        tokens: of the prompt that descriptors are counted for; None for TOKENS, or as many as fit.

    Raises:
        ValueError: if the caches have no room for the prompt.
        IncompatiblePeer: if there are more pieces than can be numbered.
    """
    layouts = (*decode.layouts, *prefill.layouts)
    rooms = (g.num_entries * g.entry_size for layout in layouts for g in kv_groups(layout))
    room = min(rooms, default=None)
    tokens = tokens or min(TOKENS, room or TOKENS)
    if room is not None and not 1 <= tokens <= room:
        raise ValueError(f"tokens is {tokens}; allowed: 1 to {room}, for which there is room")
    mismatches = match.model_mismatches(decode.model, prefill.model)
    mismatches += match.extra_mismatches(decode.extras, prefill.extras)
    mismatches += match.layout_mismatches(decode.layouts, prefill.layouts)
    if mismatches:
        return Comparison(tokens, tuple(mismatches))
    held = [[match.holdings(layout) for layout in e.layouts] for e in (decode, prefill)]
    pairs, unread = [], []
    for decode_rank in map(Rank, range(len(decode.layouts))):
        for route in match.routes(decode_rank, *held):
            if route.readers:
                pairs.append(_compare_ranks((decode, prefill), decode_rank, route, tokens=tokens))
            else:
                unread.append((route.remote_rank, decode_rank))
    return Comparison(tokens, (), tuple(pairs), tuple(sorted(unread)))


def run_lengths(plan: Plan, reads: Reads) -> Ints:
    """The bytes of each run of a request: neighbouring pieces of a dense row are one run."""
    if not reads.num_runs:
        return np.zeros(1, dtype=np.int64)
    sides = ((plan.local, reads.local), (plan.remote, reads.remote))
    rows = [np.searchsorted(np.cumsum(table[:, COUNT]), ids, side="right") for table, ids in sides]
    length = plan.local[rows[0], LENGTH].astype(np.int64)
    follows = np.ones(len(length) - 1, dtype=bool)
    for (table, ids), row in zip(sides, rows, strict=True):
        dense = table[row, LENGTH] == table[row, STRIDE]
        follows &= (np.diff(ids) == 1) & (np.diff(row) == 0) & dense[1:]
    return np.add.reduceat(length, np.concatenate(([0], np.flatnonzero(~follows) + 1)))


def example_reads(
    plan: Plan, tokens: int, *, scattered: bool = True, windows: bool = True, states: bool = True
) -> Reads:
    """What the planner makes of a prompt of so many tokens.

    Args:
        plan: of two ranks.
        tokens: of the prompt.
        scattered: whether its blocks are all over the caches, in place of in a row.
        windows: whether the blocks that windows have passed are left out.
        states: whether states are read.

    Raises:
        ValueError: if a cache has no room for the prompt.
    """
    mine, theirs = (
        [_block_ids(group, tokens, scattered=scattered) for group in groups]
        for groups in plan.groups
    )
    for ids, group in zip(mine, plan.groups[0], strict=True):
        if group.window and windows:
            ids[: max(0, tokens - group.window) // group.entry_size] = ABSENT
        if group.keeps_states and not states:
            ids[:] = ABSENT
    if scattered:  # in no order either
        theirs = [ids[::-1] for ids in theirs]
    local, remote = ([Table.of(ids) for ids in side] for side in (mine, theirs))
    return plan.reads(local, remote, range(tokens))


def _block_ids(group: Group, tokens: int, *, scattered: bool) -> BlockIds:
    """Scattered ones are as far apart as the cache allows. A state takes one block."""
    if group.keeps_states:
        return np.zeros(tokens, dtype=np.int32)
    count = len(entries(0, tokens, group.entry_size))
    if count > group.num_entries:
        raise ValueError(f"{tokens} tokens take {count} blocks; allowed: up to {group.num_entries}")
    step = group.num_entries // count if scattered else 1
    return np.arange(count, dtype=np.int32) * np.int32(step)


def _compare_ranks(
    engines: tuple[Engine, Engine], decode_rank: Rank, route: match.Route, *, tokens: int
) -> RankPair:
    layouts = engines[0].layouts[decode_rank], engines[1].layouts[route.remote_rank]
    rank_plan = plan(layouts[0], layouts[1], route.share)
    sizes = _entry_sizes(rank_plan, 0), _entry_sizes(rank_plan, 1)
    period = math.lcm(*itertools.chain(*sizes))
    one_period = example_reads(rank_plan, period, windows=False, states=False)
    lengths = run_lengths(rank_plan, one_period)
    scattered = example_reads(rank_plan, tokens)
    kv = {region.layer for group in kv_groups(layouts[0]) for region in group.regions}
    figures = Figures(
        layers=len({split_name(name)[0] for name in route.share}),
        heads=tuple(sorted({heads for name, heads in route.share.items() if name in kv})),
        spans=(len(layouts[0].spans), len(layouts[1].spans)),
        rows=(len(rank_plan.local), len(rank_plan.remote)),
        entry_sizes=sizes,
        period=period,
        runs_per_period=one_period.num_runs,
        run_bytes=(int(lengths.min()), float(np.median(lengths)), int(lengths.max())),
        bytes_per_token=one_period.num_bytes / period,
        request_bytes=scattered.num_bytes,
        index_bytes=scattered.local.nbytes + scattered.remote.nbytes,
        descriptors=scattered.num_runs,
        descriptors_in_a_row=example_reads(rank_plan, tokens, scattered=False).num_runs,
        state=tuple(_state_figures(layouts[0], route.share)),
        state_runs=scattered.num_runs - example_reads(rank_plan, tokens, states=False).num_runs,
    )
    return RankPair(decode_rank, route.remote_rank, route.share, rank_plan, figures)


def _state_figures(layout: CacheLayout, share: Mapping[str, Heads]) -> Iterator[StateFigures]:
    """Of what a rank reads, by part and heads."""
    regions = [region for g in layout.groups if g.keeps_states for region in g.regions]
    found: dict[tuple[str, Heads], list[Region]] = {}
    for region in regions:
        if region.layer in share:
            key = split_name(region.layer)[1], share[region.layer]
            found.setdefault(key, []).append(region)
    for (part, heads), of_part in found.items():
        layers = tuple(split_name(region.layer)[0] for region in of_part)
        num_bytes = sum(region.content for region in of_part) * (heads[1] - heads[0])
        yield StateFigures(part, layers, heads, num_bytes)


def _entry_sizes(rank_plan: Plan, side: int) -> tuple[int, ...]:
    """Of KV; 1 if there is none."""
    groups = [rank_plan.groups[side][rows.groups[side]] for rows in rank_plan.paged_rows]
    sizes = {group.entry_size for group in groups if not group.keeps_states}
    return tuple(sorted(sizes)) or (1,)
