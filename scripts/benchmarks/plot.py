"""Draw docs/benchmarks/in-tree.svg, vLLM's NixlConnector beside nixl_kv, from two records.

PYTHONPATH=scripts python -m benchmarks.plot
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs/benchmarks"
PLOT: Final = FOLDER / "in-tree.svg"

NAMES: Final = {"in-tree": "vLLM's NixlConnector", "nixl-kv": "nixl_kv"}
COLORS: Final = {"in-tree": "#9aa3ad", "nixl-kv": "#1a7f5a"}
SCALE: Final = 2.1  # pixels per millisecond
PANELS: Final = (
    # record, title, column that tells rows apart, bars: (label, column), pixels per millisecond
    (
        "load-h200",
        "Under load: milliseconds until the first token (bars at a fifth of the scale)",
        None,
        (("median", "TTFT p50 ms"), ("99th percentile", "TTFT p99 ms")),
        SCALE / 5,
    ),
    (
        "load-h200",
        "Under load: decode's share of that, ms",
        None,
        (("median", "leg p50 ms"), ("99th percentile", "leg p99 ms")),
        SCALE,
    ),
    (
        "load-h200",
        "Under load: pause between two tokens, ms",
        None,
        (("99th percentile", "gap p99 ms"), ("maximum", "gap max ms")),
        SCALE,
    ),
    (
        "tp2-h200",
        "KV from one GPU to two (TP 1 to 2), ms",
        "tokens",
        (("tokens", "transfer ms"),),
        SCALE,
    ),
)
WIDTH: Final = 760
WHOLE: Final = 100  # from here on, milliseconds without decimals
LEFT: Final = 150  # of the bars
BAR: Final = 15  # pixels high


def draw() -> str:
    """The plot as SVG."""
    lines, y = list(_legend()), 48
    for name, title, key, bars, scale in PANELS:
        record = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
        lines.append(text(16, y, title, weight="bold"))
        y += 12
        for label, values in _groups(record["rows"], key, bars):
            lines.append(text(LEFT - 8, y + BAR + 4, label, anchor="end"))
            for engines, value in values.items():
                length = max(value * scale, 1)
                lines.append(
                    f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR - 1}" '
                    f'fill="{COLORS[engines]}"/>'
                )
                lines.append(text(LEFT + length + 6, y + BAR - 3, _number(value)))
                y += BAR
            y += 8
        y += 22
    lines.append(
        text(
            16,
            y - 6,
            "Shorter is better. 2 H200 of one host, the shape of Qwen3-8B, vLLM 0.32, one run each",
            color="#666",
        )
    )
    return svg(WIDTH, y + 8, "vLLM's NixlConnector and nixl_kv compared", lines)


def svg(width: int, height: int, label: str, lines: Iterable[str]) -> str:
    """A drawing in the style of ours."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" font-size="13" role="img" aria-label="{label}">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *lines, "</svg>\n"])


def _groups(
    rows: list[dict[str, Any]], key: str | None, bars: tuple[tuple[str, str], ...]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Bars that stand together: a label, and the value of each connector."""
    for of_group in dict.fromkeys(row[key] if key else None for row in rows):
        for label, column in bars:
            chosen = [row for row in rows if key is None or row[key] == of_group]
            text = label if key is None else f"{of_group:,} {label}"
            values = {row["engines"]: row[column] for row in chosen}
            yield text, {engines: values[engines] for engines in NAMES}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= WHOLE else f"{value:.3g}"


def _legend() -> Iterator[str]:
    for x, name in ((16, "in-tree"), (210, "nixl-kv")):
        yield f'<rect x="{x}" y="12" width="12" height="12" fill="{COLORS[name]}"/>'
        yield text(x + 18, 23, NAMES[name])


def text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    color: str = "#222",
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{color}">{text}</text>'
    )


if __name__ == "__main__":
    PLOT.write_text(draw(), "utf-8")
