"""The digest queue of a rank: its order, its results and its refusals."""

import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import ANY

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from nixl_kv.errors import ConfigError, DigestError
from nixl_kv.geometry.layout import ABSENT, CacheLayout, Group, Memory, Part, Region, Span, Table
from nixl_kv.ids import Claim, Rank
from nixl_kv.protocol.events import (
    CompareDigest,
    DigestAction,
    DigestCompared,
    DigestEvent,
    DigestMade,
    MakeDigest,
    StartLoad,
)
from nixl_kv.protocol.messages import DigestRequest, KVSlice, Reader
from nixl_kv.verify import digest
from nixl_kv.verify.digest import Digester, Steps
from nixl_kv.verify.queue import DigestQueue, open_digests
from nixl_kv.verify.slices import LocalSlice, find_slices
from support.digest_caches import SlowDigester, finished
from support.records import CLAIM, D1, RIVAL, digest_request

Bytes = npt.NDArray[np.uint8]

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 2, 10, 2, 4, 8
END = 10
TABLE, WINDOWED = (7, 3, 5), (ABSENT, 2, 6)
"""Block tables of a prompt of 10 tokens. A window has passed the second group's first entry."""
FULL, BEHIND = KVSlice("layer.0", 0, 2, 0), KVSlice("layer.1", 0, 2, 4)
THIRD = Claim("3" * 32)


class Cache:
    """A rank's memory: one layer in each of two groups, blocks of four tokens."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
        self.bytes: Bytes = rng.integers(0, 256, shape, dtype=np.uint8)

    @property
    def layout(self) -> CacheLayout:
        """Block tables of both groups."""
        layer, block, head, token, _ = self.bytes.strides
        address = self.bytes.ctypes.data
        parts = (Part(0, 4), Part(4, 4))
        groups = tuple(
            Group(TOKENS, BLOCKS, 1, (Region(name, base, block, head, token, 0, HEADS, parts),))
            for name, base in (("layer.0", address), ("layer.1", address + layer))
        )
        return CacheLayout(groups, "DRAM", 0, (Span(address, self.bytes.nbytes),))

    def copy_to(self, other: "Cache", tables: Sequence[tuple[int, ...]]) -> None:
        """Copy the KV as a read does, into these blocks of the other rank."""
        for layer, (remote, local) in enumerate(zip(tables, (TABLE, WINDOWED), strict=True)):
            pairs = [pair for pair in zip(remote, local, strict=True) if ABSENT not in pair]
            for to, block in pairs:
                other.bytes[layer, to] = self.bytes[layer, block]


TABLES: Final = (Table.of(TABLE), Table.of(WINDOWED))
DECODE_TABLES: Final = ((1, 2, 3), (ABSENT, 9, 8))
DECODE_SENT: Final = tuple(Table.of(ids) for ids in DECODE_TABLES)


def asked(**changed: Any) -> DigestRequest:
    return digest_request(**{"end": END, "slices": (FULL, BEHIND), **changed})


def order(
    route: bytes = b"route", *, tables: tuple[Table, ...] = TABLES, **changed: Any
) -> MakeDigest:
    return MakeDigest(route, asked(**changed), tables)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def counts() -> defaultdict[str, float]:
    return defaultdict(float)


@pytest.fixture
def cache() -> Cache:
    return Cache(1)


def queue_of(cache: Cache, digester: Digester | None = None) -> DigestQueue:
    return DigestQueue(cache.layout, digester or Digester(), defaultdict(float))


@pytest.fixture
def digests(cache: Cache, counts: defaultdict[str, float]) -> DigestQueue:
    return DigestQueue(cache.layout, Digester(), counts, Clock())


def always(action: DigestAction) -> bool:
    del action
    return True


def drained(digests: DigestQueue, turns: int = 100) -> list[DigestEvent]:
    """All events until the queue is empty."""
    ended = []
    for _ in range(turns):
        ended += digests.poll(always)
    assert digests.wait_s is None
    return ended


def digest_of(digests: DigestQueue, wanted: MakeDigest) -> DigestMade:
    assert digests.add(wanted) is None
    (ended,) = drained(digests)
    assert isinstance(ended, DigestMade)
    return ended


def routes(ended: Sequence[DigestEvent]) -> list[bytes]:
    return [event.route for event in ended if isinstance(event, DigestMade)]


# --- the slices of a digest


def test_a_digest_is_that_of_what_is_in_the_blocks(cache: Cache, digests: DigestQueue) -> None:
    slices = find_slices(cache.layout, (FULL, BEHIND), TABLES, end=END)
    expected = finished(Digester()(CLAIM, slices))
    ended = digest_of(digests, order())
    sums = expected.rows.tobytes(), expected.columns.tobytes()
    assert ended == DigestMade(b"route", asked(), *sums)


def test_its_key_is_the_claim(digests: DigestQueue) -> None:
    one, other = digest_of(digests, order()), digest_of(digests, order(claim=RIVAL))
    assert one.rows != other.rows
    assert one.columns != other.columns


# --- comparisons


def comparison(
    remote: DigestMade,
    *,
    slices: tuple[KVSlice, ...] = (FULL, BEHIND),
    begin: int = 0,
    tables: tuple[Table, ...] = DECODE_SENT,
) -> CompareDigest:
    load = StartLoad(D1, begin, END, tables, verify=True)
    return CompareDigest(Rank(3), slices, load, CLAIM, remote.rows, remote.columns)


@pytest.fixture
def landed(cache: Cache) -> Cache:
    """A decode rank's memory after it has read the prompt."""
    decode = Cache(2)
    cache.copy_to(decode, DECODE_TABLES)
    return decode


