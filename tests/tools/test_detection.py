"""What scripts/detect does, in small: each fault is detected and named, and clean loads pass."""

from collections import Counter

import numpy as np
import pytest

from harness.local.engine import HOST_PATHS
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import StartLoad
from suites.detect.cells import CELLS
from suites.detect.fields import fields_of
from suites.detect.planting import FAULTS, Planted, Planter, Row, pieces_of
from suites.detect.runs import TRANSPORTS, orders_of, run_cell
from suites.detect.tally import Tally, is_named, report
from suites.detect.world import Memory

BY_NAME = {cell.name: cell for cell in CELLS}
FEW = (
    *(
        "tp-2-3",
        "pp-2-1",
        "block-4-6-one-head",
        "blnhc-bhlnc",
        "k-transposed-there",
        "sliding-window",
    ),
    *("state-1-2", "state-rows-apart"),
)
MORE = (
    *("k-and-v-apart", "one-part", "prefix-hit", "long", "tp-2-4-above-heads"),
    *("state-2-1", "state-pp-hit", "state-copies"),
)
IMPOSSIBLE = {
    "one-part": {"head", "parts"},
    "block-4-6-one-head": {"head"},
    "tp-2-4-above-heads": {"head"},
    "state-copies": {"head"},
}


@pytest.mark.parametrize("path", HOST_PATHS)
@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_every_fault_is_detected_and_named(name: str, path: str) -> None:
    """With all threads, sockets and machines; the bytes move in memory."""
    orders = orders_of(tuple(FAULTS), seeds=2, clean=10)
    tally = run_cell(BY_NAME[name], TRANSPORTS["memory"](), orders, seed=5, path=path)
    assert tally.alarms == []
    assert tally.clean == 10
    possible = set(FAULTS) - IMPOSSIBLE.get(name, set())
    assert {fault for fault, count in tally.planted.items() if count} == possible
    assert tally.detected == tally.planted
    assert tally.named == tally.planted


@pytest.mark.nixl
def test_every_fault_is_detected_over_nixl() -> None:
    pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    orders = orders_of(tuple(FAULTS), seeds=1, clean=5)
    tally = run_cell(BY_NAME["block-6-4"], TRANSPORTS["nixl"](), orders)
    assert tally.alarms == []
    assert tally.named == tally.detected == tally.planted
    assert len(tally.planted) == len(FAULTS)


def test_without_verify_the_same_faults_are_not_detected() -> None:
    """So it is the digest that detects them, and a tally says so if nothing does."""
    orders = orders_of(("byte", "layer"), seeds=3, clean=2)
    tally = run_cell(BY_NAME["same"], TRANSPORTS["memory"](), orders, verify=False)
    assert sum(tally.planted.values()) == len(tally.missed) == 6
    assert not tally.detected
    assert [alarm for alarm in tally.alarms if "not verified" in alarm] == tally.alarms
    assert len(tally.alarms) == 2


def test_every_shape_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(CELLS)


# --- the planter


@pytest.fixture
def memory() -> Memory:
    cell = BY_NAME["k-transposed-here"]
    (layout,) = cell.decode.layouts(cell.model, entries=12)
    return Memory(layout, np.random.default_rng(2))


@pytest.fixture
def load() -> StartLoad:
    table = Table.of([7, 3, 9, 1], first=1)
    return StartLoad(RequestId("r"), 4, 18, (table,), verify=True)


def all_of(memory: Memory) -> np.ndarray:
    """One piece that is the whole cache."""
    return np.array([[span.address, span.length] for span in memory.layout.spans])


@pytest.mark.parametrize("fault", list(FAULTS))
def test_planter_says_what_it_changed(memory: Memory, load: StartLoad, fault: str) -> None:
    planter = Planter(memory.layout, np.random.default_rng(4))
    planter.expect(load, fault)
    before = memory.bytes.copy()
    planting = planter.before_read(all_of(memory))
    assert planting is not None
    memory.bytes[...] ^= 0xFF  # the read lands
    landed = memory.bytes.copy()
    planted = planter.after_read(planting)
    assert planted is not None
    assert 4 <= planted.first <= planted.last < 18
    changed = memory.bytes != landed
    assert changed.any()
    if fault == "layer":
        assert np.array_equal(memory.bytes[changed], before[changed])
        assert (planted.first, planted.last) == (4, 17)
        assert [(row.part, row.head) for row in planted.rows] == [
            (part, head) for part in "KV" for head in (0, 1)
        ]
    if fault == "byte":
        assert changed.sum() == 1
        assert len(planted.rows) == 1
    assert planter.after_read(planting) is None, "planted once"
    assert np.array_equal(memory.bytes != landed, changed)


def test_planter_leaves_other_reads_alone(memory: Memory, load: StartLoad) -> None:
    planter = Planter(memory.layout, np.random.default_rng(4))
    planter.expect(load, "byte")
    elsewhere = np.array([[memory.layout.spans[0].address - 64, 16]])
    assert planter.before_read(elsewhere) is None


