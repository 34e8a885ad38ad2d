"""Which wrong bytes does `verify` find? Faults planted between two engines of many shapes.

    pytest -m detection                      # all; -k tp-2-3 one pair of shapes

All threads, sockets and machines are the real ones; only vLLM is missing, and most bytes move in
memory. Each planted fault must fail the load as corrupt, and the error must name the right layer,
part, head and tokens. Clean loads between them must be verified, and have the right bytes.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from harness.local import model_layouts
from harness.local.caches import layout_at
from harness.local.engine import HOST, HOST_PATHS, LocalEngine, Tables, tables_from
from harness.local.memory import Fabric, MemoryTransport
from harness.local.model_layouts import EngineShape, ModelShape, StatePart
from nixl_kv.config import Config
from nixl_kv.geometry.layout import ABSENT, CacheLayout
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import FailureKind, LoadEnded, StartLoad
from nixl_kv.transport.base import Transport
from support.planting import FAULTS, Bytes, Places, Planter, fields_of, memory_of

pytestmark = pytest.mark.detection

MakeTransport = Callable[[], Transport]

CONFIG = Config(host=HOST, offer_ttl_s=600, lease_s=600, request_timeout_s=600, peer_timeout_s=60)
"""Nothing fails because the machine is busy."""
STAGING_BYTES = 8 << 20
MAX_HEADS = 16
SEEDS = 2
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
    """A model's KV, and how prefill and decode divide it; decode has the first `hit` tokens."""

    prefill: EngineShape
    decode: EngineShape
    model: ModelShape
    tokens: int = 41
    hit: int = 0


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
    "tp-8-1": Cell(engine(tp=8), ONE, model(16)),
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


class Side:
    """An engine with its caches, whose blocks are used once each, in no order."""

    def __init__(self, name: str, cell: Cell, make: MakeTransport, path: str) -> None:
        shape = cell.prefill if name == "prefill" else cell.decode
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
        self._ids = iter((1 + rng.permutation(entries - 1)).tolist())
        self.engine = LocalEngine(
            name,
            self.layouts,
            make,
            shape=ParallelShape(shape.tp, shape.pp),
            config=replace(CONFIG, path=path),
            roles=name,
            staging_bytes=STAGING_BYTES,
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
    return StartLoad(RequestId(request), tokens.start, tokens.stop, sent, verify=True)


class World:
    """Prefill serves and never reads, decode reads and never serves."""

    def __init__(
        self, cell: Cell, make: MakeTransport, path: str, stack: contextlib.ExitStack
    ) -> None:
        self.cell = cell
        self.sides = [Side(name, cell, make, path) for name in ("prefill", "decode")]
        for side in self.sides:
            stack.callback(side.engine.close)
        self.planters = [Planter(layout, seed) for seed, layout in enumerate(self.sides[1].layouts)]
        for rank, planter in zip(self.sides[1].engine.ranks, self.planters, strict=True):
            rank.parts.digests._digester = planter

    def load(self, request: str, fault: str | None = None, rank: int = 0) -> list[LoadEnded] | None:
        """Each rank's report; None if the rank has nothing that can have the fault."""
        prefill, decode = self.sides
        tokens = range(self.cell.hit, self.cell.tokens)
        theirs, mine = prefill.new_tables(range(tokens.stop)), decode.new_tables(tokens)
        if fault:
            load = load_of(decode.layouts[rank], request, mine, tokens)
            if not self.planters[rank].expect(load, fault):
                return None
        for layout in prefill.layouts:
            memory, load = memory_of(layout), load_of(layout, request, theirs, range(tokens.stop))
            for places, content in self._contents(layout, load):
                memory[places] = content
        ticket = prefill.engine.offer(request, theirs, tokens.stop)
        decode.engine.prepare_load(request, ticket)
        decode.engine.start_load(request, mine, tokens, verify=True)
        reports = decode.engine.wait_load(request, 2 * CONFIG.request_timeout_s)
        for layout in () if fault else decode.layouts:
            memory, load = memory_of(layout), load_of(layout, request, mine, tokens)
            for places, content in self._contents(layout, load):
                assert np.array_equal(memory[places], content)
        return reports

    def _contents(self, layout: CacheLayout, load: StartLoad) -> Iterator[tuple[Places, Bytes]]:
        """Where each part of a rank's KV is, and the request's bytes for it."""
        for field in fields_of(layout, load):
            heads, tokens = slice(*field.region.heads), slice(field.tokens.start, field.tokens.stop)
            for number, places in enumerate(field.parts):
                seed = list(f"{load.request} {field.region.layer} {number}".encode())
                shape = MAX_HEADS, self.cell.tokens, places.shape[-1]
                whole = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
                yield places, whole[heads, tokens]


def check(name: str, make: MakeTransport, path: str) -> None:
    with contextlib.ExitStack() as stack:
        world = World(CELLS[name], make, path, stack)
        possible = {fault for fault in FAULTS if plants(world, fault)}
        assert possible >= {"byte", "blocks", "layer"}  # others need several heads, or parts
        for number in range(SEEDS + 1):
            for report in world.load(f"clean-{number}") or ():
                assert (report.failure, report.verified) == (None, True)
                assert {read.path for read in report.reads} == {path}


def plants(world: World, fault: str) -> bool:
    """Whether some layer can have a fault; then it is detected and named wherever it is."""
    for seed in range(SEEDS):
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
    return True


@pytest.mark.parametrize("path", HOST_PATHS)
@pytest.mark.parametrize("name", CELLS)
def test_every_fault_is_detected_and_named(name: str, path: str) -> None:
    fabric = Fabric()
    check(name, lambda: MemoryTransport(fabric), path)


@pytest.mark.nixl
def test_every_fault_is_detected_and_named_over_nixl() -> None:
    nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    check("block-6-4", nixl.NixlTransport, "direct")
