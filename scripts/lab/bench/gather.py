"""How many of a GPU's processors does the path `gather` need? Its kernel, without engines.

One process has prefill's cache on one GPU and decode's on another, or both on one, and copies a
prompt's KV from the one into the other, in random blocks, with the kernel that reads mapped memory:
in so many programs, each of which has a processor to itself. Each row is a number of programs. "of
copy" is a share of the speed at which torch copies as many bytes in one piece between these GPUs,
in the same rounds.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from lab.bench.models import MODELS
from lab.bench.timing import share
from lab.bench.transfer_cells import Blocks, Cut, parse_blocks
from lab.local.caches import layout_at
from lab.local.model_layouts import ORDERS
from lab.results import Figures, Results, verdict_of
from nixl_kv.geometry.layout import CacheLayout, Table
from nixl_kv.geometry.plan import plan
from nixl_kv.reading.tiles import Tiling

LAUNCHES: Final = 5
"""One behind the other, in a sample: what it costs to launch one passes beside the one before."""

BUSY_SIZE: Final = 8192
"""Rows and columns of the matrices that a busy GPU multiplies; two of them are 256 MiB."""


class Cache:
    """One side's cache, of noise or of zeros, and the prompt's blocks in it."""

    def __init__(self, layout: CacheLayout, device: str, num_blocks: int, *, noise: bool) -> None:
        """Allocate it; the prompt has so many blocks, at random."""
        end = max(span.address + span.length for span in layout.spans)
        shape = (end - layout.spans[0].address,)
        kind: dict[str, Any] = {"dtype": torch.uint8, "device": device}
        self.memory = torch.randint(0, 256, shape, **kind) if noise else torch.zeros(shape, **kind)
        self.layout = layout_at(layout, self.memory.data_ptr())
        ids = np.arange(1, 1 + 2 * num_blocks)  # no table names block 0
        self.table = Table.of(np.random.default_rng(noise).permutation(ids)[:num_blocks].tolist())


@dataclass
class Ready:
    """A prompt's copy as the kernel takes it, by so many programs."""

    launch: Callable[[int], None]
    num_bytes: int


def prepare(prefill: Cache, decode: Cache, tokens: int) -> Ready:
    """Plan it, and put its numbers where the kernel reads them."""
    from nixl_kv.reading.kernel import TILE_BYTES, launch_copy  # noqa: PLC0415 - Triton

    device = decode.memory.device
    planned = plan(decode.layout, prefill.layout)
    pieces = planned.pieces([decode.table], [prefill.table], range(tokens))
    tiling = Tiling(planned, lambda first, _: first)
    (launch,) = tiling.launches(pieces, TILE_BYTES)
    numbers, rows = (torch.from_numpy(array).to(device) for array in (launch.numbers, tiling.rows))

    def start(programs: int) -> None:
        with on(device):
            launch_copy(launch, numbers, rows, programs=programs)

    return Ready(start, planned.num_bytes(pieces))


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is copied, where, by how many programs."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--shape", choices=list(MODELS), default="qwen3-8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["BHLNC", "LBHNC"])
    parser.add_argument(
        "--blocks",
        nargs="+",
        type=parse_blocks,
        default=[parse_blocks("16-16"), parse_blocks("16-64")],
        metavar="P-D",
        help="block sizes of prefill and decode; default: 16-16 16-64",
    )
    parser.add_argument("--programs", type=int, nargs="+", default=[8, 16, 24, 32, 48, 64])
    parser.add_argument("--prefill-gpu", type=int, default=1, help="default 1")
    parser.add_argument("--decode-gpu", type=int, default=0, help="default 0")
    before = parser.add_mutually_exclusive_group()
    before.add_argument(
        "--idle",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="without work, before each sample, which then is one launch",
    )
    before.add_argument(
        "--busy",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="in which prefill's GPU multiplies matrices, before each sample, likewise",
    )
    parser.add_argument("--repeat", type=int, default=7, help="rounds, 2 or more")


def run(options: argparse.Namespace) -> int:
    """A row for each layout, pair of block sizes and number of programs."""
    title = f"{options.shape}, {options.tokens:,} tokens: the kernel, medians of {options.repeat}"
    results = Results(title, "rows are good", options.json)
    cells = list(itertools.product(options.orders, options.blocks))
    for order, blocks in cells:
        for row in measure(order, blocks, options):
            results.add(row)
    return results.print(len(cells) * len(options.programs))


def measure(
    order: str, blocks: tuple[Blocks, Blocks], options: argparse.Namespace
) -> Iterator[Figures]:
    """Rows of one pair of caches, which have to agree on what is copied."""
    gpus = [options.prefill_gpu, options.decode_gpu]
    devices = [f"cuda:{gpu}" if options.device == "cuda" else "cpu" for gpu in gpus]
    caches = []
    for size, device, noise in zip(blocks, devices, (True, False), strict=True):
        (layout,) = Cut(1, order, size).layouts(MODELS[options.shape], options.tokens, "VRAM")
        num_blocks = options.tokens // size.size
        caches.append(Cache(layout, device, num_blocks, noise=noise))
    prefill, decode = caches
    ready = prepare(prefill, decode, options.tokens)
    piece = slice(ready.num_bytes)

    def copy() -> None:
        decode.memory[piece].copy_(prefill.memory[piece])

    # A copy lets the GPU that it is from reach the other one: the kernel reads the other way.
    prefill.memory[:1].copy_(decode.memory[:1])
    before = preparation(options, prefill)
    copies = [timed(copy, decode, before) for _ in range(options.repeat)]
    first: torch.Tensor | None = None
    for programs in options.programs:
        launch = partial(ready.launch, programs)
        decode.memory.zero_()
        launch()
        first = decode.memory.clone() if first is None else first
        is_same = torch.equal(decode.memory, first)
        times = [timed(launch, decode, before) for _ in range(options.repeat)]
        seconds = statistics.median(times)
        row: dict[str, str | int | float] = {
            "layout": order,
            "blocks": " to ".join(map(str, blocks)),
            "GPUs": " to ".join(map(str, gpus)) if options.device == "cuda" else "none",
            "programs": programs,
            "ms": seconds * 1e3,
            "GB/s": ready.num_bytes / seconds / 1e9,
            "of copy": share(copies, times),
        }
        fault = "" if is_same else "other bytes than in the first row"
        yield Figures(row, verdict_of(fault, good="same bytes"))


def preparation(options: argparse.Namespace, prefill: Cache) -> Callable[[], object] | None:
    """What comes before each sample; None: nothing."""
    if options.busy:
        return partial(compute, prefill, options.busy)
    return partial(time.sleep, options.idle) if options.idle else None


def compute(cache: Cache, seconds: float) -> None:
    """Keep its GPU as busy as a long prompt does: at its limit of power the clock is lower."""
    shape = (BUSY_SIZE, BUSY_SIZE)
    matrix = torch.rand(shape, device=cache.memory.device, dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(matrix, matrix, out=product)
        wait(cache)


def timed(way: Callable[[], object], cache: Cache, before: Callable[[], object] | None) -> float:
    """Seconds of one of some in a row, or of one after what comes before it."""
    wait(cache)
    if before is not None:
        before()
    launches = LAUNCHES if before is None else 1
    begin = time.perf_counter()
    for _ in range(launches):
        way()
    wait(cache)
    return (time.perf_counter() - begin) / launches


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Where Triton launches: on the current GPU, whosever the memory is."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def wait(cache: Cache) -> None:
    """Until the GPU has done all."""
    if cache.memory.is_cuda:
        torch.cuda.synchronize(cache.memory.device)
