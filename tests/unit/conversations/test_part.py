"""Asks for cached blocks on a prefill rank: which it denies, when it grants, how offers end."""

import math
from collections.abc import Iterable
from typing import Any

import pytest

from nixl_kv.conversations import part as conversations
from nixl_kv.conversations.part import (
    FULL,
    LOOK_S,
    MAX_WAITING,
    MAX_WAITING_OF_READER,
    NO_READER,
    NOT_SEALED,
    NOT_WRITTEN,
    STALE,
    WAIT_S,
    ContentPart,
)
from nixl_kv.conversations.runs import Run, seal
from nixl_kv.conversations.slots import ContentSlots
from nixl_kv.early.part import EarlyPart
from nixl_kv.errors import LocalProtocolError
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import FenceToken, Nonce
from nixl_kv.protocol.events import (
    Action,
    AskDenied,
    Asked,
    BlocksTaken,
    ClearSlot,
    DigestMade,
    MakeDigest,
    OfferEnd,
    OfferEnded,
    Reply,
    SetContentKey,
    Tick,
    WithdrawOffer,
)
from nixl_kv.protocol.messages import Deny, Grant, Pending
from nixl_kv.protocol.prefill import (
    WITHDRAWN,
    PrefillMachine,
    State,
)
from nixl_kv.transport.base import SlotPage
from nixl_kv.verify.part import DigestPart
from support.offers import BOTH, SECOND, prefill_machine
from support.records import (
    LEASE_S,
    NONCE,
    NONCE2,
    OTHER_LIFE,
    RIVAL,
    ROUTE,
    STRANGER,
    SUMS,
    ask,
    asked,
    deny,
    digest_reply,
    digest_request,
    hex32,
    pending,
    reader,
    release,
    replied,
)

FIRST, COUNT, BLOCKS, ENTRY = 4, 3, 12, 16
KEY = b"k" * 32
NOW = 100.0
CLEAR = FenceToken(bytes(16))


class Rank:
    """A machine with the feature's two parts; the caller's thread makes steps."""

    def __init__(self, *others: Any) -> None:
        self.page = SlotPage(FIRST + COUNT)
        self.slots = ContentSlots(BLOCKS, COUNT)
        self.slots.bind(self.page, FIRST)
        self.part = ContentPart(self.slots, ENTRY)
        self.machine: PrefillMachine = prefill_machine(parts=(*others, self.part))
        self.handle(SetContentKey(KEY))
        self.at = 0
        self.step()

    def handle(self, event: Any, now: float = NOW) -> list[Action]:
        actions = self.machine.handle(event, now)
        for action in actions:
            if isinstance(action, ClearSlot):
                self.page.clear(action.slot)
        self.machine.check()
        return actions

    def step(self, *ids: int, epoch: int = 0, ends: bool = True) -> list[Action]:
        """The rank's share of a step; what its machine then does."""
        self.at += 1
        taken = BlocksTaken(self.at, Table.of(ids).ids, epoch)
        commands = self.slots.before_step([taken])
        if ends:
            self.slots.end_step(None)
        return [action for command in commands for action in self.handle(command)]

    def found(self, *ids: int, offer: Nonce = NONCE, key: bytes = KEY, **changed: Any) -> bytes:
        values = {"steps": self.at, "need": 1, "epoch": 0, "first_block": 0, **changed}
        return seal(Run(ids=Table.of(ids).ids, **values), offer, key)

    def grant(self, event: Asked | Tick, now: float = NOW) -> Grant:
        *_, answer = self.handle(event, now)
        assert isinstance(answer, Reply)
        assert isinstance(answer.message, Grant)
        return answer.message

    def is_valid(self, grant: Grant) -> bool:
        return self.page.read(grant.slot) == grant.fence_token != CLEAR


@pytest.fixture
def rank() -> Rank:
    return Rank()


def asks(found: bytes, **changed: Any) -> Asked:
    return asked(ask(found=found, **changed))


def denied(reason: str, **changed: Any) -> list[Action]:
    return [AskDenied(changed.get("nonce", NONCE), reason, is_usual=True), replied(deny(**changed))]


def test_cached_blocks_are_granted_at_once(rank: Rank) -> None:
    grant = rank.grant(asks(rank.found(3, 1, 2, first_block=5)))
    assert grant.tables == (Table(5, Table.of([3, 1, 2]).ids),)
    assert (grant.num_tokens, grant.num_cached, grant.lease_s) == (None, 0, LEASE_S)
    assert FIRST <= grant.slot < FIRST + COUNT
    assert rank.is_valid(grant)
    offer = rank.machine.offers[NONCE]
    assert (offer.state, offer.is_pinned, offer.prepared.num_tokens) == (
        State.GRANTED,
        False,
        8 * ENTRY,
    )


