"""Two engines of any shapes: all KV arrives, and `verify` finds each wrong byte.

    pytest -m detection                      # planted faults; -k tp-2-3 one pair of shapes

All threads, sockets and machines are the real ones; only vLLM is missing, and most bytes move in
memory. Each planted fault must fail the load as corrupt, and the error must name the right layer,
part, head and tokens. Clean loads between them must be verified, and have the right bytes.
"""

import contextlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from harness.local import model_layouts
from harness.local.caches import layout_at
from harness.local.engine import (
    HAS_STAGED,
    HAS_VERIFY,
    HOST,
    HOST_PATHS,
    LocalEngine,
    Tables,
    tables_from,
)
from harness.local.model_layouts import EngineShape, ModelShape, StatePart
from nixl_kv.config import Config
from nixl_kv.geometry.layout import ABSENT, CacheLayout, Stripe
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import FailureKind, LoadEnded, OfferEnd, SetEngine, StartLoad
from support.integration import MakeTransport
from support.load_fields import Bytes, Places, fields_of, memory_of

CONFIG = Config(host=HOST, offer_ttl_s=600, lease_s=600, request_timeout_s=600, peer_timeout_s=60)
"""Nothing fails because the machine is busy."""
SLOT_BYTES = 2048  # of a staging ring: only some blocks fit into one
RING_SLOTS = 16
MAX_HEADS = 16
SEEDS = 2
PLANTING = pkgutil.resolve_name("support.planting") if HAS_VERIFY else None
FAULTS = PLANTING.FAULTS if PLANTING else ()
"""A tree without `verify` plants none; this module compares the bytes of its loads."""
MAX_LOADS = SEEDS * len(FAULTS) + SEEDS + 1
SPARE = 8  # entries of a block table grow until a state fits in: then there are fewer


def engine(**numbers: int | str) -> EngineShape:
    sizes: dict[str, int | str] = {"block_size": 4, "memory": "DRAM"}
    return EngineShape(**{**sizes, **numbers})  # type: ignore[arg-type]


def model(heads: int = 2, content: tuple[int, ...] = (8, 8)) -> ModelShape:
    return ModelShape(2, heads, content, "uint8")


ONE, TWO, FOUR = engine(), model(2), model(4)
SLIDING = ModelShape(4, 2, (8, 8), "uint8", window=10, sliding=(0, 2))
STATES = ModelShape(
    4,
    4,
    (8, 8),
    "uint8",
    without_kv=(0, 1, 2),
    recurrent=(0, 1, 2),
    state=(
        StatePart("query", 2, 4, "state", rows=3),
        StatePart("key", 2, 4, "state", rows=3),
        StatePart("value", 4, 6, "state", rows=3),
        StatePart("state", 4, 32, "state"),
    ),
)
"""Three recurrent layers with a convolution of three projections, and one with KV."""
COPIES = replace(
    STATES,
    without_kv=(),
    state=(
        StatePart("x", 4, 6, "state", rows=3),
        StatePart("B", 1, 8, "state", rows=3, is_copied=True),
        StatePart("state", 4, 16, "state"),
    ),
)
"""Layers with KV and a state, of which all ranks have a part."""


@dataclass(frozen=True)
class Cell:
    """A model's KV, and how prefill and decode divide it; decode has the first `hit` tokens.

    `widths` are the tokens that each rank of prefill, and of decode, has in turn; 0: all have all.
    """

    prefill: EngineShape
    decode: EngineShape
    model: ModelShape
    tokens: int = 41
    hit: int = 0
    widths: tuple[int, int] = (0, 0)


