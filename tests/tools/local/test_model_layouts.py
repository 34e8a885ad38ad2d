"""Layouts from a few numbers, compared with numpy's own strides and with vLLM's rules."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from harness.local.model_layouts import (
    APART,
    BASE,
    ORDERS,
    PACKED,
    WHOLE,
    EngineShape,
    ModelShape,
    StatePart,
    build_layouts,
    heads_of_rank,
    layer_name,
    pipeline_stages,
)
from nixl_kv.geometry.layout import CacheLayout, Group, Region
from nixl_kv.geometry.match import holdings

SMALL = ModelShape(layers=3, kv_heads=4, content=(2, 2), element="float16")
LATENT = ModelShape(layers=3, kv_heads=1, content=(5,), element="bfloat16")
HYBRID = ModelShape(
    layers=6,
    kv_heads=4,
    content=(2, 2),
    element="float16",
    without_kv=(0, 1, 3, 4),
    recurrent=(0, 1, 3, 4),
    state=(
        StatePart("a", 4, 4, "float16 state", rows=2),
        StatePart("b", 2, 4, "float16 state", rows=2, is_copied=True),
    ),
)
"""State of two of three layers; all ranks have the second part."""
FEW_BLOCKS = EngineShape(block_size=3, num_blocks=5)


def sliding(layers: int, period: int) -> tuple[int, ...]:
    """All layers but every `period`-th one."""
    return tuple(layer for layer in range(layers) if layer % period != period - 1)


def addresses(region: Region, group: Group) -> Iterator[int]:
    """The addresses of all bytes of a region."""
    for block, head, slot in itertools.product(
        range(group.num_blocks), range(region.num_heads), range(group.block_size)
    ):
        start = region.base + block * region.block_stride
        start += head * region.head_stride + slot * region.token_stride
        for part in region.parts:
            yield from range(start + part.offset, start + part.offset + part.length)


def test_orders_are_packed_or_apart() -> None:
    assert ORDERS == PACKED + APART
    assert len(set(ORDERS)) == len(ORDERS) == 10


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tp", [1, 2])
def test_strides_are_those_of_a_numpy_array_in_that_order(order: str, tp: int) -> None:
    sizes = {"L": 3, "B": 5, "H": 4 // tp, "N": 3, "2": 2, "C": 2 if "2" in order else 4}
    array = np.empty([sizes[axis] for axis in order], dtype=np.uint8)
    strides = dict(zip(order, array.strides, strict=True))
    offset = strides["2"] if "2" in order else 2
    rank = build_layouts(SMALL, replace(FEW_BLOCKS, tp=tp, order=order))[tp - 1]
    (group,) = rank.groups
    assert [region.layer for region in group.regions] == [layer_name(n) for n in range(3)]
    for number, region in enumerate(group.regions):
        assert region.base == BASE + number * strides["L"]
        assert region.block_stride == strides["B"]
        assert (region.head_stride, region.token_stride) == (strides["H"], strides["N"])
        assert [(part.offset, part.length) for part in region.parts] == [(0, 2), (offset, 2)]
        assert region.heads == (4 - 4 // tp, 4)
    assert sum(span.length for span in rank.spans) == array.nbytes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model", [SMALL, LATENT], ids=["K and V", "latent"])
def test_every_byte_of_the_spans_is_used_once(order: str, model: ModelShape) -> None:
    (rank,) = build_layouts(model, replace(FEW_BLOCKS, order=order))
    (group,) = rank.groups
    used = [a for region in group.regions for a in addresses(region, group)]
    spans = [range(span.address, span.address + span.length) for span in rank.spans]
    assert sorted(used) == sorted(itertools.chain(*spans))
    assert len(rank.spans) == (3 if order in APART else 1)


@pytest.mark.parametrize("order", PACKED)
def test_groups_share_memory_and_a_block_has_the_same_bytes_in_each(order: str) -> None:
    model = ModelShape(5, 2, (1, 1), "int8", window=4, sliding=sliding(5, 3))
    (rank,) = build_layouts(model, replace(FEW_BLOCKS, order=order))
    assert [(len(g.regions), g.window) for g in rank.groups] == [(1, 4)] * 4 + [(1, 0)]
    wider = replace(model, sliding=(0, 1, 2))
    (rank,) = build_layouts(wider, replace(FEW_BLOCKS, order=order))
    assert [(len(g.regions), g.window) for g in rank.groups] == [(2, 4), (1, 4), (2, 0)]
    owners: dict[int, set[int]] = {}
    for group in rank.groups:
        for region in group.regions:
            for block in range(group.num_blocks):
                base = region.base + block * region.block_stride
                one = replace(group, num_blocks=1)
                for address in addresses(replace(region, base=base), one):
                    owners.setdefault(address, set()).add(block)
    assert all(len(blocks) == 1 for blocks in owners.values())
    (span,) = rank.spans
    assert sorted(owners) == list(range(span.address, span.address + span.length))


@pytest.mark.parametrize(
    ("tp", "kv_heads", "expected"),
    [
        pytest.param(1, 8, [(0, 8)], id="one rank"),
        pytest.param(2, 8, [(0, 4), (4, 8)], id="two ranks"),
        pytest.param(3, 6, [(0, 2), (2, 4), (4, 6)], id="three ranks"),
        pytest.param(4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)], id="one each"),
        pytest.param(4, 2, [(0, 1), (0, 1), (1, 2), (1, 2)], id="copied to neighbours"),
        pytest.param(3, 1, [(0, 1)] * 3, id="one head everywhere"),
    ],
)
def test_heads_of_each_rank(tp: int, kv_heads: int, expected: list[tuple[int, int]]) -> None:
    assert [heads_of_rank(rank, tp, kv_heads) for rank in range(tp)] == expected


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [
        (36, 1, [36]),
        (36, 4, [9, 9, 9, 9]),
        (61, 2, [31, 30]),
        (61, 3, [20, 21, 20]),
        (62, 3, [21, 21, 20]),
        (61, 4, [15, 15, 16, 15]),
        (62, 4, [15, 16, 16, 15]),
        (63, 4, [16, 16, 16, 15]),
        (94, 8, [11, 12, 12, 12, 12, 12, 12, 11]),
        (3, 3, [1, 1, 1]),
    ],
    ids=str,
)
def test_pipeline_stages_are_those_of_vllm(layers: int, pp: int, expected: list[int]) -> None:
    stages = pipeline_stages(layers, pp)
    assert [len(stage) for stage in stages] == expected
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_ranks_are_numbered_stage_by_stage() -> None:
    layouts = build_layouts(SMALL, replace(FEW_BLOCKS, tp=2, pp=2))
    held = [
        {layer: holding.heads for layer, holding in holdings(layout).items()} for layout in layouts
    ]
    assert held == [
        {"layer.0": (0, 2), "layer.1": (0, 2)},
        {"layer.0": (2, 4), "layer.1": (2, 4)},
        {"layer.2": (0, 2)},
        {"layer.2": (2, 4)},
    ]


@pytest.mark.parametrize(
    ("layers", "every", "sizes"),
    [
        pytest.param(36, 6, [6] * 6, id="five to one"),
        pytest.param(48, 4, [12] * 4, id="three to one"),
        pytest.param(24, 2, [12, 12], id="one to one"),
        pytest.param(25, 2, [13, 12], id="one more of one kind makes no new group"),
        pytest.param(26, 6, [4, 4, 4, 4, 3, 3, 4], id="the last period is incomplete"),
    ],
)
def test_groups_are_those_of_vllm(layers: int, every: int, sizes: list[int]) -> None:
    model = ModelShape(layers, 2, (4, 4), "int8", 16, sliding(layers, every))
    groups = model.groups()
    assert [len(members) for members, _ in groups] == sizes
    assert sorted(n for members, _ in groups for n in members) == list(range(layers))
    for members, window in groups:
        assert {n in model.sliding for n in members} == {window == 16}


def test_layers_of_a_group_are_spread_over_the_model() -> None:
    model = ModelShape(12, 2, (4, 4), "int8", 16, sliding(12, 3))
    assert model.groups() == [((0, 3, 6, 9), 16), ((1, 4, 7, 10), 16), ((2, 5, 8, 11), 0)]


@pytest.mark.parametrize("order", WHOLE)
@pytest.mark.parametrize("tp", [1, 2])
def test_states_and_kv_share_memory_but_not_blocks(order: str, tp: int) -> None:
    """A state is inside of what a block table's entry has for one layer."""
    engine = replace(FEW_BLOCKS, order=order, num_blocks=40, tp=tp)
    for rank, layout in enumerate(build_layouts(HYBRID, engine)):
        *states, kv = layout.groups
        assert [(len(one.regions), one.window, one.entry_size) for one in states] == [(4, 1, 1)] * 2
        # A state has 48 bytes or, on each of two ranks, 32; three tokens of KV have 48 or 24.
        assert kv.entry_size == 3 * tp
        owners: dict[int, set[int]] = {}
        for group in layout.groups:
            used: set[int] = set()
            for region in group.regions:
                for entry in range(group.num_entries):
                    one = replace(group, num_blocks=group.blocks_per_entry)
                    step = group.blocks_per_entry * region.block_stride
                    moved = replace(region, base=region.base + entry * step)
                    for address in addresses(moved, one):
                        assert address not in used
                        used.add(address)
                        owners.setdefault(address, set()).add(entry)
        assert all(len(entries) == 1 for entries in owners.values())
        heads = {r.layer.split()[1]: r.heads for r in states[0].regions if "0" in r.layer}
        assert heads == {"a": (rank * 4 // tp, (rank + 1) * 4 // tp), "b": (0, 2)}


def test_a_state_has_its_parts_side_by_side_in_each_row() -> None:
    layout = build_layouts(HYBRID, replace(FEW_BLOCKS, num_blocks=40, tp=2))[1]
    first, second = layout.groups[1].regions[:2]
    assert [(part.offset, part.length) for part in first.parts] == [(0, 4), (16, 4)]
    assert [(part.offset, part.length) for part in second.parts] == [(8, 4), (24, 4)]
    assert (first.head_stride, second.head_stride) == (4, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "BHLNC"}, "order is 'BHLNC'; allowed where layers have states: "),
        ({"tp": 8}, "tp is 8; allowed: divisors of 4 (a)"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_keep_a_state_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build_layouts(HYBRID, replace(FEW_BLOCKS, **changes))


def test_all_layers_may_have_a_window() -> None:
    model = ModelShape(2, 1, (4, 4), "int8", 16, (0, 1))
    assert model.groups() == [((0, 1), 16)]


def test_a_stage_may_have_no_layer_of_a_group() -> None:
    model = ModelShape(4, 1, (4, 4), "int8", 16, (0, 1))
    first, last = build_layouts(model, replace(FEW_BLOCKS, pp=2))
    assert [len(group.regions) for group in first.groups] == [2, 0]
    assert [len(group.regions) for group in last.groups] == [0, 2]


def test_sizes_memory_and_element_are_those_of_the_engine() -> None:
    engine = EngineShape(block_size=8, num_blocks=12, blocks_per_entry=4, memory="DRAM")
    (rank,) = build_layouts(SMALL, engine)
    assert (rank.memory, rank.device) == ("DRAM", 0)
    (group,) = rank.groups
    assert {region.element for region in group.regions} == {"float16"}
    assert (group.block_size, group.entry_size, group.num_entries) == (8, 32, 3)


def test_k_and_v_may_have_different_sizes() -> None:
    model = replace(SMALL, content=(6, 4))
    (packed,) = build_layouts(model, FEW_BLOCKS)
    (apart,) = build_layouts(model, replace(FEW_BLOCKS, order="LB2HNC"))
    lengths = [[part.length for part in parts_of(rank)] for rank in (packed, apart)]
    assert lengths == [[6, 4], [6, 4]]
    assert [part.offset for part in parts_of(apart)] == [0, 4 * 3 * 6]


def parts_of(rank: CacheLayout) -> tuple:
    return rank.groups[0].regions[0].parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"layers": 0}, "layers is 0; allowed: 1 to 16384", id="layers"),
        pytest.param({"kv_heads": 0}, "kv_heads is 0; allowed: 1 to 65535", id="heads"),
        pytest.param(
            {"content": ()}, "number of parts of content is 0; allowed: 1 to 2", id="parts"
        ),
        pytest.param({"content": (4, 0)}, "content is 0; allowed: 1 to 2147483647", id="empty"),
        pytest.param(
            {"window": 4, "sliding": (3,)},
            "sliding layer is 3; allowed: 0 to 2",
            id="no such layer",
        ),
        pytest.param(
            {"window": 4, "sliding": (1, 1)},
            "sliding is (1, 1); allowed: each layer once",
            id="a layer twice",
        ),
        pytest.param(
            {"window": 4},
            "window is 4 with 0 sliding layers; allowed: 1 or more with sliding layers, 0 without",
            id="window without layers",
        ),
        pytest.param(
            {"window": -1, "sliding": (0,)},
            "window is -1; allowed: 0 to 2147483647",
            id="negative window",
        ),
        pytest.param(
            {"window": 1, "sliding": (0,)},
            "window is 1; allowed: 0, or 2 or more",
            id="window of a state",
        ),
        pytest.param(
            {"without_kv": (0, 1, 2)}, "no layer keeps KV; allowed: one or more", id="no KV"
        ),
        pytest.param(
            {"window": 4, "sliding": (0,), "without_kv": (0,)},
            "sliding layers without KV are [0]; allowed: none",
            id="a window of nothing",
        ),
        pytest.param(
            {"recurrent": (0,)},
            "1 recurrent layers have a state of 0 parts; allowed: both, or neither",
            id="no state",
        ),
    ],
)
def test_impossible_models_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"tp": 0}, "tp is 0; allowed: 1 to 1024", id="tp"),
        pytest.param({"pp": 0}, "pp is 0; allowed: 1 to 1024", id="pp"),
        pytest.param({"block_size": 0}, "block_size is 0; allowed: 1 to 1048575", id="block size"),
        pytest.param({"num_blocks": 0}, "num_blocks is 0; allowed: 1 to 2147483647", id="blocks"),
        pytest.param(
            {"order": "HBLNC"}, f"order is 'HBLNC'; allowed: {', '.join(ORDERS)}", id="order"
        ),
        pytest.param({"memory": "SSD"}, "memory is 'SSD'; allowed: VRAM, DRAM", id="memory"),
        pytest.param(
            {"num_blocks": 7, "blocks_per_entry": 2},
            "num_blocks is 7; allowed: multiples of blocks_per_entry (2)",
            id="an incomplete entry",
        ),
        pytest.param(
            {"blocks_per_entry": 2, "num_blocks": 8, "order": "BHLNC"},
            "blocks_per_entry is 2; allowed: 1 where a layer's blocks are not in one line "
            "(order BHLNC)",
            id="blocks of a layer apart",
        ),
    ],
)
def test_impossible_engines_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(FEW_BLOCKS, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, "tp is 3; allowed: divisors and multiples of kv_heads (4)"),
        ({"tp": 6}, "tp is 6; allowed: divisors and multiples of kv_heads (4)"),
        ({"pp": 4}, "pp is 4; allowed: 1 to 3"),
    ],
    ids=str,
)
def test_a_model_that_the_engine_cannot_divide_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_layouts(SMALL, replace(FEW_BLOCKS, **changes))
