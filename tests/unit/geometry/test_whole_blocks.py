"""Groups of whole blocks: decode reads the entries of a load whole, and no other byte.

Entries have 256, 64, 8 or 4 tokens, and layers of one group have blocks of unequal bytes.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.geometry.layout import CacheLayout, Group, Stripe
from nixl_kv.geometry.match import Mismatch, holdings, layout_mismatches, routes
from nixl_kv.geometry.plan import plan
from nixl_kv.ids import Rank
from support.oracle import byte_pairs, check_rows, copy_pieces
from support.whole_blocks import GROUPS, Entries, Request, WholeEngine, alignment, dense_of

TOKENS = (256, 64, 8, 4)
WINDOWS = (0, 2, 5, 8, 128, 300)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    layers = st.lists(st.integers(1, 40), min_size=1, max_size=3)
    sizes = [
        (draw(st.sampled_from(TOKENS)), draw(st.sampled_from(WINDOWS)), draw(layers))
        for _ in range(draw(st.integers(1, 5)))
    ]
    groups = tuple(
        Entries(tokens, window, {f"{number}.{n}": size for n, size in enumerate(bytes_of)})
        for number, (tokens, window, bytes_of) in enumerate(sizes)
    )
    local = alignment(groups) * draw(st.integers(0, 2))
    return Request(groups, local, local + draw(st.integers(1, 600)))


def read(reader: WholeEngine, number: int, tps: tuple[int, int], remote: WholeEngine) -> int:
    """Do the reads of one rank of decode; returns the bytes."""
    mine, theirs, copied = reader.layout(), remote.layout(), 0
    request = reader.request
    tokens = range(request.local, request.end)
    # Prefill's ranks have equal copies, so one memory stands for all of them.
    for route in routes(Rank(number), [holdings(mine)] * tps[0], [holdings(theirs)] * tps[1]):
        if route.readers:
            planned = plan(mine, theirs, route.share)
            check_rows(planned.local, mine)
            check_rows(planned.remote, theirs)
            reads = planned.reads(reader.tables(tokens), remote.offered(), tokens)
            assert reads.num_bytes == len(byte_pairs(planned, reads))
            copy_pieces(planned, reads)
            copied += reads.num_bytes
    return copied


@given(
    request=requests(),
    tps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    spare=st.integers(0, 3),
    backwards=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_entries_of_a_load_are_read_whole_and_nothing_else_is_touched(
    *, request: Request, tps: tuple[int, int], spare: int, backwards: bool, seed: int
) -> None:
    """Prefill has pinned what decode needs, although windows end before the prompt's last token."""
    rng = np.random.default_rng(seed)
    dense = dense_of(request, rng)
    prefill = WholeEngine(request, request.kept_on_prefill(), rng, spare=spare, gap=5)
    prefill.write(dense, [0] * len(request.groups))
    decode = WholeEngine(
        request, request.kept_on_decode(), rng, spare=spare, gap=2, backwards=backwards
    )
    assert layout_mismatches([decode.layout()] * tps[0], [prefill.layout()] * tps[1]) == []
    since = [request.local // one.tokens for one in request.groups]
    before = decode.memory.copy()
    decode.write(dense, since)
    expected, needed = decode.memory.copy(), 0
    for group, kept, first in zip(request.groups, request.kept_on_decode(), since, strict=True):
        needed += len(range(max(first, kept.start), kept.stop)) * sum(group.layers.values())
    for number in range(tps[0]):
        decode.memory[...] = before
        assert read(decode, number, tps, prefill) == needed
        assert np.array_equal(decode.memory, expected)


ENTRIES = Request(GROUPS, 256, 299)


def test_prefill_keeps_the_entries_of_the_window_and_no_more() -> None:
    """Three 4-token blocks: the window of the last token begins within the first of them."""
    assert [len(kept) for kept in ENTRIES.kept_on_prefill()] == [2, 3, 2]
    assert [len(kept) for kept in replace(ENTRIES, end=301).kept_on_prefill()] == [2, 3, 3]
    assert ENTRIES.kept_on_decode() == [range(2), range(2, 5), range(73, 75)]


def layouts(**changes: Any) -> list[CacheLayout]:
    rng = np.random.default_rng(0)
    layout = WholeEngine(ENTRIES, ENTRIES.kept_on_decode(), rng, spare=0).layout()
    first = replace(layout.groups[0], **changes)
    return [replace(layout, groups=(first, *layout.groups[1:]))]


@pytest.mark.parametrize(
    ("changes", "here", "there"),
    [
        pytest.param({"block_size": 512}, "256", "512", id="size"),
        pytest.param({"whole": False, "block_size": 1}, "256", "1, not whole", id="not whole"),
    ],
)
def test_engines_with_other_blocks_do_not_exchange_them(
    changes: dict[str, object], here: str, there: str
) -> None:
    (mismatch,) = layout_mismatches(layouts(), layouts(**changes))
    field = "block size (blocks are read whole) of four and 1 more"
    assert mismatch == Mismatch(field, here, there)


def test_engines_with_blocks_of_other_bytes_do_not_exchange_them() -> None:
    changed = layouts()[0]
    regions = tuple(
        replace(region, parts=(replace(region.parts[0], length=region.content - 1),))
        for region in changed.groups[0].regions
    )
    there = layouts(regions=regions)
    assert layout_mismatches(layouts(), there) == [
        Mismatch("bytes per head and block of four", (64,), (63,)),
        Mismatch("bytes per head and block of hundred", (2,), (1,)),
    ]


def test_whole_blocks_are_not_divided_among_ranks() -> None:
    with pytest.raises(ValueError, match="ranks have 2 stripes of whole blocks; allowed: 1"):
        Group(64, 10, 1, (), stripe=Stripe(2, 0, 64), whole=True)


def test_the_bytes_of_a_token_are_a_share_of_its_blocks() -> None:
    request = Request((Entries(4, 0, {"a": 8, "b": 9}),), 0, 8)
    engine = WholeEngine(request, request.kept_on_decode(), np.random.default_rng(0), spare=0)
    assert engine.layout().bytes_per_token == 2 + 3
