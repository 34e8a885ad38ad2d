"""Write the tables, the rule and the plot of docs/benchmarks/goodput-h200.json into the docs.

PYTHONPATH=scripts:tests python -m benchmarks.goodput_report

Tables go between `<!-- goodput: NAME -->` and `<!-- end -->`.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks import points
from benchmarks.__main__ import markdown
from benchmarks.plot import FOLDER, svg, text
from benchmarks.points import Key, Objective, Point, Record, Shape, Verdict
from benchmarks.shapes import REPO
from nixl_kv.cli.ratio import Load, Ratio

RECORD: Final = FOLDER / "goodput-h200.json"
PLOT: Final = FOLDER / "goodput.svg"
DOCUMENTS: Final = (REPO / "README.md", REPO / "docs/goodput.md")
BLOCK: Final = re.compile(r"(<!-- goodput: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

TTFT_MS: Final = 1000.0
OBJECTIVE: Final = Objective(TTFT_MS, 15.0)
OBJECTIVES: Final = (Objective(TTFT_MS, 10.0), OBJECTIVE, Objective(TTFT_MS, 25.0))

# The plot, in pixels.
WIDTH: Final = 760
PANEL: Final = (300, 170)
LEFT: Final = 56
TOP: Final = 74
BETWEEN: Final = (72, 70)
COLORS: Final = {
    "overlap": "#1a7f5a",
    "serial": "#7cc4a4",
    "in-tree": "#9aa3ad",
    "replicas": "#c2571a",
    "tuned": "#e8a87c",
}
NAMES: Final = {
    "overlap": "nixl_kv, overlap",
    "serial": "nixl_kv, serial",
    "in-tree": "vLLM's NixlConnector",
    "replicas": "replicas",
    "tuned": "replicas, best chunk",
}


def rewrite(document: str, record: Record) -> str:
    """Put each table between its markers."""
    return BLOCK.sub(
        lambda found: f"{found[1]}\n{TABLES[found[2]](record)}\n\n{found[3]}", document
    )


# --- tables


def verdict_table(record: Record) -> str:
    """The highest good rate of each arm, by shape and objective."""
    return markdown(
        [
            {
                "prompt/answer": Shape.parse(each.shape).shown,
                "engines": each.engines,
                "mean gap, ms": f"{each.objective.gap_ms:g}",
                "replicas": str(each.best.get("replicas", "")),
                "best chunk": f"{each.best[each.replicas]} ({chunk_of(each.replicas)})",
                "in-tree": str(each.best.get("in-tree", "")),
                "serial": str(each.best.get("serial", "")),
                "overlap": str(each.best.get("overlap", "")),
                "split?": each.answer,
            }
            for each in points.verdicts(record, OBJECTIVES)
        ]
    )


def chunk_of(name: str) -> str:
    return name.partition("-")[2] or "default"


def ratio_table(record: Record) -> str:
    """The ratio from `nixl-kv plan` where the split was good, and at the next rate."""
    lines = []
    found = points.grouped(record.runs)
    for each in points.verdicts(record, [OBJECTIVE]):
        capacity = points.capacity_of(record, each.shape)
        if capacity is None:
            continue
        shape = Shape.parse(each.shape)
        about = each.card, each.vllm, each.engines, each.shape, each.split
        gpus = {key.rate: some[0].gpus for key, some in found.items() if key[:5] == about}
        good = each.best[each.split].rate
        row: dict[str, Any] = {
            "prompt/answer": shape.shown,
            "prefill tokens/s": round(capacity.prefill_tokens),
            "answers at once": round(capacity.decode_streams),
            "measured": each.engines,
        }
        worse = min((rate for rate in gpus if rate > good), default=0.0)
        for name, rate in (("good at", good), ("not good at", worse)):
            total = rate * gpus.get(rate, 0)
            plan = Ratio(Load(total, *shape), capacity) if total else None
            row |= {
                f"{name}, a second": f"{total:g}" if total else "",
                f"plan {name}": f"{plan.prefill}:{plan.decode}" if plan else "",
            }
        lines.append(row)
    return markdown(lines)


def rule(record: Record) -> str:
    """A sentence for each shape and number of engines."""
    return "\n".join(_rules(record))


def _rules(record: Record) -> Iterator[str]:
    sentences: dict[tuple[str, str], list[Verdict]] = {}
    for each in points.verdicts(record, OBJECTIVES):
        sentences.setdefault((each.shape, each.engines), []).append(each)
    for (shape, engines), of_shape in sentences.items():
        prefill, decode = map(int, engines.split(":"))
        answers = "; ".join(
            f"{PHRASES[answer]} {', '.join(_figures(each) for each in some)}"
            for answer, some in itertools.groupby(of_shape, key=lambda each: each.answer)
        )
        yield (
            f"- **{Shape.parse(shape).shown}**, {count(prefill, 'prefill engine')} and "
            f"{count(decode, 'decode engine')}: {answers}."
        )


PHRASES: Final[Mapping[str, str]] = {
    "yes": "split if the mean gap must stay within",
    "no": "do not split if the mean gap may be",
    "level": "replicas are as good with a mean gap of",
    "neither": "neither is good at a rate measured with a mean gap of",
    "open": "the limit was not measured with a mean gap of",
}


def _figures(each: Verdict) -> str:
    split, replicas = each.best[each.split], each.best[each.replicas]
    return f"{each.objective.gap_ms:g} ms ({split} against {replicas})"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def about(record: Record) -> str:
    """The measurements, and the machine that made them."""
    requests = sum(point.requests for one in record.runs for point in one.points)
    dates = sorted({one.date for one in record.runs})
    cards = " and ".join(sorted({f"{one.card} with vLLM {one.vllm}" for one in record.runs}))
    return (
        f"{cards}, the shape of Qwen3-8B with random weights in bfloat16: {requests:,} requests in "
        f"{count(len(record.runs), 'run')}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )


TABLES: Final[Mapping[str, Callable[[Record], str]]] = {
    "about": about,
    "verdicts": verdict_table,
    "ratios": ratio_table,
    "rule": rule,
}


# --- the plot


def draw(record: Record) -> str:
    """The share of good requests by the rate: a panel for each shape and number of engines."""
    found = points.grouped(record.runs)
    panels = dict.fromkeys(key[:4] for key in found)
    lines = list(_legend())
    width, height = PANEL
    for number, panel in enumerate(panels):
        x = LEFT + number % 2 * (width + BETWEEN[0])
        y = TOP + number // 2 * (height + BETWEEN[1])
        curves = {key: some for key, some in found.items() if key[:4] == panel}
        lines += _panel(x, y, curves)
    bottom = TOP + (len(panels) + 1) // 2 * (height + BETWEEN[1])
    cards = ", ".join(dict.fromkeys(f"{key.card}, vLLM {key.vllm}" for key in found))
    note = f"First token within {TTFT_MS / 1e3:g} s and mean gap within {OBJECTIVE.gap_ms:g} ms."
    bars = "Bars: 95 % intervals below 300 requests."
    lines.append(text(16, bottom - 6, f"{note} {bars} {cards}", color="#666"))
    label = "Share of good requests by the rate per GPU: replicas, and prefill and decode engines"
    return svg(WIDTH, bottom + 8, label, lines)


def _curves(panel: Mapping[Key, Sequence[Point]]) -> dict[str, dict[float, points.Share]]:
    """The share by rate, of vLLM's default, the best chunk, and each connector."""
    shares: dict[str, dict[float, points.Share]] = {}
    for key, some in panel.items():
        shares.setdefault(key.arm, {})[key.rate] = points.share_of(some, OBJECTIVE)
    tuned = [name for name in shares if name.startswith("replicas-")]
    best = max(tuned, key=lambda name: points.best_of(shares[name]), default=None)
    curves = {name: shares[name] for name in COLORS if name in shares}
    return curves | ({"tuned": shares[best]} if best else {})


