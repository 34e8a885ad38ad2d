"""What a transfer between two engines is made of, as the planner plans it.

Every figure is read off a plan, or off the reads of a made-up request: nothing of what the planner
does is computed a second time here.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from nixl_kv.cli.engines import Engine
from nixl_kv.geometry import compat, ranks
from nixl_kv.geometry.blocks import ABSENT, BlockIds, entries
from nixl_kv.geometry.compat import Mismatch
from nixl_kv.geometry.layout import Group
from nixl_kv.geometry.plan import Plan, Reads, plan
from nixl_kv.geometry.runs import Heads, Ints
from nixl_kv.ids import Rank

TOKENS: Final = 16_384

EntrySizes: TypeAlias = tuple[int, ...]
"""Tokens per entry of the block table, of each group that differs in it."""


@dataclass(frozen=True)
class Figures:
    """Of what one rank reads from another. Pairs are (reader, source).

    `period` is in tokens: after so many the edges of both sides' blocks meet again. The runs of a
    period are those where no two blocks are neighbours and no window has passed.
    """

    layers: int
    heads: tuple[Heads, ...]
    spans: tuple[int, int]
    rows: tuple[int, int]
    entry_sizes: tuple[EntrySizes, EntrySizes]
    period: int
    runs_per_period: int
    run_bytes: tuple[int, float, int]  # least, median, most
    bytes_per_token: float
    request_bytes: int
    index_bytes: int
    descriptors: int
    descriptors_in_a_row: int


@dataclass(frozen=True)
class Link:
    """One rank reads another."""

    reader: Rank
    source: Rank
    share: Mapping[str, Heads]
    plan: Plan
    figures: Figures


@dataclass(frozen=True)
class Comparison:
    """Decode reads prefill; or why it cannot. Mismatches are (decode, prefill)."""

    tokens: int
    mismatches: tuple[Mismatch, ...]
    links: tuple[Link, ...] = ()
    unread: tuple[tuple[Rank, Rank], ...] = ()  # each such source, and the reader that releases it


def compare(decode: Engine, prefill: Engine, tokens: int | None) -> Comparison:
    """What every rank of decode reads from the ranks of prefill.

    Args:
        decode: the engine that reads.
        prefill: the engine that is read.
        tokens: of the prompt that descriptors are counted for; None: as many as fit, within reason.

    Raises:
        ValueError: if the caches have no room for the prompt.
        IncompatiblePeer: if there are more pieces than can be numbered.
    """
    layouts = (*decode.layouts, *prefill.layouts)
    room = min(g.num_entries * g.entry_size for layout in layouts for g in layout.groups)
    tokens = tokens or min(TOKENS, room)
    if not 1 <= tokens <= room:
        raise ValueError(f"tokens is {tokens}; allowed: 1 to {room}, for which there is room")
    found = compat.model_mismatches(decode.facts, prefill.facts)
    found += compat.mismatches(decode.layouts, prefill.layouts)
    if found:
        return Comparison(tokens, tuple(found))
    holdings = [[ranks.holding(layout) for layout in e.layouts] for e in (decode, prefill)]
    links, unread = [], []
    for reader in map(Rank, range(len(decode.layouts))):
        for route in ranks.routes(reader, *holdings):
            if route.readers:
                links.append(_link((decode, prefill), reader, route, tokens=tokens))
            else:
                unread.append((route.source, reader))
    return Comparison(tokens, (), tuple(links), tuple(sorted(unread)))


def run_lengths(planned: Plan, reads: Reads) -> Ints:
    """The bytes of each run of a request: pieces that follow each other in a dense row are one."""
    sides = ((planned.local, reads.local), (planned.remote, reads.remote))
    rows = [np.searchsorted(np.cumsum(table[:, 4]), ids, side="right") for table, ids in sides]
    length = planned.local[rows[0], 1].astype(np.int64)
    follows = np.ones(len(length) - 1, dtype=bool)
    for (table, ids), row in zip(sides, rows, strict=True):
        dense = table[row, 1] == table[row, 3]
        follows &= (np.diff(ids) == 1) & (np.diff(row) == 0) & dense[1:]
    return np.add.reduceat(length, np.concatenate(([0], np.flatnonzero(~follows) + 1)))


@dataclass(frozen=True)
class Request:
    """Made-up block tables: a prompt of so many tokens, its blocks scattered or in a row."""

    tokens: int
    scattered: bool = True
    windows: bool = True

    def reads(self, planned: Plan) -> Reads:
        """What the planner makes of it.

        Raises:
            ValueError: if a cache has no room for the prompt.
        """
        mine = [self._passed(self._ids(group), group) for group in planned.groups[0]]
        theirs = [self._ids(group) for group in planned.groups[1]]
        if self.scattered:  # in no order either
            theirs = [ids[::-1] for ids in theirs]
        return planned.reads(mine, theirs, range(self.tokens))

    def _ids(self, group: Group) -> BlockIds:
        """Scattered ones are as far apart as the cache allows."""
        count = len(entries(0, self.tokens, group.entry_size))
        if count > group.num_entries:
            raise ValueError(
                f"{self.tokens} tokens take {count} blocks; allowed: up to {group.num_entries}"
            )
        step = group.num_entries // count if self.scattered else 1
        return np.arange(count, dtype=np.int32) * np.int32(step)

    def _passed(self, ids: BlockIds, group: Group) -> BlockIds:
        """Without the blocks that the group's window has passed."""
        if self.windows and group.window:
            ids[: max(0, self.tokens - group.window) // group.entry_size] = ABSENT
        return ids


def _link(engines: tuple[Engine, Engine], reader: Rank, route: ranks.Route, *, tokens: int) -> Link:
    layouts = engines[0].layouts[reader], engines[1].layouts[route.source]
    planned = plan(layouts[0], layouts[1], route.share)
    sizes = _entry_sizes(planned, 0), _entry_sizes(planned, 1)
    period = math.lcm(*itertools.chain(*sizes))
    one = Request(period, windows=False).reads(planned)
    lengths = run_lengths(planned, one)
    scattered = Request(tokens).reads(planned)
    figures = Figures(
        layers=len(route.share),
        heads=tuple(sorted(set(route.share.values()))),
        spans=(len(layouts[0].spans), len(layouts[1].spans)),
        rows=(len(planned.local), len(planned.remote)),
        entry_sizes=sizes,
        period=period,
        runs_per_period=one.num_runs,
        run_bytes=(int(lengths.min()), float(np.median(lengths)), int(lengths.max())),
        bytes_per_token=one.num_bytes / period,
        request_bytes=scattered.num_bytes,
        index_bytes=scattered.local.nbytes + scattered.remote.nbytes,
        descriptors=scattered.num_runs,
        descriptors_in_a_row=Request(tokens, scattered=False).reads(planned).num_runs,
    )
    return Link(reader, route.source, route.share, planned, figures)


def _entry_sizes(planned: Plan, side: int) -> EntrySizes:
    groups = planned.groups[side]
    return tuple(sorted({groups[lane.groups[side]].entry_size for lane in planned.lanes}))
