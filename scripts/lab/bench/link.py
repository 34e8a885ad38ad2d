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
from collections.abc import Sequence
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
SIZES: Final = ((64 << 10, 19), (64 << 10, 128), (1152 << 10, 128), (64 << 10, 1024))
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


class Reader:
    """The side that reads, with a server process to read from."""

    def __init__(self, device: str, options: dict[str, str]) -> None:
        """Start the server and connect."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._server = context.Process(target=serve, args=(device, options, theirs))
        self._server.start()
        self._transport = NixlTransport(ucx_options=options)
        self._tensor, self._span, self._memory = region(device)
        self._transport.register(self._span, self._memory, 0)
        metadata, self._there = self._pipe.recv()
        self._peer = self._transport.add_peer(metadata)

    def measure(self, piece: int, count: int, nap_s: float) -> Timing:
        """Medians of nine reads of so many pieces, after two that connect and warm up."""
        lists = (
            self._transport.prepare(rows(self._span.address, piece), self._memory, None),
            self._transport.prepare(rows(self._there, piece), self._memory, self._peer),
        )
        order = np.random.default_rng(0).permutation(REGION // piece)[:count].astype(np.int32)
        indices = (order, order[::-1].copy())
        posted, ended = [], []
        for _ in range(11):
            begin = time.perf_counter()
            handle = self._transport.read(*lists, indices)
            posted.append(time.perf_counter() - begin)
            while not self._transport.poll(handle):
                time.sleep(nap_s)
            ended.append(time.perf_counter() - begin)
        return Timing(statistics.median(posted[2:]), statistics.median(ended[2:]))

    def close(self) -> None:
        """End the server."""
        self._pipe.send("end")
        self._server.join(10)
        self._server.kill()


def bench(device: str, options: dict[str, str]) -> None:
    """One variant of options against all sizes and ways to wait."""
    reader = Reader(device, options)
    try:
        for (piece, count), (name, nap_s) in itertools.product(SIZES, NAPS.items()):
            timing = reader.measure(piece, count, nap_s)
            print(
                f"  {f'{piece >> 10} KiB x {count}, {name}':34}"
                f"posted {timing.posted * 1e3:8.3f} ms, ended {timing.ended * 1e3:8.3f} ms, "
                f"{piece * count / timing.ended / 1e9:7.1f} GB/s",
                flush=True,
            )
    finally:
        reader.close()


def main(arguments: Sequence[str]) -> int:
    """Run all variants."""
    parser = argparse.ArgumentParser(prog="bench link", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args(arguments)
    for variant in options.variants:
        print(f"{variant}:", flush=True)
        bench(options.device, VARIANTS[variant])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
