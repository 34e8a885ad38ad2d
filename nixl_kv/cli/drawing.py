"""Draws who reads what from whom. The only file that imports matplotlib.

On the left are the prefill ranks, on the right the decode ranks; in each a row for every KV head
and a column for every block of a few tokens. A colour is a decode rank: what is read has the colour
of its reader on both sides, and a ribbon leads from one to the other. Below, one block as it lies
in the memory of each side: a box is what is read in one piece, a gap is everything between.

States are drawn where a rank keeps nothing else.

All is drawn in one coordinate system, in points from the top left corner.
"""

import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from nixl_kv.cli.comparison import Comparison, RankPair
from nixl_kv.cli.comparison_report import heads_text, layers_text, run_lengths_text
from nixl_kv.cli.engines import Engine
from nixl_kv.cli.text import num_bytes_text
from nixl_kv.geometry.layout import CacheLayout, Group
from nixl_kv.geometry.plan import ADDRESS, COUNT, LENGTH, Heads

NUM_COLOURS: Final = 10  # of matplotlib's cycle
NOBODY: Final = "#e3e7eb"
INK: Final = "#1f2933"
SOFT: Final = "#66727f"

STYLE: Final = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],  # the first comes with matplotlib
    "text.color": INK,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "nixl_kv",  # equal pictures are equal files
}

POINTS_PER_INCH: Final = 72
WIDTH: Final = 780.0
MARGIN: Final = 24.0
SIDE: Final = 225.0  # the width of one engine's blocks
RIGHT: Final = WIDTH - MARGIN - SIDE
CAPTION: Final = 14.0  # above each rank
BETWEEN: Final = 10.0
STRIP: Final = 16.0
GAP: Final = 2.2
EDGE: Final = 1.1  # between blocks

ROWS_HEIGHT: Final = 315.0
ROW_HEIGHTS: Final = (4.5, 13.5)
COLUMNS: Final = (4, 32)  # how many of the smaller blocks are shown
LABELS: Final = 8  # up to so many pairs of ranks, there are words on the ribbons
LINE: Final = 12.0
PIECES: Final = 160  # so many boxes in a strip can still be seen one by one
LEGEND_COLUMNS: Final = 7

Band: TypeAlias = tuple[float, float]
"""Top and bottom of some rows."""

Box: TypeAlias = tuple[str, float, float, float, float]
"""Colour, left, top, width, height."""

Piece: TypeAlias = tuple[int, int, tuple[str, ...]]
"""Address, bytes, and the colour of each of its readers."""


def draw(comparison: Comparison, prefill: Engine, decode: Engine) -> str:
    """The picture, as the content of an SVG file.

    Args:
        comparison: of engines that fit each other.
        prefill: the one that is read.
        decode: the one that reads.
    """
    pairs = comparison.pairs
    with style.context(["default", STYLE]):
        figure = Figure()
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH))
        axes.axis("off")
        top = _draw_head(axes, comparison, prefill=prefill, decode=decode)
        row = _row_height(prefill.layouts, decode.layouts)
        left = _Side(prefill.layouts, MARGIN, top, row)
        right = _Side(decode.layouts, RIGHT, top, row)
        _draw_ribbons(axes, pairs, left, right)
        tokens = _shown_tokens(pairs)
        left.draw(axes, tokens, lambda rank, head: _readers(pairs, rank, head))
        right.draw(axes, tokens, lambda rank, _: [rank])
        bottom = _draw_memory(axes, pairs, max(left.bottom, right.bottom) + 1.5 * BETWEEN)
        axes.set_ylim(bottom, 0)
        figure.set_size_inches(WIDTH / POINTS_PER_INCH, bottom / POINTS_PER_INCH)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return _with_titles(file.getvalue(), pairs)


def _colour(rank: int) -> str:
    return f"C{rank % NUM_COLOURS}"


