"""Time single loads between two engines without vLLM, beside the link.

Prefill is a process, and so is each rank of decode: real transfer engines, control plane and NIXL.
"load" begins when decode starts a load that prefill has granted, and ends when all ranks have
reported it. "read" is the longest read in it. "bulk" is the link: the same bytes over the same
transport, in one piece from each prefill rank. "read of bulk" is the time of bulk divided by that
of the read: 1 is the link's speed. "in-tree" reads the same pieces with agents that have the
settings of vLLM's own connector. Each cell's bytes are compared before it is timed.

With --verify each path also takes loads that are compared with prefill's digest; "verify adds" is
the median of their extra time in a round. With --against, engines of another checkout take turns
with ours on the same paths, and ratios are ours to theirs. All figures are medians of the rounds.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from typing_extensions import Self

from harness.local.model_layouts import ORDERS
from lab.bench.cells import ROLES, VERIFIED, Cell, Cut, pair_of_numbers
from lab.bench.models import MODELS, kv_shape
from lab.bench.record import REPO
from lab.results import Figures, verdict_of
from nixl_kv.config import Config
from nixl_kv.ids import new_claim

PROGRAM: Final = Path("scripts/lab/bench/transfer_engine.py")
PATHS: Final = ("auto", "gather", "direct", "staged")
AGAINST: Final = "against"
BULK: Final = "bulk"
IN_TREE: Final = "in-tree"
WARM_UP: Final = 1
FEWEST: Final = 3
"""Rounds that have a median."""

STOP_S: Final = 30.0

Sample = dict[str, Any]
"""A load's "load", "read" and "cpu" in seconds, "num_bytes" and "num_runs"; a raw read's "read"."""


class Process:
    """A `transfer_engine` of a checkout."""

    def __init__(self, program: Path, env: Mapping[str, str], spec: Mapping[str, Any]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        told = msgspec.json.encode(spec).decode()
        self._process = subprocess.Popen(
            [sys.executable, str(program), told, str(theirs.fileno())],
            env=os.environ | env,
            pass_fds=[theirs.fileno()],
            stdout=sys.stderr,
        )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The process ends with its connection."""
        self._connection.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tell(self, question: str, **arguments: object) -> None:
        """Ask without waiting; `answer` must follow."""
        with contextlib.suppress(OSError):  # `answer` finds that the process has ended
            self._connection.send_bytes(msgspec.json.encode({question: arguments}))

    def answer(self) -> Any:
        """Wait for the answer.

        Raises:
            RuntimeError: if the process has ended.
        """
        try:
            return msgspec.json.decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RuntimeError("an engine has ended; stderr says why") from error


def ask(processes: Iterable[Process], question: str, **arguments: object) -> list[Any]:
    """Ask all at the same time; their answers."""
    asked = list(processes)
    for process in asked:
        process.tell(question, **arguments)
    return [process.answer() for process in asked]


