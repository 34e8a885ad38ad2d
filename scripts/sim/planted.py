"""Protocol bugs, planted one at a time into the running code: the simulator has to find each.

Each is what somebody might write, or leave out. None of them is kept from doing harm by a second
defence, or the schedules would be right to pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from nixl_kv.connector import agents, ledger, reading, reports
from nixl_kv.ids import Generation, Rank
from nixl_kv.protocol import (
    events,
    offers,
    receiving,
    request,
    requests,
    sender,
    sending,
)
from nixl_kv.transport import slots
from sim import planted_proofs
from sim.early import EarlyChecks
from sim.fabric import Background
from sim.planting import Planted, replaced


def slot_cleared_last() -> Planted:
    """The offer is reported before its slot is cleared."""
    return replaced(
        offers.Offers, "settle", lambda before: lambda *args: list(reversed(before(*args)))
    )


def same_generation() -> Planted:
    """Every grant has the same generation."""
    return patch.object(offers, "new_generation", lambda: Generation(b"\x01" * 16))


def readers_counted() -> Planted:
    """A done or abort ends one reader more, whoever sent it."""

    def make(before: Any) -> Any:
        def ended(self: Any, message: Any, how: Any) -> Any:
            offer = self.offers.get(message.nonce)
            if offer is None or offer.binding is None:
                return before(self, message, how)
            left = sorted(set(offer.binding.leases) - offer.binding.ended)
            offer.binding.ended.add(left[0])
            return self.offers.settle(offer, how)

        return ended

    return replaced(sender.Sender, "_ended", make)


def claim_ignored() -> Planted:
    """Whoever has the nonce is granted, and believed, whatever its claim and engine are."""

    def expects(self: Any, claim: str, reader: Any) -> bool:
        del claim
        return reader.rank in self.leases and reader.rank not in self.ended

    return patch.object(sending.Binding, "expects", expects)


def former_life_heard() -> Planted:
    """A renew that is meant for a former life of the rank counts for this one."""

    def make(before: Any) -> Any:
        def renew(self: Any, message: Any, now: float) -> Any:
            mine = self._incarnation  # the machine's own
            return before(self, type(message)(message.version, mine, *_rest(message)), now)

        return renew

    return replaced(sender.Sender, "_renew", make)


def _rest(message: Any) -> list[Any]:
    return [getattr(message, name) for name in message.__struct_fields__[2:]]


def aborted_before_drained() -> Planted:
    """A read that nobody wants any more counts as over while it is under way."""
    moves = {**receiving.TRANSITIONS[receiving.State.READING]}
    moves[receiving.Cause.UNWANTED] = receiving.State.FAILED
    return patch.dict(receiving.TRANSITIONS, {receiving.State.READING: moves})


@contextmanager
def reported_twice() -> Iterator[None]:
    """The worker believes the thread, which forgets after its death what it has reported."""

    def make(before: Any) -> Any:
        def note(self: Any, result: Any) -> None:
            self._loading.add(result.loaded.request)
            before(self, result)

        return note

    with (
        patch.object(ledger.Ledger, "paid", lambda self, name: self._orphans.pop(name, None)),
        replaced(reports.Reports, "_note_load", make),
    ):
        yield


def first_reader_ends() -> Planted:
    """An offer is over when the first of its readers has ended."""
    return patch.object(sending.Binding, "all_ended", property(lambda self: bool(self.ended)))


def no_lease_for_the_silent() -> Planted:
    """A reader that never asks has no lease, and is waited for."""

    def make(before: Any) -> Any:
        def bind(self: Any, offer: Any, ask: Any, now: float) -> Any:
            action = before(self, offer, ask, now)
            for rank in () if offer.binding is None else offer.binding.leases:
                if rank != ask.reader.rank:
                    offer.binding.leases[rank] = float("inf")
            return action

        return bind

    return replaced(offers.Offers, "bind", make)


def granted_revoked() -> Planted:
    """An offer is revoked although it was granted meanwhile."""

    def make(before: Any) -> Any:
        def handle(self: Any, event: Any, now: float) -> Any:
            offer = self.offers.get(event.nonce) if isinstance(event, events.Revoke) else None
            if offer is None or offer.binding is None:
                return before(self, event, now)
            return [events.Sent(offer.request, events.How.REVOKED)]

        return handle

    return replaced(sender.Sender, "handle", make)


def reported_before_gone() -> Planted:
    """An agent counts as gone when its end was ordered."""

    def make(before: Any) -> Any:
        def submit(self: Any, call: Any, *args: Any) -> Any:
            future = before(self, call, *args)
            if getattr(call, "__name__", "") != "close":
                return future
            early: Future[None] = Future()
            early.set_result(None)
            return early

        return submit

    return replaced(Background, "submit", make)


def slots_left_standing() -> Planted:
    """After a death of the thread the slots are not cleared."""
    return patch.object(slots.SlotPage, "clear_all", lambda _: None)


def stale_renew() -> Planted:
    """A renew that was sent before the ask takes its claim for released."""

    def make(before: Any) -> Any:
        def renew(self: Any, message: Any, now: float) -> Any:
            for _, binding in self.offers.held_by(message.reader):
                binding.numbers[Rank(message.reader.rank)] = -1
            return before(self, message, now)

        return renew

    return replaced(sender.Sender, "_renew", make)


def slot_believed() -> Planted:
    """Whatever stands in the slot is good."""

    def make(before: Any) -> Any:
        return lambda self, source, _: before(self, source, source.grant.generation)

    return replaced(request.Request, "checked", make)


def orphans_not_drained() -> Planted:
    """After a death of the thread its loads are reported while reads may still write."""
    return patch.object(agents.Agents, "reading", lambda _self, _request: False)


def offers_for_ever() -> Planted:
    """An offer that nobody claims does not end."""
    return replaced(
        offers.Offers,
        "ticket_out",
        lambda before: lambda self, nonce, _now: before(self, nonce, float("inf")),
    )


def old_tables_kept() -> Planted:
    """After a preemption the first blocks are offered."""

    def make(before: Any) -> Any:
        def prepare(self: Any, command: Any) -> None:
            if command.nonce not in self._offers:
                before(self, command)

        return prepare

    return replaced(offers.Offers, "prepare", make)


def dropped_not_reported() -> Planted:
    """A load whose request has ended is not reported."""

    def make(before: Any) -> Any:
        def settle(self: Any, each: Any) -> list[Any]:
            actions = before(self, each)
            return [a for a in actions if not (each.dropped and isinstance(a, events.Loaded))]

        return settle

    return replaced(requests.Requests, "settle", make)


def thread_death_forgets() -> Planted:
    """After a death of the thread its offers are forgotten, not reported."""

    def make(before: Any) -> Any:
        def lose(self: Any) -> tuple[list[Any], list[Any]]:
            return before(self)[0], []

        return lose

    return replaced(ledger.Ledger, "lose", make)


@dataclass(frozen=True)
class Bug:
    """How to plant it, and which profiles give it a chance; none named: all."""

    plant: Callable[[], Planted]
    profiles: Sequence[str] = ()


PLANTED: Final[Mapping[str, Bug]] = {
    "slot cleared after the free": Bug(slot_cleared_last),
    "one generation for all grants": Bug(same_generation),
    "slot checked before data landed": Bug(
        lambda: EarlyChecks.planted(reading.ReadAgent), ["late", "anew"]
    ),
    "slot not compared": Bug(slot_believed, ["late", "lossy"]),
    "readers counted, not named": Bug(readers_counted, ["gentle"]),
    "claim ignored": Bug(claim_ignored, ["gentle"]),
    "former life's renew heard": Bug(former_life_heard, ["anew"]),
    "stale renew number honoured": Bug(stale_renew, ["gentle"]),
    "ended with its first reader": Bug(first_reader_ends, ["gentle"]),
    "no lease for who never asks": Bug(no_lease_for_the_silent),
    "granted offer revoked": Bug(granted_revoked),
    "unclaimed offer never ends": Bug(offers_for_ever),
    "old blocks after preemption": Bug(old_tables_kept, ["gentle", "busy"]),
    "aborted before drained": Bug(aborted_before_drained),
    "reported before agent is gone": Bug(reported_before_gone, ["late"]),
    "dropped load not reported": Bug(dropped_not_reported, ["busy"]),
    "load reported twice": Bug(reported_twice, ["dying", "all"]),
    "restart leaves slots standing": Bug(slots_left_standing, ["all"]),
    "restart reports before drained": Bug(orphans_not_drained, ["dying"]),
    "restart forgets offers": Bug(thread_death_forgets, ["all"]),
    "proven though released": Bug(planted_proofs.proven_though_released, ["busy", "late", "lossy"]),
    "bytes not compared": Bug(planted_proofs.not_compared, ["busy", "late", "lossy"]),
    "difference ignored": Bug(planted_proofs.difference_ignored, ["busy", "late", "lossy"]),
    "digested from the prompt's start": Bug(
        planted_proofs.digested_from_the_start, ["gentle", "busy"]
    ),
    "one proof for all ranks": Bug(planted_proofs.proof_of_one_rank, ["gentle", "busy"]),
}
