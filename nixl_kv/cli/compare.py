"""Judges whether a running decode engine can read a prefill engine, and which rank reads which.

The routes and the plans are those that the connector makes. Nothing is transferred. In pairs,
decode comes before prefill.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Final, TypeAlias

from nixl_kv.cli.client import EngineAnswer
from nixl_kv.cli.status import engine_text
from nixl_kv.cli.tables import open_console, print_line, print_table
from nixl_kv.geometry import match
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.plan import Heads, Share, plan
from nixl_kv.ids import Rank
from nixl_kv.protocol.messages import Description, Status

MAX_RANGES: Final = 3
"""A table cell shows up to this many ranges of numbers."""


Comparison: TypeAlias = Mapping[str, Any]
"""A JSON object of `--json`: the comparison, or a part of it."""


def judge(decode: EngineAnswer, prefill: EngineAnswer) -> Comparison:
    """Compare two running engines, for `plan` and for `doctor`: see `compare`.

    Decode can read prefill unless there are `mismatches`. The errors are those of `compare`.
    """
    comparison = compare(decode.description, prefill.description)
    labels = [
        {"weights": str(each.status.facts.get("weights", ""))}
        for each in (decode, prefill)
        if isinstance(each.status, Status)
    ]
    mismatches = match.model_mismatches(*labels) if len(labels) == 2 else []  # noqa: PLR2004 - both
    return {**comparison, "mismatches": [*comparison["mismatches"], *map(_as_json, mismatches)]}


def _as_json(mismatch: match.Mismatch) -> Comparison:
    return {"field": mismatch.field, "decode": mismatch.local, "prefill": mismatch.remote}


def compare(decode: Description, prefill: Description) -> Comparison:
    """Plan the reads between every decode rank and the prefill ranks that it reads.

    If the engines do not fit, the comparison has `mismatches` and no links.

    Raises:
        IncompatiblePeer: the pieces do not fit into the planner's int32 indices.
    """
    ours, theirs = ([rank.layout for rank in engine.ranks] for engine in (decode, prefill))
    mismatches = match.model_mismatches(decode.model, prefill.model)
    mismatches += match.extra_mismatches(decode.extras, prefill.extras)
    mismatches += match.layout_mismatches(ours, theirs)
    held = [[match.holdings(layout) for layout in layouts] for layouts in (ours, theirs)]
    links: list[Comparison] = []
    unread = []
    for reader, layout in enumerate(ours if not mismatches else ()):
        for route in match.routes(Rank(reader), *held):
            source = route.remote_rank
            if route.readers:
                plan(layout, theirs[source], route.share)
                links.append({"reader": reader, "source": source, **_shown(layout, route.share)})
            else:
                unread.append({"source": source, "released_by": reader})
    return {
        "prefill": engine_text(prefill),
        "decode": engine_text(decode),
        "mismatches": list(map(_as_json, mismatches)),
        "links": links,
        "unread": sorted(unread, key=itemgetter("source", "released_by")),
    }


def _shown(layout: CacheLayout, share: Share) -> Comparison:
    """The layers that a rank reads, and its half-open ranges of KV heads in them."""
    kv = {
        region.layer
        for group in layout.groups
        for region in group.regions
        if not group.keeps_states
    }
    layers = {name.partition(" ")[0] for name in share}  # a part of a state follows the space
    return {
        "layers": len(layers),
        "layer_numbers": layers_text(layers),
        "heads": sorted({heads for name, heads in share.items() if name in kv}),
    }


def print_comparison(comparison: Comparison) -> None:
    console = open_console()
    print_line(console, f"prefill: {comparison['prefill']}")
    print_line(console, f"decode:  {comparison['decode']}")
    if links := comparison["links"]:
        headings = "decode rank", "prefill rank", "layers", "heads"
        rows = (
            (link["reader"], link["source"], link["layer_numbers"], _heads_text(link["heads"]))
            for link in links
        )
        print_table(console, headings, rows, justify="right")
    for line in _notes(comparison):
        print_line(console, line)


def _notes(comparison: Comparison) -> Iterator[str]:
    if comparison["mismatches"]:
        yield ""
        yield "Decode cannot read this prefill engine ('here' is decode, 'there' is prefill):"
        yield from (f"  {match.Mismatch(*each.values())}" for each in comparison["mismatches"])
        return
    yield f"Decode can read this prefill engine: {len(comparison['links']):,} pairs of ranks."
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
