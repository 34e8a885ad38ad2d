"""Layouts from a few numbers, compared with numpy's own strides and with vLLM's rules."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from harness.local.model_layouts import (
    BASE,
    ORDERS,
    WHOLE,
    EngineShape,
    ModelShape,
    StatePart,
    build_layouts,
    heads_of_rank,
    layer_name,
    pipeline_stages,
)
from nixl_kv.geometry.layout import CacheLayout

SMALL = ModelShape(layers=3, kv_heads=4, content=(2, 2), element="float16")
WINDOWS = ModelShape(5, 2, (1, 1), "int8", window=4, sliding=(0, 1, 3))
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


def entries_by_address(rank: CacheLayout) -> dict[int, set[int]]:
    """The entries that each byte belongs to; no two regions of a group share one."""
    entries: dict[int, set[int]] = {}
    for group in rank.groups:
        used: list[int] = []
        places = itertools.product(range(group.num_blocks), range(group.block_size))
        for region, (block, slot) in itertools.product(group.regions, places):
            for head, part in itertools.product(range(region.num_heads), region.parts):
                start = region.base + block * region.block_stride + slot * region.token_stride
                start += head * region.head_stride + part.offset
                used += range(start, start + part.length)
                for address in used[-part.length :]:
                    entries.setdefault(address, set()).add(block // group.blocks_per_entry)
        assert len(set(used)) == len(used)
    return entries


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


@pytest.mark.parametrize(("model", "order"), [*((SMALL, o) for o in ORDERS), (WINDOWS, "BHLNC")])
def test_groups_use_all_memory_and_an_entry_has_the_same_bytes_in_each(
    model: ModelShape, order: str
) -> None:
    (rank,) = build_layouts(model, replace(FEW_BLOCKS, order=order))
    entries = entries_by_address(rank)
    assert all(len(numbers) == 1 for numbers in entries.values())
    spans = [range(span.address, span.address + span.length) for span in rank.spans]
    assert sorted(entries) == sorted(itertools.chain(*spans))


@pytest.mark.parametrize("order", WHOLE)
@pytest.mark.parametrize("tp", [1, 2])
def test_states_and_kv_share_memory_but_not_entries(order: str, tp: int) -> None:
    for rank, layout in enumerate(
        build_layouts(HYBRID, replace(FEW_BLOCKS, order=order, num_blocks=40, tp=tp))
    ):
        *states, kv = layout.groups
        assert [(len(one.regions), one.window, one.entry_size) for one in states] == [(4, 1, 1)] * 2
        # A state has 48 bytes or, on each of two ranks, 32; three tokens of KV have 48 or 24.
        assert kv.entry_size == 3 * tp
        assert all(len(numbers) == 1 for numbers in entries_by_address(layout).values())
        heads = {r.layer.split()[1]: r.heads for r in states[0].regions if "0" in r.layer}
        assert heads == {"a": (rank * 4 // tp, (rank + 1) * 4 // tp), "b": (0, 2)}


def test_ranks_divide_heads_and_stages_divide_layers_as_in_vllm() -> None:
    assert [heads_of_rank(rank, 3, 6) for rank in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert [heads_of_rank(rank, 4, 2) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    for layers, pp, sizes in ((36, 2, [18, 18]), (61, 3, [20, 21, 20]), (62, 4, [15, 16, 16, 15])):
        assert [len(stage) for stage in pipeline_stages(layers, pp)] == sizes
