"""Judges whether a running decode engine can read a prefill engine, and shows the reads.

Every figure comes from the planner that the connector uses, or from the reads that it plans for an
example prompt. Nothing is transferred. In pairs, decode comes before prefill.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Final, TypeAlias

import numpy as np

from nixl_kv.cli.client import EngineAnswer
from nixl_kv.cli.status import engine_text
from nixl_kv.cli.tables import num_bytes_text, open_console, print_line, print_table
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import ABSENT, BlockIds, CacheLayout, Group, Region, Table, entries
from nixl_kv.geometry.plan import COUNT, LENGTH, STRIDE, Heads, Ints, Plan, Reads, Share, plan
from nixl_kv.ids import Rank
from nixl_kv.protocol.messages import Description, Status

TOKENS: Final = 16_384
"""The default length of the example prompt."""

MAX_RANGES: Final = 3
"""A table cell shows up to this many ranges of numbers."""


Figures: TypeAlias = Mapping[str, Any]
"""A JSON object of `--json`: the comparison, a link, or a part of a link's recurrent state."""


def judge(decode: EngineAnswer, prefill: EngineAnswer, tokens: int | None = None) -> Figures:
    """Compare two running engines, for `plan` and for `doctor`: see `compare`.

    Decode can read prefill unless there are `mismatches`. The errors are those of `compare`.
    """
    figures = compare(decode.description, prefill.description, tokens)
    labels = [
        {"weights": str(each.status.facts.get("weights", ""))}
        for each in (decode, prefill)
        if isinstance(each.status, Status)
    ]
    mismatches = match.model_mismatches(*labels) if len(labels) == 2 else []  # noqa: PLR2004 - both
    return {**figures, "mismatches": [*figures["mismatches"], *map(_as_json, mismatches)]}


def _as_json(mismatch: match.Mismatch) -> Figures:
    return {"field": mismatch.field, "decode": mismatch.local, "prefill": mismatch.remote}


