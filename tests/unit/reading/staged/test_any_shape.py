"""Whatever the shapes, bytes that are packed, read in one run and scattered arrive, once."""

from collections.abc import Iterator

import numpy as np
from hypothesis import HealthCheck, given, seed, settings

from nixl_kv.geometry.layout import CacheLayout, Span, Table
from nixl_kv.geometry.plan import Share, plan
from nixl_kv.reading.staged.layout import (
    Crop,
    Ring,
    crops,
    entry_bytes,
    split_tokens,
    staged_entries,
    staged_layout,
    staged_table,
)
from support.any_shape import Pair, check
from support.cases import Case, cases, typical
from support.oracle import byte_pairs

MAX_SLOT = 1 << 30


class StagedPair(Pair):
    """Compares what staged reads move with what direct reads do."""

    def check_pairs(
        self, local: CacheLayout, remote: CacheLayout, share: Share, pairs: np.ndarray
    ) -> None:
        """Packed into slots, read there in one run and scattered, the same bytes arrive, once."""
        arrived = [
            chunk
            for crop in crops(local, remote, share)
            for chunk in self._stage(local, remote, crop)
        ]
        staged = np.concatenate([np.empty((0, 2), dtype=np.int64), *arrived])
        assert np.array_equal(staged[np.lexsort(staged.T)], pairs[np.lexsort(pairs.T)])

    def _stage(self, local: CacheLayout, remote: CacheLayout, crop: Crop) -> Iterator[np.ndarray]:
        """Of each chunk, where its bytes are and where they were."""
        groups = local.groups[crop.groups[0]], remote.groups[crop.groups[1]]
        # As many entries at a time as are needed for one local one, or one more.
        most = -(-groups[0].entry_size // groups[1].entry_size) + 1 + self.case.seed % 2
        ends = []
        for begin in (1000, 2000):  # both rings have other addresses, and slots of other numbers
            least = Ring(Span(begin, MAX_SLOT), 1)
            one = staged_layout(groups[1], crop.share, least.span, memory="DRAM", device=0)
            ring = Ring(Span(begin, entry_bytes(one) * (most + 1) * 3 + 2), 3)
            assert ring.capacity(entry_bytes(one)) >= most
            ends.append(
                (ring, staged_layout(groups[1], crop.share, ring.span, memory="DRAM", device=0))
            )
        (mine, landed), (theirs, packed) = ends
        _check_dense(packed, remote)
        tables = self.tables()
        mine_table, their_table = tables[0][crop.groups[0]], tables[1][crop.groups[1]]
        for number, tokens in enumerate(split_tokens(groups, mine_table, self.case.tokens, most)):
            entries = staged_entries(their_table, groups[1], tokens)
            size, slot = entry_bytes(packed), number % 3
            first = theirs.first_entry(slot, size), mine.first_entry(2 - slot, size)
            whole = range(entries.start * groups[1].entry_size, entries.stop * groups[1].entry_size)
            pack = plan(packed, remote).reads(
                [staged_table(their_table, entries, first[0])], tables[1], whole
            )
            scatter = plan(local, landed).reads(
                tables[0], [staged_table(their_table, entries, first[1])], tokens
            )
            packed_pairs = byte_pairs(plan(packed, remote), pack)
            packed_pairs = packed_pairs[np.argsort(packed_pairs[:, 0])]
            moved = theirs.span.address + first[0] * size - mine.span.address - first[1] * size
            for side, begin, used in ((theirs, first[0], slot), (mine, first[1], 2 - slot)):
                assert begin * size >= used * side.slot_bytes
                assert (begin + len(entries)) * size <= (used + 1) * side.slot_bytes
            arrived = byte_pairs(plan(local, landed), scatter)
            found = np.searchsorted(packed_pairs[:, 0], arrived[:, 1] + moved)
            assert np.array_equal(packed_pairs[found, 0], arrived[:, 1] + moved)
            yield np.stack([arrived[:, 0], packed_pairs[found, 1]], axis=1)


def _check_dense(packed: CacheLayout, remote: CacheLayout) -> None:
    """An entry has no gap, and each of its bytes once."""
    group = packed.groups[0]
    block = group.regions[0].block_stride
    content = sum(r.content * r.num_heads * group.block_size for r in group.regions)
    assert content == block
    table = Table.of(np.zeros(1, dtype=np.int32))
    others = [Table.of(np.zeros(1, dtype=np.int32)) for _ in remote.groups]
    pack = plan(packed, remote)
    reads = pack.reads([table], others, range(group.entry_size))
    written = byte_pairs(pack, reads)[:, 0] - packed.spans[0].address
    assert sorted(written.tolist()) == list(range(block * group.blocks_per_entry))


def test_typical_engines_exchange_all_kv() -> None:
    for changes in ({}, {"tp": (4, 2)}, {"block": (48, 32), "tokens": range(48, 150)}):
        check(typical(**changes), StagedPair)


@seed(2)
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_any_two_engines_exchange_all_kv(case: Case) -> None:
    check(case, StagedPair)
