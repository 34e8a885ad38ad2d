"""A message or a tick makes as many calls for many held requests as for few."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from nixl_kv.feature import Feature
from nixl_kv.ids import Claim, EngineId, Incarnation, Nonce, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.prefill import PrefillMachine
from support.features import features_of_a_rank
from support.records import (
    LEASE_S,
    RANK_LIFE,
    answered,
    ask,
    asked,
    at,
    cancel_load,
    description,
    grant,
    hex32,
    no_record,
    prepare_load,
    prepare_offer,
    publish_offer,
    rank_description,
    reader,
    release,
    renew,
    routes,
    ticket,
)
from support.scripts import decode_machine

FEW, MANY = 20, 400
ENGINES = 10


def calls_of(step: Callable[[], object]) -> int:
    """Calls of Python and of C functions."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def names(number: int) -> dict[str, Any]:
    return {"nonce": Nonce(hex32(number)), "claim": Claim(hex32(number))}


def decode_calls(held: int, features: Sequence[Feature]) -> dict[str, int]:
    """A decode rank that reads `held` requests from some engines."""
    parts = [each.load for each in features if each.load is not None]
    machine = decode_machine(heartbeat_interval_s=0.8, parts=parts)
    lives = [Incarnation(hex32(engine + 1)) for engine in range(ENGINES)]
    grants = []
    for number in range(held):
        engine = number % ENGINES
        target: dict[str, Any] = {"engine": EngineId(str(engine)), "incarnation": lives[engine]}
        target |= {"port": 6000 + engine, "nonce": hex32(number)}
        machine.handle(prepare_load(RequestId(str(number)), names(number)["claim"], **target), 0.0)
        if number < ENGINES:
            machine.handle(described(ticket(**target)), 0.0)
        grants.append(
            answered(grant(**names(number), incarnation=lives[engine], lease_s=5.0), at(engine))
        )
    for each in grants[1:]:
        machine.handle(each, 0.1)
    return {
        "grant": calls_of(lambda: machine.handle(grants[0], 0.1)),
        "tick": calls_of(lambda: machine.handle(events.Tick(), 0.11)),
        "cancel": calls_of(lambda: machine.handle(cancel_load(RequestId("0")), 0.3)),
    }


def described(of: Any) -> events.PeerFits:
    rank = msgspec.structs.replace(rank_description(int(of.engine)), incarnation=of.incarnation)
    engine = msgspec.structs.replace(
        description(), engine=of.engine, incarnation=of.incarnation, ranks=(rank,)
    )
    key = events.PeerKey(of.engine, of.incarnation, of.endpoint)
    return events.PeerFits(key, engine, routes(0))


def prefill_calls(held: int, features: Sequence[Feature]) -> dict[str, int]:
    """A prefill rank that has granted `held` requests, each to another reader."""
    machine = PrefillMachine(
        RANK_LIFE,
        no_record,
        num_slots=held + 1,
        offer_ttl_s=60,
        lease_s=LEASE_S,
        hold_s=60,
        parts=[each.prefill for each in features if each.prefill is not None],
    )

    def by(number: int, message: Any) -> Callable[[], object]:
        who = reader(engine=f"d{number}")
        event = asked(msgspec.structs.replace(message, reader=who), b"%d" % number)
        return lambda: machine.handle(event, 0.1)

    for number in range(held + 1):
        nonce, request = names(number)["nonce"], RequestId(f"p{number}")
        machine.handle(prepare_offer(nonce=nonce, request=request), 0.0)
        machine.handle(publish_offer(nonce, request), 0.0)
        if number < held:
            by(number, ask(**names(number)))()
    return {
        "ask": calls_of(by(held, ask(**names(held)))),
        "renew": calls_of(by(held, renew(2, names(held)["claim"]))),
        "tick": calls_of(lambda: machine.handle(events.Tick(), 0.2)),
        "release": calls_of(by(held, release(**names(held)))),
    }


@pytest.mark.parametrize("measured", [decode_calls, prefill_calls])
@pytest.mark.parametrize("has_features", [False, True], ids=["alone", "with all features"])
def test_calls_do_not_grow_with_the_offers_and_loads_held(
    measured: Callable[[int, Sequence[Feature]], dict[str, int]], *, has_features: bool
) -> None:
    with features_of_a_rank() as features:
        few = measured(FEW, features if has_features else ())
    with features_of_a_rank() as features:
        many = measured(MANY, features if has_features else ())
    assert all(count > 0 for count in few.values())
    grown = {what: (few[what], many[what]) for what in few if many[what] > 1.2 * few[what] + 5}
    assert grown == {}
