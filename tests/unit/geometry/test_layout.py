"""The records of a layout: they check their own numbers, because they also come from peers."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span, Stripe, extent

properties = settings(deadline=None, database=None, derandomize=True)

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
RECORDS = {"part": PARTS[1], "region": REGION, "group": GROUP, "span": Span(1, 1), "cache": LAYOUT}


@pytest.mark.parametrize(
    ("record", "field", "low", "high", "name"),
    [
        ("part", "offset", 0, 2**63 - 1, "part offset"),
        ("part", "length", 1, 2**31 - 1, "part length"),
        ("part", "count", 1, 65535, "part count"),
        ("part", "stride", 0, 2**63 - 1, "part stride"),
        ("part", "token_stride", 0, 2**63 - 1, "part token_stride"),
        ("region", "base", 1, 2**63 - 1, "base"),
        ("region", "block_stride", 1, 2**63 - 1, "block_stride"),
        ("region", "head_stride", 1, 2**63 - 1, "head_stride"),
        ("region", "token_stride", 1, 2**63 - 1, "token_stride"),
        ("region", "first_head", 0, 65535, "first_head"),
        ("region", "num_heads", 1, 65535, "num_heads"),
        ("group", "block_size", 1, 2**20 - 1, "block_size"),
        ("group", "num_blocks", 1, 2**31 - 1, "num_blocks"),
        ("group", "blocks_per_entry", 1, 65535, "blocks_per_entry"),
        ("group", "window", 0, 2**31 - 1, "window"),
        ("span", "address", 1, 2**63 - 1, "span address"),
        ("span", "length", 1, 2**63 - 1, "span length"),
        ("cache", "device", 0, 1023, "device"),
    ],
)
def test_each_number_has_bounds_that_its_error_names(
    record: str, field: str, low: int, high: int, name: str
) -> None:
    valid: Any = RECORDS[record]
    for value in (low, high):
        assert getattr(replace(valid, **{field: value}), field) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=f"^{name} is {value}; allowed: {low} to {high}$"):
            replace(valid, **{field: value})


@pytest.mark.parametrize(
    ("record", "field", "item", "low", "high"),
    [
        ("region", "parts", PARTS[0], 1, 8),
        ("group", "regions", REGION, 0, 2**14 - 1),
        ("cache", "groups", Group(16, 10, 1, ()), 1, 64),
    ],
)
def test_the_length_of_each_tuple_has_bounds(
    record: str, field: str, item: object, low: int, high: int
) -> None:
    valid: Any = RECORDS[record]
    for count in (low, high):
        assert len(getattr(replace(valid, **{field: (item,) * count}), field)) == count
    for count in {max(0, low - 1), high + 1} - {low}:
        message = f"^number of {field} is {count}; allowed: {low} to {high}$"
        with pytest.raises(ValueError, match=message):
            replace(valid, **{field: (item,) * count})


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


def test_content_counts_all_pieces_of_all_parts() -> None:
    assert REGION.content == 384
    assert replace(REGION, parts=(Part(0, 576),)).content == 576
    assert replace(REGION, parts=(Part(0, 2, count=64, stride=32), Part(9, 128))).content == 256


def test_the_bytes_of_a_token_are_those_of_all_layers_and_heads() -> None:
    first, second, third = (replace(REGION, layer=layer) for layer in "abc")
    groups = replace(GROUP, regions=(first, second)), replace(GROUP, regions=(third,))
    assert CacheLayout(groups, "DRAM", 0, LAYOUT.spans).bytes_per_token == 3 * 8 * 384
    divided = replace(groups[1], stripe=Stripe(4, 1, 16))
    layout = CacheLayout((groups[0], divided), "DRAM", 0, LAYOUT.spans)
    assert layout.bytes_per_token == 2 * 8 * 384 + 8 * 384 // 4


def test_a_layer_is_once_in_a_cache() -> None:
    """Who names it twice would have the tokens of one of them read by nobody."""
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


@properties
@given(stripe=stripes(), begin=st.integers(0, 300))
def test_kept_tokens_are_numbered_one_after_the_other(stripe: Stripe, begin: int) -> None:
    tokens = np.arange(begin + 50)
    kept = tokens[tokens // stripe.width % stripe.count == stripe.place]
    assert tokens[stripe.holds(tokens)].tolist() == kept.tolist()
    assert stripe.position(kept).tolist() == list(range(len(kept)))
    assert stripe.token(np.arange(len(kept))).tolist() == kept.tolist()
    assert stripe.num_before(begin) == np.count_nonzero(kept < begin)


@properties
@given(one=stripes(), other=stripes())
def test_whether_two_stripes_have_a_token_in_common(one: Stripe, other: Stripe) -> None:
    tokens = np.arange(math.lcm(one.period, other.period))
    common = bool((one.holds(tokens) & other.holds(tokens)).any())
    assert one.meets(other) == other.meets(one) == common


@properties
@given(
    blocks=st.integers(1, 6),
    width=st.integers(1, 6),
    count=st.integers(1, 8),
    token=st.integers(0, 2000),
)
def test_places_are_those_of_vllm_s_kernel(blocks: int, width: int, count: int, token: int) -> None:
    """Its `_compute_slot_mapping_kernel`: a block of all ranks, and what of it is whose."""
    size = blocks * width
    entry, offset = divmod(token, size * count)
    place, slot = offset // width % count, offset // (width * count) * width + offset % width
    stripe = Stripe(count, place, width if count > 1 else 1)
    assert stripe.holds(np.array([token])).all()
    assert divmod(stripe.position(token), size) == (entry, slot)
    group = Group(size, 10, 1, (), stripe=stripe)
    assert token // group.entry_size == entry


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
    """A peer's numbers must not cost this side seconds."""
    with pytest.raises(ValueError, match="regions times spans"):
        replace(LAYOUT, spans=LAYOUT.spans * 2**20)


def test_every_region_of_every_group_is_checked() -> None:
    stray = replace(REGION, layer="stray", base=4097)
    for groups in (
        (replace(GROUP, regions=(REGION, stray)),),
        (GROUP, replace(GROUP, regions=(stray,))),
    ):
        with pytest.raises(ValueError, match="'stray' reaches from 0x1001"):
            replace(LAYOUT, groups=groups)
