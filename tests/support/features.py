"""The features of a rank with a small cache in host memory, which prefills and decodes."""

import contextlib
from collections.abc import Iterator

from harness.local.engine import features_with
from nixl_kv.config import Config
from nixl_kv.feature import Feature
from nixl_kv.reading.paths import allocate
from support.stepped import RING_SLOTS, STAGING_BYTES, rank_setup


@contextlib.contextmanager
def features_of_a_rank() -> Iterator[list[Feature]]:
    builds = features_with(
        make_memory=lambda _length: allocate(STAGING_BYTES), num_slots=RING_SLOTS
    )
    with contextlib.ExitStack() as stack:
        features = []
        for build in builds:
            features.append(feature := build(rank_setup(Config())))
            stack.callback(feature.close)
        yield features