def _draw_head(axes: Axes, comparison: Comparison, *, prefill: Engine, decode: Engine) -> float:
    """Title and legend. Returns where they end."""
    axes.text(MARGIN, 32, "Who reads what from whom", size=16, weight="bold")
    axes.text(MARGIN, 50, f"prefill: {prefill.words}", color=SOFT)
    axes.text(MARGIN, 64, f"decode: {decode.words}", color=SOFT)
    ranks = range(min(len(decode.layouts), NUM_COLOURS))
    entries = [Patch(color=_colour(rank), label=f"decode rank {rank}") for rank in ranks]
    if comparison.unread:
        entries.append(Patch(color=NOBODY, label="read by nobody"))
    axes.legend(
        handles=entries,
        loc="upper left",
        bbox_to_anchor=(MARGIN, 72),
        bbox_transform=axes.transData,
        ncols=LEGEND_COLUMNS,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1,
        handletextpad=0.5,
    )
    top = 96 + math.ceil(len(entries) / LEGEND_COLUMNS) * LINE
    axes.text(MARGIN, top, "prefill", size=12, weight="bold")
    axes.text(RIGHT, top, "decode", size=12, weight="bold")
    return top + 6


def _row_height(*engines: Sequence[CacheLayout]) -> float:
    rows = max(sum(len(_heads(layout)) for layout in layouts) for layouts in engines)
    return min(max(ROWS_HEIGHT / rows, ROW_HEIGHTS[0]), ROW_HEIGHTS[1])


def _heads(layout: CacheLayout) -> range:
    """All that a rank holds of any layer."""
    held = [region.heads for group in _drawn(layout) for region in group.regions]
    return range(min(first for first, _ in held), max(last for _, last in held))


def _drawn(layout: CacheLayout) -> Sequence[Group]:
    groups = [group for group in layout.groups if group.regions]
    return [group for group in groups if not group.keeps_states] or groups


def _heads_read(pair: RankPair) -> Sequence[Heads]:
    """Of KV; of states if there is none."""
    return pair.figures.heads or sorted({state.heads for state in pair.figures.state})


