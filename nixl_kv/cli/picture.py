"""Draws who reads what from whom.

On the left the ranks of prefill, on the right those of decode; in each a row for every KV head and
a column for every block of a few tokens. A colour is a rank of decode: what is read has the colour
of its reader on both sides, and a ribbon leads from one to the other. Below, one block as it
lies in the memory of each side: a box is what is read in one piece, a gap is everything between.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from nixl_kv.cli.engines import Engine
from nixl_kv.cli.figures import Comparison, Link
from nixl_kv.cli.svg import Box, Canvas
from nixl_kv.cli.tables import heads_of, human, layers_of, lengths_of
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.ranks import holding
from nixl_kv.geometry.runs import Heads

COLOURS: Final = (
    "#2f6fde",
    "#e8762c",
    "#1d9a6c",
    "#c2407f",
    "#7a52cc",
    "#b8920a",
    "#1598b8",
    "#c93a3a",
    "#5f7f1e",
    "#8a5a3c",
    "#4453a8",
    "#d1679b",
)
"""By rank of decode, in turn."""

NOBODY: Final = "#e3e7eb"

WIDTH: Final = 1040.0
MARGIN: Final = 32.0
SIDE: Final = 300.0  # the width of one engine's blocks
RIGHT: Final = WIDTH - MARGIN - SIDE
CAPTION: Final = 18.0  # above each rank
BETWEEN: Final = 14.0
STRIP: Final = 22.0
GAP: Final = 3.0
LEGEND_STEP: Final = 128.0

ROWS_HEIGHT: Final = 420.0
ROW_HEIGHTS: Final = (6.0, 18.0)
COLUMNS: Final = (4, 32)  # how many of the smaller blocks are shown
LINE: Final = 16.0
LABELS: Final = 8  # up to so many links, words stand on the ribbons
RUNS: Final = 160  # so many boxes in a strip are still to be told apart

Run: TypeAlias = tuple[int, int, tuple[str, ...]]
"""Address, bytes, and the colour of each of its readers."""


def draw(found: Comparison, prefill: Engine, decode: Engine) -> str:
    """The picture, as the content of an SVG file.

    Args:
        found: engines that fit each other.
        prefill: the one that is read.
        decode: the one that reads.
    """
    canvas = Canvas(WIDTH)
    top = _head(canvas, found, prefill=prefill, decode=decode)
    tokens = _shown_tokens(found.links)
    height = _row_height(prefill.layouts, decode.layouts)
    left = _Side(prefill.layouts, MARGIN, top, height)
    right = _Side(decode.layouts, RIGHT, top, height)
    for link in found.links:
        _draw_link(canvas, link, left=left, right=right)
    _draw_source(canvas, found.links, side=left, tokens=tokens)
    for rank in range(len(decode.layouts)):
        right.caption(canvas, rank)
        for head in right.heads(rank):
            for box in right.cells(rank, head, tokens):
                canvas.rect(box, _colour(rank))
    if len(found.links) <= LABELS:
        _labels(canvas, found.links, left=left, right=right)
    bottom = max(left.bottom, right.bottom) + BETWEEN
    return canvas.to_xml(_strips(canvas, found.links, bottom) + MARGIN / 2)


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _head(canvas: Canvas, found: Comparison, *, prefill: Engine, decode: Engine) -> float:
    """Title and legend. Returns where they end."""
    canvas.text((MARGIN, 42), "Who reads what from whom", size=22, look="bold")
    words = [f"prefill: {prefill.words}", f"decode: {decode.words}"]
    top = canvas.lines((MARGIN, 66), words) + 2
    entries = [(f"decode rank {rank}", _colour(rank)) for rank in range(len(decode.layouts))]
    entries = entries[: len(COLOURS)]
    if found.unread:
        entries.append(("read by nobody", NOBODY))
    for number, (words_of, fill) in enumerate(entries):
        row, column = divmod(number, int((WIDTH - 2 * MARGIN) // LEGEND_STEP))
        place = Box(MARGIN + column * LEGEND_STEP, top + row * 20 - 10, 12, 12)
        canvas.rect(place, fill)
        canvas.text((place.right + 6, place.bottom - 2), words_of)
        last = place.bottom
    canvas.text((MARGIN, last + 34), "prefill", size=16, look="bold")
    canvas.text((RIGHT, last + 34), "decode", size=16, look="bold")
    return last + 46


def _shown_tokens(links: Sequence[Link]) -> int:
    """Whole periods, with some blocks in them, but not too many."""
    period = math.lcm(*(link.figures.period for link in links))
    smallest = min(size for link in links for sizes in link.figures.entry_sizes for size in sizes)
    fewest, most = (count * smallest for count in COLUMNS)
    return min(-(-fewest // period) * period, most)


def _row_height(*engines: Sequence[CacheLayout]) -> float:
    rows = max(sum(len(_heads(layout)) for layout in layouts) for layouts in engines)
    return min(max(ROWS_HEIGHT / rows, ROW_HEIGHTS[0]), ROW_HEIGHTS[1])


def _heads(layout: CacheLayout) -> range:
    """All that a rank holds of any layer."""
    held = holding(layout).values()
    return range(min(first for first, _ in held), max(last for _, last in held))


@dataclass(frozen=True)
class _Side:
    """One engine: its ranks stand one below the other."""

    layouts: Sequence[CacheLayout]
    left: float
    top: float
    row: float  # height

    def heads(self, rank: int) -> range:
        """The rows of a rank."""
        return _heads(self.layouts[rank])

    def begin(self, rank: int) -> float:
        """Where a rank's first row is."""
        rows = sum(len(self.heads(other)) for other in range(rank))
        return self.top + CAPTION + rank * (CAPTION + BETWEEN) + rows * self.row

    @property
    def bottom(self) -> float:
        """Where the last rank ends."""
        last = len(self.layouts) - 1
        return self.begin(last) + len(self.heads(last)) * self.row

    def band(self, rank: int, heads: Heads) -> Box:
        """The rows of some heads."""
        top = self.begin(rank) + (heads[0] - self.heads(rank)[0]) * self.row
        return Box(self.left, top, SIDE, (heads[1] - heads[0]) * self.row)

    def cells(self, rank: int, head: int, tokens: int) -> Iterator[Box]:
        """One head's blocks."""
        row = self.band(rank, (head, head + 1))
        size = min(group.entry_size for group in self.layouts[rank].groups)
        for first in range(0, tokens, size):
            last = min(first + size, tokens)
            left, right = (SIDE * token / tokens for token in (first, last))
            yield Box(self.left + left, row.top, right - left - 1.5, self.row - 1.5)

    def caption(self, canvas: Canvas, rank: int) -> None:
        """Which rank, and what it holds."""
        held = holding(self.layouts[rank])
        sizes = sorted({group.entry_size for group in self.layouts[rank].groups})
        words = (
            f"rank {rank}: layers {layers_of(list(held))}, "
            f"heads {heads_of(sorted(set(held.values())))}, "
            f"blocks of {' and '.join(map(str, sizes))}"
        )
        canvas.text((self.left, self.begin(rank) - 6), words, look="soft")


