"""The ceiling of a transfer: the same bytes, in one piece from each rank that is read.

Over the same transport as the connector's reads; and as torch copies between GPUs.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
import numpy as np
import torch

from lab.bench.transfer_cells import Share
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.transport.base import ListHandle, PeerName, Transport

FIRST: Final = np.zeros(1, dtype=np.int32)

Piece: TypeAlias = tuple[ListHandle, ListHandle]
"""Where it is read to, and from."""


class Source(msgspec.Struct, frozen=True):
    """Memory of a rank of prefill, and the agent by which it is read."""

    agent: bytes
    address: int
    gpu: int


@dataclass
class _Agent:
    """A transport of its own for one rank's memory."""

    transport: Transport
    address: int
    gpu: int

    def __post_init__(self) -> None:
        self.peers: dict[bytes, PeerName] = {}

    @property
    def memory(self) -> Memory:
        return "DRAM" if self.gpu < 0 else "VRAM"

    def prepare(self, address: int, num_bytes: int, gpu: int, peer: PeerName | None) -> ListHandle:
        row = [address, num_bytes, max(0, gpu), num_bytes, 1]
        return self.transport.prepare(np.array([row], dtype=np.uint64), self.memory, peer)


class _Agents:
    """Agents by the memory that they have registered."""

    def __init__(self, make_transport: Callable[[], Transport]) -> None:
        self._make_transport = make_transport
        self._agents: dict[int, _Agent] = {}

    def get(self, memory: torch.Tensor, gpu: int) -> _Agent:
        address = memory.data_ptr()
        if address not in self._agents:
            agent = _Agent(self._make_transport(), address, gpu)
            agent.transport.register(Span(address, memory.numel()), agent.memory, max(0, gpu))
            self._agents[address] = agent
        return self._agents[address]

    def all(self) -> list[_Agent]:
        return list(self._agents.values())


class BulkServer:
    """Lets memory be read."""

    def __init__(self, make_transport: Callable[[], Transport]) -> None:
        self._agents = _Agents(make_transport)

    def source(self, memory: torch.Tensor, gpu: int) -> Source:
        """How it is read."""
        agent = self._agents.get(memory, gpu)
        return Source(agent.transport.metadata(), agent.address, gpu)

    def progress(self) -> None:
        """Some paths need the owner of the memory to take part."""
        for agent in self._agents.all():
            agent.transport.progress()


class BulkReader:
    """Reads memory of another process in large pieces."""

    def __init__(self, make_transport: Callable[[], Transport]) -> None:
        self._agents = _Agents(make_transport)
        self._copied: dict[int, torch.Tensor] = {}
        self._threads = ThreadPoolExecutor()
        self._prepared: dict[int, tuple[_Agent, list[Piece]]] = {}

    def prepare(
        self,
        memory: Mapping[int, tuple[torch.Tensor, int]],
        sources: Sequence[Source],
        shares: Sequence[Share],
    ) -> None:
        """Connect, and say what `read` reads: each share of these ranks in one piece.

        Args:
            memory: of ranks of decode, and its GPU, which is -1 where it is the host's.
            sources: each rank of prefill.
            shares: who reads how much from whom; ranks that `memory` lacks are elsewhere.
        """
        self._prepared = {rank: (self._agents.get(*mine), []) for rank, mine in memory.items()}
        read, sent = Counter[int](), Counter[int]()
        for share in shares:
            source, num_bytes = sources[share.prefill], share.num_bytes
            at = source.address + sent[share.prefill]
            sent[share.prefill] += num_bytes
            if share.decode not in memory:
                continue
            agent, pieces = self._prepared[share.decode]
            if source.agent not in agent.peers:
                agent.peers[source.agent] = agent.transport.add_peer(source.agent)
            here, peer = agent.address + read[share.decode], agent.peers[source.agent]
            mine = agent.prepare(here, num_bytes, agent.gpu, None)
            pieces.append((mine, agent.prepare(at, num_bytes, source.gpu, peer)))
            read[share.decode] += num_bytes

    def read(self) -> tuple[float, float]:
        """Read what was prepared, each rank of decode on a thread of its own.

        Returns:
            When that began, and when the last byte had come.
        """
        begin = time.monotonic()
        reading = [self._threads.submit(_read, *one) for one in self._prepared.values()]
        for one in reading:
            one.result()
        return begin, time.monotonic()

    def copy(
        self, memory: Mapping[int, torch.Tensor], gpus: Sequence[int], shares: Sequence[Share]
    ) -> tuple[float, float]:
        """Copy each share of these ranks of decode from memory of this process.

        Args:
            memory: of ranks of decode.
            gpus: of each rank of prefill.
            shares: who reads how much from whom; ranks that `memory` lacks are elsewhere.

        Returns:
            When that began, and ended.
        """
        sources, targets = [], []
        for share in shares:
            if share.decode not in memory:
                continue
            gpu = gpus[share.prefill]
            if gpu not in self._copied or self._copied[gpu].numel() < share.num_bytes:
                self._copied[gpu] = torch.zeros(
                    share.num_bytes, dtype=torch.uint8, device=f"cuda:{gpu}"
                )
            sources.append(self._copied[gpu][: share.num_bytes])
            targets.append(memory[share.decode][: share.num_bytes])
        devices = {one.device for one in (*sources, *targets)}
        for device in devices:
            torch.cuda.synchronize(device)
        begin = time.monotonic()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        return begin, time.monotonic()


def _read(agent: _Agent, pieces: Sequence[Piece]) -> None:
    if agent.gpu >= 0:
        torch.cuda.set_device(agent.gpu)  # a new thread has no context
    transport = agent.transport
    reads = [transport.read(mine, theirs, (FIRST, FIRST)) for mine, theirs in pieces]
    while reads:
        reads = [read for read in reads if not transport.poll(read)]
        time.sleep(0)
