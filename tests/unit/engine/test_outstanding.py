"""What is owed to the caller: each report exactly once, whatever comes in which order."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import pytest

from nixl_kv.engine.loop import Outstanding
from nixl_kv.ids import Nonce
from nixl_kv.protocol.events import (
    FailureKind,
    LoadEnded,
    OfferEnd,
    OfferEnded,
    Result,
    WithdrawOffer,
)
from support.records import D1, D2, NONCE, NONCE2, P1, prepare_offer, publish_offer, start_load

LOST, READ = OfferEnd.LOST, OfferEnd.READ


# --- offers


class OneOffer:
    """An offer as the prefill machine holds it, and what the caller was told of it."""

    def __init__(self) -> None:
        self.results: deque[Result] = deque()
        self.outstanding = Outstanding(self.results)
        self.held: set[Nonce] = set()

    @property
    def reports(self) -> list[OfferEnd]:
        return [report.end for report in self.results if isinstance(report, OfferEnded)]

    def do(self, step: str) -> None:
        match step:
            case "prepare":
                self.held.update({NONCE} if self.outstanding.admit(prepare_offer()) else ())
            case "publish":
                assert not self.outstanding.admit(publish_offer()) or self.held
            case "withdraw":
                self.held.difference_update({NONCE} if self.outstanding.admit(WITHDRAW) else ())
            case "end" if self.held:  # a reader has read it
                self.held.clear()
                self.outstanding.settle(OfferEnded(NONCE, P1, READ))
            case "restart":
                self.held.clear()
                self.outstanding.lose_machines()


WITHDRAW = WithdrawOffer(NONCE)
COMMANDS = [("prepare", "publish"), ("prepare", "withdraw"), ("prepare",)]
"""What the scheduler can say of an offer, in its order."""


def interleavings(commands: Sequence[str]) -> Iterator[list[str]]:
    """The commands, with up to three ends and restarts anywhere among them."""
    for count in range(4):
        size = len(commands) + count
        for others in itertools.product(("end", "restart"), repeat=count):
            for places in itertools.combinations(range(size), count):
                chosen = dict(zip(places, others, strict=True))
                remaining = iter(commands)
                yield [chosen.get(place) or next(remaining) for place in range(size)]


@pytest.mark.parametrize("commands", COMMANDS, ids=" ".join)
def test_in_every_order_a_published_offer_that_ended_is_reported_once(
    commands: tuple[str, ...],
) -> None:
    """By its first end after it was prepared, and by no other one."""
    for steps in interleavings(commands):
        offer = OneOffer()
        ends: list[OfferEnd] = []
        for number, step in enumerate(steps):
            offer.do(step)
            if step in ("end", "restart") and "prepare" in steps[:number]:
                ends.append(READ if step == "end" else LOST)
            assert not (ends and offer.held), f"{steps}: these blocks may be free by now"
        assert offer.reports == (ends[:1] if "publish" in steps else []), steps


@pytest.mark.parametrize(
    ("step", "reports"), [("publish", [LOST]), ("withdraw", []), ("restart", [])]
)
def test_an_offer_that_was_never_prepared_is_lost(step: str, reports: list[OfferEnd]) -> None:
    offer = OneOffer()
    offer.do(step)
    assert offer.reports == reports


def test_offers_are_told_apart_by_their_nonce() -> None:
    """A request may be offered again under the same id."""
    results: deque[Result] = deque()
    outstanding = Outstanding(results)
    for nonce in (NONCE, NONCE2):
        outstanding.admit(prepare_offer(nonce=nonce))
    outstanding.admit(publish_offer(NONCE2))
    ends = [OfferEnded(nonce, P1, READ) for nonce in (NONCE, NONCE2)]
    assert [outstanding.settle(end) for end in ends] == [False, True]
    assert list(results) == ends[1:]


# --- loads


def ended(num_tokens: int = 7) -> LoadEnded:
    return LoadEnded(D1, num_tokens, None)


def test_in_every_order_a_load_is_reported_once_and_when_nothing_can_write_any_more() -> None:
    """By the machine that holds it, or, if that is gone, when its reads have ended."""
    for steps in itertools.product(("end", "restart", "reads end", "turn"), repeat=5):
        results: deque[Result] = deque()
        outstanding = Outstanding(results)
        outstanding.admit(start_load())
        is_held = is_read = True
        for step in (*steps, "reads end", "end", "turn"):
            if step == "end" and is_held and not is_read:
                is_held = False
                outstanding.settle(ended())
            elif step == "restart":
                is_held = False
                outstanding.lose_machines()
            elif step == "reads end":
                is_read = False
            elif step == "turn":
                orphans = outstanding.drained({D1: is_read}.__getitem__)
                assert not orphans or not (is_held or is_read), steps
                for orphan in orphans:
                    outstanding.settle(orphan)
            assert len(results) + len(outstanding) == 1, steps
        assert len(results) == 1, steps


def test_an_orphans_report_says_that_the_thread_died() -> None:
    outstanding = Outstanding(deque())
    outstanding.admit(start_load(D1, 7))
    outstanding.admit(start_load(D2, 5))
    outstanding.lose_machines()
    assert outstanding.orphans == {D1, D2}
    (report,) = outstanding.drained(lambda request: request == D1)
    assert (report.request, report.num_tokens) == (D2, 5)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.INTERNAL
    assert outstanding.settle(report)
    assert outstanding.orphans == {D1}
    assert repr(outstanding) == "<Outstanding: 1 loads (1 orphans), 0 offers>"


def test_a_load_that_was_not_started_is_not_reported() -> None:
    assert not Outstanding(deque()).settle(ended())
