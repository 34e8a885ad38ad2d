"""How do planning and the reads of a request grow?

plan(): its time, how many rows it makes, and their bytes, for engines of many shapes, of which no
memory is needed. reads(): its time for requests of 64 rows and up to 4,096 blocks, beside the least
that has to be done for any: two arrays of indices, `first[:, None] + ids`. Both write into memory
that is there already, and are timed in turn, so that what else the machine does slows them alike.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.blocks import BlockIds
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.plan import Plan, Scratch, plan
from nixl_kv.geometry.ranks import assign, holding
from nixl_kv.geometry.shapes import EngineShape, ModelShape, layouts

KV_HEADS: Final = 8
CONTENT: Final = (256, 256)
LAYERS: Final = (32, 64, 128)
NUM_BLOCKS: Final = (10_000, 100_000, 1_000_000)
CUTS: Final = ((1, 1), (8, 4), (4, 8), (1, 2), (16, 2))
ORDERS: Final = (
    ("LBHNC", "LBHNC"),
    ("BHLNC", "BHLNC"),
    ("LB2HNC", "LB2HNC"),
    ("LBHNC", "BHLNC"),
    ("LBHNC", "LBNHC"),
)
BLOCK_SIZES: Final = ((16, 16), (16, 64), (64, 16), (48, 64))

ROWS: Final = 64
CACHE_BLOCKS: Final = 32_768
REQUESTS: Final = (64, 512, 4096)
RUN: Final = 8

Step = Callable[[], object]


def main(arguments: Sequence[str]) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        prog="bench plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=0.4, help="to spend on each figure")
    options = parser.parse_args(arguments)
    bench_plans(options.seconds)
    bench_reads(options.seconds)
    return 0


def shapes() -> Iterator[tuple[int, int, tuple[int, int], tuple[str, str], tuple[int, int]]]:
    """Layers, blocks, TP, orders, block sizes; pairs are (prefill, decode).

    Each in turn while the others are as in the first, then what is slowest of all.
    """
    base = (64, 100_000, (8, 4), ORDERS[0], BLOCK_SIZES[0])
    choices = (LAYERS, NUM_BLOCKS, CUTS, ORDERS, BLOCK_SIZES)
    found = dict.fromkeys(
        (*base[:place], value, *base[place + 1 :])
        for place, values in enumerate(choices)
        for value in values
    )
    for order, sizes in itertools.product(ORDERS[1:], BLOCK_SIZES[1:]):
        found[64, 10_000, (8, 4), order, sizes] = None
    found[128, 10_000, (1, 1), ORDERS[-1], (64, 64)] = None
    yield from found


def bench_plans(seconds: float) -> None:
    """A line for each shape: what the decode rank 0 makes of its first source."""
    print("plan(), medians; a rank of decode and one of its sources; prefill:decode")
    print(f"{'layers':>7}{'blocks':>10}{'TP':>7}{'orders':>16}{'block':>8}", end="")
    print(f"{'ms':>10}{'rows':>16}{'KiB of rows':>13}")
    for layers, num_blocks, tp, orders, sizes in shapes():
        model = ModelShape(layers, KV_HEADS, CONTENT, "bfloat16")
        engines = [
            layouts(model, EngineShape(tp[side], 1, sizes[side], num_blocks, orders[side]))
            for side in (0, 1)
        ]
        made = planned(engines[1], engines[0], seconds)
        pair = ":".join(dict.fromkeys(orders))
        print(f"{layers:7}{num_blocks:10,}{f'{tp[0]}:{tp[1]}':>7}{pair:>16}", end="")
        print(f"{f'{sizes[0]}:{sizes[1]}':>8}{made}", flush=True)


def planned(readers: list[CacheLayout], sources: list[CacheLayout], seconds: float) -> str:
    """Time and size of a plan, or that there is none."""
    shares = assign([holding(rank) for rank in readers], [holding(rank) for rank in sources])
    source, share = next(iter(shares[0].items()))
    try:
        found = plan(readers[0], sources[source], share)
    except IncompatiblePeer:
        return "   refused: more pieces than int32 can number"
    (median,) = medians([lambda: plan(readers[0], sources[source], share)], seconds)
    rows = f"{len(found.local):,}, {len(found.remote):,}"
    size = (found.local.nbytes + found.remote.nbytes) / 1024
    return f"{median * 1e3:10.2f}{rows:>16}{size:13.1f}"


def bench_reads(seconds: float) -> None:
    """A line for each number of blocks and kind of neighbourhood, of dense and of loose rows."""
    print(f"\nreads() of {ROWS} rows, medians; 'least': both arrays of indices, and nothing else")
    print(f"{'rows':>14}{'blocks':>8}  {'ids':12}{'us':>10}{'least us':>10}{'ratio':>8}{'runs':>9}")
    for name, tp in (("whole blocks", (1, 1)), ("head slices", (1, 2))):
        found = plan_of_rows(tp)
        for count, (kind, ids) in itertools.product(REQUESTS, kinds_of_ids().items()):
            local, remote = ids(count, 0), ids(count, 1)
            reads, least = steps(found, local, remote)
            ours, floor = medians([reads, least], seconds)
            runs = found.reads([local], [remote], range(16 * count)).num_runs
            print(f"{name:>14}{count:8}  {kind:12}{ours * 1e6:10.1f}{floor * 1e6:10.1f}", end="")
            print(f"{ours / floor:8.2f}{runs:9,}", flush=True)


def plan_of_rows(tp: tuple[int, int]) -> Plan:
    """One row for each layer: whole blocks, or slices of them."""
    model = ModelShape(ROWS, KV_HEADS, CONTENT, "bfloat16")
    prefill, decode = (
        layouts(model, EngineShape(ranks, num_blocks=CACHE_BLOCKS))[0] for ranks in tp
    )
    return plan(decode, prefill)


def kinds_of_ids() -> dict[str, Callable[[int, int], BlockIds]]:
    """Block ids as an allocator may hand them out, by their number and a seed."""
    return {"contiguous": contiguous, f"runs of {RUN}": in_runs, "random": at_random}


def contiguous(count: int, seed: int) -> BlockIds:
    """All in a row."""
    return np.arange(count, dtype=np.int32) + np.int32(seed)


def in_runs(count: int, seed: int) -> BlockIds:
    """Runs in any order."""
    starts = at_random(count // RUN, seed, CACHE_BLOCKS // RUN) * np.int32(RUN)
    return (starts[:, None] + np.arange(RUN, dtype=np.int32)).ravel()


def at_random(count: int, seed: int, below: int = CACHE_BLOCKS) -> BlockIds:
    """In any order, each once."""
    return np.random.default_rng(seed).permutation(below)[:count].astype(np.int32)


def steps(found: Plan, local: BlockIds, remote: BlockIds) -> tuple[Step, Step]:
    """What is compared: all of `reads`, and the least."""
    (lane,) = found.lanes
    tokens = range(16 * len(local))
    scratch = Scratch()
    out = np.empty((2, len(lane.first[0]), len(local)), dtype=np.int32)
    columns = [first[:, None] for first in lane.first]

    def least() -> None:
        np.add(columns[0], local, out=out[0])
        np.add(columns[1], remote, out=out[1])

    return lambda: found.reads([local], [remote], tokens, scratch=scratch), least


def medians(compared: Sequence[Step], seconds: float) -> list[float]:
    """Of each, in turn; in seconds."""
    times: list[list[float]] = [[] for _ in compared]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:  # noqa: PLR2004 - a median of something
        for step, taken in zip(compared, times, strict=True):
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