def test_a_fault_is_planted_where_the_name_says() -> None:
    cell = BY_NAME["state-1-2"]
    layout = cell.decode.layouts(cell.model, entries=12)[1]
    memory = Memory(layout, np.random.default_rng(2))
    tokens = 9
    state = Table.of([5], first=tokens - 1)
    tables = [state if one.keeps_states else Table.of([1, 2, 3]) for one in layout.groups]
    planter = Planter(memory.layout, np.random.default_rng(4))
    named: list[Row] = []
    for number in range(20):
        request = RequestId(f"r{number}")
        planter.expect(StartLoad(request, 0, tokens, tuple(tables)), "byte@key")
        planting = planter.before_read(all_of(memory))
        assert planting is not None
        planted = planter.after_read(planting)
        assert planted is not None
        assert (planted.first, planted.last) == (tokens - 1, tokens - 1)
        named += planted.rows
    assert {row.layer for row in named} == {f"layer.{n} key" for n in range(3)}
    assert {row.part for row in named} == {f"row {n}" for n in range(3)}
    assert {row.head for row in named} == {1}  # of two ranks the second


def test_unknown_fault_is_refused(memory: Memory, load: StartLoad) -> None:
    with pytest.raises(ValueError, match="fault is 'none'; allowed: byte, blocks, head"):
        Planter(memory.layout, np.random.default_rng(4)).expect(load, "none")


def test_fields_read_back_what_was_written_and_touch_nothing_else(
    memory: Memory, load: StartLoad
) -> None:
    """Whatever the strides."""
    inside = np.zeros(len(memory.bytes), dtype=bool)
    for field in fields_of(memory.layout, load.tables, range(load.begin, load.end)):
        for part in (0, 1):
            before = memory.bytes.copy()
            content = field.read(part) ^ np.uint8(0xFF)
            field.write(part, content)
            assert np.array_equal(field.read(part), content)
            changed = memory.bytes != before
            assert changed.sum() == content.size
            assert not (changed & inside).any(), "two parts share a byte"
            inside |= changed
    assert inside.sum() == 2 * 2 * 14 * 16  # layers, heads, tokens, bytes


def test_pieces_are_those_of_the_rows_by_address() -> None:
    rows = np.array([[100, 4, 0, 10, 3], [500, 8, 0, 8, 2]], dtype=np.uint64)
    pieces = pieces_of(rows, np.array([4, 0, 2, 3], dtype=np.int32))
    assert pieces.tolist() == [[100, 4], [120, 4], [500, 8], [508, 8]]


# --- whether a reason names a fault

REASON = "the bytes from prefill rank 3 are wrong: "
WHERE = "differs in tokens 64 to 127 (blocks 4 to 7 of the request; 1 of 3 columns of 64 tokens)"
ROWS = (Row("layer.1", "K", 2), Row("layer.1", "V", 2))
RIGHT = f"K of head 2 of layer layer.1 and 1 more heads {WHERE}"


@pytest.mark.parametrize(
    ("detail", "tokens", "right"),
    [
        pytest.param(RIGHT, (64, 127), True, id="all right"),
        pytest.param(RIGHT, (63, 100), False, id="first token is before"),
        pytest.param(RIGHT, (70, 128), False, id="last token is after"),
        pytest.param(f"K of head 2 of layer layer.1 {WHERE}", (64, 127), False, id="too few heads"),
        pytest.param(
            f"K of head 2 of layer layer.1 and 2 more heads {WHERE}",
            (64, 127),
            False,
            id="too many heads",
        ),
        pytest.param(RIGHT.replace("head 2", "head 1"), (64, 127), False, id="other head"),
        pytest.param(RIGHT.replace("K of", "V of"), (64, 127), False, id="other part"),
        pytest.param(RIGHT.replace("layer.1", "layer.0"), (64, 127), False, id="other layer"),
        pytest.param(RIGHT.replace(WHERE, "in no single place"), (64, 127), False, id="no place"),
        pytest.param(
            "no single head differs in tokens 0 to 63 (...)", (0, 1), False, id="no single head"
        ),
    ],
)
def test_reason_names_a_fault_only_if_all_of_it_is_right(
    detail: str, tokens: tuple[int, int], *, right: bool
) -> None:
    assert is_named(Planted("shift", ROWS, *tokens), REASON + detail) is right


@pytest.mark.parametrize(
    ("tally", "well"),
    [
        pytest.param(Tally(Counter(byte=2), Counter(byte=2)), True, id="all detected"),
        pytest.param(Tally(Counter(byte=2), Counter(byte=1)), False, id="missed"),
        pytest.param(
            Tally(Counter(byte=2), Counter(byte=2), alarms=["d1: gone"]), False, id="false alarm"
        ),
    ],
)
def test_run_with_a_miss_or_an_alarm_is_not_well(
    tally: Tally, capsys: pytest.CaptureFixture[str], *, well: bool
) -> None:
    assert report(["byte"], {"same": tally}, 1.0) is well
    printed = capsys.readouterr().out
    assert f"{tally.detected['byte']}/2 planted faults detected" in printed
    assert all(alarm in printed for alarm in tally.alarms)
