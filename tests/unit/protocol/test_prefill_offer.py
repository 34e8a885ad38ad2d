"""One offer: its transitions, what it records of them, and what it says of itself."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from harness.local.offers import check_offer
from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, FenceToken, Rank
from nixl_kv.protocol.events import (
    OVER,
    ReclaimBlocks,
    RevokeOffer,
    Tick,
    Transition,
    WithdrawOffer,
)
from nixl_kv.protocol.messages import Reader
from nixl_kv.protocol.prefill import TRANSITIONS, Binding, Offer, State, reader_name
from support.records import (
    CLAIM,
    DECODE,
    NONCE,
    OTHER_LIFE,
    P1,
    READER,
    RIVAL,
    STRANGER,
    ask,
    no_record,
    prepare_offer,
    publish_offer,
    reader,
    release,
    renew,
)

EVENTS = [
    *[prepare_offer(), publish_offer(), WithdrawOffer(NONCE), RevokeOffer(NONCE)],
    *[ask(), release(), renew(1), Tick(), ReclaimBlocks(1)],
]


def new_offer(record: Callable[[Transition], None] = no_record, **changed: Any) -> Offer:
    offer = Offer(prepare_offer(), record)
    for name, value in changed.items():
        setattr(offer, name, value)
    return offer


def new_binding(*ranks: int, ended: set[int] | None = None) -> Binding:
    """Of these reader ranks, with leases that end at second 10, 11, ..."""
    leases = {Rank(rank): 10.0 + rank for rank in ranks or (0,)}
    return Binding(
        CLAIM,
        DECODE,
        slot=0,
        fence_token=FenceToken(bytes(16)),
        leases=leases,
        held_until=20.0,
        ended=set(map(Rank, ended or ())),
    )


# Transitions


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_only_transitions_of_the_table_are_possible(state: State, event: object) -> None:
    recorded: list[Transition] = []
    offer = new_offer(recorded.append, state=state)
    recorded.clear()
    name = type(event).__name__
    for after in {*State, None}.difference(TRANSITIONS[state].get(type(event), ())):
        to = after.name if after else OVER
        words = (
            rf"^offer \(request 'p1', peer ''\): {name} leads from {state.name} to {to}; allowed: "
        )
        with pytest.raises(LocalProtocolError, match=words):
            offer.move(after, event)
    assert (offer.state, recorded) == (state, [])


def test_a_transition_names_peer_and_detail() -> None:
    recorded: list[Transition] = []
    offer = new_offer(recorded.append)
    offer.move(State.GRANTED, ask(), peer=reader_name(READER))
    offer.move(None, release(), peer="engine 'decode'", detail="read")
    assert recorded == [
        Transition(P1, "", "", "PREPARED", "PrepareOffer: offer 00000000"),
        Transition(P1, "engine 'decode', rank 0", "PREPARED", "GRANTED", "Ask"),
        Transition(P1, "engine 'decode'", "GRANTED", OVER, "Release: read"),
    ]


# Readers


@pytest.mark.parametrize(
    ("claim", "who", "expected"),
    [
        pytest.param(CLAIM, READER, True, id="one that has asked"),
        pytest.param(CLAIM, reader(1), True, id="one that has not asked"),
        pytest.param(CLAIM, reader(1, incarnation=OTHER_LIFE), True, id="one in any life"),
        pytest.param(RIVAL, READER, False, id="another claim"),
        pytest.param(CLAIM, STRANGER, False, id="another engine"),
        pytest.param(CLAIM, reader(2), False, id="one that has ended"),
        pytest.param(CLAIM, reader(3), False, id="one that was not announced"),
        pytest.param(CLAIM, reader(incarnation=OTHER_LIFE), False, id="another life"),
    ],
)
def test_which_readers_are_expected(claim: Claim, who: Reader, *, expected: bool) -> None:
    binding = new_binding(0, 1, 2, ended={2})
    binding.asked[READER.rank] = ask()
    assert binding.expects(claim, who) is expected


# What it says of itself


@pytest.mark.parametrize(
    ("offer", "waits_for", "expires_at"),
    [
        pytest.param(new_offer(), "its ticket", math.inf, id="prepared"),
        pytest.param(
            new_offer(state=State.OFFERED, ends_at=7.0), "a reader's ask", 7.0, id="offered"
        ),
        pytest.param(
            new_offer(state=State.GRANTED, binding=new_binding(0, 1, 2, ended={2})),
            "engine 'decode', ranks 0, 1",
            11.0,
            id="granted",
        ),
    ],
)
def test_an_offer_in_order_says_what_it_waits_for_and_until_when(
    offer: Offer, waits_for: str, expires_at: float
) -> None:
    check_offer(offer)
    assert offer.waits_for == waits_for
    assert offer.due_at(max) == expires_at


@pytest.mark.parametrize(
    ("offer", "error"),
    [
        pytest.param(new_offer(state=State.GRANTED), "GRANTED with binding None", id="unbound"),
        pytest.param(new_offer(binding=new_binding()), "PREPARED with binding", id="bound"),
        pytest.param(new_offer(state=State.OFFERED), "OFFERED with an end at inf", id="endless"),
        pytest.param(new_offer(ends_at=1.0), "PREPARED with an end at 1.0", id="ends early"),
        pytest.param(
            new_offer(state=State.GRANTED, binding=new_binding(0, ended={0})),
            "GRANTED, but all readers have ended",
            id="without a reader",
        ),
    ],
)
def test_an_offer_that_contradicts_itself_is_invalid(offer: Offer, error: str) -> None:
    with pytest.raises(LocalProtocolError, match=error):
        check_offer(offer)
