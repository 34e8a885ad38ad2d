"""How fast does NIXL read one process's memory from another, by UCX options and piece size?

One process offers a region, another reads pieces of it at random, so that none merge, and waits as
the transfer thread waits. Both are on this host; on a GPU both use the same device.
"""

import argparse
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch

from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.transport.nixl import NixlTransport

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
NAPS: Final = {"nap 0.1 ms": 1e-4, "spin": 0.0}
REGION: Final = 1 << 30
SERVE_S: Final = 0.001


@dataclass(frozen=True)
class Timing:
    """Medians, in seconds: inside `read`, and until the end."""

    posted: float
    ended: float


def region(device: str) -> tuple[Any, Span, Memory]:
    """Memory of this process, and how to register it."""
    tensor = torch.empty(REGION, dtype=torch.uint8, device=device)
    tensor.fill_(7)
    memory: Memory = "VRAM" if tensor.is_cuda else "DRAM"
    return tensor, Span(tensor.data_ptr(), REGION), memory


def serve(device: str, options: dict[str, str], pipe: Connection) -> None:
    """The side that is read: progresses until it is told to end."""
    transport = NixlTransport(ucx_options=options)
    tensor, span, memory = region(device)
    transport.register(span, memory, 0)
    pipe.send((transport.metadata(), span.address))
    while not pipe.poll(SERVE_S):
        transport.progress()
    del tensor


def rows(address: int, piece: int) -> np.ndarray:
    """One dense row of pieces over the whole region."""
    return np.array([[address, piece, 0, piece, REGION // piece]], dtype=np.uint64)


def measure(
    transport: NixlTransport, lists: tuple[Any, Any], indices: tuple[Any, Any], nap_s: float
) -> Timing:
    """Medians of nine reads, after two that connect and warm up."""
    posted, ended = [], []
    for _ in range(11):
        begin = time.perf_counter()
        handle = transport.read(*lists, indices)
        posted.append(time.perf_counter() - begin)
        while not transport.poll(handle):
            if nap_s:
                time.sleep(nap_s)
        ended.append(time.perf_counter() - begin)
    return Timing(statistics.median(posted[2:]), statistics.median(ended[2:]))


def bench(
    device: str,
    options: dict[str, str],
    say: Callable[[str, str], None],
    sizes: Sequence[tuple[int, int]],
) -> None:
    """One variant of options against all sizes and ways to wait."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    server = context.Process(target=serve, args=(device, options, theirs))
    server.start()
    try:
        transport = NixlTransport(ucx_options=options)
        tensor, span, memory = region(device)
        transport.register(span, memory, 0)
        metadata, address = pipe.recv()
        peer = transport.add_peer(metadata)
        for (piece, count), (name, nap_s) in itertools.product(sizes, NAPS.items()):
            lists = (
                transport.prepare(rows(span.address, piece), memory, None),
                transport.prepare(rows(address, piece), memory, peer),
            )
            order = np.random.default_rng(0).permutation(REGION // piece)[:count].astype(np.int32)
            timing = measure(transport, lists, (order, order[::-1].copy()), nap_s)
            speed = piece * count / timing.ended / 1e9
            say(
                f"{piece >> 10} KiB x {count}, {name}",
                f"posted {timing.posted * 1e3:8.3f} ms, ended {timing.ended * 1e3:8.3f} ms, "
                f"{speed:7.1f} GB/s",
            )
        del tensor
    finally:
        pipe.send("end")
        server.join(10)
        server.kill()


def main() -> int:
    """Run all variants."""
    parser = argparse.ArgumentParser(prog="bench-link", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    options = parser.parse_args()
    sizes = [(64 << 10, 19), (64 << 10, 128), (1152 << 10, 128), (64 << 10, 1024)]
    for variant in options.variants:
        print(f"{variant}:", flush=True)
        bench(
            options.device,
            VARIANTS[variant],
            lambda what, took: print(f"  {what:34}{took}", flush=True),
            sizes,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
