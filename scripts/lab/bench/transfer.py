"""How fast do loads move between two engines, without vLLM, and how near is that to the link?

Prefill is a process, and each rank of decode one, on this host or on its GPUs: the real transfer
engines, control plane and NIXL. "load" is from the command that starts a
load, which prefill has granted by then, until all ranks have reported it; "read" is the longest
read in it. "bulk" is the ceiling, measured in the same rounds: the same bytes over the same
transport, in one piece from each rank that is read; on GPUs, "copy" is torch's copy of them.
"read of bulk" is the time of bulk divided by that of the read: 1 is the link's speed. Before a
cell is timed, its bytes are compared.

With --verify each path is also taken by loads that are compared with prefill's bytes: "verify adds"
is the median of what that added to "load" in a round.

With --against, engines of another checkout run beside ours and do the same. Ratios are ours to
theirs. All are medians of each round's.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
from typing_extensions import Self

from lab.bench.checkouts import AGAINST, REPO, checkout, environment_of
from lab.bench.models import MODELS
from lab.bench.timing import FEWEST, ratio, share
from lab.bench.transfer_cells import (
    ROLES,
    TABLES,
    VERIFIED,
    Cell,
    cells,
    gpus_of,
    parse_blocks,
    parse_tp,
    shares,
)
from lab.local.model_layouts import ORDERS
from lab.results import Figures, Results, verdict_of
from nixl_kv.config import Config
from nixl_kv.ids import new_claim

PROGRAM: Final = Path("scripts/lab/bench/transfer_engine.py")
PATHS: Final = ("auto", "gather", "direct", "staged")
WARM_UP: Final = 1
STOP_S: Final = 30.0
BULK: Final = "bulk"
COPY: Final = "copy"
IN_TREE: Final = "in-tree agent"

Sample = dict[str, Any]
"""Of a load "load", "read" and "cpu" in seconds, "num_bytes" and "num_runs"; of ceilings "read"."""


class Process:
    """A program that answers questions, see `transfer_engine`."""

    def __init__(self, program: Path, env: Mapping[str, str], spec: Mapping[str, Any]) -> None:
        """Start it."""
        self._connection, theirs = multiprocessing.Pipe()
        command = [
            sys.executable,
            str(program),
            msgspec.json.encode(spec).decode(),
            str(theirs.fileno()),
        ]
        self._process = subprocess.Popen(
            command, env=os.environ | env, pass_fds=[theirs.fileno()], stdout=sys.stderr
        )
        theirs.close()

    def __enter__(self) -> Self:
        """At the end of the block it ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """It ends with its connection."""
        self._connection.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, question: str, **arguments: object) -> Any:
        """Wait for the answer.

        Raises:
            RuntimeError: if it has ended.
        """
        self.tell(question, **arguments)
        return self.answer()

    def tell(self, question: str, **arguments: object) -> None:
        """Ask, and go on; then `answer` has to follow.

        Raises:
            RuntimeError: if it has ended.
        """
        try:
            self._connection.send_bytes(msgspec.json.encode({question: arguments}))
        except OSError as error:
            raise RuntimeError("an engine has ended; stderr says why") from error

    def answer(self) -> Any:
        """Wait for the answer to what was told.

        Raises:
            RuntimeError: if it has ended.
        """
        try:
            return msgspec.json.decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RuntimeError("an engine has ended; stderr says why") from error