def compared(where: Cache, wanted: CompareDigest) -> DigestCompared:
    digests = queue_of(where)
    assert digests.add(wanted) is None
    (ended,) = drained(digests)
    assert isinstance(ended, DigestCompared)
    assert (ended.request, ended.rank, ended.claim, ended.refusal) == (D1, 3, CLAIM, None)
    return ended


def test_what_was_read_is_what_prefill_has(digests: DigestQueue, landed: Cache) -> None:
    assert compared(landed, comparison(digest_of(digests, order()))).difference is None


def test_one_bit_that_differs_is_named(digests: DigestQueue, landed: Cache) -> None:
    remote = digest_of(digests, order())
    landed.bytes[1, 9, 0, 0, 4] ^= 0x10
    difference = compared(landed, comparison(remote)).difference
    assert difference is not None
    assert difference.startswith("V of head 0 of layer layer.1 differs in tokens 4 to 9")


def test_a_digest_of_another_size_differs(digests: DigestQueue, landed: Cache) -> None:
    """Also if its last sum is not complete."""
    remote = digest_of(digests, order())
    cut = msgspec.structs.replace(remote, rows=remote.rows[:-1])
    words = "digests of (8, 1) heads and columns here and (7, 1) there"
    assert compared(landed, comparison(cut)).difference == words


def landing(wanted: CompareDigest) -> CompareDigest:
    """The same before prefill's digest arrives."""
    return msgspec.structs.replace(wanted, rows=b"", columns=b"")


def test_what_has_landed_is_digested_before_there_is_something_to_compare(
    digests: DigestQueue, landed: Cache, counts: defaultdict[str, float]
) -> None:
    wanted = comparison(digest_of(digests, order()))
    here = DigestQueue(landed.layout, Digester(), counts)
    counts.clear()
    assert here.add(landing(wanted)) is None
    assert here.add(landing(wanted)) is None
    assert drained(here) == []
    assert counts["digests"] == 1
    landed.bytes[:] = 0  # it was read before
    ended = here.add(wanted)
    assert isinstance(ended, DigestCompared)
    assert ended.difference is None
    assert here.add(wanted) is None  # a second comparison digests again
    (again,) = drained(here)
    assert isinstance(again, DigestCompared)
    assert again.difference is not None


def early(wanted: CompareDigest) -> CompareDigest:
    """The same while the bytes travel."""
    return msgspec.structs.replace(landing(wanted), has_landed=False)