CELLS = {
    "tp-2-3": Cell(engine(tp=2), engine(tp=3), model(6)),
    "pp-2-1": Cell(engine(pp=2), ONE, TWO),
    "block-4-6-one-head": Cell(ONE, engine(block_size=6), model(1), tokens=37),
    "blnhc-bhlnc": Cell(engine(order="BLNHC"), engine(order="BHLNC"), TWO),
    "sliding-window": Cell(ONE, engine(order="BHLNC"), SLIDING),
    "state-1-2": Cell(ONE, engine(tp=2), STATES),
    "same": Cell(ONE, ONE, TWO),
    "tp-1-2": Cell(ONE, engine(tp=2), FOUR),
    "tp-2-1": Cell(engine(tp=2), ONE, FOUR),
    "tp-1-4": Cell(ONE, engine(tp=4), FOUR),
    "tp-8-1": Cell(engine(tp=8), ONE, model(16)),
    "tp-8-2": Cell(engine(tp=8), engine(tp=2, block_size=8), model(8)),
    "tp-2-8-above-heads": Cell(engine(tp=2), engine(tp=8), FOUR),
    "tp-4-1-above-heads": Cell(engine(tp=4), ONE, TWO),
    "tp-2-4-above-heads": Cell(engine(tp=2), engine(tp=4), TWO),
    "pp-1-2": Cell(ONE, engine(pp=2), TWO),
    "tp2-pp2": Cell(engine(tp=2), engine(pp=2), FOUR),
    "block-4-8": Cell(ONE, engine(block_size=8), TWO),
    "block-6-4": Cell(engine(block_size=6), ONE, TWO),
    "blocks-per-entry-2-3": Cell(engine(blocks_per_entry=2), engine(blocks_per_entry=3), TWO),
    "lbhnc-lbnhc": Cell(ONE, engine(order="LBNHC"), TWO),
    "lhbnc-blhnc": Cell(engine(order="LHBNC"), engine(order="BLHNC"), TWO),
    "k-and-v-apart": Cell(engine(order="L2BHNC"), engine(order="LB2NHC"), TWO),
    "k-longer-than-v": Cell(ONE, engine(order="BLNHC"), model(2, (12, 6))),
    "one-part": Cell(ONE, engine(tp=2, order="BLNHC"), model(1, (18,))),
    "state-2-1": Cell(engine(tp=2, order="BLHNC"), ONE, STATES),
    "state-pp-hit": Cell(engine(pp=4), engine(tp=2, block_size=8), STATES, hit=16),
    "state-copies": Cell(engine(tp=4, block_size=8), engine(tp=2, block_size=16), COPIES),
    "prefix-hit": Cell(ONE, engine(tp=2), FOUR, hit=16),
    "long": Cell(engine(tp=2, block_size=8), engine(order="BHLNC"), FOUR, tokens=200),
}
"""Prefill first; if nothing else is said, blocks of 4 tokens, and 41 tokens."""
STRIPED = {
    "on-decode-one-by-one": Cell(ONE, engine(tp=2), model(1), 61, widths=(0, 1)),
    "on-prefill-in-blocks": Cell(engine(tp=2), ONE, model(1), 61, widths=(4, 0)),
    "on-both-unlike": Cell(engine(tp=4), engine(tp=2), model(1), 61, widths=(2, 4)),
    "on-both-alike": Cell(engine(tp=2), engine(tp=2), model(1), 61, widths=(1, 1)),
}
"""Ranks with the same head divide its tokens, as with decode context parallelism."""


