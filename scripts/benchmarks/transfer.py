"""Time single loads between two engines without vLLM, beside the link.

Prefill is a process, and so is each rank of decode: real transfer engines, control plane and NIXL.
"load" begins when decode starts a load that prefill has granted, and ends when all ranks have
reported it. "read" is the longest read in it. "copy" is the link: each decode rank copies as many
bytes with torch, in one piece, from prefill's GPU, or within host memory with one thread. "read of
copy" is the copy's time divided by the read's. Each cell's bytes are compared before it is timed.

With --verify each path also takes loads that are compared with prefill's digest; "verify adds" is
the median of their extra time in a round. With --against, engines of another checkout take turns
with ours on the same paths, and ratios are ours to theirs. All figures are medians of the rounds.

With --first-loads, processes are new in each round, and loads are not granted before they start.
"first" is the first load from this peer, "later" the median of those after it.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from typing_extensions import Self

from benchmarks.shapes import (
    MODELS,
    REPO,
    VERIFIED,
    Cell,
    Row,
    Side,
    kv_shape,
    names,
    pair_of_numbers,
)
from harness.cluster.netns import WIRE, Namespace
from harness.local.model_layouts import ORDERS
from nixl_kv.config import Config
from nixl_kv.ids import new_claim

PROGRAMS: Final = "scripts/benchmarks/process.py", "scripts/lab/bench/transfer_engine.py"
"""The second one is that of older checkouts."""

ROLES: Final = ("prefill", "decode")
PATHS: Final = ("auto", "gather", "direct", "staged")
AGAINST: Final = "against"
COPY: Final = "copy"
WARM_UP: Final = 1
STOP_S: Final = 30.0

Sample = dict[str, Any]
"""Seconds of a "load", of its longest "read" and of "cpu", and its "num_bytes" and "num_runs".
One of the link has "load" alone."""


class Process:
    """A program that answers questions over a connection."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())],
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
        self._all_decode = self._decode = decode
        self._numbers = itertools.count()
        self._port = 0
        self.paths = paths
        self.num_bytes = [0]
        """The bytes of the last load, for each decode rank."""

    def start(self, cell: Cell) -> None:
        """Start engines for each path, and write a prompt's KV into random blocks of prefill."""
        self._decode = self._all_decode[: cell[1].tp]
        for side, processes in zip(cell, ([self._prefill], self._decode), strict=True):
            # Older checkouts read `blocks`.
            blocks = {"size": side.block_size, "kernel": side.block_size}
            shape = msgspec.to_builtins(side) | {"blocks": blocks}
            for process in processes:
                process.tell("start", placed={"cut": shape, "gpus": side.gpus}, paths=self.paths)
        for process in (self._prefill, *self._decode):
            process.answer()
        ask([self._prefill, *self._decode], "choose_blocks", tables="random")
        ask([self._prefill], "fill")

    def check(self) -> dict[str, str]:
        """Load once on each path into cleared memory; names the paths that moved wrong bytes."""
        wrong = []
        for path in self.paths:
            ask(self._decode, "clear")
            self.load(path)
            if not all(ask(self._decode, "check")):
                wrong.append(path)
        return {"fault": f"wrong bytes on path {', '.join(wrong)}"} if wrong else {}

    def load(self, path: str, *, at_once: bool = False) -> Sample:
        """Load the prompt, which prefill has granted; or at once, which includes the ask."""
        about = {"path": path, "request": f"request-{next(self._numbers)}"}
        (ticket,) = ask([self._prefill], "offer", **about)
        offered = about | {"ticket": ticket, "claim": new_claim()}
        if at_once:
            ranks = ask(self._decode, "load_at_once", **offered)
        else:
            ask(self._decode, "prepare_load", **offered)
            ranks = ask(self._decode, "load", **about)
        self.num_bytes = [one["num_bytes"] for one in ranks]
        return {
            "load": _seconds(ranks),
            "read": max(one["read"] for one in ranks),
            **{name: sum(one[name] for one in ranks) for name in ("cpu", "num_bytes", "num_runs")},
        }

    def prepare_copy(self, cell: Cell) -> None:
        """Let each decode rank copy as many bytes as its last load had from prefill's GPU."""
        gpus = itertools.cycle(cell[0].gpus or (-1,))
        for process, gpu, num_bytes in zip(self._decode, gpus, self.num_bytes, strict=False):
            process.tell("prepare_copy", gpu=gpu, num_bytes=num_bytes)
        for process in self._decode:
            process.answer()

    def copy(self) -> Sample:
        return {"load": _seconds(ask(self._decode, "copy"))}

    def read_stream(self, host: str) -> Sample:
        """Receive as many bytes as the last load had from prefill's host, in a plain stream."""
        if not self._port:
            (self._port,) = ask([self._prefill], "serve_stream")
        asked = {"host": host, "port": self._port, "num_bytes": sum(self.num_bytes)}
        return {"load": _seconds(ask(self._decode, "read_stream", **asked))}


