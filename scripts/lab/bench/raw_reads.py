"""NIXL agents without an engine: the ceilings and the rival that benchmarks compare reads with."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import torch

from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.reading.agent import READING_PAUSE_S
from nixl_kv.transport.base import Indices, PeerName, Rows

NUM_THREADS: Final = 4


class InTreeTransport:
    """An agent with the settings of vLLM's own connector, and the methods of our transport.

    Its progress thread spins while it lives, so it should live no longer than its measurement.
    """

    def __init__(self) -> None:
        import nixl._api as api  # noqa: PLC0415 - UCX reads its environment at the import

        nixl: Any = api
        config = nixl.nixl_agent_config(num_threads=NUM_THREADS, capture_telemetry=True)
        self._agent: Any = nixl.nixl_agent(f"in-tree-{secrets.token_hex(8)}", config)
        self._registered: list[Any] = []

    def register(self, span: Span, memory: Memory, device: int) -> None:
        region = (span.address, span.length, device, "")
        self._registered.append(self._agent.register_memory([region], memory))

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> PeerName:
        return PeerName(self._agent.add_remote_agent(metadata))

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> Any:
        return self._agent.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", rows, memory)

    def read(self, local: Any, remote: Any, indices: tuple[Indices, Indices]) -> Any:
        read = self._agent.make_prepped_xfer("READ", local, indices[0], remote, indices[1])
        self._agent.transfer(read)
        return read

    def poll(self, read: Any) -> bool:
        """Whether the read has ended.

        Raises:
            RuntimeError: if it has failed.
        """
        state = self._agent.check_xfer_state(read)
        if state == "PROC":
            return False
        if state != "DONE":
            raise RuntimeError(f"the in-tree agent's read ended as {state}")
        self._agent.release_xfer_handle(read)
        return True

    def progress(self) -> None:
        """Its own thread serves peers."""

    def close(self) -> None:
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._agent = None


class Source(msgspec.Struct, frozen=True):
    """A rank's memory and the agent that registered it."""

    agent: bytes
    address: int
    gpu: int


@dataclass
class RawAgent:
    """The agent of one rank's memory, which is on the host if `gpu` is -1."""

    transport: Any
    """Ours, or `InTreeTransport`."""

    memory: torch.Tensor
    gpu: int
    _peers: dict[bytes, PeerName] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kind: Memory = "VRAM" if self.memory.is_cuda else "DRAM"
        span = Span(self.memory.data_ptr(), self.memory.numel())
        self.transport.register(span, self.kind, max(0, self.gpu))

    @property
    def source(self) -> Source:
        return Source(self.transport.metadata(), self.memory.data_ptr(), self.gpu)

    def prepare(
        self, source: Source, rows: tuple[Rows, Rows]
    ) -> Callable[[tuple[Indices, Indices]], Any]:
        """Connect, and return a function that posts a read of pieces of these rows."""
        if source.agent not in self._peers:
            self._peers[source.agent] = self.transport.add_peer(source.agent)
        local = self.transport.prepare(rows[0], self.kind, None)
        remote = self.transport.prepare(rows[1], self.kind, self._peers[source.agent])
        return partial(self.transport.read, local, remote)

    def run(self, posts: Sequence[Callable[[], Any]]) -> None:
        """Post all reads and wait for them as the transfer thread waits."""
        if self.memory.is_cuda:
            torch.cuda.set_device(self.gpu)
        reads = [post() for post in posts]
        while reads := [read for read in reads if not self.transport.poll(read)]:
            time.sleep(READING_PAUSE_S)


def dense_row(address: int, length: int, run: int, gpu: int = -1) -> Rows:
    """One row of runs that lie one behind the other."""
    return np.array([[address, run, max(0, gpu), run, length // run]], dtype=np.uint64)
