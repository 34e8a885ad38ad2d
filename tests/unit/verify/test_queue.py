"""The digest queue of a rank: its order, its results and its refusals."""

import itertools
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from unittest.mock import ANY, Mock

import msgspec
import pytest

from harness.local.caches import Cache, Sizes
from harness.local.machines import by_name
from nixl_kv.config import Config
from nixl_kv.errors import ConfigError, DigestError
from nixl_kv.feature import RankSetup
from nixl_kv.geometry.layout import Memory, Table
from nixl_kv.ids import Claim, Rank
from nixl_kv.protocol.events import (
    CompareDigest,
    Counts,
    DigestAction,
    DigestCompared,
    DigestEvent,
    DigestMade,
    MakeDigest,
    StartLoad,
)
from nixl_kv.protocol.messages import DigestRequest, KVSlice, Reader
from nixl_kv.verify import build, digest
from nixl_kv.verify.digest import Digester, Steps
from nixl_kv.verify.queue import DigestQueue
from nixl_kv.verify.slices import LocalSlice, find_slices
from support.digest_caches import SlowDigester, reference
from support.records import CLAIM, D1, RIVAL, digest_request

SIZES = Sizes(layers=2, key=4, value=4)
END = 10
TABLE, DECODE_TABLE = [7, 3, 5], [1, 2, 3]
FULL, BEHIND = KVSlice("layer.0", 0, 2, 0), KVSlice("layer.1", 0, 2, 4)
THIRD = Claim("3" * 32)

TABLES: Final = (Table.of(TABLE),)


def read(cache: Cache, into: Cache) -> Cache:
    """Copy the prompt's KV into the blocks of the other rank; returns that."""
    into.view[:, DECODE_TABLE] = cache.blocks(TABLE)
    return into


def asked(**changed: Any) -> DigestRequest:
    return digest_request(**{"end": END, "slices": (FULL, BEHIND), **changed})


def order(route: bytes = b"route", **changed: Any) -> MakeDigest:
    return MakeDigest(route, asked(**changed), TABLES)


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def cache() -> Cache:
    return Cache(SIZES).fill(1)


def queue_of(
    cache: Cache, digester: Digester | None = None, counts: Counts | None = None
) -> DigestQueue:
    counts = Counts() if counts is None else counts
    return DigestQueue(
        cache.layout(), digester or Digester(), counts, itertools.count(1.0).__next__
    )


@pytest.fixture
def digests(cache: Cache, counts: Counts) -> DigestQueue:
    return queue_of(cache, counts=counts)


def drained(digests: DigestQueue, turns: int = 100) -> list[DigestEvent]:
    """All events until the queue is empty."""
    ended = []
    for _ in range(turns):
        ended += digests.poll()
        digests.check()
    assert digests.wait_s is None
    return ended


def digest_of(digests: DigestQueue, wanted: MakeDigest) -> DigestMade:
    assert digests.add(wanted) is None
    (ended,) = drained(digests)
    assert isinstance(ended, DigestMade)
    return ended


# --- the slices of a digest


def test_a_digest_is_that_of_the_bytes_in_the_blocks(cache: Cache, digests: DigestQueue) -> None:
    expected = reference(find_slices(cache.layout(), (FULL, BEHIND), TABLES, end=END), CLAIM)
    sums = expected.rows.tobytes(), expected.columns.tobytes()
    assert digest_of(digests, order()) == DigestMade(b"route", asked(), *sums)


# --- comparisons


@pytest.fixture
def wanted(digests: DigestQueue, counts: Counts) -> CompareDigest:
    """A comparison with prefill's digest."""
    made = digest_of(digests, order())
    counts.pop()
    load = StartLoad(D1, 0, END, (Table.of(DECODE_TABLE),), verify=True)
    return CompareDigest(Rank(3), (FULL, BEHIND), load, CLAIM, made.rows, made.columns)


@pytest.fixture
def landed(cache: Cache) -> Cache:
    """A decode rank's memory after it has read the prompt."""
    return read(cache, Cache(SIZES).fill(2))


def compared(here: DigestQueue, wanted: CompareDigest) -> DigestCompared:
    assert here.add(wanted) is None
    (ended,) = drained(here)
    assert isinstance(ended, DigestCompared)
    assert (ended.request, ended.rank, ended.claim) == (D1, wanted.rank, CLAIM)
    return ended


def test_read_bytes_are_compared_with_prefills(wanted: CompareDigest, landed: Cache) -> None:
    here = queue_of(landed)
    equal = compared(here, wanted)
    assert (equal.difference, equal.refusal) == (None, None)
    cut = msgspec.structs.replace(wanted, rows=wanted.rows[:-1])  # its last sum is not complete
    words = "digests of (8, 1) heads and columns here and (7, 1) there"
    assert compared(here, cut).difference == words
    landed.view[1, 2, 0, 0, 4] ^= 0x10
    difference = compared(here, wanted).difference
    assert difference is not None
    assert difference.startswith("V of head 0 of layer layer.1 differs in tokens 4 to 9")


