"""Ranks of prefill, or of decode, in one process, whose loads `bench transfer` times.

    python transfer_engine.py SPEC FD     (JSON, see `Spec`; the connection of the asker)

A question and its answer are JSON: the one key that a question has names a method of `Process`. So
the engines of another checkout can be asked as well, by that checkout's own program. Times are of
the host's monotonic clock, which all processes have.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import numpy as np
import torch

from lab.bench.bulk import BulkReader, BulkServer, Source
from lab.bench.in_tree_agent import InTreeAgent
from lab.bench.transfer_cells import VERIFIED, Blocks, Cut, Share
from lab.local.caches import layout_at
from lab.local.engine import HOST, LocalEngine
from lab.local.model_layouts import ModelShape
from nixl_kv.config import Config
from nixl_kv.engine.loop import SERVING_PAUSE_S
from nixl_kv.geometry.layout import CacheLayout, Memory
from nixl_kv.ids import Claim, RequestId
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.nixl import nixl_transport

NAP_S: Final = 0.00005
"""Between two looks for results."""

THREAD_NAME: Final = "nixl-kv-transfer"
TIMEOUT_S: Final = 60.0
CONFIG: Final = Config(
    host=HOST, lease_s=30.0, request_timeout_s=TIMEOUT_S, peer_timeout_s=TIMEOUT_S
)
"""Nothing fails because this machine is busy."""


class Spec(msgspec.Struct, kw_only=True, frozen=True):
    """What a process is for."""

    role: str
    model: ModelShape
    tokens: int
    seed: int
    num_bytes: Sequence[int]
    """For each rank, the bytes of its cache where it is largest."""

    ranks: Sequence[int] | None = None
    """Of the engine's ranks those that are in this process; None for all."""

    staging_mib: int = CONFIG.staging_mib


class Placed(msgspec.Struct, frozen=True):
    """An engine's cut, and the GPU of each rank; none where caches are in the host's memory."""

    cut: Cut
    gpus: Sequence[int]


@dataclass
class LoadTimes:
    """Of one load; in seconds."""

    begin: float
    """When it was started, which prefill had granted."""

    end: float
    """When the last rank of this process had reported it."""

    read: float
    """The longest read: from its post until its generation slot was seen to be valid."""

    cpu: float
    """CPU time of the transfer threads meanwhile."""

    num_bytes: int
    num_runs: int


