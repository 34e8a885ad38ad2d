"""Two engines of any shape in one process: the real threads, sockets and machines, without vLLM."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from nixl_kv.connector.agents import Agents
from nixl_kv.connector.dataplane import DataPlane
from nixl_kv.connector.engine import Machinery
from nixl_kv.connector.holds import NULL_BLOCK
from nixl_kv.connector.publisher import Publisher
from nixl_kv.connector.registering import register
from nixl_kv.connector.results import LoadResult
from nixl_kv.connector.sources import Household, Identity
from nixl_kv.connector.thread import TransferThread
from nixl_kv.geometry import shapes
from nixl_kv.geometry.blocks import block_ids, to_bytes
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.ranks import Shape
from nixl_kv.ids import (
    EngineId,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    engine_incarnation,
    new_claim,
    new_incarnation,
    new_nonce,
)
from nixl_kv.protocol import events, messages, ticket
from nixl_kv.protocol.offers import Offers
from nixl_kv.protocol.receiver import Receiver
from nixl_kv.protocol.requests import Requests
from nixl_kv.protocol.sender import Sender
from nixl_kv.transport.base import Transport
from nixl_kv.transport.control import Control
from nixl_kv.transport.slots import SlotPage
from pd.detect_cells import Cell, Cut
from pd.detect_fields import Content, fields_of
from pd.detect_planting import Planted, PlantedTransport, Planter

HOST: Final = "127.0.0.1"
MODEL: Final[Mapping[str, str]] = {"served_model_name": "detect"}
CONTEXT: Final = "0" * 32
NUM_SLOTS: Final = 1024
TIMES: Final[Mapping[str, float]] = {"offer_ttl_s": 60.0, "lease_s": 20.0}
TIMEOUT_S: Final = 60.0
"""For all loads of a wave; generous, since a failure that has to do with time says nothing."""
NAP_S: Final = 0.0005

MakeTransport = Callable[[], Transport]


class Memory:
    """One rank's cache: `layout` is at its true addresses. At first it is noise."""

    def __init__(self, made_up: CacheLayout, rng: np.random.Generator) -> None:
        """Make room for all of its spans."""
        end = max(span.address + span.length for span in made_up.spans)
        self._bytes = rng.integers(0, 256, end - shapes.BASE, dtype=np.uint8)
        self.layout = _moved(made_up, self._bytes.ctypes.data - shapes.BASE)

    def fill(self, load: events.Load, whole: "Whole") -> None:
        """Write this rank's part of a request's KV."""
        for field in fields_of(self.layout, load):
            first = field.region.first_head
            heads = slice(first + field.heads.start, first + field.heads.stop)
            tokens = slice(field.tokens.start, field.tokens.stop)
            for number, content in enumerate(whole[field.region.layer]):
                field.put(number, content[heads, tokens])

    def holds(self, load: events.Load, whole: "Whole") -> bool:
        """Whether this rank's part of a request's KV stands here."""
        return all(
            np.array_equal(
                field.get(number),
                content[slice(*field.region.heads), field.tokens.start : field.tokens.stop],
            )
            for field in fields_of(self.layout, load)
            for number, content in enumerate(whole[field.region.layer])
        )


Whole = Mapping[str, Sequence[Content]]
"""A request's KV: for each layer, of each part, shape (heads, tokens, bytes)."""


def _moved(layout: CacheLayout, distance: int) -> CacheLayout:
    groups = tuple(
        replace(group, regions=tuple(replace(r, base=r.base + distance) for r in group.regions))
        for group in layout.groups
    )
    spans = tuple(replace(span, address=span.address + distance) for span in layout.spans)
    return CacheLayout(groups, layout.element, layout.memory, layout.device, spans)


