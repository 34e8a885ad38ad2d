"""What a prefill rank would prove, whose memory is all zeros."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from nixl_kv.connector.digests import block_tables
from nixl_kv.geometry import digest
from nixl_kv.geometry.digest import Digest, Key
from nixl_kv.geometry.excerpts import Excerpt, strips
from pd.fuzz_samples import CacheMemory
from pd.fuzz_world import CLAIM, TABLE, TOKENS

EXCERPTS: Final = tuple(Excerpt(f"layer.{number}", 0, 2, 0) for number in range(3))
"""All that is read of a rank that has all heads."""


def sums_of_zeros() -> dict[str, bytes]:
    """The sums of a `Proof` of these excerpts."""
    layout = CacheMemory().layout()
    found = strips(layout, EXCERPTS, block_tables(layout, (TABLE, TABLE), 0), end=TOKENS)
    ended: list[Digest] = []

    def steps() -> Iterator[None]:
        made = yield from digest.digest(Key(CLAIM), found, lambda _, n: np.zeros(n, np.uint8))
        ended.append(made)

    list(steps())
    return {name: sums.tobytes() for name, sums in vars(ended[0]).items()}