def _shown_tokens(pairs: Sequence[RankPair]) -> int:
    """Whole periods, with some blocks in them, but not too many."""
    period = math.lcm(*(pair.figures.period for pair in pairs))
    smallest = min(size for pair in pairs for sizes in pair.figures.entry_sizes for size in sizes)
    fewest, most = (count * smallest for count in COLUMNS)
    return min(-(-fewest // period) * period, most)


def _readers(pairs: Iterable[RankPair], prefill_rank: int, head: int) -> list[int]:
    """The decode ranks that read this head of a prefill rank."""
    return [
        pair.decode_rank
        for pair in pairs
        if pair.prefill_rank == prefill_rank
        and any(first <= head < last for first, last in _heads_read(pair))
    ]


@dataclass(frozen=True)
class _Side:
    """One engine: its ranks, one below the other."""

    layouts: Sequence[CacheLayout]
    left: float
    top: float
    row: float  # height

    def begin(self, rank: int) -> float:
        """Where a rank's first row is."""
        rows = sum(len(_heads(layout)) for layout in self.layouts[:rank])
        return self.top + CAPTION + rank * (CAPTION + BETWEEN) + rows * self.row

    @property
    def bottom(self) -> float:
        """Where the last rank ends."""
        return self.begin(len(self.layouts)) - CAPTION - BETWEEN

    def band(self, rank: int, heads: Heads) -> Band:
        """The rows of some heads."""
        top = self.begin(rank) - _heads(self.layouts[rank])[0] * self.row
        return top + heads[0] * self.row, top + heads[1] * self.row

    def draw(self, axes: Axes, tokens: int, readers: Callable[[int, int], list[int]]) -> None:
        """A caption for each rank, and its blocks; `readers` has those of a rank's head."""
        for rank, layout in enumerate(self.layouts):
            sizes = sorted({group.entry_size for group in _drawn(layout)})
            heads = {region.heads for group in _drawn(layout) for region in group.regions}
            names = [region.layer for group in layout.groups for region in group.regions]
            caption = (
                f"rank {rank}: layers {layers_text(names)}, "
                f"heads {heads_text(sorted(heads))}, "
                f"blocks of {' and '.join(map(str, sizes))}"
            )
            axes.text(self.left, self.begin(rank) - 5, caption, color=SOFT)
            edges = [SIDE * token / tokens for token in (*range(0, tokens, sizes[0]), tokens)]
            for head in _heads(layout):
                top, bottom = self.band(rank, (head, head + 1))
                colours = [_colour(reader) for reader in readers(rank, head)] or [NOBODY]
                _draw_boxes(axes, self._stripes(edges, (top, bottom - EDGE), colours))

    def _stripes(self, edges: Sequence[float], band: Band, colours: Sequence[str]) -> Iterator[Box]:
        """The blocks between these edges, with a stripe of each colour in each."""
        for begin, end in itertools.pairwise(edges):
            width = (end - begin - EDGE) / len(colours)
            for number, colour in enumerate(colours):
                left = self.left + begin + number * width
                yield colour, left, band[0], width, band[1] - band[0]


def _draw_boxes(axes: Axes, boxes: Iterable[Box]) -> None:
    """All boxes of one colour are one path."""
    paths: dict[str, list[Path]] = {}
    for colour, left, top, width, height in boxes:
        right, bottom = left + width, top + height
        corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
        paths.setdefault(colour, []).append(Path(corners, closed=True))
    for colour, of_colour in paths.items():
        _fill(axes, of_colour, colour)


def _fill(
    axes: Axes, paths: Iterable[Path], colour: str, *, alpha: float = 1, name: str | None = None
) -> None:
    path = Path.make_compound_path(*paths)
    patch = PathPatch(path, facecolor=colour, linewidth=0, alpha=alpha, clip_on=False)
    patch.set_gid(name)
    axes.add_artist(patch)


def _draw_ribbons(axes: Axes, pairs: Sequence[RankPair], left: _Side, right: _Side) -> None:
    """From what is read to where it goes; if they are few, with words in their middles."""
    begin, middle, end = MARGIN + SIDE, WIDTH / 2, RIGHT
    curve = [Path.CURVE4] * 3
    labels: list[tuple[float, RankPair]] = []
    for pair in pairs:
        ribbons, heights = [], []
        for heads in _heads_read(pair):
            top, bottom = left.band(pair.prefill_rank, heads)
            to_top, to_bottom = right.band(pair.decode_rank, heads)
            upper = [(begin, top), (middle, top), (middle, to_top), (end, to_top)]
            lower = [(end, to_bottom), (middle, to_bottom), (middle, bottom), (begin, bottom)]
            ribbons.append(Path(upper + lower, [Path.MOVETO, *curve, Path.LINETO, *curve]))
            heights.append((top + bottom + to_top + to_bottom) / 4)
        _fill(axes, ribbons, _colour(pair.decode_rank), alpha=0.28, name=_ribbon_name(pair))
        labels.append((heights[0], pair))
    if len(pairs) <= LABELS:
        _draw_labels(axes, labels)


def _ribbon_name(pair: RankPair) -> str:
    return f"prefill-{pair.prefill_rank}-decode-{pair.decode_rank}"


def _draw_labels(axes: Axes, labels: Iterable[tuple[float, RankPair]]) -> None:
    """At these heights, as far as they leave each other room."""
    bottom = 0.0
    for height, pair in sorted(labels, key=lambda label: label[0]):
        bottom = max(height, bottom + LINE)
        words = f"{pair.prefill_rank} \u2192 {pair.decode_rank}: {_runs_text(pair)}"
        axes.text(WIDTH / 2, bottom, words, weight="bold", ha="center", va="center")


def _runs_text(pair: RankPair) -> str:
    figures = pair.figures
    if not figures.runs_per_period:
        return f"{figures.state_runs:,} runs of states"
    same = all(sizes == (figures.period,) for sizes in figures.entry_sizes)
    per = "block" if same else f"{figures.period} tokens"
    runs = f"{figures.runs_per_period:,} run" + ("s" if figures.runs_per_period > 1 else "")
    return f"{runs} of {run_lengths_text(figures)} for each {per}"


def _with_titles(svg: str, pairs: Iterable[RankPair]) -> str:
    """What a pointer over a ribbon says: matplotlib knows only its name."""
    for pair in pairs:
        group = f'<g id="{_ribbon_name(pair)}">'
        words = f"decode rank {pair.decode_rank} reads prefill rank {pair.prefill_rank}"
        svg = svg.replace(group, f"{group}<title>{words}: {_runs_text(pair)}</title>")
    return svg


def _draw_memory(axes: Axes, pairs: Sequence[RankPair], top: float) -> float:
    """One block in the memory of the first rank of each side. Returns where they end."""
    prefill_rank, decode_rank = pairs[0].prefill_rank, pairs[0].decode_rank
    for name, of_rank, side in (
        (f"prefill rank {prefill_rank}", [p for p in pairs if p.prefill_rank == prefill_rank], 1),
        (f"decode rank {decode_rank}", [p for p in pairs if p.decode_rank == decode_rank], 0),
    ):
        pieces = list(_without_overlaps(_pieces(of_rank, side)))
        axes.text(MARGIN, top + 12, f"One block in the memory of {name}", weight="bold")
        axes.text(MARGIN + SIDE + 12, top + 12, _pieces_text(pieces), color=SOFT)
        _draw_boxes(axes, _strip(pieces[:PIECES], top + 18))
        top += 18 + STRIP + BETWEEN
    return top + BETWEEN


def _pieces_text(pieces: Sequence[Piece]) -> str:
    total = num_bytes_text(sum(length for _, length, _ in pieces))
    shown = f"; the first {PIECES} are shown" if len(pieces) > PIECES else ""
    return f"{len(pieces):,} piece{'s' if len(pieces) > 1 else ''}, {total}{shown}"


def _pieces(pairs: Iterable[RankPair], side: int) -> list[Piece]:
    """Of block 0 of the first drawn group: the rows of the plans, without their repetitions."""
    colours: dict[tuple[int, int], dict[str, None]] = {}
    for pair in pairs:
        rows = (pair.plan.local, pair.plan.remote)[side].astype(np.int64)
        starts = np.cumsum(rows[:, COUNT]) - rows[:, COUNT]
        groups = pair.plan.groups[side]
        drawn = sorted(pair.plan.paged_rows, key=lambda p: groups[p.groups[side]].keeps_states)
        paged = [p for p in drawn if p.groups == drawn[0].groups]
        first = np.concatenate([paged_rows.first[side] for paged_rows in paged])
        for address, length in rows[np.searchsorted(starts, first)][:, [ADDRESS, LENGTH]].tolist():
            colours.setdefault((address, length), {})[_colour(pair.decode_rank)] = None
    return [(*place, tuple(of_place)) for place, of_place in sorted(colours.items())]


def _without_overlaps(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Each byte once: where block sizes differ, a block overlaps several of the other side."""
    end = 0
    for address, length, colours in pieces:
        start, end = max(address, end), max(address + length, end)
        if start < end:
            yield start, end - start, colours


def _strip(pieces: Sequence[Piece], top: float) -> Iterator[Box]:
    """Side by side in the order of addresses, with a gap where they are apart."""
    gaps = [GAP * (a[0] + a[1] != b[0]) for a, b in itertools.pairwise(pieces)]
    scale = (WIDTH - 2 * MARGIN - sum(gaps)) / sum(length for _, length, _ in pieces)
    left = MARGIN
    for (_, length, colours), gap in zip(pieces, [*gaps, 0.0], strict=True):
        height = STRIP / len(colours)
        for number, colour in enumerate(colours):
            yield colour, left, top + number * height, length * scale - EDGE / 2, height
        left += length * scale + gap
