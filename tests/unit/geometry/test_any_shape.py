"""Any shape to any shape: a whole model's KV, divided on prefill, read by the ranks of decode.

The real routes, plans and reads move real bytes. Every byte that decode needs must be right and be
written once, nothing else may be touched, and the runs must be as few as possible.

    NIXL_KV_EXAMPLES=20000 NIXL_KV_SEED=7 pytest -sm slow tests/unit/geometry/test_any_shape.py

prints how many cases of each kind there were; the same seed makes the same cases.
"""

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings

from nixl_kv.geometry.layout import ABSENT
from support.any_shape import check
from support.cases import Case, cases, typical
from support.oracle import ALL_ORDERS, Layer
from support.seeds import seed_or

FEW = 30
EXAMPLES = int(os.environ.get("NIXL_KV_EXAMPLES", "400"))
SEED = seed_or(2)
ENOUGH = 120  # examples, which contain every kind of case

LATENT = tuple(Layer(name, 1, 5, 0) for name in "abc")
EVEN = tuple(Layer(name, 4, 6, 4) for name in "abc")
MIXED = (Layer("a", 1, 5, 0), Layer("b", 4, 2, 3), Layer("c", 12, 1, 4))


WHOLE = [
    pytest.param({"whole": True, "tokens": range(8, 21)}, id="whole blocks"),
    pytest.param({"whole": True, "model": LATENT, "tp": (2, 3)}, id="whole blocks on all ranks"),
    pytest.param(
        {"whole": True, "orders": ("LBNHC", "BHLNC"), "tp": (2, 1), "per_entry": (2, 2)},
        id="whole blocks of a head in rows and in one run",
    ),
]
TYPICAL = [
    pytest.param({"tp": (8, 8)}, id="TP 8 to 8, each head twice on both sides"),
    pytest.param({"tp": (4, 2), "pp": (1, 2)}, id="PP 2 TP 2 to TP 4"),
    pytest.param({"tp": (2, 8), "model": LATENT}, id="a latent on all ranks, TP 8 to 2"),
    pytest.param({"tp": (4, 2), "model": MIXED}, id="layers of all kinds, TP 2 to 4"),
    pytest.param({"block": (48, 32), "tokens": range(48, 150)}, id="block size 32 to 48"),
    pytest.param(
        {"tp": (2, 1), "stripes": ((2, 1), (1, 1)), "model": LATENT},
        id="a latent's tokens divided on decode, one by one",
    ),
    pytest.param(
        {"tp": (2, 8), "stripes": ((1, 1), (4, 4)), "model": LATENT},
        id="a latent's tokens divided on prefill in blocks, each twice",
    ),
    pytest.param(
        {"tp": (8, 8), "stripes": ((2, 2), (2, 4)), "tokens": range(8, 45)},
        id="TP 8 with 4 heads, tokens divided on both by other widths",
    ),
    pytest.param({"per_entry": (4, 2)}, id="four blocks per entry on decode, two on prefill"),
    pytest.param({"tp": (2, 1), "orders": ("LBHT", "BHLNC"), "model": EVEN}, id="K transposed"),
    pytest.param(
        {"tp": (4, 2), "block": (4, 6), "orders": ("BHLNC", "LB2NHC")},
        id="TP, block size and order differ",
    ),
    *WHOLE,
]


@pytest.mark.parametrize("changes", TYPICAL)
def test_typical_engines_exchange_all_kv(changes: dict[str, Any]) -> None:
    check(typical(**changes))


@pytest.mark.parametrize("prefill", ALL_ORDERS)
@pytest.mark.parametrize("decode", ALL_ORDERS)
def test_engines_of_all_orders_read_each_other(decode: str, prefill: str) -> None:
    """With unequal heads, K and V, and block sizes."""
    model = [Layer(name, 2, 4, 2) for name in "ab"]
    orders, tokens = (decode, prefill), range(4, 11)
    check(typical(orders=orders, tp=(2, 1), block=(4, 6), model=model, tokens=tokens))


