"""What does it cost to prove the bytes, beside the reading of them?

Two processes on this host, each with a cache of one model's shape, and on a GPU both on the same
one. Each round one of them reads a prompt's blocks from the other over NIXL, then digests what it
has read, as decode does with `verify`. Prefill digests the same while it is read. "slices us" is
what of the digest it takes to say what was read, and to find it.
"""

import argparse
import itertools
import statistics
import time
from typing import Final

import numpy as np

from lab.bench.link import BASE
from lab.bench.memory import RemoteMemory
from lab.bench.models import MODELS
from lab.local.caches import layout_at
from lab.local.model_layouts import EngineShape, ModelShape, build_layouts
from lab.results import Figures, Results
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.match import Route
from nixl_kv.geometry.plan import plan
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol.events import StartLoad
from nixl_kv.reading.agent import READING_PAUSE_S
from nixl_kv.verify.queue import open_digester
from nixl_kv.verify.slices import LocalSlice, count_bytes, find_slices, name_slices

WARM_UP: Final = 2
SECRET: Final = "ab" * 16


class Prompt:
    """A prompt in random blocks of two caches of the same shape, of which one is read."""

    def __init__(self, layout: CacheLayout, remote: RemoteMemory, num_tokens: int) -> None:
        """`layout` is for any address."""
        self._layout = layout_at(layout, remote.own.address)
        (group,) = layout.groups
        self._num_tokens = num_tokens
        count = -(-num_tokens // group.block_size)
        rng = np.random.default_rng(0)
        self._local, self._remote = (
            Table.of(rng.permutation(group.num_blocks)[:count]) for _ in range(2)
        )
        self._plan = plan(self._layout, layout_at(layout, remote.address))
        self._read = remote.prepare(self._plan.local, self._plan.remote)
        self._digester = open_digester(self._layout)
        share = {region.layer: region.heads for region in group.regions}
        self._route = Route(Rank(0), (Rank(0),), share)
        self._load = StartLoad(RequestId("bench"), 0, num_tokens, (self._local,), verify=True)

    @property
    def num_bytes(self) -> int:
        """Of its KV."""
        return count_bytes(self._slices())

    def read(self) -> float:
        """Read all of it, from the block tables on; in seconds."""
        begin = time.perf_counter()
        reads = self._plan.reads([self._local], [self._remote], range(self._num_tokens))
        self._read((reads.local, reads.remote), READING_PAUSE_S)
        return time.perf_counter() - begin

    def digest(self) -> float:
        """Digest all of it, from the block table on; in seconds."""
        begin = time.perf_counter()
        for _ in self._digester(SECRET, self._slices()):
            if self._digester.pause_s:
                time.sleep(READING_PAUSE_S)
        return time.perf_counter() - begin

    def find(self) -> float:
        """Find all of it, from the block table on; in seconds."""
        begin = time.perf_counter()
        self._slices()
        return time.perf_counter() - begin

    def _slices(self) -> list[LocalSlice]:
        slices = name_slices(self._layout, self._route, self._layout, self._load)
        return find_slices(self._layout, slices, self._load.tables, end=self._num_tokens)


def measure(
    model: ModelShape, engine: EngineShape, tokens: int, options: argparse.Namespace
) -> Figures:
    """Read and digest in turn; medians."""
    (layout,) = build_layouts(model, engine)
    (span,) = layout.spans
    with RemoteMemory(span.length, options.device, BASE) as remote:
        prompt = Prompt(layout, remote, tokens)
        count = WARM_UP + options.repeat
        rounds = [(prompt.read(), prompt.digest(), prompt.find()) for _ in range(count)]
        read, digest, slices = map(statistics.median, zip(*rounds[WARM_UP:], strict=True))
        return Figures(
            {
                "tokens": tokens,
                "layout": engine.order,
                "block": engine.block_size,
                "MiB": prompt.num_bytes / 2**20,
                "read ms": read * 1e3,
                "read GB/s": prompt.num_bytes / read / 1e9,
                "digest ms": digest * 1e3,
                "digest GB/s": prompt.num_bytes / digest / 1e9,
                "digest / read": digest / read,
                "slices us": slices * 1e6,
            }
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where, and of what."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(MODELS), default="tiny")
    parser.add_argument("--orders", nargs="+", default=["BHLNC", "LBHNC"])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--repeat", type=int, default=15)


def run(options: argparse.Namespace) -> int:
    """All orders and lengths."""
    title = f"{options.shape} on {options.device}: to read and to digest, medians"
    results = Results(title, "prompts are measured", options.json)
    prompts = list(itertools.product(options.orders, options.tokens))
    for order, tokens in prompts:
        engine = EngineShape(
            block_size=options.block_size,
            num_blocks=2 * -(-tokens // options.block_size),
            order=order,
            memory="DRAM" if options.device == "cpu" else "VRAM",
        )
        results.add(measure(MODELS[options.shape], engine, tokens, options))
    return results.print(len(prompts))
