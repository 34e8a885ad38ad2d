"""Digests that a rank makes: in which order, of what, and why not."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from protocol_records import CLAIM, D1, RIVAL, proof, prove

from nixl_kv.connector.digests import (
    Compute,
    Digests,
    Ended,
    Nowhere,
    OnHost,
    Steps,
    block_tables,
)
from nixl_kv.errors import DigestError
from nixl_kv.geometry import digest
from nixl_kv.geometry.blocks import ABSENT
from nixl_kv.geometry.digest import Key
from nixl_kv.geometry.excerpts import Excerpt, Strip
from nixl_kv.geometry.layout import CacheLayout, Group, Part, Region, Span
from nixl_kv.ids import Rank
from nixl_kv.protocol import proofs
from nixl_kv.protocol.messages import Prove, Reader

Bytes = npt.NDArray[np.uint8]

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 2, 10, 2, 4, 8
END = 10
TABLE, WINDOWED = (7, 3, 5), (0, 2, 6)
"""Of a prompt of 10 tokens. A window has passed the first entry of the second group."""
FULL, BEHIND = Excerpt("layer.0", 0, 2, 0), Excerpt("layer.1", 0, 2, 4)


class Cache:
    """A rank's memory: one layer in each of two groups, blocks of four tokens."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
        self.bytes: Bytes = rng.integers(0, 256, shape, dtype=np.uint8)

    @property
    def layout(self) -> CacheLayout:
        """Of both groups."""
        layer, block, head, token, _ = self.bytes.strides
        address = self.bytes.ctypes.data
        parts = (Part(0, 4), Part(4, 4))
        groups = tuple(
            Group(TOKENS, BLOCKS, 1, (Region(name, base, block, head, token, 0, HEADS, parts),))
            for name, base in (("layer.0", address), ("layer.1", address + layer))
        )
        return CacheLayout(groups, "uint8", "DRAM", 0, (Span(address, self.bytes.nbytes),))

    def copy_to(self, other: "Cache", tables: Sequence[tuple[int, ...]]) -> None:
        """What a read does, into these blocks of the other's."""
        for layer, (theirs, mine) in enumerate(zip(tables, (TABLE, WINDOWED), strict=True)):
            other.bytes[layer, list(theirs)] = self.bytes[layer, list(mine)]