class Process:
    """One role's engines, or some ranks of each, one for each path, in the same memory."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._engines: dict[str, LocalEngine] = {}
        self._layouts: list[CacheLayout] = []
        self._placed = Placed(Cut(1, "LBHNC", Blocks(16, 16)), [])
        self._table: list[int] = []
        self._in_tree: list[InTreeAgent] = []
        self._in_tree_table: list[int] = []
        self.server = BulkServer(partial(nixl_transport, CONFIG, "VRAM"))  # reads one piece
        self._reader = BulkReader(partial(nixl_transport, CONFIG, "VRAM"))

    # --- questions

    def start(self, placed: Mapping[str, Any], paths: Sequence[str]) -> None:
        """Start an engine for each path, which takes the place of those before."""
        self.stop()
        self._placed = msgspec.convert(placed, Placed)
        cut, spec = self._placed.cut, self._spec
        kind: Memory = "VRAM" if self._placed.gpus else "DRAM"
        self._layouts = cut.layouts(spec.model, spec.tokens, kind)
        for rank in self._mine:
            self._layouts[rank] = self._at_memory(self._layouts[rank], rank)
        for path in paths:
            config = replace(config_of(path), staging_mib=spec.staging_mib)
            make_transport = partial(nixl_transport, config, kind)
            name = f"{spec.role} {path}"
            self._engines[path] = LocalEngine(
                name, self._layouts, make_transport, config=config, roles=spec.role, only=self._mine
            )

    def stop(self) -> None:
        """End all engines."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def choose_blocks(self, tables: str) -> None:
        """From now on prompts are in blocks at random, or in a row."""
        self._table = block_ids(self._spec.role, self._spec, self._placed.cut, tables)

    def fill(self) -> None:
        """Write a prompt's KV into its blocks."""
        for view, expected in self._prompt():
            view[self._blocks(view)] = expected
        self._synchronize()

    def clear(self) -> None:
        """Write zeros into all memory."""
        for memory in self._memory.values():
            memory.zero_()
        self._synchronize()

    def check(self) -> bool:
        """Whether the prompt's blocks hold its KV, byte for byte."""
        pairs = ((view[self._blocks(view)], expected) for view, expected in self._prompt())
        return all(torch.equal(found, expected) for found, expected in pairs)

    def offer(self, path: str, request: str) -> Ticket:
        """Offer the prompt."""
        engine = self._engines[path]
        for rank in engine.ranks:
            rank.poll()
        return engine.offer(request, [self._table], self._spec.tokens)

    def prepare_load(self, path: str, request: str, ticket: Mapping[str, Any], claim: str) -> None:
        """Wait until prefill has granted it, to the claim that all ranks make."""
        engine = self._engines[path]
        engine.prepare_load(request, msgspec.convert(ticket, Ticket), Claim(claim))
        wait_until_granted(engine, RequestId(request))

    def load(self, path: str, request: str) -> LoadTimes:
        """Load what was prepared.

        Raises:
            RuntimeError: if that failed.
        """
        engine, name = self._engines[path], RequestId(request)
        cpu, begin = cpu_of_transfer_threads(), time.monotonic()
        is_verified = path.endswith(VERIFIED)
        engine.start_load(request, [self._table], range(self._spec.tokens), verify=is_verified)
        while not _is_over(engine, name):
            time.sleep(NAP_S)
        end, cpu = time.monotonic(), cpu_of_transfer_threads() - cpu
        reports = [rank.loads.pop(name) for rank in engine.ranks]
        failures = [one.failure for one in reports if one.failure]
        if failures:
            raise RuntimeError(f"{path}: {failures[0].detail}")
        if any(one.verified != is_verified for one in reports):
            raise RuntimeError(f"{path}: not all that was to be verified was")
        reads = [read for one in reports for read in one.reads]
        return LoadTimes(
            begin,
            end,
            max(read.seconds for read in reads),
            cpu,
            sum(read.num_bytes for read in reads),
            sum(read.num_runs for read in reads),
        )

    def serve_bulk(self) -> list[Source]:
        """Where each rank's memory can be read in one piece."""
        return [
            self.server.source(self._memory_of(rank), gpu) for rank, gpu in enumerate(self._gpus())
        ]

    def prepare_bulk(self, sources: Sequence[Any], shares: Sequence[Any]) -> None:
        """Connect, for `read_bulk`."""
        memory = {rank: (self._memory_of(rank), self._gpus()[rank]) for rank in self._mine}
        known = msgspec.convert(sources, list[Source])
        self._reader.prepare(memory, known, msgspec.convert(shares, list[Share]))

    def read_bulk(self) -> tuple[float, float]:
        """Read each share in one piece, all at the same time; when that began, and ended."""
        return self._reader.read()

    def copy(self, gpus: Sequence[int], shares: Sequence[Any]) -> tuple[float, float]:
        """Copy each share as torch does it, from memory of this process on prefill's GPUs."""
        memory = {rank: self._memory_of(rank) for rank in self._mine}
        return self._reader.copy(memory, gpus, msgspec.convert(shares, list[Share]))

    def start_in_tree(
        self,
        sources: Sequence[Any] = (),
        prefill: Mapping[str, Any] | None = None,
        tables: str = "",
    ) -> list[Source]:
        """Agents with the settings of vLLM's own connector, which on decode join prefill's.

        Args:
            sources: prefill's agents.
            prefill: how prefill is cut and placed.
            tables: how it chose its blocks.

        Returns:
            How these are joined.
        """
        self._in_tree = [
            InTreeAgent(self._in_tree_memory(rank), gpu) for rank, gpu in enumerate(self._gpus())
        ]
        if prefill is not None:
            spec, placed = self._spec, msgspec.convert(prefill, Placed)
            self._in_tree_table = block_ids("prefill", spec, placed.cut, tables)
            kind = "VRAM" if placed.gpus else "DRAM"
            known = msgspec.convert(sources, list[Source])
            layouts = placed.cut.layouts(spec.model, spec.tokens, kind)
            remotes = {
                source: replace(layout_at(layout, source.address), device=max(0, source.gpu))
                for source, layout in zip(known, layouts, strict=True)
            }
            for agent, layout in zip(self._in_tree, self._layouts, strict=True):
                agent.join(layout_at(layout, agent.source.address), remotes)
        return [agent.source for agent in self._in_tree]

    def read_in_tree(self) -> float:
        """Read the prompt with the only one; in seconds."""
        (agent,) = self._in_tree
        return agent.read(self._table, self._in_tree_table, self._spec.tokens)

    def stop_in_tree(self) -> None:
        """End them."""
        for agent in self._in_tree:
            agent.close()
        self._in_tree.clear()

    # --- memory

    @property
    def _mine(self) -> Sequence[int]:
        """The engine's ranks that are here."""
        ranks = range(self._placed.cut.tp)
        chosen = self._spec.ranks
        return ranks if chosen is None else [rank for rank in ranks if rank in chosen]

    def _gpus(self) -> Sequence[int]:
        return self._placed.gpus or [-1] * self._placed.cut.tp

    def _memory_of(self, rank: int) -> torch.Tensor:
        gpu = self._gpus()[rank]
        if (rank, gpu) not in self._memory:
            device = "cpu" if gpu < 0 else f"cuda:{gpu}"
            length = self._spec.num_bytes[rank]
            self._memory[rank, gpu] = torch.zeros(length, dtype=torch.uint8, device=device)
        return self._memory[rank, gpu]

    def _in_tree_memory(self, rank: int) -> torch.Tensor:
        """On a host its own, in pages as torch has them: our engines change those of theirs."""
        memory = self._memory_of(rank)
        return memory if memory.is_cuda else torch.ones_like(memory)

    def _at_memory(self, layout: CacheLayout, rank: int) -> CacheLayout:
        moved = layout_at(layout, self._memory_of(rank).data_ptr())
        return replace(moved, device=max(0, self._gpus()[rank]))

    def _synchronize(self) -> None:
        for gpu in {memory.device for memory in self._memory.values() if memory.is_cuda}:
            torch.cuda.synchronize(gpu)

    # --- the prompt's bytes

    def _blocks(self, view: torch.Tensor) -> torch.Tensor:
        """The prompt's blocks as the kernel counts them."""
        blocks = self._placed.cut.blocks
        each = blocks.size // blocks.kernel
        ids = np.asarray(self._table)[:, None] * each + np.arange(each)
        return torch.from_numpy(ids.ravel()).to(view.device)

    def _prompt(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each part of each layer of each rank, its cache and what the prompt's blocks hold.

        Shapes are [blocks, heads, tokens, content] of the cache, and of the prompt's blocks.
        """
        model, tokens = self._spec.model, self._spec.tokens
        for rank in self._mine:
            memory = self._memory_of(rank)
            (group,) = self._layouts[rank].groups
            size = group.block_size
            for number, region in enumerate(group.regions):
                generator = torch.Generator(memory.device).manual_seed(
                    self._spec.seed * model.layers + number
                )
                shape = (model.kv_heads, tokens // size, size, sum(model.content))
                noise = torch.randint(
                    0, 256, shape, dtype=torch.uint8, device=memory.device, generator=generator
                )
                mine = noise[slice(*region.heads)].transpose(0, 1)
                begin = 0
                for part in region.parts:
                    view = torch.as_strided(
                        memory,
                        (group.num_blocks, region.num_heads, size, part.length),
                        (
                            region.block_stride,
                            region.head_stride,
                            region.token_stride_of(part),
                            1,
                        ),
                        region.base + part.offset - memory.data_ptr(),
                    )
                    yield view, mine[..., begin : begin + part.length]
                    begin += part.length


def block_ids(role: str, spec: Spec, cut: Cut, tables: str) -> list[int]:
    """The prompt's block table on one side; `tables` is "random" or "contiguous"."""
    count = spec.tokens // cut.blocks.size
    ids = np.arange(1, 1 + 2 * count)
    if tables == "random":
        ids = np.random.default_rng([spec.seed, len(role)]).permutation(ids)
    found: list[int] = ids[:count].tolist()
    return found


def config_of(path: str) -> Config:
    """The configuration that moves bytes on this path."""
    return replace(CONFIG, path=path.removesuffix(VERIFIED), verify=float(path.endswith(VERIFIED)))


def wait_until_granted(engine: LocalEngine, request: RequestId) -> None:
    """Wait until nothing but local blocks is missing, as for a request that was queued.

    Raises:
        TimeoutError: if it does not come to that.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not all(_is_granted(rank.parts.decode.load_of(request)) for rank in engine.ranks):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{request} is not granted after {TIMEOUT_S:g} s")
        time.sleep(NAP_S)


def _is_granted(load: Any) -> bool:
    return load is not None and (load.lacks_only_blocks or load.failure is not None)


def _is_over(engine: LocalEngine, request: RequestId) -> bool:
    for rank in engine.ranks:
        rank.poll()
    return all(request in rank.loads for rank in engine.ranks)


def cpu_of_transfer_threads() -> float:
    """In seconds since they started; of all in this process."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name == THREAD_NAME and thread.ident is not None
    )


def main() -> None:
    """Answer until nobody asks."""
    connection = Connection(int(sys.argv[2]))
    process = Process(msgspec.json.decode(sys.argv[1], type=Spec))
    with contextlib.suppress(EOFError):
        while True:
            while not connection.poll(SERVING_PAUSE_S):
                process.server.progress()
            ((name, arguments),) = msgspec.json.decode(connection.recv_bytes()).items()
            answer = getattr(process, name)(**arguments)
            connection.send_bytes(msgspec.json.encode(answer))
    process.stop()


if __name__ == "__main__":
    main()
