"""How fast a link is read is told by a few reads, whatever it is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.reading.probes import LONG_BYTES, NUM_LONG, NUM_SHORT, SHORT_BYTES, Prober

BASE, LENGTH = 1 << 20, 1 << 26
SCRATCH = Span(1 << 40, LONG_BYTES)


def layout(length: int = LENGTH) -> CacheLayout:
    region = Region("a", BASE, 8192, 2048, 512, 0, 4, (Part(0, 256), Part(256, 256)))
    spans = (Span(BASE, 8192), Span(BASE, length))
    return CacheLayout((Group(4, 1, 1, (region,)),), "DRAM", 0, spans)


def probe(prober: Prober, costs: tuple[float, float, float], late: float = 0.0) -> list[float]:
    """What each read took; every other one was seen to have ended so much later."""
    took: list[float] = []
    while (pieces := prober.next) is not None:
        assert all(len(side) == len(pieces[0]) for side in pieces)
        lengths = prober.rows[0][pieces[0], 1]
        start, run, byte = costs
        seconds = start + run * len(lengths) + byte * int(lengths.sum())
        took.append(seconds + late * (len(took) % 2))
        prober.on_end(took[-1])
    return took


@given(
    start=st.floats(10e-6, 1e-3),
    run=st.floats(0.1e-6, 20e-6),
    gigabytes=st.floats(0.1, 500),
)
def test_what_a_read_costs_is_found(start: float, run: float, gigabytes: float) -> None:
    costs = start, run, 1e-9 / gigabytes
    prober = Prober(layout(), layout(), SCRATCH)
    took = probe(prober, costs)
    assert prober.costs == pytest.approx(costs, rel=1e-3)
    assert len(took) <= 9
    assert all(seconds < 1e-3 for seconds in took[5:-2]), "it went on with longer ones"
    assert took[-1] == took[-2]


def test_a_read_that_was_disturbed_changes_little() -> None:
    costs = 50e-6, 2e-6, 1 / 8e9
    prober = Prober(layout(), layout(), SCRATCH)
    probe(prober, costs, late=100e-6)
    assert prober.costs == pytest.approx(costs, rel=0.15)


def test_of_reads_that_are_alike_the_shortest_counts() -> None:
    found = []
    for late in (0.0, 1.0):
        prober = Prober(layout(), layout(), SCRATCH)
        for seconds in (5.0, 1e-4 + late, 1e-4, 3e-3 + late, 3e-3, 2e-3 + late, 2e-3):
            prober.on_end(seconds)
        assert prober.next is None
        found.append(prober.costs)
    assert found[0] == found[1] is not None


@pytest.mark.parametrize(
    "took",
    [
        pytest.param([0.0] * 9, id="no time"),
        pytest.param([1e-3, 1e-3, 1e-3, 1e-4, 1e-4, 2e-3, 2e-3], id="many faster than one"),
        pytest.param([1e-4] * 3 + [0.3] * 2 + [1e-3] * 2, id="long ones faster than short ones"),
    ],
)
def test_costs_that_cannot_be_are_not_believed(took: list[float]) -> None:
    prober = Prober(layout(), layout(), SCRATCH)
    for seconds in took:
        assert prober.next is not None
        prober.on_end(seconds)
    assert prober.next is None
    assert prober.costs is None


def test_pieces_are_apart_and_inside_the_longest_memory() -> None:
    prober = Prober(layout(), layout(), SCRATCH)
    here, there = (side.tolist() for side in prober.rows)
    assert [row[:2] for row in here] == [[1 << 40, SHORT_BYTES], [1 << 40, LONG_BYTES]]
    for address, length, _, stride, count in there:
        assert address == BASE
        assert stride >= 2 * length
        assert (count - 1) * stride + length <= LENGTH
    seen = set()
    while (pieces := prober.next) is not None:
        seen.update(np.asarray(pieces[1]).tolist())
        prober.on_end(1e-6)
    assert seen == set(range(NUM_SHORT + NUM_LONG))


@pytest.mark.parametrize(
    ("length", "scratch"), [(2 * NUM_LONG * LONG_BYTES - 1, LONG_BYTES), (LENGTH, 4096)]
)
def test_short_memory_tells_nothing(length: int, scratch: int) -> None:
    with pytest.raises(ValueError, match="its longest memory has"):
        Prober(layout(), layout(length), Span(1 << 40, scratch))