def packed(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


TABLES: Final = (packed(*TABLE), packed(*WINDOWED))
DECODE_TABLES: Final = ((1, 2, 3), (0, 9, 8))
DECODE_PACKED: Final = tuple(packed(*table) for table in DECODE_TABLES)


def asked(**changed: object) -> Prove:
    return prove(**{"end": END, "excerpts": (FULL, BEHIND), **changed})


def order(**changed: object) -> proofs.Digest:
    return proofs.Digest(asked(**changed), TABLES)


class Clock:
    """One second further at each look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Slow:
    """A digest that takes so many steps more."""

    nap_s = 0.5

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.begun: list[str] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def __call__(self, key: Key, found: Sequence[Strip]) -> object:
        for _ in range(self.steps):
            self.begun.append(key.secret)
            yield
        return (yield from OnHost()(key, found))


@pytest.fixture
def cache() -> Cache:
    return Cache(1)


@pytest.fixture
def digests(cache: Cache) -> Digests:
    return Digests(cache.layout, clock=Clock())


def anybody(order: proofs.Digest | proofs.Verify) -> bool:
    """Whoever gave an order still waits."""
    del order
    return True


def drained(digests: Digests, turns: int = 100) -> list[tuple[Ended, bytes]]:
    """All that ends; it takes no more turns than that."""
    ended = []
    for _ in range(turns):
        ended += digests.poll(anybody)
    assert digests.patience is None
    return ended


def made(digests: Digests, wanted: proofs.Digest) -> proofs.Digested:
    """One digest, made at once."""
    assert digests.begin(wanted) is None
    ((ended, _),) = drained(digests)
    assert isinstance(ended, proofs.Digested)
    return ended


# What a digest is of


def test_a_digest_is_that_of_what_stands_in_the_blocks(cache: Cache, digests: Digests) -> None:
    ended = made(digests, order())
    numbers = Key(CLAIM).numbers(1)
    rows = []
    for layer, table, begin in ((0, TABLE, 0), (1, WINDOWED, 4)):
        tokens = cache.bytes[layer, list(table)].swapaxes(0, 1).reshape(HEADS, -1, CONTENT)
        for part in (slice(0, 4), slice(4, 8)):
            positions = np.arange(begin, END)
            found = digest.terms(numbers, positions, tokens[:, begin:END, part])
            rows += list(found.sum(axis=1, dtype=np.uint64))
    sums = np.array(rows, "<u8")
    column = (sums * np.arange(1, 16, 2, np.uint64)).sum(dtype=np.uint64).tobytes()
    assert ended == proofs.Digested(asked(), sums.tobytes(), column)


def test_its_key_is_the_claim(digests: Digests) -> None:
    mine, theirs = made(digests, order()), made(digests, order(claim=RIVAL))
    assert mine.rows != theirs.rows
    assert mine.columns != theirs.columns


def test_what_stands_behind_the_end_is_not_looked_at(cache: Cache, digests: Digests) -> None:
    before = made(digests, order())
    cache.bytes[:, [5, 6], :, END % TOKENS :] ^= 1
    assert made(digests, order()) == before
    cache.bytes[0, 5, :, END % TOKENS - 1] ^= 1
    assert made(digests, order()).rows != before.rows


def test_block_tables_begin_at_the_entry_of_the_first_token(cache: Cache) -> None:
    first, second = block_tables(cache.layout, TABLES, 9)
    assert (list(first.ids), first.first) == ([7, 3, 5], 2)
    assert (list(second.ids), second.first) == ([ABSENT, 2, 6], 2)


# Comparisons


def comparison(theirs: proofs.Digested, **changed: object) -> proofs.Verify:
    given = proof(rows=theirs.rows, columns=theirs.columns)
    found = proofs.Verify(D1, Rank(3), (FULL, BEHIND), 0, END, DECODE_PACKED, given)
    return replace(found, **changed)


@pytest.fixture
def landed(cache: Cache) -> Cache:
    """A decode rank's memory, into which the prompt was read."""
    made = Cache(2)
    cache.copy_to(made, DECODE_TABLES)
    return made


def compared(where: Cache, wanted: proofs.Verify) -> proofs.Verified:
    digests = Digests(where.layout)
    assert digests.begin(wanted) is None
    ((ended, _),) = drained(digests)
    assert isinstance(ended, proofs.Verified)
    assert (ended.request, ended.source, ended.claim) == (D1, Rank(3), CLAIM)
    return ended


def test_what_was_read_is_what_prefill_has(digests: Digests, landed: Cache) -> None:
    assert compared(landed, comparison(made(digests, order()))).difference is None


@pytest.mark.parametrize(
    ("place", "told"),
    [
        pytest.param((0, 1, 0, 0, 0), "K of head 0 of layer layer.0 ", id="first byte"),
        pytest.param((0, 3, 1, 1, 7), "V of head 1 of layer layer.0 ", id="last byte"),
        pytest.param((1, 9, 0, 0, 4), "V of head 0 of layer layer.1 ", id="behind the window"),
    ],
)
def test_one_bit_that_differs_is_found_and_named(
    digests: Digests, landed: Cache, place: tuple[int, ...], told: str
) -> None:
    theirs = made(digests, order())
    landed.bytes[place] ^= 0x10
    difference = compared(landed, comparison(theirs)).difference
    assert difference is not None
    assert difference.startswith(told)
    first = 4 if "layer.1" in told else 0
    assert f"differs in tokens {first} to 9" in difference


def test_blocks_that_changed_places_are_found(digests: Digests, landed: Cache) -> None:
    theirs = made(digests, order())
    landed.bytes[0, [1, 2]] = landed.bytes[0, [2, 1]]
    assert compared(landed, comparison(theirs)).difference is not None


def test_only_what_was_read_is_compared(digests: Digests, landed: Cache) -> None:
    """The first block was here before; it may have been computed in another order."""
    excerpts = (replace(FULL, begin=4), BEHIND)
    theirs = made(digests, order(excerpts=excerpts))
    landed.bytes[0, 1] ^= 0xFF
    tables = tuple(packed(*table[1:]) for table in DECODE_TABLES)
    wanted = comparison(theirs, excerpts=excerpts, begin=4, tables=tables)
    assert compared(landed, wanted).difference is None
    landed.bytes[0, 2, 0, 0, 0] ^= 1
    assert compared(landed, wanted).difference is not None


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        pytest.param(slice(8, None), slice(None), id="rows"),
        pytest.param(slice(None, -1), slice(None), id="cut rows"),
        pytest.param(slice(None), slice(0, 7), id="cut columns"),
    ],
)
def test_a_proof_of_another_size_differs(
    digests: Digests, landed: Cache, rows: slice, columns: slice
) -> None:
    theirs = made(digests, order())
    cut = replace(theirs, rows=theirs.rows[rows], columns=theirs.columns[columns])
    difference = compared(landed, comparison(cut)).difference
    assert difference is not None
    assert difference.startswith("digests of (8, 1) heads and columns here and (")


