"""Which ranks pack, which read what is packed, and how they divide their staging memory."""

from collections import defaultdict
from typing import Any

import pytest

from harness.local.caches import Cache, Sizes
from nixl_kv.config import Config
from nixl_kv.geometry.layout import Span
from nixl_kv.reading import staged
from nixl_kv.reading.paths import ExtraMemory, Feature, RankSetup
from nixl_kv.reading.staged.path import StagedPath
from support.stepped import Background

MIB = 1 << 20


def built(*, is_decode: bool = True, **config: Any) -> Feature:
    setup = RankSetup(
        layout=Cache(Sizes()).layout(),
        config=Config(**config),
        is_prefill=True,
        is_decode=is_decode,
        wake=lambda: None,
        background=Background(),
        counts=defaultdict(float),
        clock=lambda: 0.0,
    )
    return staged.build(setup)


@pytest.mark.parametrize("changed", [{"staging_mib": 0}, {"path": "direct"}, {"path": "gather"}])
def test_a_rank_that_is_not_to_pack_has_no_ring(changed: dict[str, Any]) -> None:
    assert built(**changed) == Feature()


@pytest.mark.parametrize("is_decode", [True, False])
def test_a_rank_that_packs_and_reads_has_half_of_its_staging_for_either(*, is_decode: bool) -> None:
    feature = built(is_decode=is_decode, staging_mib=2)
    ring = feature.description["ring"]
    assert (ring.length, ring.num_slots) == ((1 if is_decode else 2) * MIB, 16)
    assert feature.served == (ExtraMemory(Span(ring.address, ring.length), "DRAM", 0),)
    if is_decode:
        half = Span(ring.address + ring.length, ring.length)
        assert feature.read_into == (ExtraMemory(half, "DRAM", 0),)
        assert isinstance(feature.path, StagedPath)
        assert feature.path.staging.ring.span == half
    else:
        assert (feature.path, feature.read_into) == (None, ())