def _draw_source(canvas: Canvas, links: Sequence[Link], *, side: _Side, tokens: int) -> None:
    """Prefill's blocks; a head with several readers has a stripe of each."""
    for rank in range(len(side.layouts)):
        side.caption(canvas, rank)
        for head in side.heads(rank):
            readers = sorted({link.reader for link in links if _is_read(link, rank, head)})
            fills = [_colour(reader) for reader in readers] or [NOBODY]
            for box in side.cells(rank, head, tokens):
                _stripes(canvas, box, fills)


def _stripes(canvas: Canvas, box: Box, fills: Sequence[str]) -> None:
    width = box.width / len(fills)
    for number, fill in enumerate(fills):
        canvas.rect(Box(box.left + number * width, box.top, width, box.height), fill)


def _is_read(link: Link, source: int, head: int) -> bool:
    heads = link.figures.heads
    return link.source == source and any(first <= head < last for first, last in heads)


def _draw_link(canvas: Canvas, link: Link, *, left: _Side, right: _Side) -> None:
    words = f"decode rank {link.reader} reads prefill rank {link.source}: {_words(link)}"
    for heads in link.figures.heads:
        ends = left.band(link.source, heads), right.band(link.reader, heads)
        canvas.ribbon(*ends, _colour(link.reader), title=words)