def _panel(x: int, y: int, panel: Mapping[Key, Sequence[Point]]) -> Iterator[str]:
    width, height = PANEL
    key = next(iter(panel))
    most = max(each.rate for each in panel)
    yield text(x, y - 10, f"{Shape.parse(key.shape).shown} tokens, {key.engines}", weight="bold")
    for percent in (0, 50, 90, 100):
        at = y + height * (1 - percent / 100)
        dash = ' stroke-dasharray="4 3"' if percent == 90 else ""  # noqa: PLR2004 - good
        yield (f'<line x1="{x}" x2="{x + width}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"{dash}/>')
        if percent != 90:  # noqa: PLR2004 - too near
            yield text(x - 6, at + 4, f"{percent} %", anchor="end", color="#666")
    for rate in sorted({each.rate for each in panel}):
        yield text(x + width * rate / most, y + height + 16, f"{rate:g}", anchor="middle")
    yield text(x + width, y + height + 32, "a second and GPU", anchor="end", color="#666")
    # Ours last, on top of the others; the arms' bars beside each other.
    for number, (name, shares) in enumerate(reversed(_curves(panel).items())):
        color, shift = COLORS[name], 3 * (number - 2)
        spots = [
            (x + width * rate / most + shift, y + height * (1 - share.good / share.total), share)
            for rate, share in sorted(shares.items())
        ]
        path = " ".join(f"{at:.1f},{up:.1f}" for at, up, _ in spots)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        for at, up, share in spots:
            yield f'<circle cx="{at:.1f}" cy="{up:.1f}" r="3" fill="{color}"/>'
            if share.total < points.MANY:
                low, high = (y + height * (1 - edge) for edge in points.wilson(share))
                yield (
                    f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}" '
                    f'stroke="{color}" stroke-opacity="0.4"/>'
                )


def _legend() -> Iterator[str]:
    x = 16
    for name, color in COLORS.items():
        yield f'<rect x="{x}" y="14" width="12" height="12" fill="{color}"/>'
        yield text(x + 17, 25, NAMES[name])
        x += 30 + round(7.1 * len(NAMES[name]))
    yield text(16, 46, "Requests that are good, by the requests per second and GPU", color="#222")


def main() -> None:
    record = points.read(RECORD)
    if not record.runs:
        raise SystemExit(f"{RECORD} has no runs; run scripts/bench --record {RECORD} goodput")
    PLOT.write_text(draw(record), "utf-8")
    for path in DOCUMENTS:
        path.write_text(rewrite(path.read_text("utf-8"), record), "utf-8")


if __name__ == "__main__":
    main()