def _seconds(ranks: Sequence[Mapping[str, float]]) -> float:
    """From the first beginning to the last end."""
    return max(one["end"] for one in ranks) - min(one["begin"] for one in ranks)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The cells, the paths and the comparisons."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(MODELS), default="qwen3-8b")
    parser.add_argument("--tokens", type=int, default=16384)
    for role, first in zip(ROLES, ("first", "last"), strict=True):
        described = f"rank n has the n-th of them, in turn; default: the {first} one"
        parser.add_argument(f"--{role}-gpus", type=int, nargs="+", metavar="N", help=described)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=["auto"], help="default: auto")
    for name, default in (("tp", "1-1 1-2 2-1"), ("blocks", "16-16 16-64 64-16")):
        pairs = [pair_of_numbers(text) for text in default.split()]
        described = f"of prefill and of decode; default: {default}"
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=pair_of_numbers,
            default=pairs,
            metavar="P-D",
            help=described,
        )
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["BHLNC", "LBHNC", "LBNHC"])
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument("--verify", action="store_true", help="also with loads that are verified")
    parser.add_argument("--staging-mib", type=int, default=Config().staging_mib)
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of nixl_kv")
    parser.add_argument("--first-loads", type=int, metavar="N", help="see above; of N new pairs")


def program_of(checkout: Path) -> Path:
    """The program of a checkout's processes.

    Raises:
        SystemExit: if it has none.
    """
    for program in PROGRAMS:
        if (checkout / program).is_file():
            return checkout.resolve() / program
    raise SystemExit(f"{checkout} has no {PROGRAMS[0]}")