class Pair:
    """The engines of one checkout: prefill's process, and one for each rank of decode."""

    def __init__(self, prefill: Process, decode: Sequence[Process], paths: Sequence[str]) -> None:
        self._prefill = prefill
        self._all_decode = decode
        self._decode = decode
        self._numbers = itertools.count()
        self.paths = paths

    def start(self, cell: Cell, gpus: Mapping[str, Sequence[int]]) -> None:
        """Start engines for each path."""
        self._decode = self._all_decode[: cell.decode.tp]
        for process in self._all_decode[cell.decode.tp :]:
            process.ask("stop")
        cuts = zip(ROLES, (cell.prefill, cell.decode), ([self._prefill], self._decode), strict=True)
        for role, cut, processes in cuts:
            placed = {"cut": asdict(cut), "gpus": gpus[role]}
            for process in processes:
                process.tell("start", placed=placed, paths=self.paths)
        for process in (self._prefill, *self._decode):
            process.answer()

    def choose_blocks(self, tables: str) -> None:
        """From now on prompts are in blocks at random, or in a row."""
        for process in (self._prefill, *self._decode):
            process.ask("choose_blocks", tables=tables)
        self._prefill.ask("fill")

    def check(self) -> str:
        """Load once on each path into cleared memory; names the paths that moved wrong bytes."""
        wrong = []
        for path in self.paths:
            self._ask_decode("clear")
            self.load(path)
            if not all(self._ask_decode("check")):
                wrong.append(path)
        return f"wrong bytes on path {', '.join(wrong)}" if wrong else ""

    def load(self, path: str) -> Sample:
        """Load the prompt."""
        what = {"path": path, "request": f"request-{next(self._numbers)}"}
        ticket = self._prefill.ask("offer", **what)
        self._ask_decode("prepare_load", ticket=ticket, claim=new_claim(), **what)
        ranks = self._ask_decode("load", **what)
        return {
            "load": _seconds((one["begin"], one["end"]) for one in ranks),
            "read": max(one["read"] for one in ranks),
            **{name: sum(one[name] for one in ranks) for name in ("cpu", "num_bytes", "num_runs")},
        }

    def read_bulk(self, parts: Sequence[Mapping[str, int]]) -> Sample:
        """The same bytes in one piece from each rank."""
        self._ask_decode("prepare_bulk", sources=self._prefill.ask("serve_bulk"), shares=parts)
        return {"read": _seconds(self._ask_decode("read_bulk"))}

    @contextlib.contextmanager
    def in_tree(
        self, cell: Cell, gpus: Mapping[str, Sequence[int]], tables: str
    ) -> Iterator[Callable[[], Sample]]:
        """What reads with agents as vLLM's own connector makes them; they end with the block.

        Decode has one rank.
        """
        (decode,) = self._decode
        sources = self._prefill.ask("start_in_tree")
        placed = {"cut": asdict(cell.prefill), "gpus": gpus["prefill"]}
        decode.ask("start_in_tree", sources=sources, prefill=placed, tables=tables)
        try:
            yield lambda: {"read": decode.ask("read_in_tree")}
        finally:
            for process in (decode, self._prefill):
                process.ask("stop_in_tree")

    def copy(self, gpus: Sequence[int], parts: Sequence[Mapping[str, int]]) -> Sample:
        """The same bytes as torch copies them."""
        return {"read": _seconds(self._ask_decode("copy", gpus=gpus, shares=parts))}

    def _ask_decode(self, question: str, **arguments: object) -> list[Any]:
        """Ask all ranks at the same time; their answers."""
        for process in self._decode:
            process.tell(question, **arguments)
        return [process.answer() for process in self._decode]


