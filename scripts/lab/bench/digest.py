"""What does it cost to prove the bytes, beside the reading of them?

Two processes on this host, each with a cache of one model's shape, and on a GPU both on the same
one. Each round one of them reads a prompt's blocks from the other over NIXL, then digests what it
has read, as decode does with `verify`. Prefill digests the same while it is read.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch

from nixl_kv.connector.digests import Compute, OnHost
from nixl_kv.geometry.digest import Digest, Key
from nixl_kv.geometry.excerpts import BlockTable, Strip, excerpts, strips
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.geometry.plan import Plan, plan
from nixl_kv.geometry.ranks import holding
from nixl_kv.transport.nixl import NixlTransport
from pd.link import BASE

SERVE_S: Final = 0.001
NAP_S: Final = 0.0001
KEY: Final = Key("ab" * 16)


@dataclass(frozen=True)
class Shape:
    """Of a cache: layers, KV heads, bytes of K (and of V) per head and token, tokens per block."""

    layers: int
    heads: int
    size: int
    block: int
    order: str

    def strides(self, num_blocks: int) -> dict[str, int]:
        """In bytes, by letter."""
        counts = (self.layers, num_blocks, self.heads, self.block, 2 * self.size)
        sizes = dict(zip("LBHNC", counts, strict=True))
        found, stride = {}, 1
        for letter in reversed(self.order):
            found[letter] = stride
            stride *= sizes[letter]
        return found


SHAPES: Final = {
    "qwen3-8b": (36, 8, 256),
    "llama-70b-tp8": (80, 1, 256),
    "deepseek": (61, 1, 576),
    "tiny": (4, 4, 256),
}


class Cache:
    """The memory of one rank, large enough for so many blocks."""

    def __init__(self, shape: Shape, num_blocks: int, device: str) -> None:
        """Take it, with something in it."""
        strides = shape.strides(num_blocks)
        total = 2 * shape.size * shape.block * shape.heads * shape.layers * num_blocks
        generator = torch.Generator(device).manual_seed(1)
        self.tensor = torch.empty(total // 8, dtype=torch.int64, device=device)
        self.tensor.random_(generator=generator)
        base = self.tensor.data_ptr()
        parts = (Part(0, shape.size), Part(shape.size, shape.size))
        regions = tuple(
            Region(
                f"layer.{n}",
                base + n * strides["L"],
                strides["B"],
                strides["H"],
                strides["N"],
                0,
                shape.heads,
                parts,
            )
            for n in range(shape.layers)
        )
        group = Group(shape.block, num_blocks, 1, regions)
        memory: Any = "DRAM" if device == "cpu" else "VRAM"
        self.layout = CacheLayout((group,), "bfloat16", memory, 0, (Span(base, total),))


def transport(layout: CacheLayout) -> NixlTransport:
    """With the cache registered, as the connector does."""
    made = NixlTransport(ucx_options=BASE)
    for span in layout.spans:
        made.register(span, layout.memory, 0)
    return made


def serve(shape: Shape, num_blocks: int, pipe: Connection, *, device: str) -> None:
    """The side that is read."""
    cache = Cache(shape, num_blocks, device)
    made = transport(cache.layout)
    if device != "cpu":
        torch.cuda.synchronize()
    pipe.send((made.metadata(), cache.layout))
    while not pipe.poll(SERVE_S):
        made.progress()


class Reader:
    """The side that reads and digests."""

    def __init__(self, shape: Shape, num_tokens: int, device: str) -> None:
        """Start the other side, and connect."""
        num_blocks = 2 * -(-num_tokens // shape.block)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._server = context.Process(
            target=serve, args=(shape, num_blocks, theirs), kwargs={"device": device}, daemon=True
        )
        self._server.start()
        self._cache = Cache(shape, num_blocks, device)
        self._transport = transport(self._cache.layout)
        self._compute = compute(self._cache.layout)
        metadata, there = self._pipe.recv()
        peer = self._transport.add_peer(metadata)
        here = self._cache.layout
        self._plan: Plan = plan(here, there, holding(here))
        self._lists = (
            self._transport.prepare(self._plan.local, here.memory, None),
            self._transport.prepare(self._plan.remote, there.memory, peer),
        )
        rng = np.random.default_rng(0)
        count = num_blocks // 2
        self._tables = [rng.permutation(num_blocks)[:count].astype(np.int32) for _ in range(2)]
        self._num_tokens = num_tokens
        self._strips = self._find()

    @property
    def num_bytes(self) -> int:
        """Of the prompt's KV."""
        return sum(strip.num_bytes for strip in self._strips)

    def read(self) -> float:
        """Read all of it; in seconds."""
        begin = time.perf_counter()
        reads = self._plan.reads(*([table] for table in self._tables), range(self._num_tokens))
        handle = self._transport.read(*self._lists, (reads.local, reads.remote))
        while not self._transport.poll(handle):
            time.sleep(NAP_S)
        return time.perf_counter() - begin

    def digest(self) -> tuple[float, Digest]:
        """Digest all of it, from the block table on, as decode does; in seconds."""
        begin = time.perf_counter()
        steps = self._compute(KEY, self._find())
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return time.perf_counter() - begin, end.value
            if self._compute.nap_s:
                time.sleep(self._compute.nap_s / 10)

    def close(self) -> None:
        """End the other side."""
        self._pipe.send("end")
        self._server.join(10)
        self._server.kill()

    def _find(self) -> list[Strip]:
        layout, table = self._cache.layout, BlockTable(self._tables[0])
        wanted = excerpts(layout, holding(layout), [table])
        return strips(layout, wanted, [table], end=self._num_tokens)


def compute(layout: CacheLayout) -> Compute:
    """As the connector does it."""
    if layout.memory == "DRAM":
        return OnHost()
    from nixl_kv.connector.device_digests import OnDevice  # noqa: PLC0415 - Triton: on GPUs only

    return OnDevice(layout)


def measure(shape: Shape, num_tokens: int, device: str, *, repeat: int) -> str:
    """A line of the table: medians."""
    reader = Reader(shape, num_tokens, device)
    try:
        rounds = [(reader.read(), *reader.digest()) for _ in range(repeat + 2)][2:]
        read = statistics.median(seconds for seconds, _, _ in rounds)
        made = statistics.median(seconds for _, seconds, _ in rounds)
        size = reader.num_bytes
    finally:
        reader.close()
    return (
        f"| {num_tokens} | {shape.order} | {shape.block} | {size / 2**20:.0f} "
        f"| {read * 1e3:.2f} | {size / read / 1e9:.1f} | {made * 1e3:.2f} "
        f"| {size / made / 1e9:.1f} | {made / read:.2f} |"
    )


def main(arguments: Sequence[str]) -> int:
    """Measure all lengths."""
    parser = argparse.ArgumentParser(
        prog="bench digest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--orders", nargs="+", default=["BHLNC", "LBHNC"])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args(arguments)
    print(f"{options.shape} on {options.device}\n")
    print("| tokens | layout | block | MiB | read ms | GB/s | digest ms | GB/s | digest / read |")
    print("|---|---|---|---|---|---|---|---|---|")
    for order in options.orders:
        shape = Shape(*SHAPES[options.shape], options.block_size, order)
        for tokens in options.tokens:
            print(measure(shape, tokens, options.device, repeat=options.repeat), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