def test_a_digest_is_prepared_before_the_bytes_land(
    digests: DigestQueue, cache: Cache, counts: defaultdict[str, float]
) -> None:
    wanted = comparison(digest_of(digests, order()))
    remote = Cache(2)
    here = DigestQueue(remote.layout, SlowDigester(1), counts)
    assert here.add(early(wanted)) is None
    assert here.add(early(wanted)) is None
    assert drained(here) == []
    cache.copy_to(remote, DECODE_TABLES)
    assert here.add(wanted) is None
    (ended,) = drained(here)
    assert isinstance(ended, DigestCompared)
    assert ended.difference is None


def test_a_digest_that_was_prepared_does_not_join_one_under_way(
    digests: DigestQueue, cache: Cache
) -> None:
    """Its bytes have not landed, though the other digest is of the same blocks."""
    wanted = comparison(digest_of(digests, order()))
    remote = Cache(2)
    here = queue_of(remote)
    other = msgspec.structs.replace(wanted, rank=Rank(4))
    assert here.add(other) is None
    assert here.add(early(wanted)) is None
    assert len(drained(here)) == 1
    cache.copy_to(remote, DECODE_TABLES)
    assert here.add(wanted) is None
    (ended,) = drained(here)
    assert isinstance(ended, DigestCompared)
    assert (ended.rank, ended.difference) == (wanted.rank, None)


def test_a_digest_that_cannot_be_prepared_is_computed_when_the_bytes_land(
    digests: DigestQueue, landed: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = comparison(digest_of(digests, order()))
    with monkeypatch.context() as patched:
        patched.setattr(digest, "numbers_of", fail_to_allocate)
        here = queue_of(landed)
        assert here.add(early(wanted)) is None
    assert here.add(wanted) is None
    (ended,) = drained(here)
    assert isinstance(ended, DigestCompared)
    assert ended.difference is None


def fail_to_allocate(*args: object) -> None:
    raise MemoryError(args)


def test_a_comparison_waits_for_the_digest_that_is_being_made(
    digests: DigestQueue, landed: Cache, counts: defaultdict[str, float]
) -> None:
    wanted = comparison(digest_of(digests, order()))
    here = DigestQueue(landed.layout, Digester(), counts)
    counts.clear()
    assert here.add(landing(wanted)) is None
    assert here.add(wanted) is None
    assert here.add(wanted) is None
    (ended,) = drained(here)
    assert isinstance(ended, DigestCompared)
    assert ended.difference is None
    assert counts["digests"] == 1


def test_the_digest_of_a_load_that_is_over_is_forgotten(
    digests: DigestQueue, landed: Cache
) -> None:
    wanted = comparison(digest_of(digests, order()))
    here = queue_of(landed)
    here.add(landing(wanted))
    drained(here)
    here.poll(lambda _: False)
    landed.bytes[:] = 0
    assert here.add(wanted) is None
    (ended,) = drained(here)
    assert isinstance(ended, DigestCompared)
    assert ended.difference is not None


def test_what_has_landed_and_cannot_be_digested_is_tried_again(
    digests: DigestQueue, cache: Cache
) -> None:
    wanted = comparison(digest_of(digests, order()))
    here = queue_of(cache, FailingDigester(DigestError("no GPU"), CLAIM))
    assert here.add(landing(wanted)) is None
    assert drained(here) == []
    assert here.add(wanted) is None
    (ended,) = drained(here)
    assert isinstance(ended, DigestCompared)
    assert ended.refusal == "no GPU"


# --- one after the other


def test_a_claim_has_one_digest_at_a_time(digests: DigestQueue) -> None:
    """Otherwise a reader could keep this rank busy forever."""
    assert digests.add(order()) is None
    assert digests.add(order(end=9)) is None
    (ended,) = drained(digests)
    assert isinstance(ended, DigestMade)
    assert ended.digest_request == asked()


def test_one_digest_is_made_at_a_time_by_a_step_at_each_poll(cache: Cache) -> None:
    slow = SlowDigester(3)
    digests = queue_of(cache, slow)
    digests.add(order())
    digests.add(order(claim=RIVAL))
    for number in range(1, 4):
        assert digests.poll(always) == []
        assert slow.secrets == [CLAIM] * number
    assert len(drained(digests)) == 2
    assert slow.secrets == [CLAIM] * 3 + [RIVAL] * 3


def test_a_digest_that_is_asked_for_again_meanwhile_is_made_once(cache: Cache) -> None:
    digests = queue_of(cache, SlowDigester(3))
    digests.add(order(b"first"))
    digests.poll(always)
    assert digests.add(order(b"second")) is None
    assert routes(drained(digests)) == [b"first"]
    assert digests.add(order(b"third")) is None
    assert routes(drained(digests)) == [b"third"]


@pytest.mark.parametrize(
    ("digester", "pause_s"),
    [
        pytest.param(Digester(), 0.0, id="host"),
        pytest.param(SlowDigester(1), 0.5, id="another"),
    ],
)
def test_the_thread_waits_as_long_as_a_step_allows(
    cache: Cache, digester: Digester, pause_s: float
) -> None:
    digests = queue_of(cache, digester)
    assert digests.wait_s is None
    digests.add(order())
    assert digests.wait_s == pause_s


def test_what_is_cleared_never_ends(digests: DigestQueue) -> None:
    digests.add(order())
    digests.poll(always)
    digests.add(order(claim=RIVAL))
    digests.clear()
    assert drained(digests) == []
    assert digest_of(digests, order()).refusal is None


def test_the_digester_is_closed_with_the_queue(cache: Cache) -> None:
    slow = SlowDigester(1)
    digests = queue_of(cache, slow)
    assert not slow.is_closed
    digests.close()
    assert slow.is_closed


class FailingDigester(SlowDigester):
    """Fails for one claim."""

    def __init__(self, error: Exception, claim: str = RIVAL) -> None:
        super().__init__(2)
        self.error, self.claim = error, claim

    def __call__(self, secret: str, local_slices: Sequence[LocalSlice]) -> Steps:
        yield from super().__call__(secret, local_slices)
        if secret == self.claim:
            raise self.error
        return (yield from Digester()(secret, local_slices))


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (DigestError("no memory"), "no memory"),
        (MemoryError("no memory"), "no memory"),
        (MemoryError(), "MemoryError"),
    ],
    ids=repr,
)
def test_a_step_that_fails_costs_its_own_digest_only(
    cache: Cache, error: Exception, refusal: str
) -> None:
    digests = queue_of(cache, FailingDigester(error))
    for claim in (CLAIM, RIVAL, THIRD):
        digests.add(order(claim.encode(), claim=claim))
    ended = [one for one in drained(digests) if isinstance(one, DigestMade)]
    assert [(one.route, one.refusal) for one in ended] == [
        (CLAIM.encode(), None),
        (RIVAL.encode(), refusal),
        (THIRD.encode(), None),
    ]


