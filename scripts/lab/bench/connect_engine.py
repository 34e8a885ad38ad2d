"""One engine of a process, whose first load `bench connect` times.

    python -m lab.bench.connect_engine SPEC FD     (JSON, see `Spec`; the connection of the asker)

A question and its answer are JSON.

    {"address": {}}                              -> "HOST:PORT"    once all ranks have started
    {"offer": {"request": "r1", "tokens": 41}}   -> {...}          a ticket
    {"load": {"request": "r1", "ticket": {...}, "tokens": 41}}     -> seconds
    {"parts": {"request": "r1"}}                 -> {...}  of a first contact, see `Engine.parts_of`
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import numpy as np
import torch

from lab.bench.transfer_engine import CONFIG
from lab.local.caches import layout_at
from lab.local.engine import HOST, LocalEngine, LocalRank, Tables
from lab.local.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.ids import RequestId
from nixl_kv.protocol.ticket import Ticket
from nixl_kv.transport.nixl import nixl_transport

NAP_S: Final = 0.0001
"""Between two looks for results."""


class Spec(msgspec.Struct, kw_only=True, frozen=True):
    """An engine of `tp` ranks; rank n is on the GPU `gpus[n]`, in turn, or on the host."""

    role: str
    model: ModelShape
    order: str
    block_size: int
    max_tokens: int
    tp: int
    gpus: Sequence[int] = ()


class Engine:
    """One engine, with a cache of noise."""

    def __init__(self, spec: Spec) -> None:
        """Start all ranks."""
        self._spec = spec
        end = 1 + 2 * -(-spec.max_tokens // spec.block_size)
        self._table = np.random.default_rng(len(spec.role)).permutation(np.arange(1, end)).tolist()
        shape = EngineShape(
            tp=spec.tp,
            block_size=spec.block_size,
            num_blocks=end,
            order=spec.order,
            memory="VRAM" if spec.gpus else "DRAM",
        )
        self._memory: list[torch.Tensor] = []
        layouts = [
            self._allocate(layout, rank, spec.gpus)
            for rank, layout in enumerate(build_layouts(spec.model, shape))
        ]
        self.local = LocalEngine(
            spec.role,
            layouts,
            lambda: nixl_transport(CONFIG, shape.memory),
            config=CONFIG,
            roles=spec.role,
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

    def offer(self, request: str, tokens: int) -> Ticket:
        """Offer a prompt, which is in the same blocks as all others."""
        return self.local.offer(request, self._tables(tokens), tokens)

    def load(self, request: str, ticket: Ticket, tokens: int) -> float:
        """Load it; the seconds until all ranks have reported it.

        Raises:
            RuntimeError: if it failed.
        """
        begin = time.perf_counter()
        self.local.prepare_load(request, ticket)
        self.local.start_load(request, self._tables(tokens), range(tokens))
        while not self._is_over(request):
            time.sleep(NAP_S)
        seconds = time.perf_counter() - begin
        bad = [one for one in self.local.wait_load(request) if one.failure]
        if bad:
            raise RuntimeError(f"{len(bad)} reports are not good: {bad[0]}")
        return seconds

    def parts_of(self, request: str) -> dict[str, float]:
        """Where the time of a load went, and that of the first contact; of the slowest rank."""
        found = [_parts(rank, request) for rank in self.local.ranks]
        return {name: max(each.get(name, 0.0) for each in found) for name in found[0]}

    def _is_over(self, request: str) -> bool:
        for rank in self.local.ranks:
            rank.poll()
        return all(RequestId(request) in rank.loads for rank in self.local.ranks)


STEPS: Final = {
    "description": ("CONNECTING", "JOINING"),
    "ask": ("ASKING", "GRANTED"),
    "join": ("JOINING", "READY"),
    "first read": ("READING", "CHECKING"),
}
"""The states between which a part of a first load goes by."""


def _parts(rank: LocalRank, request: str) -> dict[str, float]:
    """In seconds. The event log belongs to the transfer thread, which has nothing to do now."""
    rank.poll()
    entered: dict[str, float] = {}
    for when, event in rank.parts.event_log.story(request):
        entered.setdefault(event.after, when)
    parts = {
        name: entered[after] - entered[before]
        for name, (before, after) in STEPS.items()
        if before in entered and after in entered
    }
    warm_ups = max(1.0, rank.counts.get("warm_ups", 0.0))
    warm_up = rank.counts.get("warm_up_seconds", 0.0) / warm_ups
    return dict.fromkeys(STEPS, 0.0) | parts | {"warm-up": warm_up}


def main() -> None:
    """Answer until nobody asks."""
    connection = Connection(int(sys.argv[2]))
    engine = Engine(msgspec.json.decode(sys.argv[1], type=Spec))
    with contextlib.suppress(EOFError):
        while True:
            answer = _answer(engine, msgspec.json.decode(connection.recv_bytes()))
            connection.send_bytes(msgspec.json.encode(answer))
    engine.local.close()


def _answer(engine: Engine, question: dict[str, Any]) -> object:
    match question:
        case {"offer": asked}:
            return engine.offer(**asked)
        case {"load": asked}:
            ticket = msgspec.convert(asked.pop("ticket"), Ticket)
            return engine.load(ticket=ticket, **asked)
        case {"parts": asked}:
            return engine.parts_of(**asked)
        case {"address": _}:
            return f"{HOST}:{engine.local.directory.port}"
    return None


if __name__ == "__main__":
    main()