# One after the other


def test_a_claim_has_one_order_at_a_time(digests: Digests) -> None:
    """Or else a reader could keep this rank busy for ever."""
    assert digests.begin(order()) is None
    assert digests.begin(order(end=9)) is None
    assert [one.prove.end for one, _ in drained(digests)] == [order().prove.end]  # type: ignore[union-attr]


def test_orders_are_carried_out_in_their_order_with_their_routes(digests: Digests) -> None:
    wanted = [order(), order(claim=RIVAL), order(claim="3" * 32, end=9)]
    for number, each in enumerate(wanted):
        assert digests.begin(each, b"%d" % number) is None
    assert repr(digests) == "<Digests: 3 to be made>"
    ended = [(one.prove, route) for one, route in drained(digests)]  # type: ignore[union-attr]
    assert ended == [(each.prove, b"%d" % number) for number, each in enumerate(wanted)]
    assert repr(digests) == "<Digests: 0 to be made>"


def test_one_is_made_at_a_time(cache: Cache) -> None:
    slow = Slow(3)
    digests = Digests(cache.layout, slow)  # type: ignore[arg-type]
    digests.begin(order())
    digests.begin(order(claim=RIVAL))
    drained(digests)
    assert slow.begun == [CLAIM] * 3 + [RIVAL] * 3


def test_each_turn_is_one_step(cache: Cache) -> None:
    digests = Digests(cache.layout, Slow(3))  # type: ignore[arg-type]
    digests.begin(order())
    for _ in range(3):
        assert digests.poll(anybody) == []
    assert len(drained(digests)) == 1


def test_what_is_asked_again_while_it_is_made_is_made_once(cache: Cache) -> None:
    digests = Digests(cache.layout, Slow(3))  # type: ignore[arg-type]
    digests.begin(order(), b"first")
    digests.poll(anybody)
    assert digests.begin(order(), b"second") is None
    assert [route for _, route in drained(digests)] == [b"first"]
    assert digests.begin(order(), b"third") is None
    assert [route for _, route in drained(digests)] == [b"third"]


@pytest.mark.parametrize(("compute", "nap_s"), [(OnHost(), 0.0), (Slow(1), 0.5)])
def test_the_thread_waits_as_long_as_a_step_may(
    cache: Cache, compute: Compute, nap_s: float
) -> None:
    digests = Digests(cache.layout, compute)
    assert digests.patience is None
    digests.begin(order())
    assert digests.patience == nap_s


