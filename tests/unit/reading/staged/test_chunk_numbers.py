"""The numbers of chunks: prefill tells the chunks of a load's parts apart by them alone."""

from collections import deque
from types import SimpleNamespace
from typing import Any

from nixl_kv.protocol.messages import MAX_CHUNKS
from nixl_kv.reading.staged.path import StagedPath


def test_two_reads_share_no_chunk_number() -> None:
    staging: Any = SimpleNamespace(ring=SimpleNamespace(num_slots=2))
    layout: Any = None
    path = StagedPath(layout, staging)
    assert path.slots == deque((0, 1))
    assert list(path.number_chunks(3)) == [0, 1, 2]
    assert list(path.number_chunks(2)) == [3, 4]
    assert path.number_chunks(MAX_CHUNKS) == range(MAX_CHUNKS)
