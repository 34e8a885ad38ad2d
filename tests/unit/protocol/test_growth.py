"""A message or a tick makes as many calls for many held requests as for few."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from harness.local.model_layouts import EngineShape, ModelShape, build_layouts
from nixl_kv.geometry.layout import Table
from nixl_kv.geometry.match import ParallelShape, Route
from nixl_kv.ids import (
    Claim,
    EngineId,
    FenceToken,
    Incarnation,
    Nonce,
    Rank,
    RequestId,
    endpoint_at,
    engine_incarnation,
)
from nixl_kv.protocol import events, messages
from nixl_kv.protocol.prefill import PrefillMachine
from nixl_kv.protocol.ticket import Ticket
from support.records import hex32
from support.scripts import decode_machine

FEW, MANY = 20, 400
ENGINES = 10
LEASE_S = 5.0
TABLES = (Table.of([1, 2, 3]),)
CONTEXT = "0" * 32
READER = messages.Reader(engine=EngineId("decode"), incarnation=Incarnation("f" * 32), rank=Rank(0))


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


def decode_calls(held: int) -> dict[str, int]:
    """A decode rank that reads `held` requests from some engines."""
    machine = decode_machine(reader=READER, heartbeat_interval_s=0.8, slices=())
    asks: list[events.Send] = []
    for number in range(held):
        engine = number % ENGINES
        life = engine_incarnation([Incarnation(hex32(engine + 1))])
        ticket = Ticket(
            engine=EngineId(str(engine)),
            host="127.0.0.1",
            port=6000 + engine,
            incarnation=life,
            nonce=Nonce(hex32(number)),
            num_tokens=100,
            context=CONTEXT,
        )
        request = events.PrepareLoad(RequestId(str(number)), ticket, Claim(hex32(number)))
        actions = machine.handle(request, 0.0)
        if any(isinstance(getattr(one, "message", None), messages.Describe) for one in actions):
            actions = machine.handle(joined(ticket), 0.0)
        asks += [one for one in actions if isinstance(one, events.Send)]
    grants = [grant_of(sent) for sent in asks if isinstance(sent.message, messages.Ask)]
    assert len(grants) == held
    for grant in grants[1:]:
        machine.handle(grant, 0.1)
    cancel = events.CancelLoad(RequestId("0"))
    return {
        "grant": calls_of(lambda: machine.handle(grants[0], 0.1)),
        "tick": calls_of(lambda: machine.handle(events.Tick(), 0.11)),
        "cancel": calls_of(lambda: machine.handle(cancel, 0.3)),
    }


def joined(ticket: Ticket) -> events.PeerFits:
    key = events.PeerKey(ticket.engine, ticket.incarnation, ticket.endpoint)
    (layout,) = build_layouts(ModelShape(2, 2, (64, 64), "bfloat16"), EngineShape(num_blocks=10))
    rank = messages.RankDescription(
        incarnation=Incarnation(hex32(int(ticket.engine) + 1)),
        endpoint=endpoint_at("127.0.0.1", 7000 + int(ticket.engine)),
        agent=b"agent",
        slots=messages.Slots(address=4096, count=64),
        layout=layout,
    )
    description = messages.Description(
        incarnation=ticket.incarnation,
        engine=ticket.engine,
        model={"model": "any"},
        shape=ParallelShape(1, 1),
        ranks=(rank,),
    )
    share = {region.layer: region.heads for region in layout.groups[0].regions}
    return events.PeerFits(key, description, (Route(Rank(0), (Rank(0),), share),))


def grant_of(sent: events.Send) -> events.Answered:
    ask: Any = sent.message
    grant = messages.Grant(
        incarnation=ask.incarnation,
        nonce=ask.nonce,
        claim=ask.claim,
        reader=ask.reader,
        lease_s=LEASE_S,
        tables=TABLES,
        slot=0,
        fence_token=FenceToken(b"\1" * 16),
    )
    return events.Answered(sent.endpoint, grant)


def prefill_calls(held: int) -> dict[str, int]:
    """A prefill rank that has granted `held` requests, each to another reader."""
    settings: dict[str, Any] = {"num_slots": held + 1, "offer_ttl_s": 60, "hold_s": 60}
    life = Incarnation(hex32(9))
    machine = PrefillMachine(life, lambda _: None, lease_s=LEASE_S, **settings)

    def asked(kind: Any, of: int, /, **fields: Any) -> Callable[[], Sequence[events.Action]]:
        engine = EngineId(f"d{of}")
        reader = messages.Reader(engine=engine, incarnation=READER.incarnation, rank=Rank(0))
        message = kind(incarnation=life, reader=reader, **fields)
        return lambda: machine.handle(events.Asked(b"%d" % of, message), 0.1)

    def ask(number: int) -> Callable[[], Sequence[events.Action]]:
        names = {"nonce": Nonce(hex32(number)), "claim": Claim(hex32(number))}
        return asked(messages.Ask, number, **names, context=CONTEXT, number=1, readers=(0,))

    for number in range(held + 1):
        nonce, request = Nonce(hex32(number)), RequestId(f"p{number}")
        machine.handle(events.PrepareOffer(nonce, request, CONTEXT, 100, TABLES), 0.0)
        machine.handle(events.PublishOffer(nonce, request), 0.0)
        if number < held:
            ask(number)()
    claim = Claim(hex32(held))
    renew = asked(messages.Heartbeat, held, number=2, claims=(claim,), num_reading=0)
    release = asked(messages.Release, held, nonce=hex32(held), claim=claim, complete=True)
    return {
        "ask": calls_of(ask(held)),
        "renew": calls_of(renew),
        "tick": calls_of(lambda: machine.handle(events.Tick(), 0.2)),
        "release": calls_of(release),
    }


@pytest.mark.parametrize("measured", [decode_calls, prefill_calls])
def test_calls_do_not_grow_with_what_is_held(measured: Callable[[int], dict[str, int]]) -> None:
    few, many = measured(FEW), measured(MANY)
    assert all(count > 0 for count in few.values())
    grown = {what: (few[what], many[what]) for what in few if many[what] > 1.2 * few[what] + 5}
    assert grown == {}