class Pair:
    """The engines of one checkout: prefill's process, and one for each rank of decode."""

    def __init__(self, prefill: Process, decode: Sequence[Process], paths: Sequence[str]) -> None:
        self._prefill = prefill
        self._all_decode = decode
        self._decode = decode
        self._numbers = itertools.count()
        self.paths = paths

    def start(self, cell: Cell) -> None:
        """Start engines for each path, and write a prompt's KV into random blocks of prefill."""
        ranks = cell.cuts[1].tp
        self._decode = self._all_decode[:ranks]
        ask(self._all_decode[ranks:], "stop")
        for side, processes in enumerate(([self._prefill], self._decode)):
            for process in processes:
                process.tell("start", placed=cell.placed(side), paths=self.paths)
        for process in (self._prefill, *self._decode):
            process.answer()
        ask([self._prefill, *self._decode], "choose_blocks", tables="random")
        ask([self._prefill], "fill")

    def check(self) -> str:
        """Load once on each path into cleared memory; names the paths that moved wrong bytes."""
        wrong = []
        for path in self.paths:
            ask(self._decode, "clear")
            self.load(path)
            if not all(ask(self._decode, "check")):
                wrong.append(path)
        return f"wrong bytes on path {', '.join(wrong)}" if wrong else ""

    def load(self, path: str) -> Sample:
        """Load the prompt, which prefill has granted."""
        what = self._offer(path)
        ask(self._decode, "prepare_load", **what)
        ranks = ask(self._decode, "load", path=path, request=what["request"])
        return {
            "load": _seconds((one["begin"], one["end"]) for one in ranks),
            "read": max(one["read"] for one in ranks),
            **{name: sum(one[name] for one in ranks) for name in ("cpu", "num_bytes", "num_runs")},
        }

    def load_at_once(self, path: str) -> tuple[float, list[dict[str, float]]]:
        """Load a request that arrives with its blocks: seconds, and the parts on each rank."""
        what = self._offer(path)
        seconds = _seconds(ask(self._decode, "load_at_once", **what))
        return seconds, ask(self._decode, "parts", path=path, request=what["request"])

    def prepare_raw(self, kind: str, cell: Cell) -> None:
        """Connect agents without engines: see `transfer_engine`."""
        (sources,) = ask([self._prefill], "serve_raw", kind=kind)
        ask(self._decode, "prepare_raw", kind=kind, sources=sources, prefill=cell.placed(0))

    def read_raw(self, kind: str) -> Sample:
        """Read the prompt's bytes without engines."""
        return {"read": _seconds(ask(self._decode, "read_raw", kind=kind))}

    def end_raw(self, kind: str) -> None:
        """End these agents."""
        ask([*self._decode, self._prefill], "end_raw", kind=kind)

    def _offer(self, path: str) -> dict[str, Any]:
        what = {"path": path, "request": f"request-{next(self._numbers)}"}
        (ticket,) = ask([self._prefill], "offer", **what)
        return what | {"ticket": ticket, "claim": new_claim()}


def _seconds(times: Iterable[Sequence[float]]) -> float:
    """From the first beginning to the last end."""
    begins, ends = zip(*times, strict=True)
    return float(max(ends) - min(begins))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The cells, the paths and the comparisons."""
    add_place_options(parser, shape="qwen3-8b", tokens=16384)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=["auto"], help="default: auto")
    parser.add_argument(
        "--tp",
        nargs="+",
        type=pair_of_numbers,
        default=[(1, 1), (1, 2), (2, 1)],
        metavar="P-D",
        help="ranks of prefill and decode; default: 1-1 1-2 2-1",
    )
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["BHLNC", "LBHNC", "LBNHC"])
    parser.add_argument(
        "--blocks",
        nargs="+",
        type=pair_of_numbers,
        default=[(16, 16), (16, 64), (64, 16)],
        metavar="P-D",
        help="block sizes; default: 16-16 16-64 64-16",
    )
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument(
        "--row-seconds",
        type=float,
        default=4.0,
        help=f"after them a row has no more than {FEWEST} rounds; default: 4",
    )
    parser.add_argument("--in-tree", action="store_true", help="see above; after the rounds")
    parser.add_argument("--verify", action="store_true", help="also with loads that are verified")
    parser.add_argument("--staging-mib", type=int, default=Config().staging_mib)
    parser.add_argument("--against", type=checkout, metavar="DIR", help="a checkout of nixl_kv")


def add_place_options(parser: argparse.ArgumentParser, *, shape: str, tokens: int) -> None:
    """The model, and where its caches are."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(MODELS), default=shape)
    parser.add_argument("--tokens", type=int, default=tokens)
    for role, default in zip(ROLES, ("first", "last"), strict=True):
        described = f"rank n has the n-th of them, in turn; default: the {default} one"
        parser.add_argument(f"--{role}-gpus", type=int, nargs="+", metavar="N", help=described)


def checkout(text: str) -> Path:
    """A folder with nixl_kv and its benchmarks.

    Raises:
        argparse.ArgumentTypeError: if they are missing.
    """
    path = Path(text).resolve()
    if not (path / PROGRAM).is_file():
        raise argparse.ArgumentTypeError(f"{path} has no {PROGRAM}")
    return path


