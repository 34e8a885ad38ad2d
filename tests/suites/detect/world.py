"""A cell's two engines in one process, and the loads between them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from harness.local import model_layouts
from harness.local.caches import layout_at
from harness.local.engine import HOST, LocalEngine, Tables, tables_from
from nixl_kv.config import Config
from nixl_kv.geometry.layout import ABSENT, STATE_WINDOW, CacheLayout
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import LoadEnded, StartLoad
from nixl_kv.transport.base import Transport
from suites.detect.cells import Cell, Cut
from suites.detect.fields import Content, Field, fields_of
from suites.detect.planting import Planted, Planter, PlantingCopier, PlantingTransport

PATIENT_S: Final = 600.0
PATIENT: Final = Config(
    host=HOST,
    offer_ttl_s=PATIENT_S,
    lease_s=PATIENT_S,
    request_timeout_s=PATIENT_S,
    peer_timeout_s=60.0,
)
"""Nothing fails because this machine is busy: such a failure would say nothing of the digest."""

RING_SLOTS: Final = 128
STAGING_BYTES: Final = RING_SLOTS << 16
"""Of a rank: what is read of a group fits into one slot, so that a fault in it stays there."""

MakeTransport = Callable[[], Transport]

ModelKV = Mapping[str, Sequence[Content]]
"""A request's KV: for each layer, for each part, shape (heads, tokens, bytes)."""


class Memory:
    """One rank's cache: `layout` is at its true addresses. It starts with noise."""

    def __init__(self, made_up: CacheLayout, rng: np.random.Generator) -> None:
        """Allocate room for all spans."""
        begin, end = made_up.spans[0].address, made_up.spans[-1].address + made_up.spans[-1].length
        self.bytes = rng.integers(0, 256, end - begin, dtype=np.uint8)
        self.layout = layout_at(made_up, self.bytes.ctypes.data)

    def fill(self, tables: Tables, tokens: range, kv: ModelKV) -> None:
        """Write this rank's part of a request's KV."""
        for field in self._fields(tables, tokens):
            heads, present = slice(*field.region.heads), slice(field.tokens.start, tokens.stop)
            for number, content in enumerate(kv[field.region.layer]):
                field.write(number, content[heads, present])

    def has(self, tables: Tables, tokens: range, kv: ModelKV) -> bool:
        """Whether this rank's part of a request's KV is here."""
        return all(
            np.array_equal(
                field.read(number),
                content[slice(*field.region.heads), field.tokens.start : tokens.stop],
            )
            for field in self._fields(tables, tokens)
            for number, content in enumerate(kv[field.region.layer])
        )

    def _fields(self, tables: Tables, tokens: range) -> Iterator[Field]:
        return fields_of(self.layout, tables_from(self.layout, tables, tokens.start), tokens)


@dataclass(frozen=True)
class Order:
    """A load to be made, with a fault if one is named."""

    request: RequestId
    fault: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What one load ended in: each decode rank's report; what was planted, and on which rank."""

    order: Order
    reports: Sequence[LoadEnded]
    planted: Planted | None
    rank: int
    is_right: bool
    """Whether decode's memory is what prefill's is."""


@dataclass(frozen=True)
class _Job:
    """A load under way; `tables` and `tokens` are decode's."""

    order: Order
    kv: ModelKV
    tables: Tables
    tokens: range
    rank: int


