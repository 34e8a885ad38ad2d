"""Time the kernel of the path `gather` without engines, by its number of programs.

One process has prefill's cache on one GPU and decode's on another, or both on one. The kernel that
reads mapped memory copies a prompt's KV from random blocks into random blocks. Each program of the
kernel has a processor of decode's GPU to itself. "of copy" is the share of the speed at which torch
copies as many bytes in one piece between these GPUs, in the same rounds.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from benchmarks.shapes import MODELS, Row, Side, kv_shape, pair_of_numbers
from benchmarks.transfer import share
from harness.local.caches import layout_at
from harness.local.model_layouts import ORDERS
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.plan import plan
from nixl_kv.reading.tiles import Tiling

LAUNCHES: Final = 5
"""In a sample, one behind the other, so that the launch of one runs beside the one before."""


class Cache:
    """One side's cache, of noise or of zeros, and the prompt's random blocks in it."""

    def __init__(self, layout: CacheLayout, device: str, num_blocks: int, *, noise: bool) -> None:
        end = max(span.address + span.length for span in layout.spans)
        shape = (end - layout.spans[0].address,)
        kind: dict[str, Any] = {"dtype": torch.uint8, "device": device}
        self.memory = torch.randint(0, 256, shape, **kind) if noise else torch.zeros(shape, **kind)
        self.layout = layout_at(layout, self.memory.data_ptr())
        ids = np.arange(1, 1 + 2 * num_blocks)
        self.table = Table.of(np.random.default_rng(noise).permutation(ids)[:num_blocks].tolist())


def prepare(prefill: Cache, decode: Cache, tokens: int) -> tuple[Callable[[int], None], int]:
    """A function that launches the kernel with a number of programs, and the bytes per launch."""
    from nixl_kv.reading.kernel import TILE_BYTES, launch_copy  # noqa: PLC0415 - Triton

    device = decode.memory.device
    planned = plan(decode.layout, prefill.layout)
    pieces = planned.pieces([decode.table], [prefill.table], range(tokens))
    tiling = Tiling(planned, lambda first, _: first)
    (launch,) = tiling.launches(pieces, TILE_BYTES)
    numbers, rows = (torch.from_numpy(array).to(device) for array in (launch.numbers, tiling.rows))

    def start(programs: int) -> None:
        is_cuda = device.type == "cuda"
        with torch.cuda.device(device) if is_cuda else contextlib.nullcontext():
            launch_copy(launch, numbers, rows, programs=programs)

    return start, planned.num_bytes(pieces)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The prompt, its GPUs, and the numbers of programs."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--shape", choices=list(MODELS), default="qwen3-8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["BHLNC", "LBHNC"])
    sizes = [(16, 16), (16, 64)]
    parser.add_argument("--blocks", nargs="+", type=pair_of_numbers, default=sizes, metavar="P-D")
    parser.add_argument("--programs", type=int, nargs="+", default=[8, 16, 24, 32, 48, 64])
    parser.add_argument("--prefill-gpu", type=int, default=1, help="default 1")
    parser.add_argument("--decode-gpu", type=int, default=0, help="default 0")
    parser.add_argument("--repeat", type=int, default=7, help="rounds, 2 or more")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each layout, pair of block sizes and number of programs."""
    for order, blocks in itertools.product(options.orders, options.blocks):
        yield from rows_of(order, blocks, options)


def rows_of(order: str, blocks: tuple[int, int], options: argparse.Namespace) -> Iterator[Row]:
    """Rows of one pair of caches. All must copy the same bytes."""
    gpus = options.prefill_gpu, options.decode_gpu
    devices = [f"cuda:{gpu}" if options.device == "cuda" else "cpu" for gpu in gpus]
    caches = []
    for size, device, noise in zip(blocks, devices, (True, False), strict=True):
        (layout,) = Side(1, order, size).layouts(kv_shape(options.shape), options.tokens, "VRAM")
        caches.append(Cache(layout, device, options.tokens // size, noise=noise))
    prefill, decode = caches
    launch, num_bytes = prepare(prefill, decode, options.tokens)

    def copy() -> None:
        decode.memory[:num_bytes].copy_(prefill.memory[:num_bytes])

    # A copy lets the GPU that it is from reach the other one: the kernel reads the other way.
    prefill.memory[:1].copy_(decode.memory[:1])
    copies = [timed(copy, decode) for _ in range(options.repeat)]
    first: torch.Tensor | None = None
    for programs in options.programs:
        decode.memory.zero_()
        launch(programs)
        first = decode.memory.clone() if first is None else first
        is_same = torch.equal(decode.memory, first)
        times = [timed(partial(launch, programs), decode) for _ in range(options.repeat)]
        seconds = statistics.median(times)
        yield {
            "layout": order,
            "blocks": " to ".join(map(str, blocks)),
            "GPUs": " to ".join(map(str, gpus)) if options.device == "cuda" else "none",
            "programs": programs,
            "ms": seconds * 1e3,
            "GB/s": num_bytes / seconds / 1e9,
            "of copy": share(copies, times),
            **({} if is_same else {"fault": "other bytes than in the first row"}),
        }


def timed(way: Callable[[], object], cache: Cache) -> float:
    """Seconds of one of several launches on an idle GPU."""
    wait = torch.cuda.synchronize if cache.memory.is_cuda else lambda _: None
    wait(cache.memory.device)
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        way()
    wait(cache.memory.device)
    return (time.perf_counter() - begin) / LAUNCHES
