"""The engines of one process, whose loads `bench load` times.

    python -m lab.bench.load_engine SPEC FD     (JSON, see `Spec`; the connection of the asker)

A question and its answer are JSON. So the engines of another checkout can be asked as well: by that
checkout's own program, whatever its modules are.

    {}                                                        -> {}    once all ranks have started
    {"offer": ["r1", ...], "tokens": 41}                      -> {"tickets": {"r1": {...}, ...}}
    {"load": {"r1": {...}}, "tokens": 41, "verify": true}     -> see `LoadTimes`
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import numpy as np
import torch

from lab.local.caches import layout_at
from lab.local.engine import HOST, LocalEngine, Tables
from nixl_kv.config import Config
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.ids import RequestId
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.base import Transport
from nixl_kv.transport.memory import Fabric, MemoryTransport
from nixl_kv.transport.nixl import nixl_transport

NAP_S: Final = 0.0001
"""Between two looks for results."""

THREAD_NAME: Final = "nixl-kv-transfer"
TIMEOUT_S: Final = 60.0
CONFIG: Final = Config(
    host=HOST, lease_s=30.0, request_timeout_s=TIMEOUT_S, peer_timeout_s=TIMEOUT_S
)
"""Nothing fails because this machine is busy."""


class Spec(msgspec.Struct, kw_only=True, frozen=True):
    """The engines of a process: `tp` ranks for each role, rank n on the GPU `gpus[n]`, in turn."""

    model: ModelShape
    order: str
    block_size: int
    max_tokens: int
    transport: str
    tp: Mapping[str, int]
    gpus: Mapping[str, Sequence[int]]
    """Empty for caches on the host."""


@dataclass
class LoadTimes:
    """Of loads that were under way together; in seconds."""

    load: float
    """From the commands to the last result of all ranks."""

    read: float
    """The longest read: from its post until its generation slot was seen to be valid."""

    cpu: float
    """CPU time of the transfer threads meanwhile."""

    num_bytes: int
    num_runs: int


class Engine:
    """One engine, with a cache of noise."""

    def __init__(self, role: str, spec: Spec, make_transport: Callable[[], Transport]) -> None:
        """Start all ranks."""
        self._spec = spec
        end = 1 + 2 * -(-spec.max_tokens // spec.block_size)
        self._table = np.random.default_rng(len(role)).permutation(np.arange(1, end)).tolist()
        shape = EngineShape(
            tp=spec.tp[role],
            block_size=spec.block_size,
            num_blocks=end,
            order=spec.order,
            memory="VRAM" if spec.gpus[role] else "DRAM",
        )
        self._memory: list[torch.Tensor] = []
        layouts = [
            self._allocate(layout, rank, spec.gpus[role])
            for rank, layout in enumerate(build_layouts(spec.model, shape))
        ]
        self.local = LocalEngine(
            role,
            layouts,
            make_transport,
            config=CONFIG,
            roles=role,
        )

    def _allocate(self, layout: CacheLayout, rank: int, gpus: Sequence[int]) -> CacheLayout:
        number = gpus[rank % len(gpus)] if gpus else 0
        device = f"cuda:{number}" if gpus else "cpu"
        (span,) = layout.spans
        memory = torch.randint(0, 256, (span.length,), dtype=torch.uint8, device=device)
        if gpus:
            torch.cuda.synchronize(number)
        self._memory.append(memory)
        return replace(layout_at(layout, memory.data_ptr()), device=number)

    def _tables(self, tokens: int) -> Tables:
        return [self._table[: -(-tokens // self._spec.block_size)]]

    def offer(self, requests: Sequence[str], tokens: int) -> dict[str, Ticket]:
        """Offer as many prompts, all in the same blocks."""
        return {one: self.local.offer(one, self._tables(tokens), tokens) for one in requests}

    def load(self, tickets: Mapping[str, Ticket], tokens: int, *, verify: bool) -> LoadTimes:
        """Load them all.

        Raises:
            RuntimeError: if one failed.
        """
        cpu, begin = cpu_of_transfer_threads(), time.perf_counter()
        for request, ticket in tickets.items():
            self.local.prepare_load(request, ticket)
            self.local.start_load(request, self._tables(tokens), range(tokens), verify=verify)
        while not self._are_over(tickets):
            time.sleep(NAP_S)
        load, cpu = time.perf_counter() - begin, cpu_of_transfer_threads() - cpu
        reports = [one for request in tickets for one in self.local.wait_load(request)]
        bad = [one for one in reports if one.failure or one.verified is not verify]
        if bad:
            raise RuntimeError(f"{len(bad)} of {len(reports)} reports are not good: {bad[0]}")
        reads = [read for one in reports for read in one.reads]
        return LoadTimes(
            load,
            max(read.seconds for read in reads),
            cpu,
            sum(read.num_bytes for read in reads),
            sum(read.num_runs for read in reads),
        )

    def _are_over(self, tickets: Mapping[str, Ticket]) -> bool:
        for rank in self.local.ranks:
            rank.poll()
        requests = map(RequestId, tickets)
        return all(request in rank.loads for request in requests for rank in self.local.ranks)


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
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    fabric = Fabric()

    def make_transport() -> Transport:
        return MemoryTransport(fabric) if spec.transport == "memory" else nixl_transport(CONFIG)

    engines = {role: Engine(role, spec, make_transport) for role in spec.tp}
    with contextlib.suppress(EOFError):
        while True:
            answer = _answer(engines, msgspec.json.decode(connection.recv_bytes()))
            connection.send_bytes(msgspec.json.encode(answer))
    for engine in engines.values():
        engine.local.close()


def _answer(engines: Mapping[str, Engine], question: dict[str, Any]) -> object:
    if "offer" in question:
        return {"tickets": engines["prefill"].offer(question["offer"], question["tokens"])}
    if "load" in question:
        tickets = msgspec.convert(question["load"], dict[str, Ticket])
        return engines["decode"].load(tickets, question["tokens"], verify=question["verify"])
    return {}


if __name__ == "__main__":
    main()
