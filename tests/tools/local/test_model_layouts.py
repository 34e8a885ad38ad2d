"""Layouts from a few numbers, compared with numpy's own strides and with vLLM's rules."""

import itertools
from dataclasses import replace

import pytest

from harness.local.model_layouts import (
    ORDERS,
    WHOLE,
    EngineShape,
    ModelShape,
    StatePart,
    build_layouts,
    heads_of_rank,
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


@pytest.mark.parametrize(
    ("model", "order"),
    [
        *((SMALL, order) for order in ORDERS),
        *((HYBRID, order) for order in WHOLE),
        (WINDOWS, "BHLNC"),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_groups_share_memory_but_not_entries(model: ModelShape, order: str, tp: int) -> None:
    for rank in build_layouts(model, replace(FEW_BLOCKS, order=order, num_blocks=40, tp=tp)):
        entries = entries_by_address(rank)
        assert all(len(numbers) == 1 for numbers in entries.values())
        spans = [range(span.address, span.address + span.length) for span in rank.spans]
        used = set(itertools.chain(*spans))
        assert used >= set(entries) if model is HYBRID else used == set(entries)


def test_ranks_divide_heads_and_stages_divide_layers_as_in_vllm() -> None:
    assert [heads_of_rank(rank, 3, 6) for rank in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert [heads_of_rank(rank, 4, 2) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    for layers, pp, sizes in ((36, 2, [18, 18]), (61, 3, [20, 21, 20]), (62, 4, [15, 16, 16, 15])):
        assert [len(stage) for stage in pipeline_stages(layers, pp)] == sizes