@pytest.mark.parametrize("examples", [FEW, pytest.param(EXAMPLES, marks=pytest.mark.slow)])
def test_any_two_engines_exchange_all_kv(examples: int) -> None:
    seen, runs = Counter[str](), Counter[str]()

    @seed(SEED)
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def check_and_count(case: Case) -> None:
        for counts in check(case):
            runs.update({} if case.scattered else counts._asdict())
        seen.update({"cases": True, **kinds(case)})

    check_and_count()
    print(f"\n{seen}\nruns where blocks may be neighbours: {runs}")
    if examples >= ENOUGH:
        assert all(seen.values()), "the strategy no longer draws a kind of case"
        assert runs["planned"] <= 1.05 * runs["fewest"], "neighbours do not merge often enough"


def kinds(case: Case) -> dict[str, bool]:
    decode, prefill = case.decode, case.prefill
    tps = decode.tp, prefill.tp
    heads = {layer.heads for layer in case.model if layer.value}
    first_blocks = [cut.groups[0].blocks for cut in (decode, prefill)]
    pairs = [tuple(c.group_of(x.name).blocks for c in (decode, prefill)) for x in case.model]
    sizes = {(mine.tokens, theirs.tokens) for mine, theirs in pairs}
    stripes = [[(blocks.stripes, blocks.width) for blocks in pair] for pair in pairs]
    return {
        "unequal TP": tps[0] != tps[1],
        "TP that does not divide": max(tps) % min(tps) > 0,
        "heads copied on prefill": any(prefill.tp > count for count in heads),
        "heads copied on decode": any(decode.tp > count for count in heads),
        "heads copied on both": any(min(tps) > count for count in heads),
        "unequal PP": decode.stages != prefill.stages,
        "unequal TP and PP": tps[0] != tps[1] and decode.stages != prefill.stages,
        "unequal orders": decode.orders != prefill.orders,
        "K transposed": any("T" in order for order in decode.orders + prefill.orders),
        "smaller blocks on prefill": any(mine > theirs for mine, theirs in sizes),
        "smaller blocks on decode": any(mine < theirs for mine, theirs in sizes),
        "block sizes that do not divide": any(max(s) % min(s) > 0 for s in sizes),
        "unequal blocks per entry": any(mine.per_entry != b.per_entry for mine, b in pairs),
        "several groups": len(decode.groups) > 1,
        "unequal groups": {g.layers for g in decode.groups} != {g.layers for g in prefill.groups},
        "groups in one memory": decode.stacked or prefill.stacked,
        "a window beside full attention": len({layer.window for layer in case.model}) > 1,
        "a window has passed": any(ABSENT in group.table for group in decode.groups),
        "a prefix hit": case.tokens.start > 0,
        "a hit within a block of prefill": any(case.tokens.start % b.tokens for _, b in pairs),
        "an end within a block": any(case.tokens.stop % mine.tokens for mine, _ in pairs),
        "a latent": any(not layer.value for layer in case.model),
        "a latent beside K and V": len({layer.value == 0 for layer in case.model}) > 1,
        "unequal heads": len(heads) > 1,
        "unequal K and V": any(layer.value not in {0, layer.key} for layer in case.model),
        "two blocks": any(2 in (mine.count, b.count) for mine, b in pairs),
        "unused bytes": any(blocks.pad or blocks.gap for blocks in first_blocks),
        "tokens divided on decode": any(mine[0] > 1 for mine, _ in stripes),
        "tokens divided on prefill": any(theirs[0] > 1 for _, theirs in stripes),
        "tokens divided alike": any(mine[0] == theirs[0] > 1 for mine, theirs in stripes),
        "tokens divided unlike": any(a != b and min(a[0], b[0]) > 1 for a, b in stripes),
        "no neighbours": case.scattered,
    }
