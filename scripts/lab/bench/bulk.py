"""The ceiling of a transfer: the same bytes, in one piece from each rank that is read.

Over the same transport as the connector's reads; and as torch copies between GPUs.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import torch

from lab.bench.transfer_cells import Share
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.transport.base import ListHandle, PeerName, Transport

FIRST: Final = np.zeros(1, dtype=np.int32)


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

    def read(
        self,
        memory: Sequence[torch.Tensor],
        gpus: Sequence[int],
        sources: Sequence[Source],
        shares: Sequence[Share],
    ) -> float:
        """Read each share in one piece, each rank of decode on a thread of its own.

        Args:
            memory: of each rank of decode.
            gpus: of each rank of decode; -1 where it is the host's memory.
            sources: each rank of prefill.
            shares: who reads how much from whom.

        Returns:
            Seconds from the first post to the last byte.
        """
        pieces: dict[int, list[tuple[ListHandle, ListHandle]]] = {}
        read, sent = [0] * len(memory), [0] * len(sources)
        for share in shares:
            agent = self._agents.get(memory[share.decode], gpus[share.decode])
            source = sources[share.prefill]
            if source.agent not in agent.peers:
                agent.peers[source.agent] = agent.transport.add_peer(source.agent)
            peer = agent.peers[source.agent]
            here, there = agent.address + read[share.decode], source.address + sent[share.prefill]
            piece = (
                agent.prepare(here, share.num_bytes, agent.gpu, None),
                agent.prepare(there, share.num_bytes, source.gpu, peer),
            )
            pieces.setdefault(share.decode, []).append(piece)
            read[share.decode] += share.num_bytes
            sent[share.prefill] += share.num_bytes
        agents = {rank: self._agents.get(memory[rank], gpus[rank]) for rank in pieces}
        begin = time.perf_counter()
        reading = [
            self._threads.submit(_read, agents[rank], its_pieces)
            for rank, its_pieces in pieces.items()
        ]
        for one in reading:
            one.result()
        return time.perf_counter() - begin

    def copy(
        self, memory: Sequence[torch.Tensor], gpus: Sequence[int], shares: Sequence[Share]
    ) -> float:
        """Copy each share from memory of this process on prefill's GPUs; in seconds.

        The arguments are those of `read`, but `gpus` are prefill's.
        """
        sources, targets = [], []
        for share in shares:
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
        begin = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin


def _read(agent: _Agent, pieces: Sequence[tuple[ListHandle, ListHandle]]) -> None:
    if agent.gpu >= 0:
        torch.cuda.set_device(agent.gpu)  # a new thread has no context
    transport = agent.transport
    reads = [transport.read(mine, theirs, (FIRST, FIRST)) for mine, theirs in pieces]
    while reads:
        reads = [read for read in reads if not transport.poll(read)]
        time.sleep(0)
