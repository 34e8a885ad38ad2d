"""Draws bars by the millisecond, such as the spans of one trace: docs/images/trace.svg.

NIXL_KV_TRACE_PICTURE=$PWD/docs/images/trace.svg pytest -m e2e tests/e2e/test_traces.py -k router
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

Span = tuple[str, int, int, Mapping[str, int]]
"""Its label, begin and end in nanoseconds, and when each of its events happened."""
Row = tuple[str, str, Sequence[tuple[int, int]]]
"""Its label, color, and the begin and end of each bar in nanoseconds."""

WIDTH: Final = 900
LEFT: Final = 210  # of the bars
RIGHT: Final = 70
ROW: Final = 24  # pixels from one bar to the next
NS_PER_MS: Final = 1_000_000
DARK, GREY, GREEN, EVENT_COLOR = "#4c5a68", "#9aa3ad", "#1a7f5a", "#7cc4a5"
COLORS: Final = {"client": DARK, "llm_request": GREY, "nixl_kv": GREEN}


def draw(rows: Sequence[Row], title: str = "The spans of one request") -> str:
    """The first row begins at 0 ms, and covers the others. Each row shows the sum of its bars."""
    _, _, whole = rows[0]
    begin, end = whole[0][0], whole[-1][1]
    bottom = ROW * len(rows) + 8
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    lines = list(_axis((end - begin) / NS_PER_MS, scale * NS_PER_MS, bottom))
    for number, (label, color, bars) in enumerate(rows):
        y, x = ROW * number + 8, LEFT + 0.0
        lines.append(_text(LEFT - 10, y + 13, label, "end"))
        for since, until in bars:
            x, width = LEFT + (since - begin) * scale, max((until - since) * scale, 1.5)
            size = f'width="{width:.1f}" height="{ROW - 7}"'
            lines.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{color}"/>')
            x += width
        total = sum(until - since for since, until in bars) / NS_PER_MS
        lines.append(_text(x + 5, y + 13, f"{total:.1f} ms"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" '
        f'width="{WIDTH}" font-family="sans-serif" font-size="13" role="img" '
        f'aria-label="{title}">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *lines, "</svg>\n"])


def rows_of(spans: Iterable[Span]) -> Iterator[Row]:
    """A bar for each span, and one below it for each event, until the next event."""
    for label, begin, end, events in spans:
        color = next(COLORS[part] for part in COLORS if part in label)
        yield label, color, [(begin, end)]
        edges = itertools.pairwise([*events.values(), end])
        for event, (since, until) in zip(events, edges, strict=True):
            yield event, EVENT_COLOR, [(since, until)]


def _axis(length: float, scale: float, bottom: int) -> Iterator[str]:
    """A line each 1, 2 or 5 times a power of ten milliseconds, at most ten of them."""
    steps = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    step = next(step for step in steps if length / step <= 10)
    for moment in range(0, int(length) + 1, step):
        x = LEFT + moment * scale
        yield f'<path d="M{x:.1f} 4V{bottom}" stroke="#ddd"/>'
        yield _text(x, bottom + 16, f"{moment} ms" if moment else "0", "middle")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="#222">{text}</text>'