def test_both_ranks_of_a_reader_get_the_same_grant(rank: Rank) -> None:
    found = rank.found(1)
    grant = rank.grant(asks(found, readers=BOTH))
    other = rank.grant(asks(found, readers=BOTH, reader=SECOND))
    assert (other.slot, other.fence_token) == (grant.slot, grant.fence_token)
    assert rank.handle(asked(release())) == []
    (*_, ended) = rank.handle(asked(release(reader=SECOND)))
    assert isinstance(ended, OfferEnded)
    assert not rank.is_valid(grant)


SEALED_ELSE: dict[str, dict[str, Any]] = {
    "for another offer": {"offer": NONCE2},
    "with another life's key": {"key": b"o" * 32},
    "no blocks": {"ids": ()},
}


@pytest.mark.parametrize("changed", SEALED_ELSE.values(), ids=SEALED_ELSE)
def test_a_run_that_the_engine_has_not_sealed_for_this_offer_is_denied(
    rank: Rank, changed: dict[str, Any]
) -> None:
    found = rank.found(*changed.pop("ids", (1,)), **changed)
    assert rank.handle(asks(found)) == denied(NOT_SEALED)
    assert rank.handle(asks(b"\0" * 40)) == denied(NOT_SEALED)


@pytest.mark.parametrize("first", [(1 << 31) - 1, 1 << 31, 1 << 62])
def test_a_run_at_a_place_that_no_table_has_is_denied_and_takes_no_slot(
    rank: Rank, first: int
) -> None:
    *_, answer = rank.handle(asks(rank.found(1, first_block=first)))
    assert answer == replied(deny())
    assert not rank.machine.offers
    assert len(rank.slots) == 0


def test_without_a_key_nothing_is_granted(rank: Rank) -> None:
    rank.handle(SetContentKey(b""))
    assert rank.handle(asks(rank.found(1, key=b""))) == denied(NOT_SEALED)


def test_an_ask_of_a_rank_that_is_not_a_reader_leaves_nothing(rank: Rank) -> None:
    assert rank.handle(asks(rank.found(1), readers=(1,))) == denied(NO_READER)
    assert not rank.machine.offers


def test_asks_for_other_offers_are_left_to_the_machine(rank: Rank) -> None:
    reason = "no such offer: used, expired, or never made"
    assert rank.handle(asked(ask())) == [AskDenied(NONCE, reason), replied(deny())]
    words = "meant for incarnation"
    denial, _ = rank.handle(asks(rank.found(1), incarnation=OTHER_LIFE))
    assert isinstance(denial, AskDenied)
    assert words in denial.reason


def test_a_run_with_a_block_that_was_reused_is_denied(rank: Rank) -> None:
    found = rank.found(1, 2)
    rank.step(2)
    assert rank.handle(asks(found)) == denied(STALE)
    assert rank.handle(asks(rank.found(1, 2))) != denied(STALE)


def test_a_reuse_clears_the_slot_and_then_ends_the_offer(rank: Rank) -> None:
    grant = rank.grant(asks(rank.found(1, 2)))
    assert rank.step(3) == []
    assert rank.is_valid(grant)
    taken = BlocksTaken(rank.at + 1, Table.of([2]).ids)
    (withdraw,) = rank.slots.before_step([taken])
    assert not rank.is_valid(grant), "before the step, whatever the transfer thread does"
    assert withdraw == WithdrawOffer(NONCE)
    assert rank.handle(withdraw) == denied(WITHDRAWN)
    assert not rank.machine.offers
    assert len(rank.slots) == 0
    assert rank.handle(asks(rank.found(1))) == denied(WITHDRAWN), "an offer is good once"


def test_a_reset_ends_all_offers_and_asks(rank: Rank) -> None:
    found = rank.found(1, offer=NONCE2)
    rank.grant(asks(rank.found(1)))
    assert rank.step(epoch=1) == denied(WITHDRAWN)
    assert rank.handle(asks(found, nonce=NONCE2)) == denied(STALE, nonce=NONCE2)


def test_an_ask_waits_for_the_step_that_fills_its_blocks(rank: Rank) -> None:
    found = rank.found(1, steps=2, need=2)
    assert rank.handle(asks(found)) == [replied(pending("computing"))]
    assert rank.machine.is_expected(NONCE)
    assert rank.machine.next_due == NOW + LOOK_S
    rank.step(1, ends=False)
    assert rank.handle(Tick(), NOW + LOOK_S) == []
    assert rank.machine.next_due == pytest.approx(NOW + 2 * LOOK_S)
    rank.slots.end_step(None)
    assert rank.handle(Tick(), NOW + 1.5 * LOOK_S) == [], "it looks no more often"
    grant = rank.grant(Tick(), NOW + 3 * LOOK_S)
    assert rank.is_valid(grant)
    assert rank.part.next_due == math.inf
    assert len(rank.part) == 0


