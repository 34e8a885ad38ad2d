"""The records of a layout, and its arithmetic on tokens and block ids.

The records check their own numbers, because they also come from peers.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.geometry.layout import (
    ABSENT,
    BlockIds,
    CacheLayout,
    Group,
    Part,
    Region,
    Span,
    Stripe,
    Table,
    block_ids,
    entries,
    extent,
    num_token_segments,
    token_segments,
)
from support.records import written_out

PARTS = (Part(0, 256), Part(256, 128))
REGION = Region(
    layer="layer.0",
    base=4096,
    block_stride=50_000,
    head_stride=6144,
    token_stride=384,
    first_head=2,
    num_heads=8,
    parts=PARTS,
)
GROUP = Group(block_size=16, num_blocks=10, blocks_per_entry=1, regions=(REGION,))
EXTENT = 9 * 50_000 + 7 * 6144 + 15 * 384 + 384
LAYOUT = CacheLayout((GROUP,), "DRAM", 0, (Span(4096, EXTENT),))


MANY: Final = {"parts": PARTS[:1] * 9, "regions": (REGION,) * 2**14, "groups": (GROUP,) * 65}


@pytest.mark.parametrize(
    "record",
    [PARTS[1], REGION, GROUP, Span(1, 1), LAYOUT],
    ids=lambda record: type(record).__name__,
)
def test_each_field_has_bounds_that_its_error_names(record: Any) -> None:
    for each in fields(record):
        for value in (-1, 2**63) if each.type in (int, "int") else ():
            with pytest.raises(ValueError, match=rf"{each.name} is {value}; allowed: [01] to \d+$"):
                replace(record, **{each.name: value})
        if each.name in MANY:
            with pytest.raises(
                ValueError, match=rf"^number of {each.name} is \d+; allowed: [01] to"
            ):
                replace(record, **{each.name: MANY[each.name]})


@pytest.mark.parametrize(
    ("scales", "error"),
    [
        (("",), ""),
        (("x" * 256,) * 8, ""),
        (("x",) * 2, "number of scales is 2; allowed: 0, 1 or 8"),
        (("x" * 257,), "length of element or scales is 257; allowed: 0 to 256"),
    ],
)
def test_texts_have_bounds(scales: tuple[str, ...], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}$") if error else nullcontext():
        assert replace(REGION, scales=scales).scales == scales


def test_the_bytes_of_a_token_are_those_of_all_layers_and_heads() -> None:
    first, second, third = (replace(REGION, layer=layer) for layer in "abc")
    groups = replace(GROUP, regions=(first, second)), replace(GROUP, regions=(third,))
    assert CacheLayout(groups, "DRAM", 0, LAYOUT.spans).bytes_per_token == 3 * 8 * 384
    divided = replace(groups[1], stripe=Stripe(4, 1, 16))
    layout = CacheLayout((groups[0], divided), "DRAM", 0, LAYOUT.spans)
    assert layout.bytes_per_token == 2 * 8 * 384 + 8 * 384 // 4


def test_a_layer_is_once_in_a_cache() -> None:
    """Otherwise no peer would read the tokens of one of them."""
    with pytest.raises(ValueError, match=r"^layer 'layer\.0' occurs twice; allowed: once$"):
        CacheLayout((GROUP, GROUP), "DRAM", 0, LAYOUT.spans)


@pytest.mark.parametrize(
    ("per_entry", "stripe", "slots", "tokens", "num_entries"),
    [
        (1, Stripe(), 16, 16, 10),
        (4, Stripe(), 64, 64, 2),  # two blocks are left over
        (11, Stripe(), 176, 176, 0),
        (2, Stripe(4, 1, 8), 32, 128, 5),  # an entry has the tokens of all stripes
    ],
)
def test_entries_consist_of_whole_blocks(
    per_entry: int, stripe: Stripe, slots: int, tokens: int, num_entries: int
) -> None:
    group = replace(GROUP, blocks_per_entry=per_entry, stripe=stripe)
    assert (group.slots_per_entry, group.entry_size) == (slots, tokens)
    assert group.num_entries == num_entries


# --- stripes of tokens


@st.composite
def stripes(draw: st.DrawFn) -> Stripe:
    count = draw(st.integers(1, 8))
    width = draw(st.integers(1, 9)) if count > 1 else 1
    return Stripe(count, draw(st.integers(0, count - 1)), width)


@given(stripe=stripes(), begin=st.integers(0, 300))
def test_kept_tokens_are_numbered_one_after_the_other(stripe: Stripe, begin: int) -> None:
    tokens = np.arange(begin + 50)
    kept = tokens[tokens // stripe.width % stripe.count == stripe.place]
    assert tokens[stripe.holds(tokens)].tolist() == kept.tolist()
    assert stripe.position(kept).tolist() == list(range(len(kept)))
    assert stripe.token(np.arange(len(kept))).tolist() == kept.tolist()
    assert stripe.num_before(begin) == np.count_nonzero(kept < begin)


@given(one=stripes(), other=stripes())
def test_whether_two_stripes_have_a_token_in_common(one: Stripe, other: Stripe) -> None:
    tokens = np.arange(math.lcm(one.period, other.period))
    common = bool((one.holds(tokens) & other.holds(tokens)).any())
    assert one.meets(other) == other.meets(one) == common


@pytest.mark.parametrize(
    ("stripe", "window", "message"),
    [
        ((0, 0, 1), 0, "stripe count is 0; allowed: 1 to 1023"),
        ((2, 2, 1), 0, "stripe place is 2; allowed: 0 to 1"),
        ((2, 0, 0), 0, "stripe width is 0; allowed: 1 to 1048575"),
        ((1, 0, 2), 0, "stripe width is 2; allowed: 1 to 1"),
        ((2, 0, 3), 0, "stripe width is 3; allowed: a divisor of the 16 slots of an entry"),
        ((2, 0, 16), 8, "window is 8; allowed: 0 to 0"),
    ],
)
def test_stripes_fill_entries_and_have_no_window(
    stripe: tuple[int, int, int], window: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        replace(GROUP, stripe=Stripe(*stripe), window=window)


FEW_BYTES = Part(0, 2, count=64, stride=32, token_stride=2)


@pytest.mark.parametrize(
    ("parts", "last"),
    [
        pytest.param(PARTS, 15 * 384 + 384, id="K then V"),
        pytest.param(
            (Part(0, 300), Part(1000, 8)), 15 * 384 + 1008, id="the longest part is not the last"
        ),
        pytest.param(
            (FEW_BYTES, Part(9, 7)), 15 * 384 + 16, id="each part with its own token stride"
        ),
        pytest.param(
            (replace(FEW_BYTES, offset=8000),), 8000 + 63 * 32 + 15 * 2 + 2, id="content in pieces"
        ),
    ],
)
def test_extent_ends_with_the_last_element(parts: tuple[Part, ...], last: int) -> None:
    assert extent(replace(REGION, parts=parts), GROUP) == 9 * 50_000 + 7 * 6144 + last
    one = replace(GROUP, num_blocks=1)
    assert extent(replace(REGION, parts=parts, num_heads=1), one) == last


@pytest.mark.parametrize(
    ("spans", "fits"),
    [
        pytest.param((Span(4096, EXTENT),), True, id="exactly"),
        pytest.param((Span(1, 5), Span(4096, EXTENT), Span(4096, 3)), True, id="in one of several"),
        pytest.param((), False, id="no span"),
        pytest.param((Span(4096, EXTENT - 1),), False, id="ends one byte early"),
        pytest.param((Span(4097, EXTENT),), False, id="begins one byte late"),
        pytest.param((Span(4096, 1000), Span(5096, EXTENT)), False, id="two neighbours"),
    ],
)
def test_a_region_is_inside_one_span(spans: tuple[Span, ...], *, fits: bool) -> None:
    message = f"^region of layer 'layer.0' reaches from 0x1000 to {4096 + EXTENT:#x}; allowed: in"
    with nullcontext() if fits else pytest.raises(ValueError, match=message):
        assert replace(LAYOUT, spans=spans).spans == spans


def test_too_many_regions_times_spans_are_refused() -> None:
    """A peer's numbers must not cost this side seconds; a stage may have no layer of a group."""
    with pytest.raises(ValueError, match="regions times spans"):
        replace(LAYOUT, spans=LAYOUT.spans * 2**20)
    assert replace(LAYOUT, groups=(replace(GROUP, regions=()),), spans=()).spans == ()


