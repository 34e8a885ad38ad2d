"""What is digested while it is copied has prefill's digest, and what is put elsewhere has not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.geometry.blocks import ABSENT
from nixl_kv.geometry.contents import Contents, content_size
from nixl_kv.geometry.layout import STATE_WINDOW, CacheLayout, Group, Part, Region, Span, Stripe
from nixl_kv.geometry.model_layouts import ORDERS
from nixl_kv.geometry.plan import Pieces
from support.cases import Case, typical
from support.digested import DigestedPair, DigestedRead, digest_of, is_equal
from support.oracle import Blocks, CacheGroup, Cut, Layer

TILE_BYTES = 256
MODEL = tuple(Layer(name, 4, 32, 32) for name in "abc")
LATENT = (Layer("a", 1, 64, 0), Layer("b", 1, 64, 0))
WINDOWED = (Layer("a", 4, 32, 32, window=9), Layer("b", 4, 32, 32))


def check(case: Case) -> int:
    """The two sides' memory differs: what is digested are the bytes that are read."""
    count = 0
    for read in DigestedPair(case).reads():
        expected = digest_of(*read.remote)
        assert is_equal(read.copied(TILE_BYTES), expected)
        assert not is_equal(digest_of(*read.local), expected)
        count += 1
    return count


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="equal engines"),
        pytest.param({"tp": (8, 2)}, id="TP 2 to 8, above the heads"),
        pytest.param({"tp": (1, 4), "orders": ("BLHNC", "BLHNC")}, id="TP 4 to 1"),
        pytest.param({"block": (4, 16), "tokens": range(4, 61)}, id="block size 16 to 4, a hit"),
        pytest.param({"block": (16, 4), "per_entry": (1, 2)}, id="block size 4 to 16"),
        pytest.param({"pp": (2, 1), "orders": ("BHLNC", "L2BNHC")}, id="PP 1 to 2"),
        pytest.param(
            {"model": LATENT, "tp": (1, 2), "stripes": ((1, 1), (2, 4)), "tokens": range(61)},
            id="tokens divided on prefill",
        ),
    ],
)
def test_the_digest_of_what_is_copied_is_prefills(changes: dict[str, Any]) -> None:
    assert check(typical(**{"model": MODEL} | changes))


@settings(max_examples=40, deadline=None)
@given(
    tp=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2),
    block=st.tuples(*[st.sampled_from([1, 2, 4, 6])] * 2),
    per_entry=st.tuples(*[st.sampled_from([1, 3])] * 2),
    orders=st.tuples(*[st.sampled_from(ORDERS)] * 2),
    entries=st.integers(0, 3),
    length=st.integers(1, 40),
)
def test_any_two_engines(entries: int, length: int, **changes: Any) -> None:
    begin = entries * changes["block"][0] * changes["per_entry"][0]
    assert check(typical(model=MODEL, tokens=range(begin, begin + length), **changes))


def test_of_a_window_are_digested_the_tokens_after_the_last_absent_block() -> None:
    case = typical(model=WINDOWED[1:], tokens=range(4, 70))
    groups = (
        CacheGroup(("a",), Blocks(count=20, tokens=4), (*[ABSENT] * 15, 3, 1, 2)),
        CacheGroup(("b",), Blocks(count=20, tokens=4), tuple(range(18))),
    )
    stages = (("a", "b"),)
    decode = replace(case.decode, groups=groups, stages=stages)
    prefill = Cut(2, stages, ("BHLNC",), groups)
    assert check(case._replace(model=WINDOWED, decode=decode, prefill=prefill)) == 2


def one_read(**changes: Any) -> DigestedRead:
    (read,) = DigestedPair(typical(**{"model": MODEL} | changes)).reads()
    return read


def test_a_block_in_another_ones_place_is_found() -> None:
    read = one_read()
    (pieces,) = read.pieces
    local = pieces.local.copy()
    local[[1, 2]] = local[[2, 1]]
    read.pieces = [Pieces(local, pieces.remote)]
    assert not is_equal(read.copied(TILE_BYTES), digest_of(*read.remote))


def test_a_block_of_another_request_is_found() -> None:
    read = one_read()
    (pieces,) = read.pieces
    others = np.setdiff1d(np.arange(read.plan.groups[0][0].num_blocks), pieces.local)
    local = pieces.local.copy()
    local[1] = others[0]
    read.pieces = [Pieces(local.astype(np.int32), pieces.remote)]
    assert not is_equal(read.copied(TILE_BYTES), digest_of(*read.remote))


def test_heads_in_each_others_place_are_found() -> None:
    """A row of the plan leads to a wrong place of this rank's block."""
    read = one_read(tp=(1, 1), block=(4, 2))
    read.tiling.rows[[0, 1], 0] = read.tiling.rows[[1, 0], 0]
    layout = CacheLayout(read.plan.groups[0], "DRAM", 0, (Span(1, 1 << 60),))
    read.contents = Contents(read.tiling, read.plan, layout)
    assert not is_equal(read.copied(TILE_BYTES), digest_of(*read.remote))


def test_a_request_changes_nothing_of_the_next_one() -> None:
    """Blocks of an earlier request are none of a later one's."""
    read = one_read()
    expected = read.copied(TILE_BYTES)
    assert is_equal(read.copied(TILE_BYTES), expected)
    shorter = [one._replace(end=8, ids=one.ids[:2]) for one in read.local.slices]
    read.local = read.local._replace(slices=shorter)
    again = read.copied(TILE_BYTES)
    remote = [one._replace(end=8, ids=one.ids[:2]) for one in read.remote.slices]
    assert is_equal(again, digest_of(read.remote.key, remote))


# --- what cannot be digested so


def layout(
    *parts: Part, window: int = 0, stripe: Stripe | None = None, head_stride: int = 1024
) -> CacheLayout:
    region = Region("a", 4096, 8192, head_stride, 256, 0, 2, parts)
    group = Group(4, 10, 1, (region,), window, stripe or Stripe())
    return CacheLayout((group,), "DRAM", 0, (Span(4096, 1 << 20),))


@pytest.mark.parametrize(
    ("cache", "size"),
    [
        (layout(Part(0, 64), Part(64, 64)), 64),
        (layout(Part(0, 16)), 16),
        (layout(Part(0, 4096)), 4096),
        (layout(Part(0, 8)), 0),
        (layout(Part(0, 8192)), 0),
        (layout(Part(0, 48)), 0),
        (layout(Part(0, 64), Part(64, 32)), 0),
        (layout(Part(0, 2, 32, 8)), 0),
        (layout(Part(0, 64), window=STATE_WINDOW), 0),
        (layout(Part(0, 64), stripe=Stripe(2)), 0),
    ],
)
def test_content_has_one_size_which_is_a_power_of_two(cache: CacheLayout, size: int) -> None:
    assert content_size(cache) == size


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": (Layer("a", 4, 48, 48),)}, id="not a power of two"),
        pytest.param({"model": (Layer("a", 4, 32, 64),)}, id="two sizes"),
        pytest.param({"orders": ("LBHNC", "LBHT")}, id="K transposed on prefill"),
    ],
)
def test_other_runs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole heads and tokens of one size"):
        one_read(**changes)
