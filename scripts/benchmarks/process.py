"""Ranks of prefill, or one rank of decode: a process that `transfer` asks.

    python process.py SPEC FD     (JSON, see `Spec`; the connection of the asker)

A question is JSON with one key, the name of a method of `Process`, and its arguments; the answer is
JSON. `transfer --against` asks another checkout's program, so the questions up to `load` stay as
they are. Times are of the monotonic clock, which all processes of a host share.
"""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import numpy as np
import torch

from benchmarks.shapes import VERIFIED, Side
from harness.local.caches import layout_at
from harness.local.engine import HOST, LocalEngine, LocalRank
from harness.local.model_layouts import ModelShape
from nixl_kv.config import ANYWHERE, Config
from nixl_kv.geometry.layout import CacheLayout, Memory
from nixl_kv.ids import Claim, RequestId
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.nixl import nixl_transports

NAP_S: Final = 0.00005
"""Between two looks for results."""

THREAD_NAME: Final = "nixl-kv-transfer"
CHUNK: Final = 1 << 20
LENGTH_BYTES: Final = 8
TIMEOUT_S: Final = 60.0
CONFIG: Final = Config(
    host=HOST, lease_s=30.0, request_timeout_s=TIMEOUT_S, peer_timeout_s=TIMEOUT_S
)
"""A busy machine makes no load fail."""


class Spec(msgspec.Struct, kw_only=True, frozen=True):
    """One process."""

    role: str
    model: ModelShape
    tokens: int
    seed: int
    num_bytes: Sequence[int]
    """For each rank, the bytes of its largest cache."""

    ranks: Sequence[int] | None = None
    """The engine's ranks in this process; None for all. Decode has one."""

    staging_mib: int = CONFIG.staging_mib
    host: str = HOST

    @property
    def config(self) -> Config:
        """Engines on other hosts are peers, too, if this one listens on more than loopback."""
        peers = None if self.host == HOST else ANYWHERE
        return replace(CONFIG, host=self.host, peers=peers, staging_mib=self.staging_mib)