def test_a_waiting_ask_of_each_rank_of_a_reader_is_granted(rank: Rank) -> None:
    found = rank.found(1, steps=2, need=2)
    for each in (reader(), SECOND):
        rank.handle(asks(found, reader=each, readers=BOTH))
    rank.step(1)
    grants = [a.message for a in rank.handle(Tick(), NOW + 1) if isinstance(a, Reply)]
    assert [type(grant) for grant in grants] == [Grant, Grant]
    assert len({grant.slot for grant in grants if isinstance(grant, Grant)}) == 1


def test_a_repeated_ask_waits_no_longer(rank: Rank) -> None:
    found = rank.found(1, steps=9, need=9)
    for second in (0.0, 1.0):
        assert rank.handle(asks(found), NOW + second) == [replied(pending("computing"))]
    assert rank.handle(Tick(), NOW + WAIT_S - 0.1) == []
    assert rank.handle(Tick(), NOW + WAIT_S) == denied(NOT_WRITTEN)
    assert rank.machine.next_due is None


def test_a_waiting_ask_is_denied_when_a_block_is_reused(rank: Rank) -> None:
    found = rank.found(1, 2, steps=2, need=2)
    rank.handle(asks(found))
    rank.step(1, ends=False)
    rank.step(2, ends=False)
    assert rank.handle(asks(found, nonce=NONCE)) == denied(STALE)
    rank.handle(asks(rank.found(1, 5, steps=4, need=5)))
    rank.step(5, ends=False)
    rank.step(5)
    assert rank.handle(Tick(), NOW + LOOK_S) == denied(STALE)
    assert len(rank.slots) == 0


