"""A comparison of two engines, for people and as JSON."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from nixl_kv.cli.engines import Engine
from nixl_kv.cli.figures import Comparison, Figures, Link
from nixl_kv.geometry.runs import Heads

WIDE: Final = 200
"""Columns at the least: a narrow terminal breaks lines, where rich would leave figures out."""

SHOWN_RANGES: Final = 3
KIB: Final = 1024
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def print_comparison(found: Comparison, prefill: Engine, decode: Engine) -> None:
    """Who reads what from whom; or why nobody can."""
    console = Console(highlight=False, markup=False, width=max(Console().width, WIDE))
    console.print(f"prefill: {prefill.words}", soft_wrap=True)
    console.print(f"decode:  {decode.words}", soft_wrap=True)
    if found.links:
        console.print(_table(found))
    for line in _notes(found):
        console.print(line, soft_wrap=True)


def as_json(found: Comparison, prefill: Engine, decode: Engine) -> Mapping[str, Any]:
    """All figures. Ranges of heads are half open; pairs are (decode, prefill)."""
    return {
        "prefill": prefill.words,
        "decode": decode.words,
        "tokens": found.tokens,
        "mismatches": [
            {"field": one.field, "decode": one.local, "prefill": one.remote}
            for one in found.mismatches
        ],
        "links": [
            {"reader": link.reader, "source": link.source, **asdict(link.figures)}
            for link in found.links
        ],
        "unread": [{"source": source, "released_by": by} for source, by in found.unread],
        "total": _total(found.links),
    }


def human(count: float) -> str:
    """Bytes, in the largest unit that leaves a number of 1 or more, with up to two decimals."""
    for unit in UNITS[:-1]:
        if count < KIB:
            return f"{count:.2f}".rstrip("0").rstrip(".") + f" {unit}"
        count /= KIB
    return f"{count:,.2f} {UNITS[-1]}"


def ranges(numbers: Iterable[int]) -> str:
    """Such as "0-17, 20"; if they are too many, how many numbers they are."""
    numbers = sorted(numbers)
    groups = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    runs = [[number for _, number in group] for _, group in groups]
    if len(runs) > SHOWN_RANGES:
        return f"{len(numbers)} of {numbers[0]}-{numbers[-1]}"
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def layers_of(names: Sequence[str]) -> str:
    """Their numbers, where the name of each has one, and another one each."""
    numbers = {int(found[0]) for name in names if len(found := re.findall(r"\d+", name)) == 1}
    return ranges(numbers) if len(numbers) == len(names) else str(len(names))


def heads_of(heads: Iterable[Heads]) -> str:
    """Such as "0-3", or several where layers differ."""
    return " or ".join(ranges(range(*each)) for each in heads)


def lengths_of(figures: Figures) -> str:
    """One length if all runs have it, else the least, the median and the most."""
    least, median, most = figures.run_bytes
    return human(least) if least == most else " / ".join(map(human, (least, median, most)))


def _table(found: Comparison) -> Table:
    periods = {link.figures.period for link in found.links}
    period = f"{periods.pop()} tokens" if len(periods) == 1 else "period"
    table = Table(box=box.SIMPLE, pad_edge=False)
    headings = (
        "decode\nrank",
        "prefill\nrank",
        "\nlayers",
        "\nheads",
        "spans\nD, P",
        "rows\nD, P",
        f"runs per\n{period}",
        "bytes\nof a run",
        "bytes per\ntoken",
        f"{found.tokens:,}\ntokens",
        "descriptors,\nscattered",
        "descriptors,\nin a row",
        "\nindices",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for link in found.links:
        table.add_row(*_cells(link, one_period=len(periods) == 0))
    return table


def _cells(link: Link, *, one_period: bool) -> Iterator[str]:
    figures = link.figures
    yield str(link.reader)
    yield str(link.source)
    yield layers_of(list(link.share))
    yield heads_of(figures.heads)
    yield "{}, {}".format(*figures.spans)
    yield "{:,}, {:,}".format(*figures.rows)
    yield f"{figures.runs_per_period:,}" + ("" if one_period else f" in {figures.period}")
    yield lengths_of(figures)
    yield human(figures.bytes_per_token)
    yield human(figures.request_bytes)
    yield f"{figures.descriptors:,}"
    yield f"{figures.descriptors_in_a_row:,}"
    yield human(figures.index_bytes)


def _notes(found: Comparison) -> Iterator[str]:
    """What the table cannot say."""
    if found.mismatches:
        yield "\nThese engines cannot exchange KV ('here' is decode, 'there' is prefill):"
        yield from (f"  {mismatch}" for mismatch in found.mismatches)
        return
    total = _total(found.links)
    yield (
        f"Total: {total['links']:,} links, {human(total['bytes'])}, "
        f"{total['descriptors']:,} descriptors scattered, "
        f"{total['descriptors_in_a_row']:,} in a row."
    )
    yield from sorted({_edges(link.figures) for link in found.links} - {""})
    if found.unread:
        ranks = ", ".join(f"{source} ({reader})" for source, reader in found.unread)
        yield f"Nobody reads these ranks of prefill (who of decode releases each): {ranks}."


def _total(links: Sequence[Link]) -> Mapping[str, int]:
    figures = [link.figures for link in links]
    return {
        "links": len(links),
        "bytes": sum(one.request_bytes for one in figures),
        "descriptors": sum(one.descriptors for one in figures),
        "descriptors_in_a_row": sum(one.descriptors_in_a_row for one in figures),
    }


def _edges(figures: Figures) -> str:
    """What a period is, where it is more than a block."""
    sizes = [" and ".join(map(str, sizes)) for sizes in figures.entry_sizes]
    if sizes[0] == sizes[1] == str(figures.period):
        return ""
    return (
        f"Blocks have {sizes[0]} tokens on decode and {sizes[1]} on prefill: their edges meet "
        f"every {figures.period} tokens, and runs are counted over those."
    )
