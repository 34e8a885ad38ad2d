"""Reads between two processes on one GPU: owners that stop or die, and agents that are destroyed.

python -m pytest -s -m gpu tests/gpu/test_fence.py
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

from nixl_kv.geometry.layout import Span  # noqa: E402
from nixl_kv.transport.base import Rows  # noqa: E402
from support.gpus import needs_gpus  # noqa: E402

pytestmark = needs_gpus(1)

SIZE = 4 << 30
PIECE = 16 << 10  # with gaps between pieces, so that none are merged and the read takes a while
CONFIG = nixl.UCX_ENGINE_CONFIG


def rows(memory: int) -> Rows:
    return np.array([[memory, PIECE, 0, 2 * PIECE, SIZE // (2 * PIECE)]], dtype=np.uint64)


def _own(pipe: Connection) -> None:
    memory = torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    transport = nixl.NixlTransport(engine_config=CONFIG)
    transport.register(Span(memory.data_ptr(), SIZE), "VRAM", 0)
    pipe.send((transport.metadata(), memory.data_ptr()))
    while not pipe.poll(0.001):
        transport.progress()


@contextmanager
def owner() -> Iterator[tuple[int, bytes, int]]:
    """A process whose memory is read: its id, its metadata, and where its memory is."""
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_own, args=(theirs,), daemon=True)
    process.start()
    try:
        assert pipe.poll(120), "the process did not start"
        yield process.pid, *pipe.recv()
    finally:
        process.kill()
        process.join()


class Reader:
    def __init__(self, metadata: bytes, address: int) -> None:
        self.memory = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        self.transport = nixl.NixlTransport(engine_config=CONFIG)
        self.transport.register(Span(self.memory.data_ptr(), SIZE), "VRAM", 0)
        self.peer = self.transport.add_peer(metadata)
        local, remote = rows(self.memory.data_ptr()), rows(address)
        self.local = self.transport.prepare(local, "VRAM", None)
        self.remote = self.transport.prepare(remote, "VRAM", self.peer)

    def erase(self) -> None:
        self.memory.zero_()
        torch.cuda.synchronize()

    def begin(self) -> object:
        indices = np.arange(SIZE // (2 * PIECE), dtype=np.int32)
        return self.transport.read(self.local, self.remote, (indices, indices))

    def finish(self, read: object, timeout_s: float = 20.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.transport.poll(read):
                return True
        return False

    def landed(self) -> int:
        """Pieces of which something is here; waits for no copy that NIXL may have begun."""
        with torch.cuda.stream(torch.cuda.Stream()):
            return int((self.memory[:: 2 * PIECE] == 7).sum())


def test_a_read_from_a_stopped_owner_ends_by_itself() -> None:
    with owner() as (process, metadata, address):
        reader = Reader(metadata, address)
        assert reader.finish(reader.begin())  # connected, with all of NIXL's threads
        reader.erase()
        read = reader.begin()
        os.kill(process, signal.SIGSTOP)
        assert reader.finish(read)
        assert reader.landed() == SIZE // (2 * PIECE)
        assert reader.finish(reader.begin())
        os.kill(process, signal.SIGCONT)
        reader.transport.close()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_nothing_lands_after_the_agent_is_gone(*, stopped: bool) -> None:
    with owner() as (process, metadata, address):
        for _ in range(5):
            reader = Reader(metadata, address)
            assert reader.finish(reader.begin())
            reader.erase()
            reader.begin()
            if stopped:
                os.kill(process, signal.SIGSTOP)
            begun = time.monotonic()
            reader.transport.close()
            seconds = time.monotonic() - begun
            first = reader.landed()
            os.kill(process, signal.SIGCONT)
            time.sleep(0.5)  # that nothing comes can only be seen by waiting
            print(f"{first} of {SIZE // (2 * PIECE)} pieces, closed in {seconds * 1000:.0f} ms")
            assert reader.landed() == first


def test_the_memory_of_a_killed_owner_comes_back() -> None:
    """Else each life of a prefill engine takes its cache's size from the GPU until decode ends."""
    for _ in range(2):
        with owner() as (process, metadata, address):
            reader = Reader(metadata, address)
            assert reader.finish(reader.begin())
            free, _ = torch.cuda.mem_get_info()
            os.kill(process, signal.SIGKILL)
        reader.transport.drop_peer(reader.peer)
        deadline = time.monotonic() + 60.0
        while torch.cuda.mem_get_info()[0] < free + SIZE:
            assert time.monotonic() < deadline, "this process keeps the dead owner's memory"
            time.sleep(0.1)
        reader.transport.close()
