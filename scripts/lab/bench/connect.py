"""What does the first request to a new peer cost over a later one?

Prefill and decode are processes of their own, as in `bench transfer`, fresh ones in each round: the
first load is timed, and then later ones. What the first takes longer is the price of a new peer.
Where it goes, by decode's event log and counters, of the rank that took longest:

    description   until prefill's description was here, and fits
    ask           from then on until the grant
    join          from the description on until prefill's memory could be read, beside the ask
    warm-up       reads that nobody waits for: they connect, and map prefill's memory
    first read    of the first load's data, posted as soon as there are a grant and memory to read;
                  it waits for what the warm-up has not done by then
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lab.bench.checkouts import REPO, environment_of
from lab.bench.models import MODELS
from lab.bench.transfer import Process
from lab.bench.transfer_cells import ROLES
from lab.results import Figures, Results

PARTS: Final = ("description", "ask", "join", "warm-up", "first read")
PROGRAM: Final = Path("scripts/lab/bench/connect_engine.py")
Sample = dict[str, float]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which engines, and how often."""
    parser.add_argument("--shape", choices=list(MODELS), default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prefill-gpus", type=int, nargs="+", default=[0], help="default 0")
    parser.add_argument("--decode-gpus", type=int, nargs="+", default=[1], help="default 1")
    parser.add_argument("--order", default="BHLNC")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--tp", type=int, nargs=2, default=[1, 1], metavar=("PREFILL", "DECODE"), help="default 1 1"
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of fresh processes")
    parser.add_argument("--later", type=int, default=20, help="loads after the first one")


def run(options: argparse.Namespace) -> int:
    """Print one row."""
    title = (
        f"{options.shape} in {options.order} on {options.device}, "
        f"{'TP{} to TP{}'.format(*options.tp)}, {options.tokens} tokens: ms, medians of "
        f"{options.rounds} pairs of fresh processes"
    )
    results = Results(title, "rows are measured", options.json)
    results.add(Figures(figures([measure(options) for _ in range(options.rounds)])))
    return results.print(1)


def measure(options: argparse.Namespace) -> Sample:
    """The first load of fresh processes, and later ones; in seconds."""
    with Process(REPO / PROGRAM, environment_of(REPO), spec_of(options, "prefill")) as prefill:
        prefill.ask("address")
        with Process(REPO / PROGRAM, environment_of(REPO), spec_of(options, "decode")) as decode:
            decode.ask("address")
            times: list[float] = []
            for number in range(1 + options.later):
                what = {"request": f"request-{number}", "tokens": options.tokens}
                ticket = prefill.ask("offer", **what)
                times.append(decode.ask("load", ticket=ticket, **what))
            later = statistics.median(times[1:])
            parts = decode.ask("parts", request="request-0")
            return {"first": times[0], "later": later, "added": times[0] - later, **parts}


def spec_of(options: argparse.Namespace, role: str) -> dict[str, object]:
    """Of a process, see `connect_engine.Spec`."""
    tp = dict(zip(ROLES, options.tp, strict=True))
    on_gpus = {"prefill": options.prefill_gpus, "decode": options.decode_gpus}
    return {
        "model": MODELS[options.shape],
        "order": options.order,
        "block_size": options.block_size,
        "max_tokens": options.tokens,
        "role": role,
        "tp": tp[role],
        "gpus": on_gpus[role] if options.device == "cuda" else (),
    }


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Medians in ms; of what is added, the largest too."""
    rounds = {name: [sample.get(name, 0.0) * 1e3 for sample in samples] for name in samples[0]}
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    return {
        "first": medians["first"],
        "later": medians["later"],
        "added": medians["added"],
        "most added": max(rounds["added"]),
        **{part: medians[part] for part in PARTS},
    }