def test_every_region_of_every_group_is_checked() -> None:
    stray = replace(REGION, layer="stray", base=4097)
    for groups in (
        (replace(GROUP, regions=(REGION, stray)),),
        (GROUP, replace(GROUP, regions=(stray,))),
    ):
        with pytest.raises(ValueError, match="'stray' reaches from 0x1001"):
            replace(LAYOUT, groups=groups)


# --- block tables


@given(hit=st.integers(0, 9), load=st.integers(0, 99), size=st.integers(1, 17))
def test_entries_are_exactly_those_that_contain_a_loaded_token(
    hit: int, load: int, size: int
) -> None:
    local = hit * size
    tokens = range(local, local + load)
    assert list(entries(local, load, size)) == sorted({token // size for token in tokens})


@pytest.mark.parametrize(
    ("ids", "first", "expected"),
    [
        pytest.param([], 0, (0, b""), id="nothing"),
        pytest.param([3, 256], 0, (0, b"\3\0\0\0\0\1\0\0"), id="little-endian"),
        pytest.param([ABSENT, ABSENT, 3], 0, (2, b"\3\0\0\0"), id="absent at first"),
        pytest.param([3, ABSENT], 0, (0, b"\3\0\0\0\xff\xff\xff\xff"), id="absent at last"),
        pytest.param([ABSENT] * 4, 2, (6, b""), id="all absent"),
        pytest.param([0], 0, (0, bytes(4)), id="block 0 is there"),
    ],
)
def test_a_table_begins_with_the_first_entry_that_is_present(
    ids: list[int], first: int, expected: tuple[int, bytes]
) -> None:
    made = Table.of(ids, first)
    assert (made.first, made.ids) == expected
    assert made == Table.of(np.array(ids, dtype=np.int64), first)


TABLES = st.builds(
    lambda absent, ids: [ABSENT] * absent + ids,
    st.integers(0, 50),
    st.lists(st.integers(ABSENT, 2**31 - 1), max_size=20),
)
"""In some tables the first entries are absent, as a window leaves them."""


@given(ids=TABLES, begin=st.integers(0, 20))
def test_a_table_comes_back_whole(ids: list[int], begin: int) -> None:
    """Whether it was cut, and where."""
    made = Table.of(ids[begin:], min(begin, len(ids)))
    assert written_out(made)[begin:] == ids[begin:]
    assert len(written_out(made)) == len(ids)
    assert made.num_present == sum(block != ABSENT for block in ids[begin:])
    assert made.num_ids == len(made.block_ids)
    assert not made.num_ids or made.block_ids[0] != ABSENT
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Table) == made
    assert Table.of(written_out(made)) == made


# --- token segments


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Blocks of any size; of their tokens a rank may have a stripe."""
    size, per_entry = draw(st.integers(1, 24)), draw(st.integers(1, 3))
    stripe = Stripe()
    if draw(st.booleans()):
        widths = [width for width in range(1, 25) if size * per_entry % width == 0]
        count = draw(st.integers(2, 4))
        stripe = Stripe(count, draw(st.integers(0, count - 1)), draw(st.sampled_from(widths)))
    return Group(size, 12, per_entry, (), stripe=stripe)


def is_kept(group: Group, token: int) -> bool:
    return token // group.stripe.width % group.stripe.count == group.stripe.place


def place_of(group: Group, token: int) -> tuple[int, int]:
    """(block, slot) of a token, by counting those before it that are kept."""
    kept = sum(is_kept(group, t) for t in range(token))
    return kept // group.block_size, kept % group.block_size


@given(mine=groups(), theirs=groups(), first=st.integers(0, 2), n=st.integers(0, 40))
def test_segments_cover_each_common_token_once(
    mine: Group, theirs: Group, first: int, n: int
) -> None:
    """Each in one block on both sides, where their slots follow each other.

    Only the last segments may reach beyond the end, but not beyond their blocks.
    """
    start = first * mine.entry_size
    tokens = range(start, start + n)
    common = [t for t in tokens if is_kept(mine, t) and is_kept(theirs, t)]
    expected = {(place_of(mine, t), place_of(theirs, t)) for t in common}
    covered = []
    for segment in token_segments(mine, theirs):
        for token in segment.starts(tokens):
            (block, slot), (other, other_slot) = place_of(mine, token), place_of(theirs, token)
            covered += [((block, slot + n), (other, other_slot + n)) for n in range(segment.length)]
    assert len(set(covered)) == len(covered)
    assert expected <= set(covered)
    blocks = {(here[0], there[0]) for here, there in expected}
    for here, there in covered:
        assert (here[0], there[0]) in blocks
        assert here[1] < mine.block_size
        assert there[1] < theirs.block_size


@pytest.mark.parametrize(
    ("mine", "theirs", "number"),
    [
        pytest.param(Stripe(), Stripe(2, 1, 1), 16, id="one by one: each token is a segment"),
        pytest.param(Stripe(4, 2, 8), Stripe(4, 2, 8), 1, id="alike: as without"),
        pytest.param(Stripe(2, 0, 4), Stripe(4, 1, 2), 8, id="unlike"),
    ],
)
def test_how_many_segments_stripes_make(mine: Stripe, theirs: Stripe, number: int) -> None:
    both = [Group(16, 12, 1, (), stripe=stripe) for stripe in (mine, theirs)]
    assert num_token_segments(*both) == len(token_segments(*both)) == number


def test_segments_of_a_long_period_are_not_listed() -> None:
    mine = Group(1 << 19, 12, 1, (), stripe=Stripe(2, 0, 1))
    assert num_token_segments(mine, Group(16, 12, 1, ())) == 1 << 20


# --- piece numbers


def table(ids: list[int], **changes: Any) -> Callable[[range, int], BlockIds]:
    """The piece numbers of a table of a cache of 12 blocks of four tokens."""
    sizes = {"block_size": 4, "num_blocks": 12, "blocks_per_entry": 1} | changes
    kept = Table(0, block_ids(ids).tobytes())
    return partial(kept.piece_numbers, Group(**sizes, regions=()))


@pytest.mark.parametrize(
    ("table", "tokens", "message"),
    [
        (table([1, 2]), range(4, 12, 4), "block table has 2 entries; needed: 3"),
        (table([12]), range(1), "block id 12; allowed: 0 to 11"),
        (table([4], blocks_per_entry=3), range(1), "block id 4; allowed: 0 to 3"),
        (table([3, 99, -2]), range(0, 12, 4), "block id 99"),
    ],
)
def test_tokens_without_a_valid_entry_are_refused(
    table: Callable[[range, int], BlockIds], tokens: range, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        table(tokens, 1)


def test_ids_of_other_tokens_are_not_checked() -> None:
    assert table([99, 3, 99, 5, 99])(range(4, 16, 8), 1).tolist() == [3, 5]


@settings(max_examples=150)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    ids=st.lists(st.integers(ABSENT, 5), max_size=6),
    first=st.integers(0, 3),
    step=st.integers(1, 30),
    data=st.data(),
)
def test_each_token_has_the_piece_of_a_table_written_out(
    sizes: tuple[int, int, int], ids: list[int], first: int, step: int, data: st.DataObject
) -> None:
    """All pieces of an absent entry have negative numbers; before the first all are absent."""
    size, per_block, per_entry = sizes
    numbers = [ABSENT] * (first * size * per_block * per_entry) + [
        ABSENT if entry < 0 else (entry * per_entry + block) * per_block + piece
        for entry in ids
        for block in range(per_entry)
        for piece in range(per_block)
        for _ in range(size)
    ]
    begin = data.draw(st.integers(0, len(numbers)))
    tokens = range(begin, data.draw(st.integers(begin, len(numbers))), step)
    group = Group(size * per_block, 6 * per_entry, per_entry, ())
    found = Table(first, block_ids(ids).tobytes()).piece_numbers(group, tokens, per_block)
    assert np.maximum(found, ABSENT).tolist() == [numbers[token] for token in tokens]
    assert found.dtype == np.int32
