"""The prefill machine under commands and messages in any order that its caller allows."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.ids import Generation, Nonce, Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import Grant, Reader, ToRank
from nixl_kv.protocol.prefill.machine import PrefillMachine
from support.records import (
    CLAIM,
    LEASE_S,
    RANK_LIFE,
    RIVAL,
    STRANGER,
    ask,
    asked,
    hex32,
    no_record,
    prepare_offer,
    publish_offer,
    reader,
    release,
    renew,
)

Item = TypeVar("Item")

TTL_S = 10.0
READERS = (reader(0), reader(1))
WRONG_READERS = (STRANGER, reader(2))


class World:
    """An offer may be prepared again until its prompt is finished. Then its ticket leaves, and
    readers may send messages about it; its publication comes later.

    Each step takes a number, by which it chooses.
    """

    def __init__(self) -> None:
        self.machine = PrefillMachine(
            RANK_LIFE, no_record, num_slots=2, offer_ttl_s=TTL_S, lease_s=LEASE_S
        )
        self.now = 100.0
        self.nonces = (Nonce(hex32(number)) for number in itertools.count())
        self.numbers = itertools.count()
        self.prepared: list[Nonce] = []
        self.finished: list[Nonce] = []
        self.published: list[Nonce] = []
        self.ends: Counter[Nonce] = Counter()
        self.slots: dict[int, Generation] = {}
        self.grants: dict[Nonce, Grant] = {}
        self.leases: dict[Nonce, dict[Rank, float]] = {}  # of readers that have not ended

    def handle(self, event: events.PrefillEvent) -> None:
        for action in self.machine.handle(event, self.now):
            match action:
                case events.WriteSlot():
                    assert action.slot not in self.slots, "a slot is written only when clear"
                    assert action.generation not in self.slots.values()
                    self.slots[action.slot] = action.generation
                case events.ClearSlot():
                    del self.slots[action.slot]
                case events.Reply(message=Grant() as grant):
                    assert self.slots[grant.slot] == grant.generation, "the slot is written first"
                    self.grants[grant.nonce] = grant
                    self.extend(grant.nonce, grant.reader)
                case events.OfferEnded():
                    self.on_end(action)

    def on_end(self, action: events.OfferEnded) -> None:
        self.ends[action.nonce] += 1
        grant = self.grants.get(action.nonce)
        if grant is not None:
            assert grant.generation not in self.slots.values(), "the slot is cleared first"
            leases = self.leases.get(action.nonce, {}).values()
            assert all(until <= self.now for until in leases), "nobody may be reading"

    def check(self) -> None:
        self.machine.offers.validate()
        offers = self.machine.offers.all()
        bindings = [offer.binding for offer in offers if offer.binding is not None]
        assert self.slots == {binding.slot: binding.generation for binding in bindings}
        alive = Counter(offer.nonce for offer in offers)
        known = [*self.prepared, *self.finished]
        assert alive + self.ends == Counter(known), "each offer lives, or has ended once"

    # --- the caller

    def prepare(self, pick: int) -> None:
        """Now and then one is prepared again."""
        if not self.prepared or pick % 4:
            self.prepared.append(next(self.nonces))
        nonce = self.prepared[-1]
        self.handle(prepare_offer(nonce=nonce, request=RequestId(nonce)))

    def finish(self, pick: int) -> None:
        if self.prepared:
            self.finished.append(self.prepared.pop(pick % len(self.prepared)))

    def withdraw(self, pick: int) -> None:
        if self.prepared:
            self.handle(events.WithdrawOffer(self.prepared.pop(pick % len(self.prepared))))

    def publish(self, _pick: int) -> None:
        for nonce in self.finished[len(self.published) :]:
            self.published.append(nonce)
            self.handle(publish_offer(nonce, RequestId(nonce)))

    def revoke(self, pick: int) -> None:
        if self.published:
            self.handle(events.RevokeOffer(one(self.published, pick)))

    # --- readers

    def ask(self, pick: int) -> None:
        if self.finished:
            nonce, who = one(self.finished[-4:], pick), one(READERS, pick // 4)
            ranks = one([(0, 1), (0, 1), (0,)], pick // 8)
            number = next(self.numbers)
            is_first = nonce not in self.grants
            self.handle(asked(ask(nonce=nonce, reader=who, readers=ranks, number=number)))
            if is_first and nonce in self.grants:
                self.leases[nonce] = dict.fromkeys(map(Rank, ranks), self.now + LEASE_S)

    def extend(self, nonce: Nonce, who: Reader) -> None:
        leases = self.leases.get(nonce, {})
        if who.rank in leases:
            leases[who.rank] = self.now + LEASE_S

    def release(self, pick: int) -> None:
        if self.finished:
            nonce, who = one(self.finished[-4:], pick), one(READERS, pick // 4)
            self.leases.get(nonce, {}).pop(who.rank, None)
            message = release(complete=pick % 3 > 0, nonce=nonce, reader=who)
            self.handle(asked(message))

    def renew(self, pick: int) -> None:
        claims, who = one([(CLAIM,), (CLAIM,), (CLAIM, RIVAL), ()], pick // 2), one(READERS, pick)
        for nonce, leases in self.leases.items():
            if CLAIM in claims:
                self.extend(nonce, who)
            else:
                leases.pop(who.rank, None)
        self.handle(asked(renew(next(self.numbers), *claims, reader=who)))

    def intrude(self, pick: int) -> None:
        """A message of somebody who is not expected, or with another claim."""
        if self.finished:
            nonce, who = one(self.finished[-4:], pick), one([*WRONG_READERS, *READERS], pick // 4)
            claim = CLAIM if who in WRONG_READERS else RIVAL
            messages: list[ToRank] = [
                ask(nonce=nonce, claim=claim, reader=who, readers=(who.rank,)),
                release(nonce=nonce, claim=claim, reader=who),
                renew(0, claim, reader=who),
            ]
            self.handle(asked(one(messages, pick // 20)))

    def wait(self, pick: int) -> None:
        self.tick(one([0.1, 0.5, LEASE_S / 2, LEASE_S, TTL_S / 2], pick))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.handle(events.Tick())
        for leases in self.leases.values():
            for rank in [rank for rank, until in leases.items() if until <= self.now]:
                del leases[rank]

    def end(self) -> None:
        """Finish and publish what is prepared, and let all time pass."""
        while self.prepared:
            self.finish(0)
        self.publish(0)
        self.tick(TTL_S)
        self.check()
        assert self.machine.offers.all() == []
        assert self.slots == {}


def one(items: Sequence[Item], pick: int) -> Item:
    return items[pick % len(items)]


STEPS = (
    *[World.prepare] * 3,
    *[World.finish] * 3,
    *[World.publish] * 2,
    *[World.ask] * 8,
    *[World.release] * 3,
    *[World.renew] * 3,
    *[World.wait] * 2,
    World.intrude,
    World.withdraw,
    World.revoke,
)
"""The frequent ones more often."""


@given(day=st.binary(min_size=100, max_size=300))
def test_in_any_order_each_offer_ends_once_and_after_its_slot_is_cleared(day: bytes) -> None:
    """Each pair of bytes is a step, and what it chooses."""
    world = World()
    for which, pick in zip(day[::2], day[1::2], strict=False):
        STEPS[which % len(STEPS)](world, pick)
        world.check()
    world.end()
