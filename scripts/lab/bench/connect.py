"""Time the first load from a new peer, and later ones.

Prefill and decode are processes of their own, as in `bench transfer`, and new ones in each round.
"added" is the time of the first load less the median of later ones. Decode's event log and counters
divide the first load, some of whose parts overlap; figures are those of the slowest rank:

    description   until decode has prefill's description and finds that it fits
    ask           from then on until the grant
    join          from the description on until prefill's memory can be read, beside the ask
    warm-up       reads that connect and map prefill's memory; no load waits for them
    first read    the first load's data, posted as soon as there are a grant and memory to read
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence

from harness.local.model_layouts import ORDERS
from lab.bench import transfer
from lab.bench.cells import pair_of_numbers
from lab.bench.record import REPO
from lab.results import Figures

PATH = "auto"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the number of rounds."""
    transfer.add_place_options(parser, shape="tiny", tokens=1024)
    parser.add_argument("--order", choices=ORDERS, default="BHLNC")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tp", type=pair_of_numbers, default=(1, 1), metavar="P-D")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of new processes")
    parser.add_argument("--later", type=int, default=20, help="loads after the first one")


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """One row of medians."""
    yield Figures(figures([sample(options) for _ in range(options.rounds)]))


def sample(options: argparse.Namespace) -> dict[str, float]:
    """The first load of new processes, and later ones; in seconds."""
    sizes = options.block_size, options.block_size
    cell = transfer.cell_of(options.tp, options.order, sizes, options)
    with transfer.running_pair(REPO, [cell], [PATH], options) as pair:
        pair.start(cell)
        first, parts = pair.load_at_once(PATH)
        later = statistics.median(pair.load_at_once(PATH)[0] for _ in range(options.later))
    slowest = {name: max(rank[name] for rank in parts) for name in parts[0]}
    return {"first": first, "later": later, "added": first - later, **slowest}


def figures(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians in ms, and the most that was added."""
    row = {
        f"{name} ms": statistics.median(one[name] for one in samples) * 1e3 for name in samples[0]
    }
    return row | {"most added ms": max(one["added"] for one in samples) * 1e3}