# --- who waits


def reader(rank: int) -> Reader:
    return msgspec.structs.replace(asked().reader, rank=rank)


def test_readers_of_the_same_heads_get_the_same_digest(
    cache: Cache, counts: defaultdict[str, float]
) -> None:
    slow = SlowDigester(3)
    digests = DigestQueue(cache.layout, slow, counts)
    for rank in range(3):
        assert digests.add(order(b"%d" % rank, reader=reader(rank))) is None
    digests.add(order(b"3", reader=reader(3), slices=(BEHIND,)))
    ended = {one.route: one for one in drained(digests) if isinstance(one, DigestMade)}
    assert slow.secrets == [CLAIM] * 6  # two digests
    assert {route: one.digest_request.reader.rank for route, one in ended.items()} == {
        b"%d" % rank: rank for rank in range(4)
    }
    assert ended[b"0"].rows == ended[b"2"].rows != ended[b"3"].rows
    assert counts["digests"] == 2


def test_a_digest_that_nobody_waits_for_is_dropped(
    cache: Cache, counts: defaultdict[str, float]
) -> None:
    """Under overload later digests would be late too."""
    slow = SlowDigester(3)
    digests = DigestQueue(cache.layout, slow, counts)
    digests.add(order(b"gone"))
    digests.add(order(b"here", claim=RIVAL))

    def is_wanted(action: DigestAction) -> bool:
        assert isinstance(action, MakeDigest)
        return action.digest_request.claim == RIVAL or len(slow.secrets) < 2

    dropped, kept = (event for _ in range(10) for event in digests.poll(is_wanted))
    assert dropped == DigestMade(b"gone", asked(), refusal=ANY)
    assert isinstance(kept, DigestMade)
    assert (kept.route, kept.refusal) == (b"here", None)
    assert slow.secrets == [CLAIM] * 2 + [RIVAL] * 3
    assert counts["digests"] == 1


