"""Shows what decode would read from prefill, from the descriptions of two running engines.

Every figure comes from the planner that the connector uses, or from the reads that it plans for an
example prompt. Nothing is transferred. In pairs, decode comes before prefill.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from nixl_kv.cli.status import (
    engine_text,
    num_bytes_text,
    plain_table,
    print_line,
    wide_console,
)
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import ABSENT, BlockIds, CacheLayout, Group, Region, Table, entries
from nixl_kv.geometry.plan import COUNT, LENGTH, STRIDE, Heads, Ints, Plan, Reads, plan
from nixl_kv.ids import Rank
from nixl_kv.protocol.messages import Description

TOKENS: Final = 16_384
"""The default length of the example prompt."""

MAX_RANGES: Final = 3
"""A table cell shows up to this many ranges of numbers."""


@dataclass(frozen=True)
class StateFigures:
    """One part of a recurrent state, read once per request. `heads` is a half-open range."""

    part: str
    layers: str
    heads: Heads
    num_bytes: int


@dataclass(frozen=True)
class Figures:
    """A link: the reads of one decode rank from one prefill rank. Field names are the JSON keys.

    A request has the example prompt. The figures of a request include recurrent states; `heads`,
    `bytes_per_token` and the figures of a period cover KV alone.
    """

    reader: Rank
    source: Rank
    layers: int
    layer_numbers: str
    heads: tuple[Heads, ...]  # half-open ranges; several if layers differ
    spans: tuple[int, int]  # registered memory ranges
    rows: tuple[int, int]  # of the two prepared descriptor lists
    entry_sizes: tuple[tuple[int, ...], tuple[int, ...]]  # tokens per block, of all groups
    period: int  # tokens after which block edges of both sides meet again
    runs_per_period: int  # for scattered blocks and no sliding window
    run_bytes: tuple[int, float, int]  # shortest, median, longest
    bytes_per_token: float
    request_bytes: int
    index_bytes: int  # of the two index arrays of a request
    descriptors: int  # of a request whose blocks are scattered
    descriptors_in_a_row: int  # of a request whose blocks are consecutive
    state: tuple[StateFigures, ...]
    state_runs: int


@dataclass(frozen=True)
class Comparison:
    """The links of two engines, or the `mismatches` that prevent a transfer."""

    tokens: int
    mismatches: tuple[match.Mismatch, ...]
    links: tuple[Figures, ...] = ()
    unread: tuple[tuple[Rank, Rank], ...] = ()  # prefill ranks, and the rank that releases each

    @property
    def total(self) -> Mapping[str, int]:
        return {
            "links": len(self.links),
            "bytes": sum(link.request_bytes for link in self.links),
            "descriptors": sum(link.descriptors for link in self.links),
            "descriptors_in_a_row": sum(link.descriptors_in_a_row for link in self.links),
            "state_bytes": sum(part.num_bytes for link in self.links for part in link.state),
            "state_runs": sum(link.state_runs for link in self.links),
        }


def compare(decode: Description, prefill: Description, tokens: int | None) -> Comparison:
    """Plan a transfer between every decode rank and the prefill ranks that it reads.

    The example prompt has `tokens` tokens. None means TOKENS, or fewer in small caches.

    Raises:
        ValueError: the caches are too small for the prompt.
        IncompatiblePeer: the pieces do not fit into the planner's int32 indices.
    """
    ours, theirs = ([rank.layout for rank in engine.ranks] for engine in (decode, prefill))
    rooms = (g.num_entries * g.entry_size for layout in ours + theirs for g in _kv_groups(layout))
    room = min(rooms, default=None)
    tokens = tokens or min(TOKENS, room or TOKENS)
    if room is not None and not 1 <= tokens <= room:
        raise ValueError(f"tokens is {tokens}; allowed: 1 to {room}, the size of the smaller cache")
    mismatches = match.model_mismatches(decode.model, prefill.model)
    mismatches += match.extra_mismatches(decode.extras, prefill.extras)
    mismatches += match.layout_mismatches(ours, theirs)
    if mismatches:
        return Comparison(tokens, tuple(mismatches))
    held = [[match.holdings(layout) for layout in layouts] for layouts in (ours, theirs)]
    links, unread = [], []
    for reader, layout in enumerate(ours):
        for route in match.routes(Rank(reader), *held):
            if route.readers:
                layouts = layout, theirs[route.remote_rank]
                links.append(_figures(Rank(reader), layouts, route, tokens))
            else:
                unread.append((route.remote_rank, Rank(reader)))
    return Comparison(tokens, (), tuple(links), tuple(sorted(unread)))


def _figures(
    reader: Rank, layouts: tuple[CacheLayout, CacheLayout], route: match.Route, tokens: int
) -> Figures:
    planned = plan(*layouts, route.share)
    sizes = _entry_sizes(planned, 0), _entry_sizes(planned, 1)
    period = math.lcm(*itertools.chain(*sizes))
    one_period = example_reads(planned, period, windows=False, states=False)
    lengths = run_lengths(planned, one_period)
    scattered = example_reads(planned, tokens)
    kv = {region.layer for group in _kv_groups(layouts[0]) for region in group.regions}
    layers = {name.partition(" ")[0] for name in route.share}
    return Figures(
        reader=reader,
        source=route.remote_rank,
        layers=len(layers),
        layer_numbers=layers_text(layers),
        heads=tuple(sorted({heads for name, heads in route.share.items() if name in kv})),
        spans=(len(layouts[0].spans), len(layouts[1].spans)),
        rows=(len(planned.local), len(planned.remote)),
        entry_sizes=sizes,
        period=period,
        runs_per_period=one_period.num_runs,
        run_bytes=(int(lengths.min()), float(np.median(lengths)), int(lengths.max())),
        bytes_per_token=one_period.num_bytes / period,
        request_bytes=scattered.num_bytes,
        index_bytes=scattered.local.nbytes + scattered.remote.nbytes,
        descriptors=scattered.num_runs,
        descriptors_in_a_row=example_reads(planned, tokens, scattered=False).num_runs,
        state=tuple(_state_figures(layouts[0], route.share)),
        state_runs=scattered.num_runs - example_reads(planned, tokens, states=False).num_runs,
    )


def _state_figures(layout: CacheLayout, share: Mapping[str, Heads]) -> Iterator[StateFigures]:
    """The states that a rank reads, by part and heads."""
    found: dict[tuple[str, Heads], list[Region]] = {}
    for group in layout.groups:
        for region in group.regions if group.keeps_states else ():
            if region.layer in share:
                part = region.layer.partition(" ")[2]  # behind the name of the layer
                found.setdefault((part, share[region.layer]), []).append(region)
    for (part, heads), regions in found.items():
        layers = layers_text({region.layer.partition(" ")[0] for region in regions})
        num_bytes = sum(region.content for region in regions) * (heads[1] - heads[0])
        yield StateFigures(part, layers, heads, num_bytes)


def run_lengths(planned: Plan, reads: Reads) -> Ints:
    """The bytes of each run of a request."""
    if not reads.num_runs:
        return np.zeros(1, dtype=np.int64)
    sides = ((planned.local, reads.local), (planned.remote, reads.remote))
    rows = [np.searchsorted(np.cumsum(table[:, COUNT]), ids, side="right") for table, ids in sides]
    length = planned.local[rows[0], LENGTH].astype(np.int64)
    # Neighbouring pieces of a row without gaps are one run, if they are neighbours on both sides.
    follows = np.ones(len(length) - 1, dtype=bool)
    for (table, ids), row in zip(sides, rows, strict=True):
        dense = table[row, LENGTH] == table[row, STRIDE]
        follows &= (np.diff(ids) == 1) & (np.diff(row) == 0) & dense[1:]
    return np.add.reduceat(length, np.concatenate(([0], np.flatnonzero(~follows) + 1)))


def example_reads(
    planned: Plan, tokens: int, *, scattered: bool = True, windows: bool = True, states: bool = True
) -> Reads:
    """The reads of a prompt of this length, whose blocks are scattered or consecutive.

    `windows` leaves out blocks that a sliding window has passed; `states` reads recurrent states.

    Raises:
        ValueError: a cache is too small for the prompt.
    """
    ours, theirs = (
        [_block_ids(group, tokens, scattered=scattered) for group in groups]
        for groups in planned.groups
    )
    for ids, group in zip(ours, planned.groups[0], strict=True):
        if group.window and windows:
            ids[: max(0, tokens - group.window) // group.entry_size] = ABSENT
        if group.keeps_states and not states:
            ids[:] = ABSENT
    if scattered:
        # Opposite orders, because blocks of a full cache are neighbours on both sides.
        theirs = [ids[::-1] for ids in theirs]
    local, remote = ([Table.of(ids) for ids in side] for side in (ours, theirs))
    return planned.reads(local, remote, range(tokens))


def _block_ids(group: Group, tokens: int, *, scattered: bool) -> BlockIds:
    """Block ids as far apart as the cache allows, or consecutive. A state takes one block."""
    if group.keeps_states:
        return np.zeros(tokens, dtype=np.int32)
    count = len(entries(0, tokens, group.entry_size))
    if count > group.num_entries:
        raise ValueError(f"{tokens} tokens need {count} blocks; allowed: up to {group.num_entries}")
    step = group.num_entries // count if scattered else 1
    return np.arange(count, dtype=np.int32) * np.int32(step)


def _entry_sizes(planned: Plan, side: int) -> tuple[int, ...]:
    """The tokens per block of all KV groups of one side; (1,) without KV."""
    groups = [planned.groups[side][rows.groups[side]] for rows in planned.paged_rows]
    sizes = {group.entry_size for group in groups if not group.keeps_states}
    return tuple(sorted(sizes)) or (1,)


def _kv_groups(layout: CacheLayout) -> list[Group]:
    return [group for group in layout.groups if not group.keeps_states]


def comparison_as_json(
    comparison: Comparison, prefill: Description, decode: Description
) -> Mapping[str, Any]:
    return {
        "prefill": engine_text(prefill),
        "decode": engine_text(decode),
        "tokens": comparison.tokens,
        "mismatches": [
            {"field": mismatch.field, "decode": mismatch.local, "prefill": mismatch.remote}
            for mismatch in comparison.mismatches
        ],
        "links": [asdict(link) for link in comparison.links],
        "unread": [{"source": rank, "released_by": by} for rank, by in comparison.unread],
        "total": comparison.total,
    }


def print_comparison(comparison: Comparison, prefill: Description, decode: Description) -> None:
    """Print a row for each link, or the mismatches."""
    console = wide_console()
    print_line(console, f"prefill: {engine_text(prefill)}")
    print_line(console, f"decode:  {engine_text(decode)}")
    periods = {link.period for link in comparison.links}
    period = f"{max(periods)} tokens" if len(periods) == 1 else "period"
    links = [_link_row(link, f"{comparison.tokens:,}", period) for link in comparison.links]
    states = [_state_row(link, part) for link in comparison.links for part in link.state]
    for rows in filter(None, (links, states)):
        cells = (row.values() for row in rows)
        console.print(plain_table(rows[0], cells, justify="right", no_wrap=True))
    for line in _notes(comparison):
        print_line(console, line)


def _link_row(link: Figures, tokens: str, period: str) -> Mapping[str, str]:
    """The cells of a link, by heading. `period` is the heading of the period of all links."""
    lengths = dict.fromkeys(map(num_bytes_text, link.run_bytes))  # one if all runs are alike
    own_period = f" in {link.period}" if period == "period" else ""
    return {
        "decode\nrank": f"{link.reader}",
        "prefill\nrank": f"{link.source}",
        "\nlayers": link.layer_numbers,
        "\nheads": _heads_text(link.heads),
        "spans\nD, P": "{}, {}".format(*link.spans),
        "rows\nD, P": "{:,}, {:,}".format(*link.rows),
        f"runs per\n{period}": f"{link.runs_per_period:,}{own_period}",
        "bytes\nof a run": " / ".join(lengths),
        "bytes per\ntoken": num_bytes_text(link.bytes_per_token),
        f"{tokens}\ntokens": num_bytes_text(link.request_bytes),
        "descriptors,\nscattered": f"{link.descriptors:,}",
        "descriptors,\nin a row": f"{link.descriptors_in_a_row:,}",
        "\nindices": num_bytes_text(link.index_bytes),
    }


def _state_row(link: Figures, part: StateFigures) -> Mapping[str, str]:
    return {
        "decode\nrank": f"{link.reader}",
        "prefill\nrank": f"{link.source}",
        "\nlayers": part.layers,
        "state:\npart": part.part,
        "\nheads": _heads_text([part.heads]),
        "\nbytes": num_bytes_text(part.num_bytes),
    }


def _notes(comparison: Comparison) -> Iterator[str]:
    if comparison.mismatches:
        yield ""
        yield "Decode cannot read this prefill engine ('here' is decode, 'there' is prefill):"
        yield from (f"  {mismatch}" for mismatch in comparison.mismatches)
        return
    total = comparison.total
    yield (
        f"Total: {total['links']:,} pairs of ranks, {num_bytes_text(total['bytes'])}, "
        f"{total['descriptors']:,} descriptors scattered, "
        f"{total['descriptors_in_a_row']:,} in a row."
    )
    if total["state_runs"]:
        yield (
            f"This includes {num_bytes_text(total['state_bytes'])} of recurrent states in "
            f"{total['state_runs']:,} descriptors, read once per request of any length."
        )
    yield from sorted({_period_note(link) for link in comparison.links} - {""})
    if comparison.unread:
        ranks = ", ".join(f"{source} ({reader})" for source, reader in comparison.unread)
        yield f"Prefill ranks that no decode rank reads (and the rank that releases each): {ranks}."


def _period_note(link: Figures) -> str:
    """Explains the period, unless it is one block on both sides."""
    decode, prefill = (" and ".join(map(str, sizes)) for sizes in link.entry_sizes)
    if decode == prefill == str(link.period):
        return ""
    return (
        f"A block has {decode} tokens on decode and {prefill} on prefill. Block edges meet "
        f"every {link.period} tokens, the period over which runs are counted."
    )


def layers_text(names: Iterable[str]) -> str:
    """The numbers of the layers if each name has one and they differ; else how many there are."""
    names = set(names)
    numbers = {int(digits[0]) for name in names if len(digits := re.findall(r"\d+", name)) == 1}
    return ranges_text(numbers) if len(numbers) == len(names) else str(len(names))


def _heads_text(heads: Iterable[Heads]) -> str:
    """Such as "0-3"; several ranges if layers differ, "-" for none."""
    return " or ".join(ranges_text(range(*each)) for each in heads) or "-"


def ranges_text(numbers: Iterable[int]) -> str:
    """Such as "0-17, 20", or "30 of 0-61" if there are more than MAX_RANGES ranges."""
    numbers = sorted(numbers)
    groups = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    runs = [[number for _, number in group] for _, group in groups]
    if len(runs) > MAX_RANGES:
        return f"{len(numbers)} of {numbers[0]}-{numbers[-1]}"
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