def _seconds(times: Iterable[Sequence[float]]) -> float:
    """From the first beginning to the last end."""
    begins, ends = zip(*times, strict=True)
    return float(max(ends) - min(begins))


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is loaded, where, and whom to compare with."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(MODELS), default="qwen3-8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=["auto"], help="default: auto")
    parser.add_argument(
        "--tp",
        nargs="+",
        type=parse_tp,
        default=[(1, 1), (1, 2), (2, 1)],
        metavar="P-D",
        help="ranks of prefill and decode; default: 1-1 1-2 2-1",
    )
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["BHLNC", "LBHNC", "LBNHC"])
    parser.add_argument(
        "--blocks",
        nargs="+",
        type=parse_blocks,
        default=[parse_blocks(text) for text in ("16-16", "16-64", "64-16", "128/64-128/64")],
        metavar="P-D",
        help="block sizes; 128/64 has kernel blocks of 64. "
        "Default: 16-16 16-64 64-16 128/64-128/64, the last one where the order allows it",
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    for role in ROLES:
        parser.add_argument(
            f"--{role}-gpus",
            type=int,
            nargs="+",
            metavar="N",
            help="rank n has the n-th of them, in turn; default: prefill the first GPUs, "
            "decode the others, both the only one",
        )
    parser.add_argument("--repeat", type=int, default=11, help="rounds, 2 or more")
    parser.add_argument(
        "--row-seconds",
        type=float,
        default=4.0,
        help=f"after them a row has no more than {FEWEST} rounds; default: 4",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--beside-in-tree-agent",
        action="store_true",
        help="also read with NIXL agents as vLLM's own connector makes them, after the rounds: "
        "their threads spin for as long as they live. Where decode has one rank",
    )
    parser.add_argument("--verify", action="store_true", help="also with loads that are verified")
    parser.add_argument(
        "--staging-mib", type=int, metavar="N", default=Config().staging_mib, help="default: 256"
    )
    parser.add_argument(
        "--against",
        type=checkout,
        metavar="DIR",
        help="a checkout of nixl_kv to compare with, whose engines answer the same questions",
    )


def run(options: argparse.Namespace) -> int:
    """A row for each cell, kind of block tables, and path; 0 only if all bytes were right."""
    measured = list(cells(options.tp, options.orders, options.blocks))
    sizes = {
        blocks.size for cell in measured for blocks in (cell.prefill.blocks, cell.decode.blocks)
    }
    uneven = [size for size in sizes if options.tokens % size]
    if uneven:
        raise SystemExit(f"--tokens is {options.tokens}; allowed: multiples of {max(uneven)}")
    title = (
        f"{options.shape} on {options.device}, {options.tokens:,} tokens, "
        f"medians of {options.repeat} or fewer"
    )
    results = Results(title, "rows are good", options.json)
    kinds = ("", VERIFIED) if options.verify else ("",)
    paths = [path + kind for path in options.paths for kind in kinds]
    with contextlib.ExitStack() as stack:
        pairs = {"": stack.enter_context(running_pair(REPO, measured, paths, options))}
        if options.against:
            theirs = running_pair(options.against, measured, ["auto"], options)
            pairs[AGAINST] = stack.enter_context(theirs)
        for cell in measured:
            for row in measure(pairs, cell, options):
                results.add(row)
    num_paths = sum(len(pair.paths) for pair in pairs.values())
    return results.print(len(measured) * len(options.tables) * num_paths)


@contextlib.contextmanager
def running_pair(
    path: Path, measured: Sequence[Cell], paths: Sequence[str], options: argparse.Namespace
) -> Iterator[Pair]:
    """The processes of a checkout, which serve all cells: to import and to connect takes long."""
    model, env = MODELS[options.shape], environment_of(path)
    if options.device == "cpu":
        # UCX also connects over TCP, by every interface there is: one that goes ends the loads.
        env["UCX_NET_DEVICES"] = "lo"

    def process(role: str, ranks: Sequence[int] | None = None) -> Process:
        spec = {
            "role": role,
            "model": model,
            "tokens": options.tokens,
            "seed": options.seed,
            "num_bytes": largest(measured, role, options),
            "ranks": ranks,
            "staging_mib": options.staging_mib,
        }
        return Process(path / PROGRAM, env, spec)

    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(process("prefill"))
        ranks = range(max(cell.decode.tp for cell in measured))
        decode = [stack.enter_context(process("decode", [rank])) for rank in ranks]
        yield Pair(prefill, decode, paths)


def largest(measured: Sequence[Cell], role: str, options: argparse.Namespace) -> list[int]:
    """For each rank, the bytes of its cache in the cell where it is largest."""
    sizes: dict[int, int] = {}
    for cell in measured:
        cut = cell.prefill if role == "prefill" else cell.decode
        layouts = cut.layouts(MODELS[options.shape], options.tokens, "DRAM")
        for rank, layout in enumerate(layouts):
            end = max(span.address + span.length for span in layout.spans)
            sizes[rank] = max(sizes.get(rank, 0), end - layout.spans[0].address)
    return [sizes[rank] for rank in sorted(sizes)]


def measure(
    pairs: Mapping[str, Pair], cell: Cell, options: argparse.Namespace
) -> Iterator[Figures]:
    """Rows of one cell: rounds in which all are timed in turn; who is first changes."""
    gpus = place(cell, options)
    parts = [asdict(part) for part in shares(cell, MODELS[options.shape], options.tokens)]
    for pair in pairs.values():
        pair.start(cell, gpus)
    ways: dict[str, Any] = {
        name or path: (lambda pair=pair, path=path: pair.load(path))
        for name, pair in pairs.items()
        for path in pair.paths
    }
    contenders = list(ways)
    ways[BULK] = lambda: pairs[""].read_bulk(parts)
    if gpus["prefill"]:
        ways[COPY] = lambda: pairs[""].copy(gpus["prefill"], parts)
    for tables in options.tables:
        for pair in pairs.values():
            pair.choose_blocks(tables)
        wrong = {name: pair.check() for name, pair in pairs.items()}
        samples = rounds(ways, options.repeat, options.row_seconds)
        if options.beside_in_tree_agent and cell.decode.tp == 1:
            with pairs[""].in_tree(cell, gpus, tables) as read:
                samples |= rounds({IN_TREE: read}, options.repeat, options.row_seconds)
        for name in contenders:
            about = {"path": name, **cell.names, "tables": tables, "GPUs": in_words(gpus)}
            verdict = verdict_of(wrong[AGAINST if name == AGAINST else ""], good="same bytes")
            yield Figures(about | figures(samples, name), verdict)


def rounds(
    ways: Mapping[str, Callable[[], Sample]], count: int, seconds: float
) -> dict[str, list[Sample]]:
    """Samples of each way in turn; who is first changes. The first round does not count.

    After so many seconds there are no more rounds than a median needs.
    """
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


def place(cell: Cell, options: argparse.Namespace) -> dict[str, list[int]]:
    """The GPU of each rank; none on the host."""
    if options.device == "cpu":
        return {role: [] for role in ROLES}
    import torch  # noqa: PLC0415 - only to count GPUs

    tp = cell.prefill.tp, cell.decode.tp
    placed = gpus_of(tp, torch.cuda.device_count())
    for role, ranks in zip(ROLES, tp, strict=True):
        given = getattr(options, f"{role}_gpus")
        if given:
            placed[role] = [given[rank % len(given)] for rank in range(ranks)]
    return placed


def in_words(gpus: Mapping[str, Sequence[int]]) -> str:
    """Of prefill's ranks, and of decode's."""
    if not gpus["prefill"]:
        return "none"
    return " to ".join(", ".join(map(str, gpus[role])) for role in ROLES)


def figures(samples: Mapping[str, Sequence[Sample]], name: str) -> dict[str, str | int | float]:
    """Medians of one way, and ratios of each round's times to the ceilings'."""
    ours = samples[name]
    times = {one: [sample[one] for sample in ours] for one in ("load", "read", "cpu")}
    medians = {f"{one} ms": statistics.median(times[one]) * 1e3 for one in times}
    num_bytes = ours[0]["num_bytes"]
    bulk = [sample["read"] for sample in samples[BULK]]
    measured: dict[str, str | int | float] = {
        "rounds": len(ours),
        "MiB": num_bytes / 2**20,
        "runs": ours[0]["num_runs"],
    }
    measured |= medians | {"GB/s": num_bytes / medians["read ms"] / 1e6}
    measured["bulk GB/s"] = num_bytes / statistics.median(bulk) / 1e9
    if COPY in samples:
        copies = [sample["read"] for sample in samples[COPY]]
        measured["copy GB/s"] = num_bytes / statistics.median(copies) / 1e9
    measured["read of bulk"] = share(bulk, times["read"])
    measured["load of bulk"] = share(bulk, times["load"])
    if name.endswith(VERIFIED):
        plain = samples[name.removesuffix(VERIFIED)]
        pairs = zip(times["load"], (sample["load"] for sample in plain), strict=True)
        measured["verify adds ms"] = statistics.median(more - less for more, less in pairs) * 1e3
    if IN_TREE in samples:
        theirs = statistics.median(sample["read"] for sample in samples[IN_TREE])
        measured["in-tree agent ms"] = theirs * 1e3
        measured["in-tree agent to read"] = theirs * 1e3 / medians["read ms"]
    if AGAINST in samples and name != AGAINST:
        for one, its_times in times.items():
            measured[f"{one} ratio"] = ratio(
                its_times, [sample[one] for sample in samples[AGAINST]]
            )
    return measured
