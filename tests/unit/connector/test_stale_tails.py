"""What a load leaves in the last blocks that it fills."""

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


def cache_of(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{n}"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=ENTRIES, kv_cache_tensors=[], kv_cache_groups=groups)


def load(*tables: list[int]) -> StartLoad:
    return StartLoad(D1, 0, 20, tuple(map(Table.of, tables)))


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    """Of attention, whose blocks are of two kernel blocks each; and of state."""
    return {
        "layers.0": torch.ones(2 * ENTRIES, 1, 8, 16),
        "layers.1": torch.ones(ENTRIES, 1, 1, 16, dtype=torch.int8),
    }


def cleared(cache: torch.Tensor) -> list[int]:
    """Which blocks."""
    return [number for number, block in enumerate(cache) if not block.any()]


def test_beside_state_the_last_block_of_attention_is_cleared(
    caches: dict[str, torch.Tensor],
) -> None:
    tails = StaleTails(cache_of(FULL, STATE), caches)
    tails.clear([load([3, 1], [-1] * 19 + [2])])
    assert cleared(caches["layers.0"]) == [2, 3]
    assert cleared(caches["layers.1"]) == []


@pytest.mark.parametrize("ids", [[], [-1, -1], [3, -1]], ids=["no entry", "all absent", "the last"])
def test_what_is_absent_is_not_cleared(caches: dict[str, torch.Tensor], ids: list[int]) -> None:
    StaleTails(cache_of(FULL, STATE), caches).clear([load(ids, [])])
    assert cleared(caches["layers.0"]) == []


def test_without_state_nothing_is_touched(caches: dict[str, torch.Tensor]) -> None:
    StaleTails(cache_of(FULL), caches).clear([load([3, 1])])
    assert cleared(caches["layers.0"]) == []


def test_layers_of_other_stages_are_not_here(caches: dict[str, torch.Tensor]) -> None:
    del caches["layers.0"]
    StaleTails(cache_of(FULL, STATE), caches).clear([load([3, 1], [-1] * 19 + [2])])
    assert cleared(caches["layers.1"]) == []