def test_a_digest_is_made_while_one_of_its_readers_waits(digests: DigestQueue) -> None:
    for rank in range(2):
        digests.add(order(reader=reader(rank)))

    def is_wanted(action: DigestAction) -> bool:
        return isinstance(action, MakeDigest) and action.digest_request.reader.rank == 1

    ended = [*digests.poll(is_wanted), *digests.poll(is_wanted)]
    assert [one.refusal for one in ended] == [None, None]


# --- counts


def test_what_was_made_is_counted(digests: DigestQueue, counts: defaultdict[str, float]) -> None:
    assert counts == {}
    digest_of(digests, order())
    digest_of(digests, order(slices=(BEHIND,)))
    digests.add(order(end=END + 8))
    num_bytes = (END + END - 4 + END - 4) * HEADS * CONTENT
    assert counts == {"digests": 2, "digest_bytes": num_bytes, "digest_seconds": 2.0}


# --- missing layers and blocks


def test_a_digest_of_what_is_not_here_is_refused(digests: DigestQueue) -> None:
    wanted = order(slices=(replace(FULL, layer="layer.9"),))
    refused = digests.add(wanted)
    assert isinstance(refused, DigestMade)
    assert (refused.route, refused.digest_request) == (b"route", wanted.digest_request)
    assert refused.refusal == "layer 'layer.9' is not on this rank"
    assert digests.wait_s is None
    assert digest_of(digests, order()).refusal is None, "later digests run"


def test_a_comparison_that_is_refused_is_no_difference(cache: Cache, digests: DigestQueue) -> None:
    remote = digest_of(digests, order())
    wanted = comparison(remote, slices=(replace(FULL, layer="layer.9"),))
    refused = queue_of(cache).add(wanted)
    assert refused == DigestCompared(
        D1, Rank(3), CLAIM, refusal="layer 'layer.9' is not on this rank"
    )


# --- opening the digests of a rank


def opened(memory: Memory, *, is_prefill: bool, verifies: bool) -> object:
    layout = replace(Cache(1).layout, memory=memory)
    made = open_digests(
        layout, defaultdict(float), Clock(), is_prefill=is_prefill, verifies=verifies
    )
    return None if made is None else made._digester


@pytest.fixture
def _no_gpu_digester(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import fails, as without torch."""
    monkeypatch.setitem(sys.modules, "nixl_kv.verify.gpu", None)


@pytest.mark.parametrize("verifies", [False, True])
def test_memory_of_this_process_is_digested_on_the_host(*, verifies: bool) -> None:
    assert type(opened("DRAM", is_prefill=False, verifies=verifies)) is Digester


@pytest.mark.usefixtures("_no_gpu_digester")
def test_a_rank_that_verifies_does_not_start_where_it_cannot() -> None:
    with pytest.raises(ConfigError, match=r"^verify is on, .*allowed: 'off'$"):
        opened("VRAM", is_prefill=True, verifies=True)


@pytest.mark.usefixtures("_no_gpu_digester")
def test_a_rank_that_only_prefills_starts_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="nixl_kv"):
        digester = opened("VRAM", is_prefill=True, verifies=False)
    assert digester is None
    assert "loads that read from this rank cannot be verified" in caplog.text


def test_a_rank_that_digests_nothing_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[CacheLayout] = []
    fake = SimpleNamespace(GpuDigester=made.append)
    monkeypatch.setitem(sys.modules, "nixl_kv.verify.gpu", fake)
    assert opened("VRAM", is_prefill=False, verifies=False) is None
    assert (made, caplog.messages) == ([], [])
    opened("VRAM", is_prefill=True, verifies=False)
    assert len(made) == 1