class Side:
    """An engine with its caches, whose blocks are used once each, in no order."""

    def __init__(
        self, name: str, cell: Cell, make: MakeTransport, path: str, num_slots: int
    ) -> None:
        number = ("prefill", "decode").index(name)
        shape, width = (cell.prefill, cell.decode)[number], cell.widths[number]
        rng = np.random.default_rng(0)
        num_groups = len(cell.model.groups())
        entries = 1 + MAX_LOADS * num_groups * -(-cell.tokens // shape.block_size)
        shape = replace(shape, num_blocks=SPARE * entries * shape.blocks_per_entry)
        made_up = model_layouts.build_layouts(cell.model, shape)
        sizes = [layout.spans[-1].address + layout.spans[-1].length for layout in made_up]
        self._memory = [
            rng.integers(0, 256, size - model_layouts.BASE, dtype=np.uint8) for size in sizes
        ]
        self.layouts = [
            layout_at(layout, memory.ctypes.data)
            for layout, memory in zip(made_up, self._memory, strict=True)
        ]
        if width:
            stripes = [Stripe(shape.tp, place, width) for place in range(shape.tp)]
            self.layouts = [
                replace(layout, groups=(replace(layout.groups[0], stripe=stripe),))
                for layout, stripe in zip(self.layouts, stripes, strict=True)
            ]
        self._ids = iter((1 + rng.permutation(entries - 1)).tolist())
        self.engine = LocalEngine(
            name,
            self.layouts,
            make,
            shape=ParallelShape(shape.tp, shape.pp),
            config=replace(CONFIG, path=path),
            roles=name,
            staging_bytes=2 * num_slots * SLOT_BYTES,
            num_ring_slots=num_slots,
        )

    def new_tables(self, tokens: range) -> Tables:
        """From the first of the tokens on; entries that a window has passed are absent."""
        tables = []
        for group in self.layouts[0].groups:
            size, end = group.entry_size, tokens.stop
            passed = max(0, end - group.window) // size if group.window else 0
            present = itertools.islice(self._ids, -(-end // size) - passed)
            tables.append([*[ABSENT] * passed, *present][tokens.start // size :])
        return tables


def load_of(layout: CacheLayout, request: str, tables: Tables, tokens: range) -> StartLoad:
    sent = tables_from(layout, tables, tokens.start)
    return StartLoad(RequestId(request), tokens.start, tokens.stop, sent, verify=HAS_VERIFY)


class World:
    """Prefill serves and never reads, decode reads and never serves."""

    def __init__(self, cell: Cell, make: MakeTransport, path: str, num_slots: int) -> None:
        self.cell, self.path = cell, path
        self.sides = [Side(name, cell, make, path, num_slots) for name in ("prefill", "decode")]
        self.prefill, self.decode = (side.engine for side in self.sides)
        plant_on: Callable[..., Any] = PLANTING.plant_on if PLANTING else lambda *_: None
        self.planters = [plant_on(rank, seed) for seed, rank in enumerate(self.decode.ranks)]

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def offer(self, request: str) -> None:
        """Prefill computes a prompt, and decode asks for it."""
        tables, tokens = self.sides[0].new_tables(range(self.cell.tokens)), range(self.cell.tokens)
        for layout in self.sides[0].layouts:
            for places, content in self._contents(layout, request, tables, tokens):
                memory_of(layout)[places] = content
        ticket = self.prefill.offer(request, tables, self.cell.tokens)
        self.decode.prepare_load(request, ticket)

    def load(self, request: str, fault: str | None = None, rank: int = 0) -> list[LoadEnded] | None:
        """Each rank's report; None if the rank has nothing that can have the fault.

        Ranks that report success have the right bytes.
        """
        tokens = range(self.cell.hit, self.cell.tokens)
        tables, layouts = self.sides[1].new_tables(tokens), self.sides[1].layouts
        if fault:
            load = load_of(layouts[rank], request, tables, tokens)
            if not self.planters[rank].expect(load, fault):
                return None
        self.offer(request)
        self.decode.start_load(request, tables, tokens, verify=HAS_VERIFY)
        reports = self.decode.wait_load(request, 2 * CONFIG.request_timeout_s)
        good = [layout for layout, one in zip(layouts, reports, strict=True) if not one.failure]
        for layout in good:
            for places, content in self._contents(layout, request, tables, tokens):
                assert np.array_equal(memory_of(layout)[places], content)
        return reports

    def expect_clean(self, request: str) -> None:
        """All bytes arrive, and prefill releases all ranks, also those that no rank has read."""
        reports = self.load(request) or []
        assert {(one.failure, one.verified) for one in reports} == {(None, HAS_VERIFY)}
        reads = [read for report in reports for read in report.reads]
        assert {read.path for read in reads} == {self.path}
        sources = {read.rank for read in reads}
        assert self.prefill.wait_offer(request) == [
            OfferEnd.READ if number in sources else OfferEnd.NOT_NEEDED
            for number in range(len(self.prefill.ranks))
        ]

    def _contents(
        self, layout: CacheLayout, request: str, tables: Tables, tokens: range
    ) -> Iterator[tuple[Places, Bytes]]:
        """Where each part of a rank's KV is, and the request's bytes for it."""
        for field in fields_of(layout, load_of(layout, request, tables, tokens)):
            for number, places in enumerate(field.parts):
                seed = list(f"{request} {field.region.layer} {number}".encode())
                shape = MAX_HEADS, self.cell.tokens, places.shape[-1]
                whole = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
                yield places, whole[slice(*field.region.heads), field.tokens]


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(memory: MakeTransport) -> Iterator[MakeWorld]:
    with contextlib.ExitStack() as stack:

        def make(
            cell: Cell,
            path: str = "direct",
            transport: MakeTransport = memory,
            num_slots: int = RING_SLOTS,
        ) -> World:
            return stack.enter_context(contextlib.closing(World(cell, transport, path, num_slots)))

        yield make


def plants(world: World, fault: str) -> bool:
    """Whether some layer can have a fault; then it is detected and named wherever it is."""
    for seed in range(SEEDS if HAS_VERIFY else 0):
        rank = seed % len(world.planters)
        reports = world.load(f"{fault}-{seed}", fault, rank)
        if reports is None:
            return False
        planted, failure = world.planters[rank].planted[-1], reports.pop(rank).failure
        assert planted.request == f"{fault}-{seed}"
        assert failure is not None, planted
        assert failure.kind is FailureKind.CORRUPT
        assert planted.is_named_in(failure.detail), (planted, failure.detail)
        assert [(one.failure, one.verified) for one in reports] == [(None, True)] * len(reports)
    return HAS_VERIFY


@pytest.mark.detection
@pytest.mark.parametrize("path", HOST_PATHS)
@pytest.mark.parametrize("name", CELLS)
def test_all_ranks_get_their_bytes_and_every_fault_is_named(
    make_world: MakeWorld, name: str, path: str
) -> None:
    world = make_world(CELLS[name], path)
    possible = {fault for fault in FAULTS if plants(world, fault)}
    assert not HAS_VERIFY or possible >= {
        "byte",
        "blocks",
        "layer",
    }  # others need several heads, or parts
    for number in range(SEEDS + 1):
        world.expect_clean(f"clean-{number}")


@pytest.mark.parametrize("path", HOST_PATHS)
@pytest.mark.parametrize("name", STRIPED)
def test_ranks_with_the_same_head_divide_the_tokens(
    make_world: MakeWorld, name: str, path: str
) -> None:
    make_world(STRIPED[name], path).expect_clean("striped")


@pytest.mark.detection
@pytest.mark.nixl
@pytest.mark.parametrize(
    ("name", "path", "num_slots"),
    [
        ("block-6-4", "direct", RING_SLOTS),
        *[
            ("tp-2-1", "staged", RING_SLOTS),
            pytest.param("tp-1-4", "staged", 4, id="four readers share a ring of four slots"),
        ]
        * HAS_STAGED,
    ],
)
def test_over_nixl(make_world: MakeWorld, name: str, path: str, num_slots: int) -> None:
    nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    world = make_world(CELLS[name], path, nixl.NixlTransport, num_slots)
    assert plants(world, "byte") == HAS_VERIFY
    world.expect_clean("clean")


def test_a_cancelled_load_releases_all_ranks(make_world: MakeWorld) -> None:
    world = make_world(CELLS["tp-8-2"])
    world.offer("cancelled")
    world.decode.cancel_load("cancelled")
    ends = world.prefill.wait_offer("cancelled")
    assert set(ends) <= {OfferEnd.NOT_NEEDED, OfferEnd.ABORTED}


def test_a_cut_that_is_not_known_yet_is_refused(make_world: MakeWorld) -> None:
    """A rank that was not told of the others takes itself for the whole engine."""
    world = make_world(CELLS["tp-1-2"])
    layout = world.sides[1].layouts[0]
    world.decode.ranks[0].engine.submit([SetEngine(world.decode.name, (layout,))])
    (failure, *_) = (report.failure for report in world.load("unknown") or ())
    assert failure is not None
    assert "number of KV heads" in failure.detail
