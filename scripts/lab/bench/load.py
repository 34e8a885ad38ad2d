"""How long does a load take between two engines, without vLLM?

Prefill and decode are processes of their own with all ranks of an engine (with `--transport memory`
they are one), on this host or on its GPUs: the real transfer engines, control plane and NIXL. Timed
is a load from the commands that decode's scheduler sends until all ranks have reported it.

With --against, engines of another checkout run beside ours, and in each round both load the same.
A ratio is ours to theirs, of each round: the median of all rounds, and where half of them lie.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from typing_extensions import Self

from lab.bench.checkouts import AGAINST, OURS, REPO, checkout, environment_of
from lab.bench.models import MODELS
from lab.bench.timing import ratio
from lab.results import Figures, Results

ROLES: Final = ("prefill", "decode")
PROGRAM: Final = Path("scripts/lab/bench/load_engine.py")
WARM_UP: Final = 3
STOP_S: Final = 30.0

Sample = dict[str, Any]
"""See `load_engine.LoadTimes`."""


class Process:
    """A program that answers questions, see `load_engine`."""

    def __init__(self, program: Path, env: dict[str, str], spec: Mapping[str, Any]) -> None:
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

    def ask(self, **question: object) -> dict[str, Any]:
        """Wait for the answer.

        Raises:
            RuntimeError: if it has ended.
        """
        try:
            self._connection.send_bytes(msgspec.json.encode(question))
            answer: dict[str, Any] = msgspec.json.decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RuntimeError("an engine has ended; stderr says why") from error
        return answer


class Pair:
    """Prefill and decode of one checkout."""

    def __init__(self, prefill: Process, decode: Process) -> None:
        """Both, which may be one."""
        self._prefill = prefill
        self._decode = decode
        self._numbers = itertools.count()

    def load(self, tokens: int, requests: int, *, verify: bool = False) -> Sample:
        """Load so many prompts at the same time."""
        names = [f"request-{next(self._numbers)}" for _ in range(requests)]
        tickets = self._prefill.ask(offer=names, tokens=tokens)["tickets"]
        return self._decode.ask(load=tickets, tokens=tokens, verify=verify)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is loaded, where, and whom to compare with."""
    parser.add_argument(
        "--against", type=checkout, metavar="DIR", help="a checkout of nixl_kv to compare with"
    )
    parser.add_argument(
        "--against-program",
        type=Path,
        metavar="FILE",
        help=f"what answers for it; default: its {PROGRAM}",
    )
    parser.add_argument("--shape", choices=list(MODELS), default="tiny")
    parser.add_argument("--transport", choices=["nixl", "memory"], default="nixl")
    for role in ROLES:
        parser.add_argument(
            f"--{role}-gpus", type=int, nargs="*", default=[], help="default: memory of the host"
        )
    parser.add_argument("--order", default="BHLNC")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--tp", type=int, nargs=2, default=[1, 1], metavar=("PREFILL", "DECODE"), help="default 1 1"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--at-once", type=int, default=1, help="loads under way together")
    parser.add_argument("--repeat", type=int, default=30, help="rounds, 2 or more")


def run(options: argparse.Namespace) -> int:
    """A row for each prompt length and checkout."""
    title = (
        f"{options.shape} in {options.order}, {'TP{} to TP{}'.format(*options.tp)}, "
        f"{options.at_once} at once, medians of {options.repeat}"
    )
    results = Results(title, "rows are measured", options.json)
    with contextlib.ExitStack() as stack:
        pairs = {OURS: stack.enter_context(running_pair(REPO, REPO / PROGRAM, options))}
        if options.against:
            program = options.against_program or options.against / PROGRAM
            pairs[AGAINST] = stack.enter_context(running_pair(options.against, program, options))
        for tokens in options.tokens:
            for row in measure(pairs, tokens, options.at_once, options.repeat):
                results.add(row)
    return results.print(len(options.tokens) * len(pairs))


@contextlib.contextmanager
def running_pair(path: Path, program: Path, options: argparse.Namespace) -> Iterator[Pair]:
    """Both engines of a checkout, which have started."""
    tp = dict(zip(ROLES, options.tp, strict=True))
    gpus = {"prefill": options.prefill_gpus, "decode": options.decode_gpus}
    spec = {
        "model": MODELS[options.shape],
        "order": options.order,
        "block_size": options.block_size,
        "max_tokens": max(options.tokens),
        "transport": options.transport,
        "gpus": gpus,
    }
    shares = [tp] if options.transport == "memory" else [{role: tp[role]} for role in ROLES]
    with contextlib.ExitStack() as stack:
        env = environment_of(path)
        processes = [
            stack.enter_context(Process(program, env, spec | {"tp": share})) for share in shares
        ]
        for process in processes:
            process.ask()
        yield Pair(processes[0], processes[-1])


def measure(pairs: Mapping[str, Pair], tokens: int, at_once: int, repeat: int) -> Iterator[Figures]:
    """Rounds in which each pair loads; who is first changes. The first load of all is verified."""
    for pair in pairs.values():
        for number in range(WARM_UP):
            pair.load(tokens, at_once, verify=not number)
    samples: dict[str, list[Sample]] = {name: [] for name in pairs}
    for number in range(repeat):
        for name in sorted(pairs, reverse=bool(number % 2)):
            samples[name].append(pairs[name].load(tokens, at_once))
    for name in pairs:
        theirs = samples.get(AGAINST, []) if name == OURS else []
        yield Figures({"checkout": name, "tokens": tokens, **figures(samples[name], theirs)})


def figures(ours: Sequence[Sample], theirs: Sequence[Sample]) -> dict[str, str | int | float]:
    """Medians, and ratios to the other checkout's."""
    times = {name: [sample[name] for sample in ours] for name in ("load", "read", "cpu")}
    medians = {f"{name} ms": statistics.median(times[name]) * 1e3 for name in times}
    num_bytes = ours[0]["num_bytes"]
    measured: dict[str, str | int | float] = {"MiB": num_bytes / 2**20, "runs": ours[0]["num_runs"]}
    measured |= medians | {"read GB/s": num_bytes / medians["read ms"] / 1e6}
    if theirs:
        for name, its_times in times.items():
            measured[f"{name} ratio"] = ratio(its_times, [sample[name] for sample in theirs])
    return measured
