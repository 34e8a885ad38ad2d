"""The rest of the last blocks that a load fills."""

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)

from nixl_kv.connector.worker import StaleTails
from nixl_kv.geometry.layout import Table
from nixl_kv.protocol.events import StartLoad
from support.records import D1

ENTRIES = 4
FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
STATE = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("specs", "ids", "cleared"),
    [
        pytest.param((FULL, STATE), [3, 1], [2, 3], id="the last block beside state"),
        pytest.param((FULL, STATE), [3, -1], [], id="an absent last block"),
        pytest.param((FULL, STATE), [], [], id="no block"),
        pytest.param((FULL,), [3, 1], [], id="no state"),
    ],
)
@pytest.mark.parametrize("is_here", [True, False], ids=["", "layers of another stage"])
def test_the_last_block_of_attention_is_cleared_beside_state(
    specs: tuple[KVCacheSpec, ...], ids: list[int], cleared: list[int], *, is_here: bool
) -> None:
    attention = torch.ones(2 * ENTRIES, 1, 8, 16)  # each block is two kernel blocks
    state = torch.ones(ENTRIES, 1, 1, 16, dtype=torch.int8)
    groups = [KVCacheGroupSpec([f"layers.{n}"], spec) for n, spec in enumerate(specs)]
    cache = KVCacheConfig(ENTRIES, [], groups)
    caches = {"layers.0": attention, "layers.1": state} if is_here else {"layers.1": state}
    tables = (Table.of(ids), Table.of([-1] * 19 + [2]))[: len(specs)]
    StaleTails(cache, caches).clear([StartLoad(D1, 0, 20, tables)])
    assert [n for n, block in enumerate(attention) if not block.any()] == cleared * is_here
    assert state.all()
