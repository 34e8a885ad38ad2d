"""How fast does NIXL read one process's memory from another, by UCX options and piece size?

One process offers a region, another reads pieces of it at random, so that none merge, and waits as
the transfer thread waits. Both are on this host; on a GPU both use the same device.
"""

import argparse
import itertools
import statistics
from typing import Final

import numpy as np

from lab.bench.memory import RemoteMemory, Timing
from lab.results import Figures, Results
from nixl_kv.reading.agent import READING_PAUSE_S
from nixl_kv.transport.base import Rows

BASE: Final = {
    "ucx_error_handling_mode": "peer",
    "engine_config": "CUDA_IPC_ENABLE_GET_ZCOPY=on",
}
VARIANTS: Final = {
    "UCX's defaults": {"ucx_error_handling_mode": "peer"},
    "inline": BASE,
    "2 threads, from 16": BASE | {"num_threads": "2", "split_batch_size": "16"},
    "2 threads, from 1024": BASE | {"num_threads": "2", "split_batch_size": "1024"},
    "1 thread, from 1": BASE | {"num_threads": "1", "split_batch_size": "1"},
    "4 threads, from 64": BASE | {"num_threads": "4", "split_batch_size": "64"},
}
WAITS: Final = {"pause 0.1 ms": READING_PAUSE_S, "spin": 0.0}
REGION: Final = 1 << 30
SIZES: Final = ((64 << 10, 19), (64 << 10, 128), (1152 << 10, 128), (64 << 10, 1024))
WARM_UP: Final = 2
READS: Final = 9


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where, and with which options of UCX."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))


def run(options: argparse.Namespace) -> int:
    """All variants against all sizes and ways to wait."""
    title = f"reads from another process, {options.device}, medians of {READS}"
    results = Results(title, "kinds of reads are measured", options.json)
    kinds = list(itertools.product(SIZES, WAITS))
    for variant in options.variants:
        with RemoteMemory(REGION, options.device, VARIANTS[variant]) as remote:
            for (piece, count), wait in kinds:
                posted, ended = measure(remote, piece, count, WAITS[wait])
                figures = {
                    "UCX backend": variant,
                    "pieces": f"{piece >> 10} KiB x {count}",
                    "wait": wait,
                    "posted ms": posted * 1e3,
                    "ended ms": ended * 1e3,
                    "GB/s": piece * count / ended / 1e9,
                }
                results.add(Figures(figures))
    return results.print(len(options.variants) * len(kinds))


def measure(remote: RemoteMemory, piece: int, count: int, pause_s: float) -> Timing:
    """The medians, after reads that connect and warm up."""
    read = remote.prepare(dense_row(remote.own.address, piece), dense_row(remote.address, piece))
    order = np.random.default_rng(0).permutation(REGION // piece)[:count].astype(np.int32)
    indices = (order, order[::-1].copy())
    timings = [read(indices, pause_s) for _ in range(WARM_UP + READS)][WARM_UP:]
    posted, ended = map(statistics.median, zip(*timings, strict=True))
    return Timing(posted, ended)


def dense_row(address: int, piece: int) -> Rows:
    """One row of pieces over the whole region."""
    return np.array([[address, piece, 0, piece, REGION // piece]], dtype=np.uint64)
