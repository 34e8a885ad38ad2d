"""Any shape to any shape: a whole model's KV, cut for prefill's ranks, moved, joined from decode's.

The real routes, plans and reads move real bytes over the transport in memory. Every wanted byte
must be right and be written once, nothing else may be touched, in as few runs as there can be.

    NIXL_KV_EXAMPLES=20000 NIXL_KV_SEED=7 pytest -s tests/geometry/test_any_shape.py

prints how many cases there were, and of which kinds; the same seed makes the same cases.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases import Case, cases, classic
from hypothesis import HealthCheck, given, seed, settings
from oracle import (
    ABSENT,
    Dense,
    Engine,
    Layer,
    dense,
    fewest_runs,
    moved,
    runs_within_rows,
)
from oracle import Rank as RankMemory

from nixl_kv.geometry.blocks import BlockIds, block_ids
from nixl_kv.geometry.compat import mismatches
from nixl_kv.geometry.plan import Plan, Scratch, plan
from nixl_kv.geometry.ranks import holding, routes
from nixl_kv.ids import Rank
from nixl_kv.transport.memory import Fabric, MemoryTransport

EXAMPLES = int(os.environ.get("NIXL_KV_EXAMPLES", "300"))
SEED = int(os.environ.get("NIXL_KV_SEED", "1"))
ENOUGH = 300  # examples for all kinds of cases to be among them

# What prefill keeps for windows is the connector's to say; here it keeps what decode looks at.
KEPT = "for a sliding window"

# Each kind of byte has its own values: what was copied is seen, and whether it should have been.
KV, PREFILL_NOISE, DECODE_NOISE = 100, (100, 150), (150, 256)


class Runs(NamedTuple):
    """How many were made; how few there can be; how few if no two blocks were neighbours."""

    made: int
    fewest: int
    apart: int


class Pair:
    """Two engines with a case's KV in prefill's memory."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        most = max(len(g.spots) for cut in (case.prefill, case.decode) for g in cut.groups)
        self.case = case
        self.dense: Dense = dense(case.model, most, rng, KV)
        self.prefill = Engine(case.prefill, case.model, rng, PREFILL_NOISE)
        self.prefill.write(self.dense)
        self.decode = Engine(case.decode, case.model, rng, DECODE_NOISE)
        self.before = [rank.memory.copy() for rank in self.decode.ranks]
        self.layouts = [
            [rank.layout for rank in engine.ranks] for engine in (self.decode, self.prefill)
        ]
        self.holdings = [list(map(holding, layouts)) for layouts in self.layouts]
        self.scratch = Scratch()
        self.fabric = Fabric()
        self.sources = [self._joined(rank) for rank in self.prefill.ranks]
        self.readers = [self._joined(rank) for rank in self.decode.ranks]

    def _joined(self, rank: RankMemory) -> MemoryTransport:
        transport = MemoryTransport(self.fabric)
        for span in rank.layout.spans:
            transport.register(span, "DRAM", 0)
        return transport

    def tables(self) -> tuple[list[BlockIds], list[BlockIds]]:
        """As `Plan.reads` takes them."""
        start = self.case.tokens.start
        return (
            [block_ids(g.table[start // g.entry_size :]) for g in self.case.decode.groups],
            [block_ids(group.table) for group in self.case.prefill.groups],
        )

    def read(self, number: int) -> Iterator[Runs]:
        """All that one rank of decode reads."""
        here, reader = self.decode.ranks[number], self.readers[number]
        for route in routes(Rank(number), *self.holdings):
            if not route.readers:
                continue
            there = self.prefill.ranks[route.source]
            planned = plan(here.layout, there.layout, route.share)
            reads = planned.reads(*self.tables(), self.case.tokens, scratch=self.scratch)
            pairs = moved(planned, reads)
            assert reads.num_bytes == len(pairs)
            self._check_count(reads.num_runs - runs_within_rows(planned, reads), planned)
            blocks = [
                rank.owners[pairs[:, side] - rank.base] for side, rank in enumerate((here, there))
            ]
            yield Runs(reads.num_runs, fewest_runs(pairs), fewest_runs(pairs, np.stack(blocks, 1)))
            if len(pairs):
                peer = reader.add_peer(self.sources[route.source].metadata())
                local = reader.prepare(planned.local, "DRAM", None)
                remote = reader.prepare(planned.remote, "DRAM", peer)
                assert reader.poll(reader.read(local, remote, (reads.local, reads.remote)))

    def _check_count(self, more: int, planned: Plan) -> None:
        """Groups in the same memory on both sides share rows; where two of them meet, runs merge.

        That is not counted; it is rare.
        """
        shared = self.case.decode.stacked and self.case.prefill.stacked
        assert 0 <= more <= (len(planned.lanes) - 1 if shared else 0)

    def check_memory(self, number: int, copied: int) -> None:
        """All of one rank's memory, after so many bytes were copied into it."""
        rank, before = self.decode.ranks[number], self.before[number]
        wanted = np.zeros(len(before), dtype=bool)
        allowed, right = wanted.copy(), before.copy()
        for layer in rank.layers:
            group = self.case.decode.group_of(layer.name)
            tokens = group.present[group.present >= self.case.tokens.start]
            for offsets in rank.offsets(layer.name, tokens[tokens < self.case.tokens.stop]):
                wanted[offsets] = True
            tokens = tokens[tokens < self._end_of_stretch(layer)]
            for offsets in rank.offsets(layer.name, tokens):
                allowed[offsets] = True
            rank.put(right, layer, tokens, self.dense)
        touched = rank.memory < DECODE_NOISE[0]
        assert np.array_equal(rank.memory, np.where(touched, right, before))
        assert not (wanted & ~touched).any(), "not read"
        assert not (touched & ~allowed).any(), "read, but not wanted"
        assert copied == np.count_nonzero(touched), "read twice"

    def _end_of_stretch(self, layer: Layer) -> int:
        """The first edge of a block of either side that is not before the end."""
        cuts = (self.case.decode, self.case.prefill)
        sizes = [cut.group_of(layer.name).blocks.tokens for cut in cuts]
        return min(-(-self.case.tokens.stop // size) * size for size in sizes)


def check(case: Case) -> list[Runs]:
    """Move a case's KV and check everything."""
    pair = Pair(case)
    assert [m for m in mismatches(*pair.layouts) if KEPT not in m.field] == []
    found = []
    for number in range(len(pair.decode.ranks)):
        before = pair.fabric.bytes_copied
        runs = list(pair.read(number))
        pair.check_memory(number, pair.fabric.bytes_copied - before)
        for each in runs:
            assert each.fewest <= each.made <= each.apart
            assert each.fewest == each.apart or not case.scattered
        found += runs
    return found


LATENT = tuple(Layer(name, 1, 5, 0) for name in "abc")
EVEN = tuple(Layer(name, 4, 6, 4) for name in "abc")
MIXED = (Layer("a", 1, 5, 0), Layer("b", 4, 2, 3), Layer("c", 12, 1, 4))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tp": (2, 1)}, id="TP 1 to 2"),
        pytest.param({"tp": (1, 2)}, id="TP 2 to 1"),
        pytest.param({"tp": (8, 8)}, id="TP 8 to 8, each head twice on both sides"),
        pytest.param({"tp": (4, 8)}, id="TP 8 to 4, each head twice on prefill"),
        pytest.param({"tp": (8, 2)}, id="TP 2 to 8, each head twice on decode"),
        pytest.param({"tp": (3, 2), "model": MIXED[::2]}, id="TP 2 to 3"),
        pytest.param({"tp": (6, 4), "model": MIXED[::2]}, id="TP 4 to 6"),
        pytest.param({"pp": (1, 2)}, id="PP 2 to 1"),
        pytest.param({"pp": (3, 2)}, id="PP 2 to 3"),
        pytest.param({"tp": (4, 2), "pp": (1, 2)}, id="PP 2 TP 2 to TP 4"),
        pytest.param({"tp": (2, 8), "model": LATENT}, id="a latent on all ranks, TP 8 to 2"),
        pytest.param({"tp": (4, 2), "model": MIXED}, id="layers of all kinds, TP 2 to 4"),
        pytest.param({"block": (16, 64), "tokens": range(48, 150)}, id="block size 64 to 16"),
        pytest.param({"block": (64, 16), "tokens": range(64, 150)}, id="block size 16 to 64"),
        pytest.param({"block": (48, 16), "tokens": range(48, 150)}, id="block size 16 to 48"),
        pytest.param({"block": (32, 128), "tokens": range(32, 150)}, id="block size 128 to 32"),
        pytest.param({"block": (48, 32), "tokens": range(48, 150)}, id="block size 32 to 48"),
        pytest.param({"per_entry": (1, 3)}, id="three blocks per entry on prefill"),
        pytest.param({"per_entry": (4, 2)}, id="four blocks per entry on decode, two on prefill"),
        pytest.param({"orders": ("LB2NHC", "L2BHNC")}, id="K and V apart in two ways"),
        pytest.param({"tp": (2, 1), "orders": ("LBHT", "BHLNC"), "model": EVEN}, id="K transposed"),
        pytest.param(
            {"tp": (4, 2), "block": (4, 6), "orders": ("BHLNC", "LB2NHC")}, id="all of it"
        ),
    ],
)
def test_classic_shapes(changes: dict[str, Any]) -> None:
    check(classic(**changes))


def test_any_shape() -> None:
    seen, runs, began = Counter[str](), Counter[str](), time.monotonic()

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=cases())
    def holds(case: Case) -> None:
        for found in check(case):
            runs.update({} if case.scattered else found._asdict())
        seen.update({"cases": True, **kinds(case)})

    holds()
    print(f"\nseed {SEED}, {time.monotonic() - began:.0f} s")  # noqa: T201 - what -s is for
    for kind, count in seen.items():
        print(f"{count:6} {kind}")  # noqa: T201
    print(f"runs where blocks may be neighbours: {dict(runs)}")  # noqa: T201
    if EXAMPLES >= ENOUGH:
        assert all(seen.values()), "the strategy has lost a kind of case"
        assert runs["made"] <= 1.05 * runs["fewest"], "neighbours hardly merge"


def kinds(case: Case) -> dict[str, bool]:
    """What is special about a case."""
    here, there = case.decode, case.prefill
    heads = {layer.heads for layer in case.model if layer.value}
    idle = [cut.groups[0].blocks for cut in (here, there)]
    pairs = [tuple(c.group_of(x.name).blocks for c in (here, there)) for x in case.model]
    sizes = {(mine.tokens, theirs.tokens) for mine, theirs in pairs}
    return {
        "unequal TP": here.tp != there.tp,
        "TP that does not divide": max(here.tp, there.tp) % min(here.tp, there.tp) > 0,
        "heads copied on prefill": any(there.tp > count for count in heads),
        "heads copied on decode": any(here.tp > count for count in heads),
        "heads copied on both": any(min(here.tp, there.tp) > count for count in heads),
        "unequal PP": here.stages != there.stages,
        "unequal TP and PP": here.tp != there.tp and here.stages != there.stages,
        "unequal orders": here.orders != there.orders,
        "K transposed": any("T" in order for order in here.orders + there.orders),
        "smaller blocks on prefill": any(mine > theirs for mine, theirs in sizes),
        "smaller blocks on decode": any(mine < theirs for mine, theirs in sizes),
        "block sizes that do not divide": any(max(s) % min(s) > 0 for s in sizes),
        "unequal blocks per entry": any(mine.per_entry != b.per_entry for mine, b in pairs),
        "several groups": len(here.groups) > 1,
        "unequal groups": {g.layers for g in here.groups} != {g.layers for g in there.groups},
        "groups in one memory": here.stacked or there.stacked,
        "a window beside full attention": len({layer.window for layer in case.model}) > 1,
        "a window has passed": any(ABSENT in group.table for group in here.groups),
        "a hit": case.tokens.start > 0,
        "a hit that cuts a block of prefill": any(case.tokens.start % b.tokens for _, b in pairs),
        "an end that cuts a block": any(case.tokens.stop % mine.tokens for mine, _ in pairs),
        "a latent": any(not layer.value for layer in case.model),
        "a latent beside K and V": len({layer.value == 0 for layer in case.model}) > 1,
        "unequal heads": len(heads) > 1,
        "unequal K and V": any(layer.value not in {0, layer.key} for layer in case.model),
        "two blocks": any(2 in (mine.count, b.count) for mine, b in pairs),
        "idle bytes": any(blocks.pad or blocks.gap for blocks in idle),
        "no neighbours": case.scattered,
    }