def landing(wanted: CompareDigest, *, has_landed: bool = True) -> CompareDigest:
    """The same before prefill's digest arrives, or while the bytes travel."""
    return msgspec.structs.replace(wanted, rows=b"", columns=b"", has_landed=has_landed)


def test_a_landed_load_is_digested_before_prefills_digest_comes(
    wanted: CompareDigest, landed: Cache, counts: Counts
) -> None:
    here = queue_of(landed, counts=counts)
    for _ in range(2):
        assert here.add(landing(wanted)) is None
    assert drained(here) == []
    assert by_name(counts)["digest_seconds"] == 1
    landed.memory[:] = 0  # it was read before
    ended = here.add(wanted)
    assert isinstance(ended, DigestCompared)
    assert ended.difference is None
    assert compared(here, wanted).difference is not None, "a second one digests again"


def test_a_digest_is_prepared_before_the_bytes_land(wanted: CompareDigest, cache: Cache) -> None:
    """It does not join one under way, though that is of the same blocks."""
    remote = Cache(SIZES)
    here = queue_of(remote, SlowDigester(1))
    assert here.add(msgspec.structs.replace(wanted, rank=Rank(4))) is None
    for _ in range(2):
        assert here.add(landing(wanted, has_landed=False)) is None
    assert len(drained(here)) == 1
    read(cache, remote)
    assert compared(here, wanted).difference is None


def test_a_digest_that_cannot_be_prepared_is_computed_when_the_bytes_land(
    wanted: CompareDigest, landed: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = queue_of(landed)
    with monkeypatch.context() as patched:
        patched.setattr(digest, "numbers_of", Mock(side_effect=MemoryError))
        assert here.add(landing(wanted, has_landed=False)) is None
    assert compared(here, wanted).difference is None


def test_a_comparison_waits_for_the_digest_that_is_being_made(
    wanted: CompareDigest, landed: Cache, counts: Counts
) -> None:
    here = queue_of(landed, counts=counts)
    assert here.add(landing(wanted)) is None
    assert here.add(wanted) is None
    assert compared(here, wanted).difference is None
    assert by_name(counts)["digest_seconds"] == 1


def test_the_digest_of_a_load_that_is_over_is_forgotten(
    wanted: CompareDigest, landed: Cache
) -> None:
    here = queue_of(landed)
    here.add(landing(wanted))
    drained(here)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here, "_is_wanted", lambda _: False)
        here.poll()
    landed.memory[:] = 0
    assert compared(here, wanted).difference is not None


def test_a_landed_load_that_cannot_be_digested_is_tried_again(
    wanted: CompareDigest, cache: Cache
) -> None:
    here = queue_of(cache, FailingDigester(DigestError("no GPU"), CLAIM))
    assert here.add(landing(wanted)) is None
    assert drained(here) == []
    assert compared(here, wanted).refusal == "no GPU"


# --- one after the other


def test_one_digest_is_made_at_a_time_by_a_step_at_each_poll(cache: Cache) -> None:
    slow = SlowDigester(3, pause_s=0.25)
    digests = queue_of(cache, slow)
    assert digests.wait_s is None
    digests.add(order())
    digests.add(order(claim=RIVAL))
    for number in range(1, 4):
        assert digests.wait_s == 0.25
        assert digests.poll() == []
        assert slow.secrets == [CLAIM] * number
    one, other = (made for made in drained(digests) if isinstance(made, DigestMade))
    assert slow.secrets == [CLAIM] * 3 + [RIVAL] * 3
    assert one.rows != other.rows
    digests.close()
    assert slow.is_closed


def test_a_claim_has_one_digest_at_a_time(cache: Cache) -> None:
    """Otherwise a reader could keep this rank busy forever."""
    digests = queue_of(cache, SlowDigester(3))
    digests.add(order(b"first"))
    digests.poll()
    assert digests.add(order(b"second")) is None
    assert digests.add(order(b"another", end=9)) is None
    (ended,) = drained(digests)
    assert isinstance(ended, DigestMade)
    assert ended.route == b"first"
    assert digest_of(digests, order(b"third")).route == b"third"


def test_a_cleared_digest_never_ends(digests: DigestQueue) -> None:
    digests.add(order())
    digests.poll()
    digests.clear()
    assert drained(digests) == []
    assert digest_of(digests, order()).refusal is None


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


