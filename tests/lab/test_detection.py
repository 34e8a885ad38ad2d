"""What scripts/detect does, in small: each fault is seen and named, and clean loads pass."""

from argparse import Namespace
from collections import Counter

import numpy as np
import pytest
from pd.damage import RECALL, held_out
from pd.damage import Row as DamageRow
from pd.detect import Tally, names, orders_of, report, run_cell, transport_of
from pd.detect_cells import CELLS
from pd.detect_fields import fields_of
from pd.detect_planting import FAULTS, Planted, Planter, Row, pieces_of
from pd.detect_world import Memory, World

from nixl_kv.geometry.blocks import block_ids, to_bytes
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import Load

BY_NAME = {cell.name: cell for cell in CELLS}
FEW = ("tp-2-3", "pp-2-1", "block-6-4", "blnhc-bhlnc", "k-transposed-there", "one-part")
MORE = ("k-and-v-apart", "sliding-window", "prefix-hit", "long", "tp-2-4-above-heads")
FEASIBLE = {"one-part": {"head", "parts"}, "tp-2-4-above-heads": {"head"}}


@pytest.mark.parametrize("name", FEW + MORE)
def test_every_fault_is_seen_and_named(name: str) -> None:
    """Without vLLM, but with all threads, sockets and machines; the bytes move in memory."""
    orders = orders_of(tuple(FAULTS), seeds=2, clean=10)
    tally = run_cell(BY_NAME[name], transport_of("memory")(), orders, seed=5)
    assert tally.alarms == []
    assert tally.clean == 10
    possible = set(FAULTS) - FEASIBLE.get(name, set())
    assert {fault for fault, count in tally.planted.items() if count} == possible
    assert tally.detected == tally.planted
    assert tally.named == tally.planted


@pytest.mark.nixl
def test_every_fault_is_seen_over_nixl() -> None:
    pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    orders = orders_of(tuple(FAULTS), seeds=1, clean=5)
    tally = run_cell(BY_NAME["block-6-4"], transport_of("nixl")(), orders)
    assert tally.alarms == []
    assert tally.named == tally.detected == tally.planted
    assert len(tally.planted) == len(FAULTS)