class Side:
    """One rank of one engine, with what its worker and its scheduler would tell it."""

    def __init__(
        self, number: int, memory: Memory, make: MakeTransport, *, is_prefill: bool
    ) -> None:
        """Start its thread. Prefill serves and never reads, decode reads and never serves."""
        self.memory = memory
        self.planter = Planter(memory.layout, np.random.default_rng(number))
        self._engine = EngineId("prefill" if is_prefill else "decode")
        self._number = Rank(number)
        self._incarnation = new_incarnation()
        build = self._serving if is_prefill else self._reading
        self.thread = TransferThread(lambda: build(make))
        self._machinery = self.thread.start()

    @property
    def described(self) -> messages.RankDescription:
        """What prefill publishes of this rank."""
        return messages.decode_rank(self._machinery.description)

    def close(self) -> None:
        """End the thread, and check that the machines' books are in order."""
        self.thread.stop()
        self._machinery.receiver.requests.validate()
        self._machinery.sender.offers.validate()

    def _serving(self, make: MakeTransport) -> Machinery:
        serving, slots = make(), SlotPage(NUM_SLOTS)
        register(serving, self.memory.layout, slots)
        return self._machinery_of(make, slots, serving)

    def _reading(self, make: MakeTransport) -> Machinery:
        return self._machinery_of(
            lambda: PlantedTransport(make(), self.planter), SlotPage(NUM_SLOTS), None
        )

    def _machinery_of(
        self, make: MakeTransport, slots: SlotPage, serving: Transport | None
    ) -> Machinery:
        layout, control = self.memory.layout, Control()
        household = Household.alone(layout, Identity(MODEL, self._number))
        agents = Agents(make, household)
        if serving is None:
            agents.open()
        port = control.listen(f"tcp://{HOST}", 0)
        reader = messages.Reader(self._engine, self._incarnation, self._number)
        description = messages.RankDescription(
            self._incarnation,
            ticket.endpoint(HOST, port),
            serving.metadata() if serving else b"",
            messages.Slots(slots.address, slots.count),
            layout,
        )
        return Machinery(
            control,
            DataPlane(agents, household),
            serving,
            slots,
            Sender(self._incarnation, Offers(num_slots=NUM_SLOTS, **TIMES)),
            Receiver(reader, Requests(reader, timeout_s=TIMEOUT_S, renew_interval_s=4.0)),
            messages.encode_rank(description),
        )


@dataclass(frozen=True)
class Order:
    """A load to be made and verified; with a fault, if one is named."""

    request: RequestId
    fault: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of one: each decode rank's report, and what was planted, and on which rank."""

    order: Order
    loaded: Sequence[events.Loaded]
    planted: Planted | None
    rank: int
    right: bool
    """Whether decode's memory is what prefill's is."""