def test_what_is_cleared_never_ends(digests: Digests) -> None:
    digests.begin(order())
    digests.poll(anybody)
    digests.begin(order(claim=RIVAL))
    digests.clear()
    assert drained(digests) == []
    assert made(digests, order()).refusal is None


def test_with_it_what_computes_is_closed(cache: Cache) -> None:
    slow = Slow(1)
    digests = Digests(cache.layout, slow)  # type: ignore[arg-type]
    assert not slow.closed
    digests.close()
    assert slow.closed


def test_what_cannot_be_computed_is_refused_in_words(cache: Cache) -> None:
    class Unable(OnHost):
        def __call__(self, key: Key, found: Sequence[Strip]) -> Steps:
            raise DigestError(f"{len(found)} strips by {key.secret}")

    refused = Digests(cache.layout, Unable()).begin(order())
    assert refused == proofs.Digested(asked(), refusal=f"4 strips by {CLAIM}")


@pytest.mark.parametrize("error", [DigestError("no memory"), MemoryError("no memory")])
def test_a_step_that_fails_costs_its_own_digest_only(cache: Cache, error: Exception) -> None:
    class Failing(Slow):
        def __call__(self, key: Key, found: Sequence[Strip]) -> object:
            yield from super().__call__(key, found)
            if key.secret == RIVAL:
                raise error
            return (yield from OnHost()(key, found))

    digests = Digests(cache.layout, Failing(2))  # type: ignore[arg-type]
    for claim in (CLAIM, RIVAL, "3" * 32):
        digests.begin(order(claim=claim), claim.encode())
    refusals = [(route, one.refusal) for one, route in drained(digests)]
    third = "3" * 32
    assert refusals == [
        (CLAIM.encode(), None),
        (RIVAL.encode(), "no memory"),
        (third.encode(), None),
    ]


def test_where_nothing_can_be_digested_all_is_refused(cache: Cache) -> None:
    refused = Digests(cache.layout, Nowhere("no compiler")).begin(order())
    assert refused == proofs.Digested(asked(), refusal="no compiler")


# Who waits


def reader(rank: int) -> Reader:
    return msgspec.structs.replace(asked().reader, rank=rank)


def test_readers_of_the_same_heads_are_told_the_same_digest(cache: Cache) -> None:
    slow = Slow(3)
    digests = Digests(cache.layout, slow)  # type: ignore[arg-type]
    for rank in range(3):
        assert digests.begin(order(reader=reader(rank)), b"%d" % rank) is None
    digests.begin(order(reader=reader(3), excerpts=(BEHIND,)), b"3")
    ended = {route: one for one, route in drained(digests)}
    assert slow.begun == [CLAIM] * 6  # two digests
    assert {route: one.prove.reader.rank for route, one in ended.items()} == {  # type: ignore[union-attr]
        b"%d" % rank: rank for rank in range(4)
    }
    assert ended[b"0"].rows == ended[b"2"].rows != ended[b"3"].rows  # type: ignore[union-attr]
    assert digests.take_counts()["digests"] == 2


def test_what_nobody_waits_for_is_dropped(cache: Cache) -> None:
    """Under overload those behind it would be late too."""
    slow = Slow(3)
    digests = Digests(cache.layout, slow)  # type: ignore[arg-type]
    digests.begin(order(), b"gone")
    digests.begin(order(claim=RIVAL), b"here")

    def is_awaited(wanted: proofs.Digest | proofs.Verify) -> bool:
        assert isinstance(wanted, proofs.Digest)
        return wanted.prove.claim == RIVAL or len(slow.begun) < 2

    ended = [digests.poll(is_awaited) for _ in range(10)]
    ((dropped, first), (_, second)) = [one for turn in ended for one in turn]
    assert (first, second) == (b"gone", b"here")
    assert dropped == proofs.Digested(asked(), refusal="nobody waits for it any more")
    assert slow.begun == [CLAIM] * 2 + [RIVAL] * 3
    assert digests.take_counts()["digests"] == 1