def _labels(canvas: Canvas, links: Sequence[Link], *, left: _Side, right: _Side) -> None:
    """In the middles of the ribbons, as far as they leave each other room."""
    middles = []
    for link in links:
        heads = link.figures.heads[0]
        ends = left.band(link.source, heads), right.band(link.reader, heads)
        middles.append((sum(end.top + end.height / 2 for end in ends) / len(ends), link))
    reached = 0.0
    for middle, link in sorted(middles, key=lambda item: item[0]):
        reached = max(middle + 4, reached + LINE)
        words = f"{link.source} \u2192 {link.reader}: {_words(link)}"
        place = (MARGIN + SIDE + RIGHT) / 2, reached
        canvas.text(place, words, look="middle bold", fill=_colour(link.reader))


def _words(link: Link) -> str:
    figures = link.figures
    same = all(sizes == (figures.period,) for sizes in figures.entry_sizes)
    per = "block" if same else f"{figures.period} tokens"
    runs = f"{figures.runs_per_period:,} run" + ("s" if figures.runs_per_period > 1 else "")
    return f"{runs} of {lengths_of(figures)} for each {per}"


def _strips(canvas: Canvas, links: Sequence[Link], top: float) -> float:
    """One block in the memory of the first rank of each side. Returns where they end."""
    first = links[0]
    sources = [link for link in links if link.source == first.source]
    readers = [link for link in links if link.reader == first.reader]
    for name, joined, side in (
        (f"prefill rank {first.source}", sources, 1),
        (f"decode rank {first.reader}", readers, 0),
    ):
        runs = list(_apart(_runs(joined, side)))
        canvas.text((MARGIN, top + 16), f"One block in the memory of {name}", look="bold")
        canvas.text((MARGIN + 300, top + 16), _count(runs), look="soft")
        _strip(canvas, runs[:RUNS], top + 24)
        top += 24 + STRIP + BETWEEN
    return top


def _count(runs: Sequence[Run]) -> str:
    total = human(sum(length for _, length, _ in runs))
    shown = f"; the first {RUNS} are shown" if len(runs) > RUNS else ""
    return f"{len(runs):,} piece{'s' if len(runs) > 1 else ''}, {total}{shown}"


def _runs(links: Sequence[Link], side: int) -> list[Run]:
    """Of block 0 of the first group: the rows of the plans, but for what makes them repeat."""
    found: dict[tuple[int, int], dict[str, None]] = {}
    for link in links:
        rows = (link.plan.local, link.plan.remote)[side].astype(np.int64)
        starts = np.cumsum(rows[:, 4]) - rows[:, 4]
        lanes = [lane for lane in link.plan.lanes if lane.groups == link.plan.lanes[0].groups]
        named = np.concatenate([lane.first[side] for lane in lanes])
        for address, length in rows[np.searchsorted(starts, named), :2].tolist():
            found.setdefault((address, length), {})[_colour(link.reader)] = None
    return [(*place, tuple(colours)) for place, colours in sorted(found.items())]


def _apart(runs: Sequence[Run]) -> Iterator[Run]:
    """Without what lies below another one: a block meets several of the other side's."""
    reached = 0
    for address, length, fills in runs:
        start, end = max(address, reached), address + length
        if start < end:
            yield start, end - start, fills
            reached = end


def _strip(canvas: Canvas, runs: Sequence[Run], top: float) -> None:
    """Side by side in the order of addresses, with a gap where they are apart."""
    gaps = [GAP * (a[0] + a[1] != b[0]) for a, b in itertools.pairwise(runs)]
    scale = (WIDTH - 2 * MARGIN - sum(gaps)) / sum(length for _, length, _ in runs)
    left = MARGIN
    for (_, length, fills), gap in zip(runs, [*gaps, 0.0], strict=True):
        height = STRIP / len(fills)
        for number, fill in enumerate(fills):
            box = Box(left, top + number * height, length * scale - 0.75, height)
            canvas.rect(box, fill, title=human(length))
        left += length * scale + gap
