"""Ranks of prefill, or one rank of decode: a process that `bench transfer` asks.

    python transfer_engine.py SPEC FD     (JSON, see `Spec`; the connection of the asker)

A question is JSON with one key, the name of a method of `Process`, and its arguments; the answer is
JSON. `bench transfer --against` asks another checkout's program, so the questions up to `load` stay
as they are. Times are of the monotonic clock, which all processes of a host share.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import numpy as np
import torch

from harness.local.caches import layout_at
from harness.local.engine import HOST, LocalEngine, LocalRank
from harness.local.model_layouts import ModelShape
from lab.bench.cells import VERIFIED, Cut
from lab.bench.raw_reads import InTreeTransport, RawAgent, Source, dense_row
from nixl_kv.config import Config
from nixl_kv.engine.loop import SERVING_PAUSE_S
from nixl_kv.geometry.layout import CacheLayout, Memory, Table
from nixl_kv.geometry.match import assign, holdings
from nixl_kv.geometry.plan import plan
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
"""A busy machine makes no load fail."""

BULK: Final = "bulk"
IN_TREE: Final = "in-tree"
STEPS: Final = {
    "description": ("CONNECTING", "HANDSHAKING"),
    "ask": ("ASKING", "GRANTED"),
    "join": ("HANDSHAKING", "READY"),
    "first read": ("READING", "DONE"),
}
"""Parts of a first load, each between two states of the event log."""


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


class Process:
    """One engine for each path, all in the same memory."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._engines: dict[str, LocalEngine] = {}
        self._layouts: list[CacheLayout] = []
        self._cut = Cut(1, "LBHNC", 16)
        self._gpus: Sequence[int] = ()
        self._table: list[int] = []
        self._raw: dict[tuple[str, int, int], RawAgent] = {}
        self._posts: dict[str, tuple[RawAgent, list[Any]]] = {}

    # --- loads

    def start(self, placed: Mapping[str, Any], paths: Sequence[str]) -> None:
        """Start an engine for each path; those of the last cell end."""
        self.stop()
        self._cut, self._gpus = msgspec.convert(placed["cut"], Cut), placed["gpus"]
        spec, kind = self._spec, self._kind
        self._layouts = self._cut.layouts(spec.model, spec.tokens, kind)
        for rank in self._mine:
            layout = layout_at(self._layouts[rank], self._memory_of(rank).data_ptr())
            self._layouts[rank] = replace(layout, device=max(0, self._gpu(rank)))
        for path in paths:
            is_verified = float(path.endswith(VERIFIED))
            config = replace(
                CONFIG,
                path=path.removesuffix(VERIFIED),
                verify=is_verified,
                staging_mib=spec.staging_mib,
            )
            self._engines[path] = LocalEngine(
                f"{spec.role} {path}",
                self._layouts,
                partial(nixl_transport, config, kind),
                config=config,
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
        self._table = self._block_ids(self._spec.role, self._cut)

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
        """Wait until prefill has granted the request, as if it had been queued.

        Raises:
            TimeoutError: without a grant.
        """
        engine = self._engines[path]
        engine.prepare_load(request, msgspec.convert(ticket, Ticket), Claim(claim))
        deadline = time.monotonic() + TIMEOUT_S
        while not all(_is_granted(rank, RequestId(request)) for rank in engine.ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{request} is not granted after {TIMEOUT_S:g} s")
            time.sleep(NAP_S)

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

    # --- the first load

    def load_at_once(
        self, path: str, request: str, ticket: Mapping[str, Any], claim: str
    ) -> tuple[float, float]:
        """Load a request that arrives with its blocks; when that began and ended."""
        begin = time.monotonic()
        ours = msgspec.convert(ticket, Ticket)
        self._engines[path].prepare_load(request, ours, Claim(claim))
        return begin, self.load(path, request)["end"]

    def parts(self, path: str, request: str) -> dict[str, float]:
        """The seconds of each part of a first load. The transfer thread is idle now."""
        (rank,) = self._engines[path].ranks
        rank.poll()
        entered: dict[str, float] = {}
        for when, event in rank.parts.event_log.story(request):
            entered.setdefault(event.after, when)
        parts = {
            name: entered[after] - entered[before] if {before, after} <= entered.keys() else 0.0
            for name, (before, after) in STEPS.items()
        }
        warm_ups = max(1.0, rank.counts.get("warm_ups", 0.0))
        return parts | {"warm-up": rank.counts.get("warm_up_seconds", 0.0) / warm_ups}

    # --- reads without an engine

    def serve_raw(self, kind: str) -> list[Source]:
        """Let each rank's memory be read by agents of a kind."""
        return [self._raw_agent(kind, rank).source for rank in self._mine]

    def prepare_raw(self, kind: str, sources: Sequence[Any], prefill: Mapping[str, Any]) -> None:
        """Connect to prefill's agents, for `read_raw`.

        "bulk" reads the prompt's bytes in one piece from each rank, "in-tree" in the pieces of our
        own plan, so that only the agents differ.
        """
        (rank,) = self._mine
        spec, agent = self._spec, self._raw_agent(kind, rank)
        known, cut = msgspec.convert(sources, list[Source]), msgspec.convert(prefill["cut"], Cut)
        layouts = cut.layouts(spec.model, spec.tokens, self._kind)
        theirs = [
            replace(layout_at(layout, source.address), device=max(0, source.gpu))
            for source, layout in zip(known, layouts, strict=True)
        ]
        mine = layout_at(self._layouts[rank], agent.source.address)
        shares = assign([holdings(one) for one in self._layouts], [holdings(one) for one in theirs])
        tables = [Table.of(self._table)], [Table.of(self._block_ids("prefill", cut))]
        posts, begin = [], mine.spans[0].address
        for number, share in shares[rank].items():
            common, source = plan(mine, theirs[number], share), known[number]
            reads = common.reads(*tables, range(spec.tokens))
            rows, indices = (common.local, common.remote), (reads.local, reads.remote)
            if kind == BULK:
                length, first = reads.num_bytes, np.zeros(1, dtype=np.int32)
                theirs_begin = source.address + rank * length
                rows = (
                    dense_row(begin, length, length, agent.gpu),
                    dense_row(theirs_begin, length, length, source.gpu),
                )
                begin, indices = begin + length, (first, first)
            posts.append(partial(agent.prepare(source, rows), indices))
        self._posts[kind] = agent, posts

    def read_raw(self, kind: str) -> tuple[float, float]:
        """Read the prompt's bytes; when that began and ended."""
        agent, posts = self._posts[kind]
        begin = time.monotonic()
        agent.run(posts)
        return begin, time.monotonic()

    def end_raw(self, kind: str) -> None:
        """End the agents of a kind."""
        self._posts.pop(kind, None)
        for key in [key for key in self._raw if key[0] == kind]:
            self._raw.pop(key).transport.close()

    def progress(self) -> None:
        """Serve readers: some paths of UCX need the owner of the memory."""
        for agent in self._raw.values():
            agent.transport.progress()

    def _raw_agent(self, kind: str, rank: int) -> RawAgent:
        key = kind, rank, self._gpu(rank)
        if key not in self._raw:
            memory = self._memory_of(rank)
            if kind == BULK:
                transport: Any = nixl_transport(CONFIG, "VRAM")  # reads one piece
            else:
                transport = InTreeTransport()
                if not memory.is_cuda:  # ours is in huge pages by now, which torch does not use
                    memory = torch.ones_like(memory)
            self._raw[key] = RawAgent(transport, memory, self._gpu(rank))
        return self._raw[key]

    # --- memory

    @property
    def _mine(self) -> Sequence[int]:
        ranks, chosen = range(self._cut.tp), self._spec.ranks
        return ranks if chosen is None else [rank for rank in ranks if rank in chosen]

    @property
    def _kind(self) -> Memory:
        return "VRAM" if self._gpus else "DRAM"

    def _gpu(self, rank: int) -> int:
        return self._gpus[rank] if self._gpus else -1

    def _memory_of(self, rank: int) -> torch.Tensor:
        gpu = self._gpu(rank)
        if (rank, gpu) not in self._memory:
            device = "cpu" if gpu < 0 else f"cuda:{gpu}"
            length = self._spec.num_bytes[rank]
            self._memory[rank, gpu] = torch.zeros(length, dtype=torch.uint8, device=device)
        return self._memory[rank, gpu]

    def _synchronize(self) -> None:
        for gpu in {memory.device for memory in self._memory.values() if memory.is_cuda}:
            torch.cuda.synchronize(gpu)

    # --- the prompt

    def _block_ids(self, role: str, cut: Cut) -> list[int]:
        count = self._spec.tokens // cut.block_size
        chooser = np.random.default_rng([self._spec.seed, len(role)])
        found: list[int] = chooser.permutation(np.arange(1, 1 + 2 * count))[:count].tolist()
        return found

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
                seed = spec.seed * model.layers + number
                noise = torch.randint(
                    0,
                    256,
                    shape,
                    dtype=torch.uint8,
                    device=memory.device,
                    generator=torch.Generator(memory.device).manual_seed(seed),
                )
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
    load = rank.parts.decode.load_of(request)
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
            while not connection.poll(SERVING_PAUSE_S):
                process.progress()
            ((name, arguments),) = msgspec.json.decode(connection.recv_bytes()).items()
            answer = getattr(process, name)(**arguments)
            connection.send_bytes(msgspec.json.encode(answer))
    process.stop()


if __name__ == "__main__":
    main()
