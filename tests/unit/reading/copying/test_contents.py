"""What is digested while it is copied has prefill's digest, and what is put elsewhere has not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.local.model_layouts import ORDERS
from nixl_kv.geometry import digest
from nixl_kv.geometry.layout import (
    ABSENT,
    STATE_WINDOW,
    CacheLayout,
    Group,
    Part,
    Region,
    Span,
    Stripe,
)
from nixl_kv.geometry.plan import ADDRESS, COUNT, LENGTH, STRIDE, Pieces
from nixl_kv.reading.copying.contents import UNIT, Contents, content_size
from nixl_kv.reading.copying.tiles import Tiling
from nixl_kv.reading.gather.base import Wanted
from support.cases import Case, typical
from support.digested import KEY, DigestedPair, DigestedRead, digest_of, is_equal
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
        pytest.param(
            {"block": (16, 4), "orders": ("LBNHC", "LBNHC")}, id="several pieces for each block"
        ),
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
    prefill = Cut(2, stages, ("BHLNC",), groups[::-1])
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


def planned_anew(read: DigestedRead, **changed: Any) -> DigestedRead:
    """With another plan."""
    read.plan = replace(read.plan, **changed)
    read.tiling = Tiling(read.plan, lambda first, _: first)
    read.contents = Contents(read.tiling, read.plan, read.pair.decode.ranks[0].layout)
    return read


def test_heads_in_each_others_place_are_found() -> None:
    """A row of the plan leads to a wrong place of this rank's block."""
    read = one_read(block=(4, 2))
    local = read.plan.local.copy()
    local[[0, 1], ADDRESS] = local[[1, 0], ADDRESS]
    assert not is_equal(planned_anew(read, local=local).copied(TILE_BYTES), digest_of(*read.remote))


def test_a_row_too_many_is_found() -> None:
    """It leads to a head that is read from another rank."""
    pair = DigestedPair(typical(model=MODEL[:1], tp=(1, 2), tokens=range(13)))
    read = next(pair.reads())
    lists, firsts = [], []
    (paged,) = read.plan.paged_rows
    for rows, first in zip((read.plan.local, read.plan.remote), paged.first, strict=True):
        lists.append(np.concatenate([rows, rows[:1]]))
        firsts.append(np.append(first, np.int32(rows[:, COUNT].sum())))
    region = pair.decode.ranks[0].layout.groups[0].regions[0]
    lists[0][-1, ADDRESS] = region.base + region.head_offset(2)
    assert lists[0][-1, LENGTH] == 2 * region.head_stride
    read = planned_anew(
        read,
        local=lists[0],
        remote=lists[1],
        paged_rows=(replace(paged, first=(firsts[0], firsts[1])),),
    )
    assert not is_equal(read.copied(TILE_BYTES), digest_of(*read.remote))


def test_blocks_that_are_nearer_to_each_other_than_they_are_is_refused() -> None:
    """Else all but the first one would go to a wrong place, unseen."""
    read = one_read()
    local = read.plan.local.copy()
    local[:, STRIDE] //= 2
    with pytest.raises(ValueError, match="not as far apart as the layout says"):
        planned_anew(read, local=local)


def test_a_request_changes_nothing_of_the_next_one() -> None:
    """What is put into a block of an earlier one is none of a later one's tokens."""
    read = one_read(tokens=range(16))
    expected = read.copied(TILE_BYTES)
    assert is_equal(read.copied(TILE_BYTES), expected)
    ids = read.local.slices[0].ids.copy()
    ids[1] = np.setdiff1d(np.arange(read.plan.groups[0][0].num_blocks), ids)[0]
    read.local = Wanted(KEY, [one._replace(ids=ids) for one in read.local.slices])
    assert not is_equal(read.copied(TILE_BYTES), expected)


def test_slices_may_come_in_another_order_the_next_time() -> None:
    read = one_read(tp=(1, 1))
    for _ in range(2):
        assert is_equal(read.copied(TILE_BYTES), digest_of(*read.remote))
        read.local = Wanted(KEY, read.local.slices[::-1])
        read.remote = Wanted(KEY, read.remote.slices[::-1])


def test_slices_may_end_at_different_tokens() -> None:
    """Those of an opaque layer end with the block."""
    read = one_read(tokens=range(60), block=(128, 128))
    for side in ("local", "remote"):
        first, *others = getattr(read, side).slices
        later = [one._replace(end=128) for one in others]
        setattr(read, side, Wanted(KEY, [first, *later]))
    made = read.copied(TILE_BYTES)
    assert is_equal(made, digest_of(*read.remote))
    assert len(made.columns) == 2


def test_columns_of_long_prompts_have_more_tokens() -> None:
    read = one_read()
    end = 300_000
    slices = [one._replace(end=end) for one in read.local.slices]
    (launch,) = read.tiling.launches(read.pieces, TILE_BYTES)
    digest_input = read.contents.request(KEY, slices, read.pieces, launch)
    assert 1 << digest_input.numbers[2] == digest.column_tokens(end) == 128
    assert len(digest_input.digest(digest_input.numbers).columns) == digest.num_columns(end)


def test_a_digest_stays_when_its_numbers_are_used_again() -> None:
    read = one_read()
    (launch,) = read.tiling.launches(read.pieces, TILE_BYTES)
    digest_input = read.contents.request(*read.local, read.pieces, launch)
    numbers = digest_input.numbers.copy()
    made = digest_input.digest(numbers)
    numbers[:] = 7
    assert not made.rows.any()
    assert not made.columns.any()


def test_a_part_may_have_a_token_stride_of_its_own() -> None:
    pair = DigestedPair(typical(model=MODEL))
    (rank,) = pair.decode.ranks
    (group,) = rank.layout.groups
    regions = tuple(
        replace(
            region,
            token_stride=1,
            parts=tuple(replace(part, token_stride=region.token_stride) for part in region.parts),
        )
        for region in group.regions
    )
    rank.__dict__["layout"] = replace(rank.layout, groups=(replace(group, regions=regions),))
    (read,) = pair.reads()
    assert is_equal(read.copied(TILE_BYTES), digest_of(*read.remote))


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


def test_layers_that_have_the_same_memory_are_refused() -> None:
    pair = DigestedPair(typical(model=MODEL))
    for engine in (pair.prefill, pair.decode):
        (rank,) = engine.ranks
        (group,) = rank.layout.groups
        regions = (*group.regions, replace(group.regions[1], layer="d"))
        rank.__dict__["layout"] = replace(rank.layout, groups=(replace(group, regions=regions),))
    with pytest.raises(ValueError, match="the same memory"):
        next(pair.reads())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"unit": 8}, "whole heads and tokens"),
        ({"width": 3}, "whole heads and tokens"),
        ({}, "does not begin"),
    ],
)
def test_runs_that_are_cut_elsewhere_are_refused(changed: dict[str, Any], words: str) -> None:
    read = one_read()
    job = read.tiling.jobs[0]
    read.tiling.jobs[0] = replace(job, **changed)
    if not changed:
        read.tiling.rows[job.first, 0] += UNIT
    with pytest.raises(ValueError, match=words):
        Contents(read.tiling, read.plan, read.pair.decode.ranks[0].layout)


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
