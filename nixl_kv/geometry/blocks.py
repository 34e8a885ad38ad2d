"""Arithmetic on block ids. All ranges are half open.

    tokens   0 ............ local ............ local + load ... prompt
             |-- cached here --|---- to be read ----|-- computed --|
    entries  [0, local // size)  [local // size, ceil((local + load) / size))

`local` is a multiple of the entry size: vLLM shows a connector only whole blocks of its own hits.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]
"""Shape (n,), int32: the element type that NIXL takes without a conversion."""


def entries(local: int, load: int, entry_size: int) -> range:
    """The positions in a block table whose blocks hold tokens [local, local + load)."""
    return range(local // entry_size, -(-(local + load) // entry_size))


def block_ids(table: Sequence[int] | bytes) -> BlockIds:
    """A block table's ids as an array; bytes are little-endian int32, as on the wire."""
    if isinstance(table, bytes):
        return np.frombuffer(table, dtype="<i4")
    return np.asarray(table, dtype=np.int32)


def to_bytes(ids: BlockIds) -> bytes:
    """The wire form of `block_ids`."""
    return ids.astype("<i4", copy=False).tobytes()


def expand(ids: BlockIds, blocks_per_entry: int) -> BlockIds:
    """From entries of a block table to the blocks of the cache's regions.

    Entry e stands for the blocks e * blocks_per_entry and the following ones, in token order.
    """
    if blocks_per_entry == 1:
        return ids
    steps = np.arange(blocks_per_entry, dtype=np.int32)
    return (ids[:, None] * np.int32(blocks_per_entry) + steps).ravel()


def pair(local: BlockIds, remote: BlockIds, absent: int) -> tuple[BlockIds, BlockIds]:
    """Match the blocks of both sides position by position and order them for merging.

    Positions where the local side has no block (id `absent`, as outside of a sliding window) are
    left out. The pairs come in ascending order of the local ids, so that neighbours merge: an
    allocator hands out runs, but often backwards.

    Raises:
        ValueError: if the remote side lacks a block that the local side wants.
    """
    if len(local) != len(remote):
        raise ValueError(f"{len(remote)} remote blocks; allowed: {len(local)}, as many as local")
    wanted = local != absent
    local, remote = local[wanted], remote[wanted]
    if (remote == absent).any():
        missing = int(np.flatnonzero(remote == absent)[0])
        raise ValueError(f"remote block {missing} is absent; allowed: a block for each local one")
    order = np.argsort(local, kind="stable")
    return local[order], remote[order]