class World:
    """A cell's two engines. `wave` is how many loads are under way at a time."""

    def __init__(self, cell: Cell, make: MakeTransport, *, wave: int, seed: int = 0) -> None:
        """Start all ranks of both."""
        self.cell = cell
        self.wave = wave
        self._rng = np.random.default_rng(seed)
        self._tables = [self._deal(cut) for cut in (cell.prefill, cell.decode)]
        self.prefill = self._engine(cell.prefill, make, is_prefill=True)
        self.decode = self._engine(cell.decode, make, is_prefill=False)
        self._publisher = Publisher(HOST, 0)
        self._life = self._publish()
        siblings = tuple(side.memory.layout for side in self.decode)
        for side in self.decode:
            side.thread.submit([events.Siblings(siblings)])

    def close(self) -> None:
        """End all."""
        for side in [*self.decode, *self.prefill]:
            side.close()
        self._publisher.stop()

    def run(self, orders: Sequence[Order]) -> Iterator[Outcome]:
        """Make loads, as many at a time as there is room for."""
        for first in range(0, len(orders), self.wave):
            yield from self._run_wave(orders[first : first + self.wave])

    def _run_wave(self, orders: Sequence[Order]) -> Iterator[Outcome]:
        wholes, loads, ranks = [], [], []
        for slot, order in enumerate(orders):
            wholes.append(self._whole())
            theirs, mine = self._loads(order, slot)
            loads.append(mine)
            ranks.append(int(self._rng.integers(len(self.decode))))
            for side in self.prefill:
                side.memory.fill(theirs, wholes[-1])
            if order.fault:
                self.decode[ranks[-1]].planter.expect(mine, order.fault)
            self._start(order, theirs, mine)
        reports = [_reports(side, len(orders)) for side in self.decode]
        for order, whole, load, rank in zip(orders, wholes, loads, ranks, strict=True):
            yield Outcome(
                order,
                [report[order.request] for report in reports],
                self.decode[rank].planter.planted.pop(order.request, None),
                rank,
                all(side.memory.holds(load, whole) for side in self.decode),
            )

    def _start(self, order: Order, theirs: events.Load, mine: events.Load) -> None:
        """What both schedulers and all workers do for a request."""
        nonce, tokens = Nonce(new_nonce()), self.cell.tokens
        prepare = events.Prepare(nonce, order.request, CONTEXT, tokens, theirs.tables)
        for side in self.prefill:
            side.thread.submit([prepare, events.Offer(nonce, order.request)])
        offered = ticket.Ticket(
            remote_engine_id=EngineId("prefill"),
            remote_host=HOST,
            remote_port=self._publisher.port,
            incarnation=self._life,
            nonce=nonce,
            num_tokens=tokens,
            context=CONTEXT,
        )
        fetch = events.Fetch(order.request, offered, new_claim())
        for side in self.decode:
            side.thread.submit([fetch, mine])

    def _publish(self) -> Incarnation:
        ranks = tuple(side.described for side in self.prefill)
        life = engine_incarnation([Incarnation(rank.incarnation) for rank in ranks])
        cut = self.cell.prefill
        description = messages.Description(
            messages.WIRE_VERSION,
            life,
            EngineId("prefill"),
            dict(MODEL),
            Shape(cut.tp, cut.pp),
            ranks,
        )
        self._publisher.publish(description)
        return life

    def _engine(self, cut: Cut, make: MakeTransport, *, is_prefill: bool) -> list[Side]:
        entries = 1 + self.wave * self._entries(cut) * len(self.cell.model.groups())
        made_up = cut.layouts(self.cell.model, entries)
        return [
            Side(number, Memory(layout, self._rng), make, is_prefill=is_prefill)
            for number, layout in enumerate(made_up)
        ]

    def _entries(self, cut: Cut) -> int:
        """Of one request's block table."""
        return -(-self.cell.tokens // (cut.block * cut.per_entry))

    def _deal(self, cut: Cut) -> list[list[np.ndarray]]:
        """For each slot, for each group: blocks, from all over the cache; groups share none."""
        groups, entries = len(self.cell.model.groups()), self._entries(cut)
        ids = 1 + self._rng.permutation(self.wave * groups * entries)
        return [list(slot) for slot in ids.reshape(self.wave, groups, entries)]

    def _whole(self) -> Whole:
        model, tokens = self.cell.model, self.cell.tokens
        return {
            shapes.layer_name(layer): [
                self._rng.integers(0, 256, (model.kv_heads, tokens, length), dtype=np.uint8)
                for length in model.content
            ]
            for layer in range(model.layers)
        }

    def _loads(self, order: Order, slot: int) -> tuple[events.Load, events.Load]:
        """What prefill holds and what decode reads, as loads."""
        tokens, cuts = self.cell.tokens, (self.cell.prefill, self.cell.decode)
        windows = [window for _, window in self.cell.model.groups()]
        loads = []
        for cut, tables, begin in zip(cuts, self._tables, (0, self.cell.hit), strict=True):
            size = cut.block * cut.per_entry
            wire = tuple(
                to_bytes(block_ids(_passed(ids, window, tokens, size=size)[begin // size :]))
                for ids, window in zip(tables[slot], windows, strict=True)
            )
            loads.append(events.Load(order.request, begin, tokens, wire, verify=True))
        return loads[0], loads[1]


def _passed(ids: np.ndarray, window: int, tokens: int, *, size: int) -> list[int]:
    """A block table in which a sliding window has passed the first entries."""
    gone = max(0, tokens - window) // size if window else 0
    return [NULL_BLOCK] * gone + ids[gone:].tolist()


def _reports(side: Side, count: int) -> dict[RequestId, events.Loaded]:
    """All loads' reports of one rank, each of which comes once.

    Raises:
        TimeoutError: if they do not come.
    """
    found: dict[RequestId, events.Loaded] = {}
    deadline = time.monotonic() + 2 * TIMEOUT_S
    while len(found) < count:
        for result in side.thread.take():
            if isinstance(result, LoadResult):
                found[result.loaded.request] = result.loaded
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count - len(found)} of {count} loads were not reported")
        time.sleep(NAP_S)
    return found