def compare(decode: Description, prefill: Description, tokens: int | None) -> Figures:
    """Plan a transfer between every decode rank and the prefill ranks that it reads.

    The example prompt has `tokens` tokens. None means TOKENS, or fewer in small caches. If the
    engines do not fit, the comparison has `mismatches` and no links.

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
    held = [[match.holdings(layout) for layout in layouts] for layouts in (ours, theirs)]
    links: list[Figures] = []
    unread = []
    for reader, layout in enumerate(ours if not mismatches else ()):
        for route in match.routes(Rank(reader), *held):
            source = route.remote_rank
            if route.readers:
                figures = _link((layout, theirs[source]), route.share, tokens)
                links.append({"reader": reader, "source": source, **figures})
            else:
                unread.append({"source": source, "released_by": reader})
    sums = "request_bytes", "descriptors", "descriptors_in_a_row", "state_bytes", "state_runs"
    totals = {name.removeprefix("request_"): sum(link[name] for link in links) for name in sums}
    return {
        "prefill": engine_text(prefill),
        "decode": engine_text(decode),
        "tokens": tokens,
        "mismatches": list(map(_as_json, mismatches)),
        "links": links,
        "unread": sorted(unread, key=itemgetter("source", "released_by")),
        "total": {"links": len(links), **totals},
    }


def _link(layouts: tuple[CacheLayout, CacheLayout], share: Share, tokens: int) -> Figures:
    """The reads of one decode rank from one prefill rank. Pairs are of decode and prefill.

    A request has the example prompt. Its figures include recurrent states; `heads`,
    `bytes_per_token` and the figures of a period cover KV alone. `heads` are half-open ranges.
    """
    planned = plan(*layouts, share)
    sizes = _entry_sizes(planned, 0), _entry_sizes(planned, 1)
    period = math.lcm(*itertools.chain(*sizes))
    one_period = example_reads(planned, period, windows=False, states=False)
    lengths = run_lengths(planned, one_period)
    scattered = example_reads(planned, tokens)
    kv = {region.layer for group in _kv_groups(layouts[0]) for region in group.regions}
    layers = {name.partition(" ")[0] for name in share}
    states = _states(layouts[0], share)
    return {
        "layers": len(layers),
        "layer_numbers": layers_text(layers),
        "heads": sorted({heads for name, heads in share.items() if name in kv}),
        "spans": [len(layout.spans) for layout in layouts],  # registered memory ranges
        "rows": [len(planned.local), len(planned.remote)],  # of the prepared descriptor lists
        "entry_sizes": sizes,  # tokens per block, of all groups
        "period": period,  # tokens after which block edges of both sides meet again
        "runs_per_period": one_period.num_runs,  # for scattered blocks and no sliding window
        # The shortest, the median and the longest.
        "run_bytes": [int(lengths.min()), float(np.median(lengths)), int(lengths.max())],
        "bytes_per_token": one_period.num_bytes / period,
        "request_bytes": scattered.num_bytes,
        "index_bytes": scattered.local.nbytes + scattered.remote.nbytes,
        "descriptors": scattered.num_runs,
        "descriptors_in_a_row": example_reads(planned, tokens, scattered=False).num_runs,
        "state": states,
        "state_bytes": sum(state["num_bytes"] for state in states),
        "state_runs": scattered.num_runs - example_reads(planned, tokens, states=False).num_runs,
    }


def _states(layout: CacheLayout, share: Share) -> list[Figures]:
    """The recurrent states that a rank reads once per request, by part and heads."""
    found: dict[tuple[str, Heads], list[Region]] = {}
    for group in layout.groups:
        for region in group.regions if group.keeps_states else ():
            if region.layer in share:
                part = region.layer.partition(" ")[2]  # behind the name of the layer
                found.setdefault((part, share[region.layer]), []).append(region)
    return [
        {
            "part": part,
            "layers": layers_text({region.layer.partition(" ")[0] for region in regions}),
            "heads": heads,
            "num_bytes": sum(region.content for region in regions) * (heads[1] - heads[0]),
        }
        for (part, heads), regions in found.items()
    ]


def run_lengths(planned: Plan, reads: Reads) -> Ints:
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


def print_comparison(comparison: Figures) -> None:
    console = open_console()
    print_line(console, f"prefill: {comparison['prefill']}")
    print_line(console, f"decode:  {comparison['decode']}")
    periods = {link["period"] for link in comparison["links"]}
    period = f"{max(periods)} tokens" if len(periods) == 1 else "period"
    links = [_link_row(link, comparison["tokens"], period) for link in comparison["links"]]
    states = [_state_row(link, part) for link in comparison["links"] for part in link["state"]]
    for rows in filter(None, (links, states)):
        cells = (row.values() for row in rows)
        print_table(console, rows[0], cells, justify="right")
    for line in _notes(comparison):
        print_line(console, line)


def _link_row(link: Figures, tokens: int, period: str) -> Mapping[str, str]:
    """The cells of a link, by heading. `period` is the heading of the period of all links."""
    lengths = dict.fromkeys(map(num_bytes_text, link["run_bytes"]))  # one if all runs are alike
    own_period = f" in {link['period']}" if period == "period" else ""
    return {
        "decode\nrank": f"{link['reader']}",
        "prefill\nrank": f"{link['source']}",
        "\nlayers": link["layer_numbers"],
        "\nheads": _heads_text(link["heads"]),
        "spans\nD, P": "{}, {}".format(*link["spans"]),
        "rows\nD, P": "{:,}, {:,}".format(*link["rows"]),
        f"runs per\n{period}": f"{link['runs_per_period']:,}{own_period}",
        "bytes\nof a run": " / ".join(lengths),
        "bytes per\ntoken": num_bytes_text(link["bytes_per_token"]),
        f"{tokens:,}\ntokens": num_bytes_text(link["request_bytes"]),
        "descriptors,\nscattered": f"{link['descriptors']:,}",
        "descriptors,\nin a row": f"{link['descriptors_in_a_row']:,}",
        "\nindices": num_bytes_text(link["index_bytes"]),
    }


def _state_row(link: Figures, state: Figures) -> Mapping[str, str]:
    return {
        "decode\nrank": f"{link['reader']}",
        "prefill\nrank": f"{link['source']}",
        "\nlayers": state["layers"],
        "state:\npart": state["part"],
        "\nheads": _heads_text([state["heads"]]),
        "\nbytes": num_bytes_text(state["num_bytes"]),
    }


def _notes(comparison: Figures) -> Iterator[str]:
    if comparison["mismatches"]:
        yield ""
        yield "Decode cannot read this prefill engine ('here' is decode, 'there' is prefill):"
        yield from (f"  {match.Mismatch(*each.values())}" for each in comparison["mismatches"])
        return
    total = comparison["total"]
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
    if comparison["unread"]:
        ranks = ", ".join(f"{one['source']} ({one['released_by']})" for one in comparison["unread"])
        yield f"Prefill ranks that no decode rank reads (and the rank that releases each): {ranks}."


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