def test_a_tick_looks_once_for_all_asks_and_at_no_block(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million blocks may wait, and a tick comes each millisecond."""
    for nonce in nonces(9):
        rank.handle(asks(rank.found(1, need=2, offer=nonce), nonce=nonce))
    looks: list[int] = []

    def has_ended() -> bool:
        looks.append(1)
        return False

    rank.step(1, ends=False)
    rank.slots.end_step(has_ended)
    monkeypatch.setattr(rank.slots, "is_stale", None)
    assert rank.handle(Tick(), NOW + LOOK_S) == []
    assert len(looks) == 1


def test_a_turn_grants_a_few_asks_and_the_next_turn_comes_at_once(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "GRANTS_OF_TURN", 2)
    for nonce in nonces(COUNT):
        rank.handle(asks(rank.found(1, need=2, offer=nonce), nonce=nonce))
    rank.step()
    rank.handle(Tick(), NOW + LOOK_S)
    assert (len(rank.slots), len(rank.part)) == (2, COUNT - 2)
    assert rank.machine.next_due == NOW + LOOK_S
    rank.handle(Tick(), NOW + LOOK_S)
    assert (len(rank.slots), len(rank.part)) == (COUNT, 0)


def test_a_reader_that_gives_up_waits_no_longer(rank: Rank) -> None:
    rank.handle(asks(rank.found(1, need=2)))
    assert rank.handle(asked(release(complete=False, claim=RIVAL))) == []
    assert len(rank.part) == 1
    assert rank.handle(asked(release(complete=False))) == []
    assert len(rank.part) == 0
    assert rank.handle(Tick(), NOW + WAIT_S) == []


def nonces(count: int) -> Iterable[Nonce]:
    return (Nonce(hex32(number)) for number in range(1000, 1000 + count))


def test_few_asks_wait_of_each_reader_and_in_all(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_WAITING >= 2 * MAX_WAITING_OF_READER
    monkeypatch.setattr(conversations, "MAX_WAITING", 5)
    monkeypatch.setattr(conversations, "MAX_WAITING_OF_READER", 3)
    by = ({"reader": reader()}, {"reader": STRANGER, "claim": RIVAL})
    answers = [
        rank.handle(asks(rank.found(1, need=9, offer=nonce), nonce=nonce, **who))
        for who in by
        for nonce in nonces(4)
    ]
    kinds = [type(answer.message) for one in answers for answer in one if isinstance(answer, Reply)]
    assert kinds == [Pending, Pending, Pending, Deny, Pending, Pending, Deny, Deny]
    assert answers[3][0] == AskDenied(Nonce(hex32(1003)), FULL, is_usual=True)
    first, *_ = nonces(1)
    again = asks(rank.found(1, need=9, offer=first), nonce=first)
    assert rank.handle(again) == [replied(pending("computing", nonce=first))], "it waits already"
    assert len(rank.part) == 5


def test_offers_are_bounded_by_their_slots(rank: Rank) -> None:
    for nonce in nonces(COUNT):
        rank.grant(asks(rank.found(1, offer=nonce), nonce=nonce))
    assert rank.handle(asks(rank.found(1))) == denied(FULL)
    first, *_ = nonces(1)
    rank.handle(asked(release(nonce=first)))
    rank.grant(asks(rank.found(1)))


@pytest.mark.parametrize("complete", [True, False])
def test_a_release_ends_the_offer(rank: Rank, *, complete: bool) -> None:
    grant = rank.grant(asks(rank.found(1)))
    (ended,) = rank.handle(asked(release(complete=complete)))
    assert isinstance(ended, OfferEnded)
    assert ended.end is (OfferEnd.READ if complete else OfferEnd.ABORTED)
    assert not rank.is_valid(grant)


def test_a_slot_that_one_tick_closes_may_be_granted_in_that_tick(rank: Rank) -> None:
    """The rank carries out the actions of an event after it. None may clear the new grant."""
    for nonce in nonces(COUNT):
        rank.grant(asks(rank.found(1, offer=nonce), nonce=nonce))
    rank.handle(asks(rank.found(2, steps=2, need=2)), NOW + LEASE_S - 2 * LOOK_S)
    rank.step(2)
    assert rank.is_valid(rank.grant(Tick(), NOW + LEASE_S))
    assert len(rank.slots) == 1


def test_a_restart_and_another_life_forget_all(rank: Rank) -> None:
    grant = rank.grant(asks(rank.found(1)))
    rank.handle(asks(rank.found(1, need=5, offer=NONCE2), nonce=NONCE2))
    rank.page.clear_all()
    assert rank.machine.clear() == []
    assert not rank.is_valid(grant)
    assert (len(rank.part), len(rank.slots), rank.part.next_due) == (0, 0, math.inf)
    rank.grant(asks(rank.found(1)))
    assert rank.machine.begin_life(OTHER_LIFE) == []
    rank.machine.check()
    rank.grant(asks(rank.found(1), incarnation=OTHER_LIFE))


def test_early_requests_hear_nothing_of_it() -> None:
    early = EarlyPart(10.0, lambda _slot: CLEAR)
    rank = Rank(early)
    grant = rank.grant(asks(rank.found(1)))
    assert rank.is_valid(grant)
    assert len(early.asks) == 0
    assert rank.step(1) == denied(WITHDRAWN)
    rank.grant(asks(rank.found(1, offer=NONCE2), nonce=NONCE2))
    (ended,) = rank.handle(asked(release(nonce=NONCE2, complete=False)))
    assert isinstance(ended, OfferEnded)


def test_a_digest_is_told_while_its_slot_is_valid() -> None:
    rank = Rank(DigestPart())
    rank.grant(asks(rank.found(1)))
    request = digest_request(end=ENTRY)
    (made,) = rank.handle(asked(request))
    assert isinstance(made, MakeDigest)
    rank.step(1)
    (told,) = rank.handle(asked(request))
    assert isinstance(told, Reply)
    assert isinstance(told.message, Deny)


def test_a_digest_is_not_told_once_a_step_may_have_written_the_blocks() -> None:
    """The caller's thread may begin a step while the digest is made. The reader's own bytes, of
    before, would look corrupt."""
    rank = Rank(DigestPart())
    rank.grant(asks(rank.found(1)))
    request = digest_request(end=ENTRY)
    made = DigestMade(ROUTE, request, rows=SUMS * 4, columns=SUMS)
    assert rank.handle(made) == [replied(digest_reply())]
    commands = rank.slots.before_step([BlocksTaken(rank.at + 1, Table.of([1]).ids)])
    assert commands == [WithdrawOffer(NONCE)], "the transfer thread has not had it yet"
    assert rank.handle(made) == [replied(deny())]


def test_a_digest_request_that_comes_before_the_grant_is_repeated() -> None:
    rank = Rank(DigestPart())
    rank.handle(asks(rank.found(1, need=5)))
    assert rank.handle(asked(digest_request(end=ENTRY))) == []


def test_a_broken_promise_is_told(rank: Rank) -> None:
    rank.grant(asks(rank.found(1)))
    rank.slots._offers[0] = None
    with pytest.raises(LocalProtocolError, match=r"cached blocks: slots \{\}, offers \{0: "):
        rank.machine.check()
    rank.slots._offers[0] = NONCE
    rank.handle(asks(rank.found(1, need=5, offer=NONCE2), nonce=NONCE2))
    rank.part.next_due = math.inf
    with pytest.raises(LocalProtocolError, match="1 asks wait without a deadline"):
        rank.machine.check()