class Process:
    """One engine for each path, all in the same memory."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._memory: dict[int, torch.Tensor] = {}
        self._engines: dict[str, LocalEngine] = {}
        self._layouts: list[CacheLayout] = []
        self._side = Side(1, "LBHNC", 16)
        self._table: list[int] = []
        self._source = torch.empty(0)
        self._stream: socket.socket | None = None
        torch.set_num_threads(1)  # for copies of host memory

    # --- loads

    def start(self, placed: Mapping[str, Any], paths: Sequence[str]) -> None:
        """Start an engine for each path; those of the last cell end."""
        self.stop()
        self._side = msgspec.convert({**placed["cut"], "gpus": placed["gpus"]}, Side)
        spec, kind = self._spec, self._kind
        self._layouts = self._side.layouts(spec.model, spec.tokens, kind)
        for rank in self._mine:
            memory = self._memory_of(rank)
            layout = layout_at(self._layouts[rank], memory.data_ptr())
            self._layouts[rank] = replace(layout, device=memory.device.index or 0)
        for path in paths:
            is_verified = float(path.endswith(VERIFIED))
            config = replace(spec.config, path=path.removesuffix(VERIFIED), verify=is_verified)
            make_transport, ports = nixl_transports(config, kind)
            self._engines[path] = LocalEngine(
                f"{spec.role} {path}",
                self._layouts,
                make_transport,
                config=config,
                ports=ports,
                roles=spec.role,
                only=self._mine,
            )

    def stop(self) -> None:
        """End all engines."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def choose_blocks(self, tables: str) -> None:
        """Choose the prompt's blocks. Older checkouts can also choose others than random ones."""
        del tables
        spec, count = self._spec, self._spec.tokens // self._side.block_size
        chooser = np.random.default_rng([spec.seed, len(spec.role)])
        self._table = chooser.permutation(np.arange(1, 1 + 2 * count))[:count].tolist()

    def fill(self) -> None:
        """Write a prompt's KV into its blocks."""
        for view, expected in self._prompt():
            view[torch.tensor(self._table, device=view.device)] = expected
        self._synchronize()

    def clear(self) -> None:
        """Write zeros into all memory."""
        for memory in self._memory.values():
            memory.zero_()
        self._synchronize()

    def check(self) -> bool:
        """Whether the prompt's blocks hold its KV, byte for byte."""
        return all(
            torch.equal(view[torch.tensor(self._table, device=view.device)], expected)
            for view, expected in self._prompt()
        )

    def offer(self, path: str, request: str) -> Ticket:
        """Offer the prompt."""
        engine = self._engines[path]
        for rank in engine.ranks:
            rank.poll()
        return engine.offer(request, [self._table], self._spec.tokens)

    def prepare_load(self, path: str, request: str, ticket: Mapping[str, Any], claim: str) -> None:
        """Wait until prefill has granted the request, as if it had been queued."""
        engine, name = self._engines[path], RequestId(request)
        engine.prepare_load(request, msgspec.convert(ticket, Ticket), Claim(claim))
        engine.wait(lambda: all(_is_granted(rank, name) for rank in engine.ranks), TIMEOUT_S)

    def load(self, path: str, request: str) -> dict[str, float]:
        """Load a request with a ticket.

        Returns:
            In seconds, when it began and ended, its longest read (until its fence slot has been
            checked) and the CPU time of the transfer threads; and its bytes and runs.

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
        failures = [one.failure.detail for one in reports if one.failure]
        failures += ["a load was not verified" for one in reports if one.verified != is_verified]
        if failures:
            raise RuntimeError(f"{path}: {failures[0]}")
        reads = [read for one in reports for read in one.reads]
        return {
            "begin": begin,
            "end": end,
            "read": max(read.seconds for read in reads),
            "cpu": cpu,
            "num_bytes": sum(read.num_bytes for read in reads),
            "num_runs": sum(read.num_runs for read in reads),
        }

    def load_at_once(
        self, path: str, request: str, ticket: Mapping[str, Any], claim: str
    ) -> dict[str, float]:
        """Load a request that arrives with its blocks."""
        begin = time.monotonic()
        ours = msgspec.convert(ticket, Ticket)
        self._engines[path].prepare_load(request, ours, Claim(claim))
        return self.load(path, request) | {"begin": begin}

    # --- the link, without engines and NIXL

    def prepare_copy(self, gpu: int, num_bytes: int) -> None:
        """Allocate as much on prefill's GPU, or on the host if that is -1."""
        device = f"cuda:{gpu}" if gpu >= 0 else "cpu"
        self._source = torch.ones(num_bytes, dtype=torch.uint8, device=device)

    def copy(self) -> dict[str, float]:
        """Copy it into decode's memory; when that began and ended."""
        (rank,) = self._mine
        target, begin = self._memory_of(rank)[: len(self._source)], time.monotonic()
        target.copy_(self._source)
        self._synchronize()
        return {"begin": begin, "end": time.monotonic()}

    def serve_stream(self) -> int:
        """Send memory to one reader that asks for bytes by plain TCP. Returns the port."""
        listening = socket.create_server((self._spec.host, 0))
        memory = self._memory_of(0).numpy()

        def serve() -> None:
            stream, _ = listening.accept()
            while asked := stream.recv(LENGTH_BYTES):
                stream.sendall(memory.data[: int.from_bytes(asked, "big")])

        threading.Thread(target=serve, daemon=True).start()
        return int(listening.getsockname()[1])

    def read_stream(self, host: str, port: int, num_bytes: int) -> dict[str, float]:
        """Ask and receive; when that began and ended."""
        self._stream = self._stream or socket.create_connection((host, port))
        memory, received, begin = self._memory_of(0).numpy(), 0, time.monotonic()
        self._stream.sendall(num_bytes.to_bytes(LENGTH_BYTES, "big"))
        while received < num_bytes:
            received += self._stream.recv_into(memory.data[received : received + CHUNK])
        return {"begin": begin, "end": time.monotonic()}

    # --- memory

    @property
    def _mine(self) -> Sequence[int]:
        ranks, chosen = range(self._side.tp), self._spec.ranks
        return ranks if chosen is None else [rank for rank in ranks if rank in chosen]

    @property
    def _kind(self) -> Memory:
        return "VRAM" if self._side.gpus else "DRAM"

    def _memory_of(self, rank: int) -> torch.Tensor:
        """All cells have this rank on the same GPU."""
        if rank not in self._memory:
            device = f"cuda:{self._side.gpus[rank]}" if self._side.gpus else "cpu"
            length = self._spec.num_bytes[rank]
            self._memory[rank] = torch.zeros(length, dtype=torch.uint8, device=device)
        return self._memory[rank]

    def _synchronize(self) -> None:
        for gpu in {memory.device for memory in self._memory.values() if memory.is_cuda}:
            torch.cuda.synchronize(gpu)

    def _prompt(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each part of each layer of each rank, its cache and what the prompt's blocks hold.

        Shapes are [blocks, heads, tokens, content] of the cache, and of the prompt's blocks.
        """
        model, spec = self._spec.model, self._spec
        for rank in self._mine:
            memory, (group,) = self._memory_of(rank), self._layouts[rank].groups
            size = group.block_size
            shape = (model.kv_heads, spec.tokens // size, size, sum(model.content))
            for number, region in enumerate(group.regions):
                seeded = torch.Generator(memory.device)
                seeded.manual_seed(spec.seed * model.layers + number)
                kind: Any = {"dtype": torch.uint8, "device": memory.device, "generator": seeded}
                noise = torch.randint(0, 256, shape, **kind)
                mine, begin = noise[slice(*region.heads)].transpose(0, 1), 0
                for part in region.parts:
                    token_stride = region.token_stride_of(part)
                    view = memory.as_strided(
                        (group.num_blocks, region.num_heads, size, part.length),
                        (region.block_stride, region.head_stride, token_stride, 1),
                        region.base + part.offset - memory.data_ptr(),
                    )
                    yield view, mine[..., begin : begin + part.length]
                    begin += part.length


def _is_granted(rank: LocalRank, request: RequestId) -> bool:
    load = next((load for load in rank.parts.decode.loads if load.request == request), None)
    return load is not None and (load.lacks_only_blocks or load.failure is not None)


def _is_over(engine: LocalEngine, request: RequestId) -> bool:
    for rank in engine.ranks:
        rank.poll()
    return all(request in rank.loads for rank in engine.ranks)


def cpu_of_transfer_threads() -> float:
    """CPU seconds of all transfer threads of this process so far."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name == THREAD_NAME and thread.ident is not None
    )


def main() -> None:
    """Answer until the asker closes the connection."""
    connection = Connection(int(sys.argv[2]))
    process = Process(msgspec.json.decode(sys.argv[1], type=Spec))
    with contextlib.suppress(EOFError):
        while True:
            ((name, arguments),) = msgspec.json.decode(connection.recv_bytes()).items()
            answer = getattr(process, name)(**arguments)
            connection.send_bytes(msgspec.json.encode(answer))
    process.stop()


if __name__ == "__main__":
    main()
