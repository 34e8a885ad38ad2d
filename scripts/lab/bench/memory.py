"""Memory of this process, and as much of another one on the same host and device to read from."""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import torch
from typing_extensions import Self

from nixl_kv.engine.loop import SERVING_PAUSE_S
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.transport.base import Indices, Rows
from nixl_kv.transport.nixl import NixlTransport

END_S: Final = 10.0


class Timing(NamedTuple):
    """Of one read, in seconds: inside `read`, and until it has ended."""

    posted: float
    ended: float


class OwnMemory:
    """Memory of this process, registered with an agent of its own."""

    def __init__(self, num_bytes: int, device: str, options: Mapping[str, str]) -> None:
        """Filled, so that it is there; `options` are those of the UCX backend."""
        self._tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._tensor.fill_(7)
        if self._tensor.is_cuda:
            torch.cuda.synchronize()
        self.memory: Memory = "VRAM" if self._tensor.is_cuda else "DRAM"
        self.address = self._tensor.data_ptr()
        self.transport = NixlTransport(ucx_options=options)
        self.transport.register(Span(self.address, num_bytes), self.memory, 0)


def serve(num_bytes: int, device: str, options: Mapping[str, str], pipe: Connection) -> None:
    """The side that is read: progresses until it is told to end."""
    own = OwnMemory(num_bytes, device, options)
    pipe.send((own.transport.metadata(), own.address))
    while not pipe.poll(SERVING_PAUSE_S):
        own.transport.progress()


class RemoteMemory:
    """Reads from another process into this one."""

    def __init__(self, num_bytes: int, device: str, options: Mapping[str, str]) -> None:
        """Start the other process, and connect."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (num_bytes, device, options, theirs)
        self._server = context.Process(target=serve, args=arguments, daemon=True)
        self._server.start()
        self.own = OwnMemory(num_bytes, device, options)
        metadata, self.address = self._pipe.recv()
        self._peer = self.own.transport.add_peer(metadata)

    def __enter__(self) -> Self:
        """At the end of the block both agents end."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the other process, and let go of the memory."""
        self._pipe.send("end")
        self._server.join(END_S)
        self._server.kill()
        self.own.transport.close()

    def prepare(
        self, local: Rows, remote: Rows
    ) -> Callable[[tuple[Indices, Indices], float], Timing]:
        """A function that reads pieces of these rows, and looks for the end so often."""
        transport = self.own.transport
        lists = (
            transport.prepare(local, self.own.memory, None),
            transport.prepare(remote, self.own.memory, self._peer),
        )

        def read(indices: tuple[Indices, Indices], pause_s: float) -> Timing:
            begin = time.perf_counter()
            handle = transport.read(*lists, indices)
            posted = time.perf_counter() - begin
            while not transport.poll(handle):
                time.sleep(pause_s)
            return Timing(posted, time.perf_counter() - begin)

        return read
