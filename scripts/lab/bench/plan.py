"""How does planning grow with layers, blocks, ranks, orders and block sizes?

For a rank of decode and one of the prefill ranks that it reads from, of engines of many shapes: the
time of plan(), how many rows it makes, and their bytes; then the time of reads() for one request in
random blocks, which writes into memory that is there already, and how many runs that gives. No
memory of a cache is needed.
"""

import argparse
import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np

from lab.bench.timing import median_time
from lab.local.model_layouts import EngineShape, ModelShape, build_layouts
from lab.results import Figures, Results
from nixl_kv.errors import IncompatiblePeer
from nixl_kv.geometry.layout import Table
from nixl_kv.geometry.match import assign, holdings
from nixl_kv.geometry.plan import IndexBuffer, Reads, plan

TOKENS: Final = 4096
"""Of the request."""

KV_HEADS: Final = 8
CONTENT: Final = (256, 256)
LAYERS: Final = (32, 64, 128)
NUM_BLOCKS: Final = (10_000, 100_000, 1_000_000)
TENSOR_PARALLEL: Final = ((1, 1), (8, 4), (4, 8), (1, 2), (16, 2))
ORDERS: Final = (
    ("LBHNC", "LBHNC"),
    ("BHLNC", "BHLNC"),
    ("LB2HNC", "LB2HNC"),
    ("LBHNC", "BHLNC"),
    ("LBHNC", "LBNHC"),
)
BLOCK_SIZES: Final = ((16, 16), (16, 64), (64, 16), (48, 64))


@dataclass(frozen=True)
class Case:
    """Two engines; pairs are (prefill, decode)."""

    layers: int = 64
    num_blocks: int = 100_000
    tp: tuple[int, int] = (8, 4)
    orders: tuple[str, str] = ORDERS[0]
    block_sizes: tuple[int, int] = BLOCK_SIZES[0]

    def figures(self) -> dict[str, str | int | float]:
        """For the table; prefill:decode."""
        return {
            "layers": self.layers,
            "blocks": self.num_blocks,
            "TP": "{}:{}".format(*self.tp),
            "orders": ":".join(dict.fromkeys(self.orders)),
            "block size": "{}:{}".format(*self.block_sizes),
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long."""
    parser.add_argument("--seconds", type=float, default=0.4, help="to spend on each figure")


def run(options: argparse.Namespace) -> int:
    """A row for each case."""
    results = Results("plan(), medians; prefill:decode", "cases are measured", options.json)
    for case in cases():
        results.add(measure(case, options.seconds))
    return results.print(len(cases()))


def cases() -> list[Case]:
    """Each number in turn while the others stay as they are, then what is slowest of all."""
    each = [
        *(Case(layers=layers) for layers in LAYERS),
        *(Case(num_blocks=num_blocks) for num_blocks in NUM_BLOCKS),
        *(Case(tp=tp) for tp in TENSOR_PARALLEL),
        *(Case(orders=orders) for orders in ORDERS),
        *(Case(block_sizes=sizes) for sizes in BLOCK_SIZES),
    ]
    pairs = itertools.product(ORDERS[1:], BLOCK_SIZES[1:])
    each += [Case(num_blocks=10_000, orders=orders, block_sizes=sizes) for orders, sizes in pairs]
    each.append(Case(128, 10_000, (1, 1), ORDERS[-1], (64, 64)))
    return list(dict.fromkeys(each))


def measure(case: Case, seconds: float) -> Figures:
    """What decode's rank 0 needs to read from its first prefill rank."""
    model = ModelShape(case.layers, KV_HEADS, CONTENT, "bfloat16")
    prefill, decode = (
        build_layouts(model, EngineShape(tp, 1, block_size, case.num_blocks, order))
        for tp, block_size, order in zip(case.tp, case.block_sizes, case.orders, strict=True)
    )
    shares = assign([holdings(rank) for rank in decode], [holdings(rank) for rank in prefill])
    remote_rank, share = next(iter(shares[0].items()))
    local, remote = decode[0], prefill[remote_rank]
    try:
        rows = plan(local, remote, share)
    except IncompatiblePeer:
        return Figures(case.figures() | {"rows": "refused: more pieces than int32 can number"})
    tables = [
        Table.of(np.random.default_rng(size).permutation(case.num_blocks)[: -(-TOKENS // size)])
        for size in reversed(case.block_sizes)
    ]
    buffer = IndexBuffer()

    def read() -> Reads:
        return rows.reads([tables[0]], [tables[1]], range(TOKENS), buffer=buffer)

    measured: dict[str, str | int | float] = {
        "plan ms": median_time(lambda: plan(local, remote, share), seconds) * 1e3,
        "rows": f"{len(rows.local):,}, {len(rows.remote):,}",
        "KiB of rows": (rows.local.nbytes + rows.remote.nbytes) / 1024,
        "reads us": median_time(read, seconds) * 1e6,
        "runs": read().num_runs,
    }
    return Figures(case.figures() | measured)