def environment_of(checkout: Path, device: str, host: Namespace | None) -> dict[str, str]:
    """Variables of a process that imports nixl_kv and all else from a checkout."""
    root = checkout.resolve()
    paths = [*(str(root / part) for part in ("", "scripts", "tests")), os.getenv("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
    if host:  # hosts are one machine: UCX must not find its shared memory
        env |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": WIRE}
    elif device == "cpu":
        # UCX also connects over TCP by every interface; one that disappears would end the loads.
        env["UCX_NET_DEVICES"] = "lo"
    return env


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each cell and path."""
    if options.against:
        program_of(options.against)  # refuse it before anything starts
    kinds = ("", VERIFIED) if options.verify else ("",)
    paths = [path + kind for path in options.paths for kind in kinds]
    cells = cells_of(options)
    if options.first_loads:
        for cell, path in itertools.product(cells, paths):
            yield {"path": path, **names(cell), **first_loads(cell, path, options)}
        return
    checkouts = {"": REPO} | ({AGAINST: options.against} if options.against else {})
    running = {name: running_pair(path, cells, paths, options) for name, path in checkouts.items()}
    with contextlib.ExitStack() as stack:
        pairs = {name: stack.enter_context(pair) for name, pair in running.items()}
        for cell in cells:
            yield from rows_of(pairs, cell, options)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """All combinations, on the chosen GPUs.

    Raises:
        SystemExit: if the tokens do not fill blocks.
    """
    sizes = {size for pair in options.blocks for size in pair}
    if any(options.tokens % size for size in sizes):
        raise SystemExit(f"--tokens is {options.tokens}; allowed: multiples of {max(sizes)}")
    chosen: list[list[int]] = [[], []]
    if options.device == "cuda":
        import torch  # noqa: PLC0415 - only to count GPUs

        chosen = [
            options.prefill_gpus or [0],
            options.decode_gpus or [torch.cuda.device_count() - 1],
        ]
    cells = []
    for tp, order, blocks in itertools.product(options.tp, options.orders, options.blocks):
        prefill, decode = (
            Side(ranks, order, size, tuple(itertools.islice(itertools.cycle(gpus), ranks)))
            for ranks, size, gpus in zip(tp, blocks, chosen, strict=True)
        )
        cells.append((prefill, decode))
    return cells


@contextlib.contextmanager
def running_pair(
    path: Path,
    cells: Sequence[Cell],
    paths: Sequence[str],
    options: argparse.Namespace,
    hosts: Sequence[Namespace | None] = (None, None),
) -> Iterator[Pair]:
    """The processes of a checkout. They serve all cells, because imports take long."""
    with contextlib.ExitStack() as stack:
        sides: list[list[Process]] = []
        for side, (role, host) in enumerate(zip(ROLES, hosts, strict=True)):
            sizes = largest([cell[side] for cell in cells], options)
            spec = {
                "role": role,
                "model": kv_shape(options.shape),
                "tokens": options.tokens,
                "seed": 0,
                "num_bytes": sizes,
                "staging_mib": options.staging_mib,
                **({"host": host.wire_address} if host else {}),
            }
            env = environment_of(path, options.device, host)
            sides.append([])
            for ranks in [None] if role == "prefill" else [[rank] for rank in range(len(sizes))]:
                told = msgspec.json.encode(spec | {"ranks": ranks}).decode()
                command = [sys.executable, str(program_of(path)), told]
                process = Process(host.inside(command) if host else command, env)
                sides[side].append(stack.enter_context(process))
        ((prefill,), decode) = sides
        yield Pair(prefill, decode, paths)


def largest(sides: Sequence[Side], options: argparse.Namespace) -> list[int]:
    """For each rank, bytes that are enough for its cache in all cells."""
    every = [side.layouts(kv_shape(options.shape), options.tokens, "DRAM") for side in sides]
    spans = [layout.spans for layouts in every for layout in layouts]
    most = max(each[-1].address + each[-1].length - each[0].address for each in spans)
    return [most] * max(side.tp for side in sides)


def first_loads(cell: Cell, path: str, options: argparse.Namespace) -> dict[str, float]:
    """Medians, and the most that the first load took longer."""
    first, later = [], []
    for _ in range(options.first_loads):
        with running_pair(REPO, [cell], [path], options) as pair:
            pair.start(cell)
            loads = [pair.load(path, at_once=True)["load"] for _ in range(1 + options.repeat)]
        first.append(loads[0])
        later.append(statistics.median(loads[1:]))
    added = [one - other for one, other in zip(first, later, strict=True)]
    medians = {"first": first, "later": later, "added": added}
    row = {f"{name} ms": statistics.median(times) * 1e3 for name, times in medians.items()}
    return row | {"most added ms": max(added) * 1e3}


def rows_of(pairs: Mapping[str, Pair], cell: Cell, options: argparse.Namespace) -> Iterator[Row]:
    """Time all paths of all pairs in turn."""
    for pair in pairs.values():
        pair.start(cell)
    faults = {name: pair.check() for name, pair in pairs.items()}
    ours = pairs[""]
    ours.prepare_copy(cell)
    ways: dict[str, Callable[[], Sample]] = {
        f"{name} {path}".strip(): partial(pair.load, path)
        for name, pair in pairs.items()
        for path in pair.paths
    }
    samples = rounds(ways | {COPY: ours.copy}, options.repeat)
    for name in ways:
        staging = {"staging MiB": options.staging_mib} if "staged" in name else {}
        fault = faults[AGAINST if name.startswith(AGAINST) else ""]
        yield {"path": name, **names(cell), **staging, **figures(samples, name), **fault}


def rounds(ways: Mapping[str, Callable[[], Sample]], count: int) -> dict[str, list[Sample]]:
    """Samples of each way in turn, whose order alternates. The first round does not count."""
    samples: dict[str, list[Sample]] = {way: [] for way in ways}
    for number in range(WARM_UP + count):
        for way in sorted(ways, reverse=bool(number % 2)):
            sample = ways[way]()
            if number >= WARM_UP:
                samples[way].append(sample)
    return samples


def figures(samples: Mapping[str, Sequence[Sample]], name: str) -> dict[str, str | int | float]:
    """Medians of one way, and of the rounds' ratios to other ways."""
    ours, copies = samples[name], [sample["load"] for sample in samples[COPY]]
    times = {one: [sample[one] for sample in ours] for one in ("load", "read", "cpu")}
    medians = {f"{one} ms": statistics.median(times[one]) * 1e3 for one in times}
    num_bytes = ours[0]["num_bytes"]
    row: dict[str, str | int | float] = {
        "rounds": len(ours),
        "MiB": num_bytes / 2**20,
        "runs": ours[0]["num_runs"],
        **medians,
        "GB/s": num_bytes / medians["read ms"] / 1e6,
        "copy GB/s": num_bytes / statistics.median(copies) / 1e9,
        "read of copy": share(copies, times["read"]),
        "load of copy": share(copies, times["load"]),
    }
    if name.endswith(VERIFIED):
        plain = [sample["load"] for sample in samples[name.removesuffix(VERIFIED)]]
        added = [more - less for more, less in zip(times["load"], plain, strict=True)]
        row["verify adds ms"] = statistics.median(added) * 1e3
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
