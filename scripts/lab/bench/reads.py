"""How do the indices of a request's reads grow with its blocks?

The time of Plan.reads() for requests of 64 rows and up to 4,096 blocks, beside the least that has
to be done for any: two arrays of indices, `first[:, None] + ids`. Both write into memory that is
there already, and are timed in turn.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from lab.bench.plan import CONTENT, KV_HEADS
from lab.bench.timing import medians
from lab.results import Figures, Results
from nixl_kv.geometry.blocks import BlockIds
from nixl_kv.geometry.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.geometry.plan import IndexBuffer, Plan, plan

ROWS: Final = 64
BLOCK_SIZE: Final = 16
CACHE_BLOCKS: Final = 32_768
REQUESTS: Final = (64, 512, 4096)
RUN: Final = 8
TENSOR_PARALLEL: Final = {"whole blocks": (1, 1), "head slices": (1, 2)}

Step = Callable[[], object]


def run(options: argparse.Namespace) -> int:
    """A row for each number of blocks and kind of neighbourhood, of dense and of loose rows."""
    title = f"reads() of {ROWS} rows, medians; 'least': both arrays of indices, and nothing else"
    results = Results(title, "kinds of requests are measured", options.json)
    cases = list(itertools.product(TENSOR_PARALLEL, REQUESTS, KINDS_OF_IDS))
    for rows, count, ids in cases:
        results.add(measure(rows, count, ids, options.seconds))
    return results.print(len(cases))


def measure(rows: str, count: int, ids: str, seconds: float) -> Figures:
    """One row for each layer: whole blocks, or slices of them."""
    model = ModelShape(ROWS, KV_HEADS, CONTENT, "bfloat16")
    prefill, decode = (
        build_layouts(model, EngineShape(tp, num_blocks=CACHE_BLOCKS, block_size=BLOCK_SIZE))[0]
        for tp in TENSOR_PARALLEL[rows]
    )
    one_plan = plan(decode, prefill)
    local, remote = (KINDS_OF_IDS[ids](count, seed) for seed in (0, 1))
    median, least = medians(compared_steps(one_plan, local, remote), seconds)
    return Figures(
        {
            "rows": rows,
            "blocks": count,
            "ids": ids,
            "us": median * 1e6,
            "least us": least * 1e6,
            "ratio": median / least,
            "runs": one_plan.reads([local], [remote], range(BLOCK_SIZE * count)).num_runs,
        }
    )


def compared_steps(one_plan: Plan, local: BlockIds, remote: BlockIds) -> tuple[Step, Step]:
    """All of `reads`, and the least."""
    (rows,) = one_plan.paged_rows
    tokens = range(BLOCK_SIZE * len(local))
    buffer = IndexBuffer()
    out = np.empty((2, len(rows.first[0]), len(local)), dtype=np.int32)
    columns = [first[:, None] for first in rows.first]

    def least() -> None:
        np.add(columns[0], local, out=out[0])
        np.add(columns[1], remote, out=out[1])

    return lambda: one_plan.reads([local], [remote], tokens, buffer=buffer), least


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


KINDS_OF_IDS: Final[Mapping[str, Callable[[int, int], BlockIds]]] = {
    "contiguous": contiguous,
    f"runs of {RUN}": in_runs,
    "random": at_random,
}
"""Block ids as an allocator may hand them out, by their number and a seed."""
