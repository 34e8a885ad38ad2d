"""The digests of a load cover each whole block that it reads, to the last byte."""

import numpy as np
import pytest

from nixl_kv.geometry.match import holdings, routes
from nixl_kv.ids import Rank
from nixl_kv.protocol.events import StartLoad
from nixl_kv.verify.digest import describe_difference
from nixl_kv.verify.slices import LocalSlice, find_slices, name_slices
from support.digest_caches import is_equal, reference
from support.records import D1
from support.whole_blocks import GROUPS, Request, WholeEngine, dense_of

REQUEST = Request(GROUPS, 256, 598)
LAYERS = ["four", "hundred", "window", "state"]


class Both:
    """Both sides have the same KV in other blocks, and other noise beside it."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        dense = dense_of(REQUEST, rng)
        kept = REQUEST.kept_on_decode(), REQUEST.kept_on_prefill()
        self.decode, self.prefill = (
            WholeEngine(REQUEST, each, rng, spare=2, gap=gap)
            for each, gap in zip(kept, (1, 4), strict=True)
        )
        self.prefill.write(dense, [0, 0, 0])
        self.decode.write(dense, [REQUEST.local // one.tokens for one in REQUEST.groups])

    def slices(self) -> tuple[list[LocalSlice], list[LocalSlice]]:
        tokens = range(REQUEST.local, REQUEST.end)
        mine, theirs = self.decode.layout(), self.prefill.layout()
        tables = self.decode.tables(tokens)
        load = StartLoad(D1, tokens.start, tokens.stop, tuple(tables))
        (route,) = routes(Rank(0), [holdings(mine)], [holdings(theirs)])
        wanted = name_slices(mine, route, theirs, load)
        return (
            find_slices(mine, wanted, tables, end=tokens.stop),
            find_slices(theirs, wanted, self.prefill.offered(), end=tokens.stop),
        )


def test_both_sides_digest_the_entries_that_were_read() -> None:
    both = Both()
    mine, theirs = both.slices()
    assert [(one.region.layer, one.begin, len(one.ids)) for one in mine] == [
        ("four", 256, 2),
        ("hundred", 256, 2),
        ("window", 448, 3),
        ("state", 588, 3),
    ]
    assert is_equal(reference(mine), reference(theirs))


@pytest.mark.parametrize(
    ("layer", "tokens"),
    [
        ("four", "512 to 575"),
        ("hundred", "512 to 575"),
        ("window", "576 to 597"),
        ("state", "588 to 597"),
    ],
)
def test_any_byte_of_an_entry_counts(layer: str, tokens: str) -> None:
    """The last byte of the last entry, of which the load fills a part.

    A digest has columns of 64 tokens; the entry is in that of its first token.
    """
    both = Both()
    mine, theirs = both.slices()
    blocks, ids = both.decode.blocks(layer), mine[LAYERS.index(layer)].ids
    blocks[ids[-1], -1] ^= 1
    told = describe_difference(reference(mine), reference(theirs), mine)
    assert told is not None
    assert f"of layer {layer} differs in tokens {tokens} (" in told


def test_other_bytes_of_a_block_do_not_count() -> None:
    both = Both()
    mine, theirs = both.slices()
    view = both.decode.memory.reshape(both.decode.num_blocks, both.decode.page)
    view[mine[0].ids, 64] ^= 1  # between two layers
    assert is_equal(reference(mine), reference(theirs))