def environment_of(path: Path) -> dict[str, str]:
    """Variables with which processes import nixl_kv and `lab` from this checkout.

    Raises:
        RuntimeError: if they do not.
    """
    inherited = os.environ.get("PYTHONPATH")
    paths = [
        str(path),
        str(path / "scripts"),
        str(path / "tests"),
        *([inherited] if inherited else []),
    ]
    env = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "import nixl_kv; print(nixl_kv.__file__)"]
    imported = subprocess.check_output(command, env=os.environ | env, cwd="/", text=True).strip()
    if not Path(imported).is_relative_to(path):
        raise RuntimeError(f"nixl_kv is imported from {imported}, not from {path}")
    return env


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """A row for each cell and path."""
    sizes = {size for pair in options.blocks for size in pair}
    if any(options.tokens % size for size in sizes):
        raise SystemExit(f"--tokens is {options.tokens}; allowed: multiples of {max(sizes)}")
    every = itertools.product(options.tp, options.orders, options.blocks)
    measured = [cell_of(tp, order, blocks, options) for tp, order, blocks in every]
    kinds = ("", VERIFIED) if options.verify else ("",)
    paths = [path + kind for path in options.paths for kind in kinds]
    with contextlib.ExitStack() as stack:
        pairs = {"": stack.enter_context(running_pair(REPO, measured, paths, options))}
        if options.against:
            theirs = running_pair(options.against, measured, paths, options)
            pairs[AGAINST] = stack.enter_context(theirs)
        for cell in measured:
            yield from rows_of(pairs, cell, options)


def cell_of(
    tp: tuple[int, int], order: str, blocks: tuple[int, int], options: argparse.Namespace
) -> Cell:
    """A cell on the chosen GPUs."""
    gpus: list[tuple[int, ...]] = [(), ()]
    if options.device == "cuda":
        import torch  # noqa: PLC0415 - only to count GPUs

        chosen = options.prefill_gpus or [0], options.decode_gpus or [torch.cuda.device_count() - 1]
        gpus = [
            tuple(itertools.islice(itertools.cycle(some), ranks))
            for some, ranks in zip(chosen, tp, strict=True)
        ]
    prefill, decode = (Cut(n, order, size) for n, size in zip(tp, blocks, strict=True))
    return Cell((prefill, decode), (gpus[0], gpus[1]))


@contextlib.contextmanager
def running_pair(
    path: Path, measured: Sequence[Cell], paths: Sequence[str], options: argparse.Namespace
) -> Iterator[Pair]:
    """The processes of a checkout. They serve all cells, because imports take long."""
    model, env = kv_shape(options.shape), environment_of(path)
    if options.device == "cpu":
        # UCX also connects over TCP by every interface; one that disappears would end the loads.
        env["UCX_NET_DEVICES"] = "lo"
    with contextlib.ExitStack() as stack:
        sides: list[list[Process]] = []
        for side, role in enumerate(ROLES):
            sizes = largest([cell.cuts[side] for cell in measured], options)
            each = [None] if role == "prefill" else [[rank] for rank in range(len(sizes))]
            spec = {
                "role": role,
                "model": model,
                "tokens": options.tokens,
                "seed": 0,
                "num_bytes": sizes,
                "staging_mib": getattr(options, "staging_mib", Config().staging_mib),
            }
            processes = [Process(path / PROGRAM, env, spec | {"ranks": ranks}) for ranks in each]
            sides.append([stack.enter_context(process) for process in processes])
        ((prefill,), decode) = sides
        yield Pair(prefill, decode, paths)


def largest(cuts: Sequence[Cut], options: argparse.Namespace) -> list[int]:
    """For each rank, the bytes of its largest cache."""
    sizes: dict[int, int] = {}
    for cut in cuts:
        layouts = cut.layouts(kv_shape(options.shape), options.tokens, "DRAM")
        for rank, layout in enumerate(layouts):
            end = max(span.address + span.length for span in layout.spans)
            sizes[rank] = max(sizes.get(rank, 0), end - layout.spans[0].address)
    return list(sizes.values())


