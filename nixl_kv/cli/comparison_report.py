"""A comparison of two engines, for people and as JSON."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from nixl_kv.cli.comparison import Comparison, Figures, RankPair
from nixl_kv.cli.engines import Engine, split_name
from nixl_kv.cli.text import num_bytes_text, plain_table, ranges_text, wide_console
from nixl_kv.geometry.plan import Heads


def print_comparison(comparison: Comparison, prefill: Engine, decode: Engine) -> None:
    """Who reads what from whom; or why nobody can."""
    console = wide_console()
    console.print(f"prefill: {prefill.words}", soft_wrap=True)
    console.print(f"decode:  {decode.words}", soft_wrap=True)
    if comparison.pairs:
        console.print(_table(comparison))
    if any(pair.figures.state for pair in comparison.pairs):
        console.print(_state_table(comparison))
    for line in _notes(comparison):
        console.print(line, soft_wrap=True)


def comparison_as_json(
    comparison: Comparison, prefill: Engine, decode: Engine
) -> Mapping[str, Any]:
    """All figures. Ranges of heads are half open; pairs are (decode, prefill)."""
    return {
        "prefill": prefill.words,
        "decode": decode.words,
        "tokens": comparison.tokens,
        "mismatches": [
            {"field": mismatch.field, "decode": mismatch.local, "prefill": mismatch.remote}
            for mismatch in comparison.mismatches
        ],
        "links": [
            {"reader": pair.decode_rank, "source": pair.prefill_rank, **asdict(pair.figures)}
            for pair in comparison.pairs
        ],
        "unread": [
            {"source": prefill_rank, "released_by": decode_rank}
            for prefill_rank, decode_rank in comparison.unread
        ],
        "total": _total(comparison.pairs),
    }


def layers_text(names: Iterable[str]) -> str:
    """Their numbers, if each name has exactly one number and no two are equal; or how many."""
    names = {split_name(name)[0] for name in names}
    numbers = {int(digits[0]) for name in names if len(digits := re.findall(r"\d+", name)) == 1}
    return ranges_text(numbers) if len(numbers) == len(names) else str(len(names))


def heads_text(heads: Iterable[Heads]) -> str:
    """Such as "0-3", or several where layers differ; "-" for none."""
    return " or ".join(ranges_text(range(*each)) for each in heads) or "-"


def run_lengths_text(figures: Figures) -> str:
    """One length if all runs have it, else the least, the median and the most."""
    least, median, most = figures.run_bytes
    if least == most:
        return num_bytes_text(least)
    return " / ".join(map(num_bytes_text, (least, median, most)))


def _table(comparison: Comparison) -> Table:
    periods = {pair.figures.period for pair in comparison.pairs}
    has_one_period = len(periods) == 1
    period = f"{max(periods)} tokens" if has_one_period else "period"
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
        f"{comparison.tokens:,}\ntokens",
        "descriptors,\nscattered",
        "descriptors,\nin a row",
        "\nindices",
    )
    table = plain_table(headings, justify="right", no_wrap=True)
    for pair in comparison.pairs:
        table.add_row(*_cells(pair, has_one_period=has_one_period))
    return table


def _cells(pair: RankPair, *, has_one_period: bool) -> Iterator[str]:
    figures = pair.figures
    yield str(pair.decode_rank)
    yield str(pair.prefill_rank)
    yield layers_text(pair.share)
    yield heads_text(figures.heads)
    yield "{}, {}".format(*figures.spans)
    yield "{:,}, {:,}".format(*figures.rows)
    yield f"{figures.runs_per_period:,}" + ("" if has_one_period else f" in {figures.period}")
    yield run_lengths_text(figures)
    yield num_bytes_text(figures.bytes_per_token)
    yield num_bytes_text(figures.request_bytes)
    yield f"{figures.descriptors:,}"
    yield f"{figures.descriptors_in_a_row:,}"
    yield num_bytes_text(figures.index_bytes)


def _state_table(comparison: Comparison) -> Table:
    """What is read once for a request, however long it is."""
    headings = ("decode\nrank", "prefill\nrank", "\nlayers", "state:\npart", "\nheads", "\nbytes")
    table = plain_table(headings, justify="right", no_wrap=True)
    for pair in comparison.pairs:
        for state in pair.figures.state:
            table.add_row(
                str(pair.decode_rank),
                str(pair.prefill_rank),
                layers_text(state.layers),
                state.part,
                heads_text([state.heads]),
                num_bytes_text(state.num_bytes),
            )
    return table


def _notes(comparison: Comparison) -> Iterator[str]:
    """What the table cannot say."""
    if comparison.mismatches:
        yield "\nThese engines cannot exchange KV ('here' is decode, 'there' is prefill):"
        yield from (f"  {mismatch}" for mismatch in comparison.mismatches)
        return
    total = _total(comparison.pairs)
    yield (
        f"Total: {total['links']:,} links, {num_bytes_text(total['bytes'])}, "
        f"{total['descriptors']:,} descriptors scattered, "
        f"{total['descriptors_in_a_row']:,} in a row."
    )
    if any(pair.figures.state for pair in comparison.pairs):
        yield (
            f"Of these, states are {num_bytes_text(total['state_bytes'])} in "
            f"{total['state_runs']:,} descriptors: read once for each request, however long it is."
        )
    yield from sorted({_period_note(pair.figures) for pair in comparison.pairs} - {""})
    if comparison.unread:
        ranks = ", ".join(f"{prefill} ({decode})" for prefill, decode in comparison.unread)
        yield f"Nobody reads these ranks of prefill (who of decode releases each): {ranks}."


def _total(pairs: Sequence[RankPair]) -> Mapping[str, int]:
    figures = [pair.figures for pair in pairs]
    return {
        "links": len(pairs),
        "bytes": sum(one.request_bytes for one in figures),
        "descriptors": sum(one.descriptors for one in figures),
        "descriptors_in_a_row": sum(one.descriptors_in_a_row for one in figures),
        "state_bytes": sum(state.num_bytes for one in figures for state in one.state),
        "state_runs": sum(one.state_runs for one in figures),
    }


def _period_note(figures: Figures) -> str:
    """What a period is, where it is more than a block."""
    sizes = [" and ".join(map(str, sizes)) for sizes in figures.entry_sizes]
    if sizes[0] == sizes[1] == str(figures.period):
        return ""
    return (
        f"Blocks have {sizes[0]} tokens on decode and {sizes[1]} on prefill: their edges meet "
        f"every {figures.period} tokens, and runs are counted over those."
    )