def test_without_proof_the_same_faults_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is the digest that sees them, and the harness would tell if it did not."""
    loads = World._loads

    def unproven(self: World, *args: object) -> tuple[Load, Load]:
        theirs, mine = loads(self, *args)  # type: ignore[arg-type]
        return theirs, Load(mine.request, mine.begin, mine.end, mine.tables)

    monkeypatch.setattr(World, "_loads", unproven)
    orders = orders_of(("byte", "layer"), seeds=3, clean=2)
    tally = run_cell(BY_NAME["same"], transport_of("memory")(), orders)
    assert sum(tally.planted.values()) == 6
    assert not tally.detected
    assert [alarm for alarm in tally.alarms if "not verified" in alarm] == tally.alarms
    assert len(tally.alarms) == 2


# --- the planter


@pytest.fixture
def memory() -> Memory:
    cell = BY_NAME["k-transposed-here"]
    (layout,) = cell.decode.layouts(cell.model, entries=12)
    return Memory(layout, np.random.default_rng(2))


@pytest.fixture
def load() -> Load:
    table = to_bytes(block_ids([7, 3, 9, 1]))
    return Load(RequestId("r"), 4, 18, (table,), verify=True)


def all_of(memory: Memory) -> np.ndarray:
    """One piece that is the whole cache."""
    return np.array([[span.address, span.length] for span in memory.layout.spans])


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_is_planted_is_what_changed(memory: Memory, load: Load, fault: str) -> None:
    planter = Planter(memory.layout, np.random.default_rng(4))
    planter.expect(load, fault)
    before = memory._bytes.copy()
    planting = planter.begun(all_of(memory))
    assert planting is not None
    memory._bytes[...] ^= 0xFF  # the read lands
    landed = memory._bytes.copy()
    planted = planter.landed(planting)
    assert planted is not None
    assert 4 <= planted.first <= planted.last < 18
    changed = memory._bytes != landed
    assert changed.any()
    if fault == "layer":
        assert np.array_equal(memory._bytes[changed], before[changed])
        assert (planted.first, planted.last) == (4, 17)
        assert [(row.part, row.head) for row in planted.rows] == [
            (part, head) for part in "KV" for head in (0, 1)
        ]
    if fault == "byte":
        assert changed.sum() == 1
        assert len(planted.rows) == 1
    assert planter.landed(planting) is None, "planted once"
    assert np.array_equal(memory._bytes != landed, changed)


def test_other_reads_are_left_alone(memory: Memory, load: Load) -> None:
    planter = Planter(memory.layout, np.random.default_rng(4))
    planter.expect(load, "byte")
    elsewhere = np.array([[memory.layout.spans[0].address - 64, 16]])
    assert planter.begun(elsewhere) is None


def test_an_unknown_fault_is_refused(memory: Memory, load: Load) -> None:
    with pytest.raises(ValueError, match="fault is 'none'; allowed: byte, blocks, head"):
        Planter(memory.layout, np.random.default_rng(4)).expect(load, "none")


def test_fields_read_back_what_they_wrote(memory: Memory, load: Load) -> None:
    """Without touching anything else, whatever the strides."""
    inside = np.zeros(len(memory._bytes), dtype=bool)
    for field in fields_of(memory.layout, load):
        for part in (0, 1):
            before = memory._bytes.copy()
            content = field.get(part) ^ np.uint8(0xFF)
            field.put(part, content)
            assert np.array_equal(field.get(part), content)
            changed = memory._bytes != before
            assert changed.sum() == content.size
            assert not (changed & inside).any(), "two parts share a byte"
            inside |= changed
    assert inside.sum() == 2 * 2 * 14 * 16  # layers, heads, tokens, bytes


def test_pieces_are_those_of_the_rows() -> None:
    rows = np.array([[100, 4, 0, 10, 3], [500, 8, 0, 8, 2]], dtype=np.uint64)
    found = pieces_of(rows, np.array([4, 0, 2, 3], dtype=np.int32))
    assert found.tolist() == [[100, 4], [120, 4], [500, 8], [508, 8]]


# --- whether a reason names a fault

REASON = "what was read from prefill rank 3 is not what it has: "
WHERE = "differs in tokens 64 to 127 (blocks 4 to 7 of the request; 1 of 3 columns of 64 tokens)"
ROWS = (Row("layer.1", "K", 2), Row("layer.1", "V", 2))


@pytest.mark.parametrize(
    ("told", "fault", "tokens", "right"),
    [
        (f"K of head 2 of layer layer.1 and 1 more heads {WHERE}", "shift", (64, 127), True),
        (f"K of head 2 of layer layer.1 and 1 more heads {WHERE}", "shift", (63, 100), False),
        (f"K of head 2 of layer layer.1 and 1 more heads {WHERE}", "shift", (70, 128), False),
        (f"K of head 2 of layer layer.1 {WHERE}", "shift", (64, 127), False),
        (f"K of head 2 of layer layer.1 and 2 more heads {WHERE}", "shift", (64, 127), False),
        (f"K of head 1 of layer layer.1 and 1 more heads {WHERE}", "shift", (64, 127), False),
        (f"V of head 2 of layer layer.1 and 1 more heads {WHERE}", "shift", (64, 127), False),
        (f"K of head 2 of layer layer.0 and 1 more heads {WHERE}", "shift", (64, 127), False),
        (
            "K of head 2 of layer layer.1 and 1 more heads in no single place",
            "parts",
            (64, 127),
            False,
        ),
        ("no single head differs in tokens 0 to 63 (...)", "byte", (0, 1), False),
    ],
)
def test_a_reason_names_a_fault_only_if_all_of_it_is_right(
    told: str, fault: str, tokens: tuple[int, int], *, right: bool
) -> None:
    assert names(REASON + told, Planted(fault, ROWS, *tokens)) is right


def test_every_shape_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(CELLS)


@pytest.mark.parametrize(
    ("tally", "well"),
    [
        (Tally(planted=Counter(byte=2), detected=Counter(byte=2)), True),
        (Tally(planted=Counter(byte=2), detected=Counter(byte=1)), False),
        (Tally(planted=Counter(byte=2), detected=Counter(byte=2), alarms=["d1: gone"]), False),
    ],
    ids=["all seen", "missed", "false alarm"],
)
def test_a_run_with_a_miss_or_an_alarm_is_not_well(
    tally: Tally, capsys: pytest.CaptureFixture[str], *, well: bool
) -> None:
    assert report(Namespace(faults=["byte"]), {"same": tally}, 1.0) is well
    told = capsys.readouterr().out
    assert f"{tally.detected['byte']}/2 planted faults detected" in told
    assert all(alarm in told for alarm in tally.alarms)


# --- what scripts/damage calls well


@pytest.mark.parametrize(
    ("row", "well"),
    [
        (DamageRow("none", "off", 0, 3, 4, 4, 0, 0), True),
        (DamageRow("none", "all", 0, 3, 3, 4, 0, 0), False),
        (DamageRow("none", "all", 0, 4, 4, 3, 0, 1), False),
        (DamageRow("byte", "off", 4, 0, 0, 4, 0, 0), True),
        (DamageRow("byte", "off", 0, 4, 4, 4, 0, 0), False),
        (DamageRow("layer", "all", 3, 3, 4, 1, 3, 0), True),
        (DamageRow("byte", "all", 4, 3, 4, 0, 4, 0), True),
        (DamageRow("byte", "all", 4, 4, 4, 1, 3, 0), False),
        (DamageRow("byte", "all", 4, 3, 3, 0, 4, 0), False),
        (DamageRow("byte", "all", 4, 4, 4, 0, 4, 1), False),
        (DamageRow("byte", "all", 0, 4, 4, 4, 0, 0), False),
    ],
)
def test_a_row_of_the_damage_table_is_as_it_should_be(row: DamageRow, *, well: bool) -> None:
    assert row.is_good(4) is well


def test_held_out_prompts_are_of_all_lengths() -> None:
    found = held_out(RECALL, 40)
    assert found == held_out(RECALL, 80)[:40]
    assert {len(prompt.split()) for prompt, _ in found} >= {98, 398, 800, 1499}
    assert all(answer.split()[-1] == "end" for _, answer in found)
