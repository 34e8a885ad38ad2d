"""The results that a rank owes, for the offers of pairs."""

from collections import deque

from nixl_kv.engine.loop import Outstanding
from nixl_kv.protocol.events import OfferEnd, OfferEnded, OfferGranted, Result, WithdrawOffer
from support.records import NONCE, NONCE2, P1, prepare_offer, publish_offer


def test_an_offer_that_was_read_before_a_preemption_is_reported_as_read() -> None:
    results: deque[Result] = deque()
    outstanding = Outstanding(results)
    assert outstanding.admit(prepare_offer(is_early=True))
    outstanding.settle(OfferEnded(NONCE, P1, OfferEnd.READ))
    assert not outstanding.admit(WithdrawOffer(NONCE, is_final=False))
    assert not outstanding.admit(prepare_offer(is_early=True))
    assert not outstanding.admit(publish_offer())
    assert list(results) == [OfferEnded(NONCE, P1, OfferEnd.READ)]


READ = OfferEnded(NONCE, P1, OfferEnd.READ)
GRANTED = OfferGranted(P1)


def test_a_grant_is_reported_once_while_the_blocks_are_pinned() -> None:
    results: deque[Result] = deque()
    outstanding = Outstanding(results)
    outstanding.grant(NONCE2)
    for _ in range(2):  # a second request may have the nonce of a pair that has ended
        outstanding.admit(prepare_offer())
        outstanding.admit(publish_offer())
        outstanding.grant(NONCE)
        outstanding.grant(NONCE)  # to another rank
        outstanding.settle(READ)
        outstanding.grant(NONCE)
    assert list(results) == [GRANTED, READ] * 2


def test_a_grant_of_a_part_is_reported_with_the_ticket() -> None:
    results: deque[Result] = deque()
    outstanding = Outstanding(results)
    outstanding.admit(prepare_offer(is_early=True))
    outstanding.grant(NONCE)
    outstanding.admit(WithdrawOffer(NONCE, is_final=False))
    outstanding.admit(prepare_offer(is_early=True))
    outstanding.admit(publish_offer())
    assert not results, "the grant was taken back"
    outstanding.settle(READ)
    outstanding.admit(prepare_offer(is_early=True))
    outstanding.grant(NONCE)
    outstanding.admit(publish_offer())
    assert list(results) == [READ, GRANTED]


def test_a_part_that_was_read_before_the_ticket_left_is_not_reported_as_granted() -> None:
    results: deque[Result] = deque()
    outstanding = Outstanding(results)
    outstanding.admit(prepare_offer(is_early=True))
    outstanding.grant(NONCE)
    outstanding.settle(READ)
    outstanding.admit(publish_offer())
    assert list(results) == [READ]
    assert not outstanding._granted
