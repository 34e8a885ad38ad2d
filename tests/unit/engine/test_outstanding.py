"""The results that a rank owes, for the offers of pairs."""

from collections import deque

from nixl_kv.engine.loop import Outstanding
from nixl_kv.protocol.events import OfferEnd, OfferEnded, Result, WithdrawOffer
from support.records import NONCE, P1, prepare_offer, publish_offer


def test_an_offer_that_was_read_before_a_preemption_is_reported_as_read() -> None:
    results: deque[Result] = deque()
    outstanding = Outstanding(results)
    assert outstanding.admit(prepare_offer(is_pair=True))
    outstanding.settle(OfferEnded(NONCE, P1, OfferEnd.READ))
    assert not outstanding.admit(WithdrawOffer(NONCE, is_final=False))
    assert not outstanding.admit(prepare_offer(is_pair=True))
    assert not outstanding.admit(publish_offer())
    assert list(results) == [OfferEnded(NONCE, P1, OfferEnd.READ)]