def rows_of(
    pairs: Mapping[str, Pair], cell: Cell, options: argparse.Namespace
) -> Iterator[Figures]:
    """Time all paths of all pairs in turn."""
    ours = pairs[""]
    for pair in pairs.values():
        pair.start(cell)
    wrong = {name: pair.check() for name, pair in pairs.items()}
    ours.prepare_raw(BULK, cell)
    ways: dict[str, Callable[[], Sample]] = {
        f"{name} {path}".strip(): partial(pair.load, path)
        for name, pair in pairs.items()
        for path in pair.paths
    }
    raw = {BULK: partial(ours.read_raw, BULK)}
    samples = rounds(ways | raw, options.repeat, options.row_seconds)
    if options.in_tree:
        ours.prepare_raw(IN_TREE, cell)
        in_tree = {IN_TREE: partial(ours.read_raw, IN_TREE)}
        samples |= rounds(in_tree, options.repeat, options.row_seconds)
        ours.end_raw(IN_TREE)
    for name in ways:
        about: dict[str, str | int | float] = {"path": name, **cell.names}
        if "staged" in name:
            about["staging MiB"] = options.staging_mib
        verdict = verdict_of(wrong[AGAINST if name.startswith(AGAINST) else ""], good="same bytes")
        yield Figures(about | figures(samples, name), verdict)


def rounds(
    ways: Mapping[str, Callable[[], Sample]], count: int, seconds: float
) -> dict[str, list[Sample]]:
    """Samples of each way in turn, whose order alternates. The first round does not count."""
    samples: dict[str, list[Sample]] = {way: [] for way in ways}
    end = time.monotonic() + seconds
    for number in range(WARM_UP + count):
        if number >= WARM_UP + FEWEST and time.monotonic() > end:
            break
        for way in sorted(ways, reverse=bool(number % 2)):
            sample = ways[way]()
            if number >= WARM_UP:
                samples[way].append(sample)
    return samples


def figures(samples: Mapping[str, Sequence[Sample]], name: str) -> dict[str, str | int | float]:
    """Medians of one way, and of the rounds' ratios to other ways."""
    ours = samples[name]
    times = {one: [sample[one] for sample in ours] for one in ("load", "read", "cpu")}
    medians = {f"{one} ms": statistics.median(times[one]) * 1e3 for one in times}
    num_bytes = ours[0]["num_bytes"]
    row: dict[str, str | int | float] = {
        "rounds": len(ours),
        "MiB": num_bytes / 2**20,
        "runs": ours[0]["num_runs"],
        **medians,
        "GB/s": num_bytes / medians["read ms"] / 1e6,
    }
    for kind in (BULK, IN_TREE):
        if kind in samples:
            seconds = statistics.median(sample["read"] for sample in samples[kind])
            row[f"{kind} GB/s"] = num_bytes / seconds / 1e9
    bulk = [sample["read"] for sample in samples[BULK]]
    row["read of bulk"] = share(bulk, times["read"])
    row["load of bulk"] = share(bulk, times["load"])
    if name.endswith(VERIFIED):
        plain = samples[name.removesuffix(VERIFIED)]
        pairs = zip(times["load"], (sample["load"] for sample in plain), strict=True)
        row["verify adds ms"] = statistics.median(more - less for more, less in pairs) * 1e3
    if theirs := samples.get(f"{AGAINST} {name}"):
        for one, its_times in times.items():
            row[f"{one} ratio"] = ratio(its_times, [sample[one] for sample in theirs])
    return row


def share(ceiling: Sequence[float], ours: Sequence[float]) -> float:
    """The share of the ceiling's speed that ours reaches: the median of the rounds."""
    return statistics.median(best / one for best, one in zip(ceiling, ours, strict=True))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Below 1 if ours are smaller: the median of the rounds, and the middle half of them."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f} to {high:.2f})"