class World:
    """See the module's head. Prefill serves and never reads, decode reads and never serves."""

    def __init__(
        self, cell: Cell, make: MakeTransport, *, wave: int, seed: int = 0, verify: bool = True,
        path: str = "direct",
    ) -> None:  # fmt: skip
        """Start all ranks of both engines.

        Args:
            cell: the model, and how both divide it.
            make: makes a transport.
            wave: how many loads are under way at a time.
            seed: of all that is chosen by chance.
            verify: whether loads are verified.
            path: how KV is read.
        """
        self._cell = cell
        self._wave = wave
        self._verify, self._config = verify, replace(PATIENT, path=path)
        self._rng = np.random.default_rng(seed)
        self._tables = [self._deal_blocks(cut) for cut in (cell.prefill, cell.decode)]
        self._prefill_memory, self._decode_memory = map(self._allocate, (cell.prefill, cell.decode))
        self._planters = [
            Planter(memory.layout, np.random.default_rng((seed, rank)))
            for rank, memory in enumerate(self._decode_memory)
        ]
        self._prefill = self._start("prefill", cell.prefill, self._prefill_memory, make)
        self._copiers: list[PlantingCopier] = []
        # Each decode rank takes one of each, in rank order.
        planters, planters_of_copiers = iter(self._planters), iter(self._planters)

        def wrap(copier: Any) -> PlantingCopier:
            self._copiers.append(PlantingCopier(copier, next(planters_of_copiers)))
            return self._copiers[-1]

        self._decode = self._start(
            "decode",
            cell.decode,
            self._decode_memory,
            lambda: PlantingTransport(make(), next(planters)),
            {"wrap_copier": wrap},
        )

    def close(self) -> None:
        """End both engines, and check that their machines are in order.

        Raises:
            RuntimeError: if nothing took the path that was wanted.
        """
        self._decode.close()
        self._prefill.close()
        is_staged = any(copier.num_started for copier in self._copiers)
        if is_staged != (self._config.path == "staged"):
            raise RuntimeError(f"path is {self._config.path!r}, read in chunks: {is_staged}")

    def run(self, orders: Sequence[Order]) -> Iterator[Outcome]:
        """Make loads, as many at a time as there is room for."""
        for first in range(0, len(orders), self._wave):
            yield from self._run_wave(orders[first : first + self._wave])

    def _run_wave(self, orders: Sequence[Order]) -> Iterator[Outcome]:
        jobs = [self._start_job(order, slot) for slot, order in enumerate(orders)]
        for job in jobs:
            reports = self._decode.wait_load(job.order.request, 2 * PATIENT_S)
            planted = self._planters[job.rank].planted.pop(job.order.request, None)
            memories = self._decode_memory
            is_right = all(memory.has(job.tables, job.tokens, job.kv) for memory in memories)
            yield Outcome(job.order, reports, planted, job.rank, is_right)

    def _start_job(self, order: Order, slot: int) -> _Job:
        """Do what both schedulers do for a request."""
        cell, prompt = self._cell, range(self._cell.tokens)
        theirs = self._tables_of(slot, 0, cell.prefill, begin=0)
        mine = self._tables_of(slot, 1, cell.decode, begin=cell.hit)
        rank = int(self._rng.integers(len(self._decode_memory)))
        job = _Job(order, self._random_kv(), mine, prompt[cell.hit :], rank)
        for memory in self._prefill_memory:
            memory.fill(theirs, prompt, job.kv)
        if order.fault:
            sent = tables_from(self._decode_memory[rank].layout, mine, cell.hit)
            load = StartLoad(order.request, cell.hit, cell.tokens, sent)
            self._planters[rank].expect(load, order.fault)
        ticket = self._prefill.offer(order.request, theirs, cell.tokens)
        self._decode.prepare_load(order.request, ticket)
        self._decode.start_load(order.request, mine, job.tokens, verify=self._verify)
        return job

    def _start(
        self,
        name: str,
        cut: Cut,
        memories: Sequence[Memory],
        make: MakeTransport,
        feature_options: Mapping[str, Any] | None = None,
    ) -> LocalEngine:
        layouts = [memory.layout for memory in memories]
        return LocalEngine(
            name,
            layouts,
            make,
            shape=cut.shape,
            config=self._config,
            roles=name,
            staging_bytes=STAGING_BYTES,
            num_ring_slots=RING_SLOTS,
            feature_options=feature_options,
        )

    def _allocate(self, cut: Cut) -> list[Memory]:
        """The caches of all ranks, with room for a wave; block 0 is nobody's."""
        entries = 1 + self._wave * cut.num_entries(self._cell.tokens) * self._num_groups
        layouts = cut.layouts(self._cell.model, entries)
        return [Memory(layout, self._rng) for layout in layouts]

    def _deal_blocks(self, cut: Cut) -> list[list[list[int]]]:
        """For each slot of a wave, for each group: blocks from all over the cache, each once."""
        shape = self._wave, self._num_groups, cut.num_entries(self._cell.tokens)
        ids = 1 + self._rng.permutation(int(np.prod(shape)))
        blocks: list[list[list[int]]] = ids.reshape(shape).tolist()
        return blocks

    @property
    def _num_groups(self) -> int:
        return len(self._cell.model.groups())

    def _tables_of(self, slot: int, side: int, cut: Cut, *, begin: int) -> Tables:
        """A request's block tables from token `begin` on, where sliding windows have passed."""
        windows = [window for _, window in self._cell.model.groups()]
        sizes = [1 if window == STATE_WINDOW else cut.entry_size for window in windows]
        return [
            _pass_window(ids, window, self._cell.tokens, size)[begin // size :]
            for ids, window, size in zip(self._tables[side][slot], windows, sizes, strict=True)
        ]

    def _random_kv(self) -> ModelKV:
        model, tokens = self._cell.model, self._cell.tokens
        shapes = {
            model_layouts.layer_name(layer): [(model.kv_heads, length) for length in model.content]
            for layer in range(model.layers)
        }
        for layer in model.recurrent:
            for part in model.state:
                name = f"{model_layouts.layer_name(layer)} {part.name}"
                shapes[name] = [(part.number, part.length)] * part.rows
        return {
            name: [
                self._rng.integers(0, 256, (heads, tokens, length), dtype=np.uint8)
                for heads, length in parts
            ]
            for name, parts in shapes.items()
        }


def _pass_window(ids: list[int], window: int, tokens: int, entry_size: int) -> list[int]:
    """A block table whose first entries are absent, since a sliding window has passed them.

    A state has one of the ids, for the last of as many entries as there are tokens.
    """
    passed = max(0, tokens - window) // entry_size if window else 0
    return [ABSENT] * passed + (ids[:1] if window == STATE_WINDOW else ids[passed:])