def test_a_digest_is_made_while_one_of_its_readers_waits(digests: Digests) -> None:
    for rank in range(2):
        digests.begin(order(reader=reader(rank)))
    ended = digests.poll(lambda one: one.prove.reader.rank == 1)  # type: ignore[union-attr]
    assert [one.refusal for one, _ in ended] == [None, None]


def test_counts_are_taken_once(digests: Digests) -> None:
    assert digests.take_counts() == {}
    made(digests, order())
    made(digests, order(excerpts=(BEHIND,)))
    digests.begin(order(end=END + 8))
    num_bytes = (END + END - 4 + END - 4) * HEADS * CONTENT
    assert digests.take_counts() == {
        "digests": 2,
        "digest_bytes": num_bytes,
        "digest_seconds": 2.0,
    }
    assert digests.take_counts() == {}


def test_the_seconds_are_those_from_the_first_step_to_the_last(cache: Cache) -> None:
    times = iter((10.0, 14.5))
    digests = Digests(cache.layout, Slow(3), lambda: next(times))  # type: ignore[arg-type]
    digests.begin(order())
    drained(digests)
    assert digests.take_counts()["digest_seconds"] == 4.5


# What is not here


REFUSALS = [
    pytest.param(
        {"excerpts": (replace(FULL, layer="layer.9"),)},
        "layer 'layer.9' is not on this rank",
        id="unknown layer",
    ),
    pytest.param(
        {"excerpts": (replace(FULL, end_head=3),)},
        "heads of 'layer.0' are 0 to 3; allowed: within 0 to 2",
        id="heads",
    ),
    pytest.param(
        {"excerpts": (replace(FULL, begin=END),)},
        "begin of 'layer.0' is 10; allowed: below 10",
        id="begin beyond the end",
    ),
    pytest.param(
        {"excerpts": (FULL, BEHIND, replace(FULL, end_head=1))},
        "a layer stands twice among the excerpts; allowed: once",
        id="a layer twice",
    ),
    pytest.param(
        {"excerpts": (FULL, replace(BEHIND, begin=0))},
        "the block of token 0 is absent",
        id="absent block",
    ),
]


@pytest.mark.parametrize(("changed", "told"), REFUSALS)
def test_what_is_not_here_is_refused_in_words(
    digests: Digests, changed: dict[str, object], told: str
) -> None:
    wanted = order(**changed)
    assert digests.begin(wanted) == proofs.Digested(wanted.prove, refusal=told)
    assert digests.patience is None


def test_a_table_that_is_too_short_is_refused_in_words(digests: Digests) -> None:
    wanted = order(end=13)
    refused = digests.begin(wanted)
    assert isinstance(refused, proofs.Digested)
    assert refused.refusal is not None
    assert "block table" in refused.refusal


@pytest.mark.parametrize("block", [BLOCKS, -2])
def test_a_block_that_the_cache_does_not_have_is_refused(digests: Digests, block: int) -> None:
    wanted = replace(order(), tables=(packed(7, block, 5), TABLES[1]))
    refused = digests.begin(wanted)
    assert isinstance(refused, proofs.Digested)
    assert refused.refusal is not None
    assert digests.patience is None


def test_a_comparison_that_is_refused_is_no_difference(cache: Cache, digests: Digests) -> None:
    theirs = made(digests, order())
    wanted = comparison(theirs, excerpts=(replace(FULL, layer="layer.9"),))
    refused = Digests(cache.layout).begin(wanted)
    assert refused == proofs.Verified(
        D1, Rank(3), wanted.proof.claim, refusal="layer 'layer.9' is not on this rank"
    )


def test_what_comes_after_a_refusal_is_made(digests: Digests) -> None:
    digests.begin(order(excerpts=(replace(FULL, layer="layer.9"),)))
    assert made(digests, order()).refusal is None
