"""The ways in which `bench tcp` moves bytes from one host to another, and the processes that do.

Of each way an owner and a reader run, each on its host. Both begin with the same memory, the
owner's filled.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lab.cluster import netns
from nixl_kv.config import ANYWHERE, Config
from nixl_kv.engine.loop import SERVING_PAUSE_S
from nixl_kv.geometry.layout import Span
from nixl_kv.reading.agent import READING_PAUSE_S
from nixl_kv.transport.base import Rows, Transport

ENVIRONMENT: Final = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": netns.WIRE}
"""Namespaces are one machine, of whose shared memory UCX must not know."""
PORT: Final = 7000
CHUNK: Final = 1 << 20
FILLED: Final = 7

Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int32]
"""Numbers of the runs, as they are read."""
Read = Callable[[Order], None]
"""Reads these runs, each to where it is at the owner's, and ends when all are here."""


class BulkOwner:
    """Answers each byte with all of its memory."""

    def __init__(self, memory: Bytes) -> None:
        """Listen."""
        self._memory = memory
        self._listening = socket.create_server(("", PORT))
        self.known = PORT

    def serve(self, pipe: Connection) -> None:
        """Until the reader leaves."""
        pipe.send(self.known)
        stream, _ = self._listening.accept()
        while stream.recv(1):
            stream.sendall(self._memory.data)


def bulk_reader(memory: Bytes, known: Any, host: str, _: int) -> Read:
    """Connect."""
    stream = socket.create_connection((host, known))

    def read(_: Order) -> None:
        stream.sendall(b"?")
        received = 0
        while received < len(memory):
            received += stream.recv_into(memory.data[received : received + CHUNK])

    return read


class NixlOwner:
    """Is read by nixl_kv, and progresses as its transfer thread does."""

    def __init__(self, memory: Bytes) -> None:
        """Register it."""
        self._memory = memory  # NIXL does not keep it
        self._transport = make_transport()
        self._transport.register(Span(memory.ctypes.data, len(memory)), "DRAM", 0)
        self.known = (self._transport.metadata(), memory.ctypes.data)

    def serve(self, pipe: Connection) -> None:
        """Until it is told to end."""
        pipe.send(self.known)
        while not pipe.poll(SERVING_PAUSE_S):
            self._transport.progress()


def nixl_reader(memory: Bytes, known: Any, _: str, run: int) -> Read:
    """Prepare, and wait as the transfer thread waits."""
    metadata, address = known
    transport = make_transport()
    transport.register(Span(memory.ctypes.data, len(memory)), "DRAM", 0)
    peer = transport.add_peer(metadata)
    local = transport.prepare(dense_row(memory.ctypes.data, len(memory), run), "DRAM", None)
    remote = transport.prepare(dense_row(address, len(memory), run), "DRAM", peer)

    def read(order: Order) -> None:
        handle = transport.read(local, remote, (order, order))
        while not transport.poll(handle):
            time.sleep(READING_PAUSE_S)

    return read


class InTreeOwner:
    """An agent as vLLM's in-tree connector makes it: its own thread serves readers."""

    def __init__(self, memory: Bytes) -> None:
        """Register it."""
        self._memory = memory  # NIXL does not keep it
        self._agent = make_in_tree_agent(memory)
        self.known = (self._agent.get_agent_metadata(), memory.ctypes.data)

    def serve(self, pipe: Connection) -> None:
        """Until it is told to end."""
        pipe.send(self.known)
        pipe.recv()


def in_tree_reader(memory: Bytes, known: Any, _: str, run: int) -> Read:
    """All runs in one transfer, whose state is asked for as often as ours."""
    from lab.bench.in_tree_agent import wait_until_done  # noqa: PLC0415 - after the environment

    metadata, address = known
    agent = make_in_tree_agent(memory)
    peer = agent.add_remote_agent(metadata)
    local = agent.prep_xfer_dlist(
        "NIXL_INIT_AGENT", dense_row(memory.ctypes.data, len(memory), run), "DRAM"
    )
    remote = agent.prep_xfer_dlist(peer, dense_row(address, len(memory), run), "DRAM")

    def read(order: Order) -> None:
        handle = agent.make_prepped_xfer("READ", local, order, remote, order)
        agent.transfer(handle)
        wait_until_done(agent, [handle])
        agent.release_xfer_handle(handle)

    return read


def make_transport() -> Transport:
    """As an engine's, by default, but for hosts elsewhere."""
    from nixl_kv.transport.nixl import nixl_transport  # noqa: PLC0415 - after the environment

    return nixl_transport(Config(peers=ANYWHERE), "DRAM")


def make_in_tree_agent(memory: Bytes) -> Any:
    """It has registered this memory."""
    from lab.bench.in_tree_agent import make_agent  # noqa: PLC0415 - after the environment

    agent = make_agent()
    agent.register_memory([(memory.ctypes.data, len(memory), 0, "")], "DRAM")
    return agent


def dense_row(address: int, length: int, run: int) -> Rows:
    """One row of runs over the whole memory."""
    return np.array([[address, run, 0, run, length // run]], dtype=np.uint64)


BULK: Final = "one stream"
NIXL_KV: Final = "nixl_kv"
IN_TREE: Final = "in-tree settings"

OWNERS: Final[Mapping[str, Callable[[Bytes], Any]]] = {
    BULK: BulkOwner,
    NIXL_KV: NixlOwner,
    IN_TREE: InTreeOwner,
}
READERS: Final = {BULK: bulk_reader, NIXL_KV: nixl_reader, IN_TREE: in_tree_reader}


def run_owner(way: str, namespace: str, num_bytes: int, pipe: Connection) -> None:
    """The process that is read."""
    owner = OWNERS[way](_enter(namespace, num_bytes, FILLED))
    owner.serve(pipe)


def run_reader(way: str, namespace: str, num_bytes: int, run: int, pipe: Connection) -> None:
    """The process that reads what it is told to, and says in what time; wrong bytes end it."""
    memory = _enter(namespace, num_bytes, 0)
    known, host = pipe.recv()
    read = READERS[way](memory, known, host, run)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        memory[:] = 0
        begin = time.perf_counter()
        read(order)
        seconds = time.perf_counter() - begin
        if not (memory == FILLED).all():
            raise RuntimeError(f"{way}: not all bytes are as they were")
        pipe.send(seconds)


def _enter(namespace: str, num_bytes: int, value: int) -> Bytes:
    netns.enter(namespace)
    os.environ.update(ENVIRONMENT)
    return np.full(num_bytes, value, dtype=np.uint8)