def test_readers_of_the_same_heads_get_the_same_digest(cache: Cache, counts: Counts) -> None:
    slow = SlowDigester(3)
    digests = queue_of(cache, slow, counts)
    for rank in range(3):
        assert digests.add(order(b"%d" % rank, reader=reader(rank))) is None
    digests.add(order(b"3", reader=reader(3), slices=(BEHIND,)))
    ended = {one.route: one for one in drained(digests) if isinstance(one, DigestMade)}
    assert slow.secrets == [CLAIM] * 6  # two digests
    assert {route: one.digest_request.reader.rank for route, one in ended.items()} == {
        b"%d" % rank: rank for rank in range(4)
    }
    assert ended[b"0"].rows == ended[b"2"].rows != ended[b"3"].rows
    assert by_name(counts)["digest_seconds"] == 2


def test_an_unwanted_digest_is_dropped(
    cache: Cache, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under overload later digests would be late too."""
    slow = SlowDigester(3)
    digests = queue_of(cache, slow, counts)
    digests.add(order(b"gone"))
    digests.add(order(b"here", claim=RIVAL))

    def is_wanted(action: DigestAction) -> bool:
        assert isinstance(action, MakeDigest)
        return action.digest_request.claim == RIVAL or len(slow.secrets) < 2

    monkeypatch.setattr(digests, "_is_wanted", is_wanted)
    dropped, kept = (event for _ in range(10) for event in digests.poll())
    assert dropped == DigestMade(b"gone", asked(), refusal=ANY)
    assert isinstance(kept, DigestMade)
    assert (kept.route, kept.refusal) == (b"here", None)
    assert slow.secrets == [CLAIM] * 2 + [RIVAL] * 3
    assert by_name(counts)["digest_seconds"] == 1


def test_a_digest_is_made_while_one_of_its_readers_waits(
    digests: DigestQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        digests.add(order(reader=reader(rank)))

    def is_wanted(action: DigestAction) -> bool:
        return isinstance(action, MakeDigest) and action.digest_request.reader.rank == 1

    monkeypatch.setattr(digests, "_is_wanted", is_wanted)
    ended = [*digests.poll(), *digests.poll()]
    assert [one.refusal for one in ended] == [None, None]


# --- missing layers and blocks


def test_a_digest_of_absent_blocks_is_refused(digests: DigestQueue) -> None:
    wanted = order(slices=(replace(FULL, layer="layer.9"),))
    refused = digests.add(wanted)
    assert isinstance(refused, DigestMade)
    assert (refused.route, refused.digest_request) == (b"route", wanted.digest_request)
    assert refused.refusal == "layer 'layer.9' is not on this rank"
    assert digest_of(digests, order()).refusal is None, "later digests run"


def test_a_rank_without_a_digester_refuses(cache: Cache) -> None:
    refused = DigestQueue(cache.layout(), None, Counts()).add(order())
    assert refused == DigestMade(b"route", asked(), refusal="this rank computes no digests")


def test_a_refused_comparison_does_not_count_as_a_difference(
    wanted: CompareDigest, cache: Cache
) -> None:
    absent = msgspec.structs.replace(wanted, slices=(replace(FULL, layer="layer.9"),))
    refusal = "layer 'layer.9' is not on this rank"
    assert queue_of(cache).add(absent) == DigestCompared(D1, Rank(3), CLAIM, refusal=refusal)


# --- opening the digests of a rank


def opened(memory: Memory, *, is_prefill: bool, verifies: bool) -> object:
    layout = replace(Cache(SIZES).layout(), memory=memory)
    setup = RankSetup(
        layout=layout,
        config=Config(verify=verifies),
        is_prefill=is_prefill,
        is_decode=not is_prefill or verifies,
        wake=Mock(),
        watch=Mock(),
        background=Mock(),
        counts=Counts(),
        clock=time.monotonic,
    )
    queue = build(setup).worker
    assert isinstance(queue, DigestQueue)
    return queue._digester


@pytest.mark.parametrize("verifies", [False, True])
def test_memory_of_this_process_is_digested_on_the_host(*, verifies: bool) -> None:
    assert type(opened("DRAM", is_prefill=False, verifies=verifies)) is Digester


def test_without_a_gpu_digester_only_a_rank_that_does_not_verify_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nixl_kv.verify.gpu", None)  # as without torch
    with pytest.raises(ConfigError, match=r"^verify is on, .*set verify to 'off'$"):
        opened("VRAM", is_prefill=True, verifies=True)
    with caplog.at_level(logging.WARNING, logger="nixl_kv"):
        assert opened("VRAM", is_prefill=True, verifies=False) is None
    assert "loads that read from this rank cannot be verified" in caplog.text


def test_a_rank_that_digests_nothing_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Mock()
    monkeypatch.setitem(sys.modules, "nixl_kv.verify.gpu", gpu)
    assert opened("VRAM", is_prefill=False, verifies=False) is None
    gpu.GpuDigester.assert_not_called()
    assert caplog.messages == []
    opened("VRAM", is_prefill=True, verifies=False)
    gpu.GpuDigester.assert_called_once()
