"""Bugs, planted one at a time into the running code: the simulator has to find each.

Each is what somebody might write, or leave out. None of them is kept from doing harm by a second
defence, or the schedules would be right to pass.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import msgspec

from lab.sim.data_plane import Background
from nixl_kv.connector import block_pinning, prefill
from nixl_kv.geometry import blocks, digest
from nixl_kv.ids import Generation
from nixl_kv.protocol import events, peers
from nixl_kv.protocol.decode import load, loads
from nixl_kv.protocol.decode import machine as decode_machine
from nixl_kv.protocol.prefill import machine as prefill_machine
from nixl_kv.protocol.prefill import offer, offers
from nixl_kv.transfer import agents, digests, outstanding, read_agent
from nixl_kv.transport import slots

Planted = AbstractContextManager[Any]


def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Planted:
    """An attribute, made anew from what it was."""
    return patch.object(owner, name, make(getattr(owner, name)))


# --- prefill


def slot_cleared_last() -> Planted:
    """The offer is reported before its slot is cleared."""
    return _replaced(
        offers.OfferBook, "settle", lambda before: lambda *args: list(reversed(before(*args)))
    )


def same_generation() -> Planted:
    """Every grant has the same generation."""
    return patch.object(offers, "new_generation", lambda: Generation(b"\x01" * 16))


def readers_counted() -> Planted:
    """A release ends one reader more, whoever sent it."""

    def make(before: Any) -> Any:
        def on_release(self: Any, release: Any) -> Any:
            granted = self.offers.get(release.nonce)
            if granted is None or granted.binding is None:
                return before(self, release)
            granted.binding.ended.add(granted.binding.reading[0])
            return self.offers.settle(granted, release, events.OfferEnd.READ)

        return on_release

    return _replaced(prefill_machine.PrefillMachine, "_on_release", make)


def claim_ignored() -> Planted:
    """Whoever has the nonce is granted, and believed, whatever its claim and engine are."""

    def expects(self: Any, claim: str, reader: Any) -> bool:
        del claim
        return reader.rank in self.leases and reader.rank not in self.ended

    return patch.object(offer.Binding, "expects", expects)


def former_life_heard() -> Planted:
    """A renew that is meant for a former life of the rank counts for this one."""

    def make(before: Any) -> Any:
        def on_renew(self: Any, renew: Any, *args: Any) -> Any:
            mine = msgspec.structs.replace(renew, incarnation=self._incarnation)
            return before(self, mine, *args)

        return on_renew

    return _replaced(prefill_machine.PrefillMachine, "_on_renew", make)


def stale_renew() -> Planted:
    """A renew that was sent before the ask releases the ask's claim."""

    def make(before: Any) -> Any:
        def on_renew(self: Any, renew: Any, *args: Any) -> Any:
            for _, binding in self.offers.held_by(renew.reader):
                binding.numbers[renew.reader.rank] = -1
            return before(self, renew, *args)

        return on_renew

    return _replaced(prefill_machine.PrefillMachine, "_on_renew", make)


def first_reader_ends() -> Planted:
    """An offer is over when the first of its readers has ended."""
    return patch.object(
        offer.Binding, "reading", property(lambda self: [] if self.ended else sorted(self.leases))
    )


def no_lease_for_the_silent() -> Planted:
    """A reader that never asks has no lease, and is waited for."""

    def make(before: Any) -> Any:
        def bind(self: Any, granted: Any, ask: Any, now: float) -> Any:
            action = before(self, granted, ask, now)
            for rank in () if granted.binding is None else granted.binding.leases:
                if rank != ask.reader.rank:
                    granted.binding.leases[rank] = float("inf")
            return action

        return bind

    return _replaced(offers.OfferBook, "bind", make)


def granted_revoked() -> Planted:
    """An offer is revoked although it was granted meanwhile."""

    def make(before: Any) -> Any:
        def revoke(self: Any, command: Any) -> Any:
            granted = self.offers.get(command.nonce)
            if granted is None or granted.binding is None:
                return before(self, command)
            return [events.OfferEnded(granted.nonce, granted.request, events.OfferEnd.REVOKED)]

        return revoke

    return _replaced(prefill_machine.PrefillMachine, "_revoke", make)


def offers_for_ever() -> Planted:
    """An offer that nobody claims does not end."""
    return _replaced(
        offers.OfferBook,
        "publish",
        lambda before: lambda self, command, _now: before(self, command, float("inf")),
    )


def old_tables_kept() -> Planted:
    """After a preemption the first blocks are offered."""

    def make(before: Any) -> Any:
        def prepare(self: Any, command: Any) -> None:
            if self.get(command.nonce) is None:
                before(self, command)

        return prepare

    return _replaced(offers.OfferBook, "prepare", make)


# --- decode


@contextmanager
def released_before_drained() -> Iterator[None]:
    """A read that nobody wants any more counts as over while it is under way."""

    def make_on_read_event(before: Any) -> Any:
        def on_read_event(self: Any, event: Any, now: float) -> Any:
            known = self.loads.get(event.request)
            read = (known.reads or {}).get(event.rank) if known is not None else None
            is_over = read is not None and read.state is load.State.FAILED
            return [] if is_over else before(self, event, now)

        return on_read_event

    def make_cancel(before: Any) -> Any:
        def cancel(self: Any, failure: Any) -> Any:
            reading = [each for each in self.rank_reads if each.state is load.State.READING]
            actions = before(self, failure)
            for read in reading:
                read.state = load.State.FAILED
                actions.append(self._release(read, complete=False))
            return actions

        return cancel

    with (
        _replaced(load.Load, "cancel", make_cancel),
        _replaced(decode_machine.DecodeMachine, "_on_read_event", make_on_read_event),
    ):
        yield


class _EarlySlots:
    """Reads the slot together with the data, which it overtakes, and answers by that."""

    def __init__(self) -> None:
        self._start = read_agent.ReadAgent.start_read
        self._read = read_agent.ReadAgent.read_slot
        self._early: dict[tuple[str, int], events.SlotRead] = {}

    def start_read(self, agent: Any, action: Any) -> Any:
        """Both at once; the short one is the first to land."""
        result = self._start(agent, action)
        request, rank = action.load.request, action.rank
        slot = events.ReadSlot(action.peer, rank, request, action.grant.slot)
        if agent.reads and not self._read(agent, slot):
            read = agent.reads.pop()
            read.handle.land_all()
            agent._free_slots.append(read.slot)  # noqa: SLF001 - a bug would
            if not read.handle.pieces:
                generation = agent._slots.read(read.slot)  # noqa: SLF001
                self._early[request, rank] = events.SlotRead(request, rank, generation)
            read.handle.pieces.clear()
        return result

    def read_slot(self, agent: Any, action: Any) -> Any:
        """What stood there then."""
        early = self._early.pop((action.request, action.rank), None)
        return self._read(agent, action) if early is None else [early]


@contextmanager
def slot_read_early() -> Iterator[None]:
    """The slot is read before the data has landed."""
    early = _EarlySlots()
    with (
        patch.object(read_agent.ReadAgent, "start_read", lambda *args: early.start_read(*args)),  # noqa: PLW0108 - binds
        patch.object(read_agent.ReadAgent, "read_slot", lambda *args: early.read_slot(*args)),  # noqa: PLW0108
    ):
        yield


def slot_not_compared() -> Planted:
    """Whatever stands in the slot is good."""

    def make(before: Any) -> Any:
        def on_slot(self: Any, read: Any, event: Any) -> Any:
            good = dataclasses.replace(event, generation=read.grant.generation)
            return before(self, read, good)

        return on_slot

    return _replaced(load.Load, "on_slot", make)


def cancelled_not_reported() -> Planted:
    """A load whose request has ended is not reported."""

    def make(before: Any) -> Any:
        def settle(self: Any, each: Any) -> list[Any]:
            actions = before(self, each)
            return [
                action
                for action in actions
                if not (each.is_cancelled and isinstance(action, events.LoadEnded))
            ]

        return settle

    return _replaced(loads.LoadBook, "settle", make)


@contextmanager
def peer_dropped_while_read() -> Iterator[None]:
    """A peer whose connection broke is dropped, whatever reads it."""
    with (
        patch.object(read_agent.ReadAgent, "is_reading", lambda _self, _peer: False),
        _replaced(
            peers.PeerBook,
            "forget",
            lambda before: lambda self, tick, _in_use, now: before(self, tick, set(), now),
        ),
    ):
        yield


# --- agents


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

    return _replaced(Background, "submit", make)


# --- deaths of the thread, and what is owed


def slots_left_valid() -> Planted:
    """After a death of the thread the slots are not cleared."""
    return patch.object(slots.SlotPage, "clear_all", lambda _: None)


def orphans_not_drained() -> Planted:
    """After a death of the thread its loads are reported while reads may still write."""
    return patch.object(agents.Agents, "is_read", lambda _self, _request: False)


def offers_lost_silently() -> Planted:
    """After a death of the thread its offers are forgotten, not reported."""

    def make(before: Any) -> Any:
        def lose_machines(self: Any) -> list[Any]:
            before(self)
            return []

        return lose_machines

    return _replaced(outstanding.Outstanding, "lose_machines", make)


@contextmanager
def _owed_again(kind: type, owe_again: Callable[[Any, list[Any]], list[Any]]) -> Iterator[None]:
    """After a death of the thread it is not known what was reported before."""
    before_settle = outstanding.Outstanding.settle
    before_lose = outstanding.Outstanding.lose_machines
    reported: dict[Any, list[Any]] = {}

    def settle(self: Any, report: Any) -> Any:
        result = before_settle(self, report)
        if isinstance(result, kind):
            reported.setdefault(self, []).append(result)
        return result

    def lose_machines(self: Any) -> list[Any]:
        again = owe_again(self, reported.pop(self, []))
        return before_lose(self) + again

    with (
        patch.object(outstanding.Outstanding, "settle", settle),
        patch.object(outstanding.Outstanding, "lose_machines", lose_machines),
    ):
        yield


def load_reported_twice() -> Planted:
    """After a death of the thread, loads are reported that were reported before."""

    def owe_again(self: Any, reported: list[Any]) -> list[Any]:
        self._loads.update({each.request: each.num_tokens for each in reported})
        return []

    return _owed_again(events.LoadEnded, owe_again)


def offer_reported_twice() -> Planted:
    """After a death of the thread, offers are reported that were reported before."""
    return _owed_again(events.OfferEnded, lambda _self, reported: reported)


def early_end_forgotten() -> Planted:
    """An offer that ends before it is published has never ended."""

    def make(before: Any) -> Any:
        def settle(self: Any, report: Any) -> Any:
            known = None
            if isinstance(report, events.OfferEnded):
                known = self._offers.get(report.nonce)
            result = before(self, report)
            if known is not None:
                known.end = None
            return result

        return settle

    return _replaced(outstanding.Outstanding, "settle", make)


def ended_offer_published() -> Planted:
    """An offer that has ended is published to the machine, which does not know it any more."""

    def publish(self: Any, command: Any) -> Any:
        if command.nonce in self._offers:
            self._offers[command.nonce].is_published = True
        return True, None

    return patch.object(outstanding.Outstanding, "_publish", publish)


def ended_offer_prepared() -> Planted:
    """An offer that has ended is prepared again, with blocks that nobody will hold."""

    def make(before: Any) -> Any:
        def admit(self: Any, command: Any) -> Any:
            is_admitted, report = before(self, command)
            return is_admitted or isinstance(command, events.PrepareOffer), report

        return admit

    return _replaced(outstanding.Outstanding, "admit", make)


# --- digests


def digest_though_released() -> Planted:
    """A digest is sent whether its blocks are still held or not."""
    always = lambda _self, _request: True  # noqa: E731
    return patch.object(prefill_machine.PrefillMachine, "is_digest_wanted", always)


def bytes_not_compared() -> Planted:
    """Whatever is to be verified is good as soon as its slot was valid."""

    def make(before: Any) -> Any:
        def on_slot(self: Any, read: Any, event: Any) -> Any:
            read.slices = None
            return before(self, read, event)

        return on_slot

    return _replaced(load.Load, "on_slot", make)


def difference_ignored() -> Planted:
    """Bytes that differ count as equal."""
    return patch.object(digest, "describe_difference", lambda *_: None)


def digested_from_the_start() -> Planted:
    """The block tables of a load are supposed to begin with the prompt."""
    return _replaced(
        digests, "block_tables", lambda before: lambda layout, tables, _: before(layout, tables, 0)
    )


def digest_of_one_rank() -> Planted:
    """Decode has one digest for all ranks: the first that comes."""

    def make(before: Any) -> Any:
        def compare(self: Any, read: Any) -> Any:
            replies = [each.digest for each in self.rank_reads if each.digest is not None]
            read.digest = replies[0] if replies else None
            return before(self, read)

        return compare

    return _replaced(load.Load, "_compare", make)


# --- sliding windows


def null_block_offered() -> Planted:
    """What a window has passed stands in a table as vLLM's null block, which is a block."""
    return patch.object(
        block_pinning, "table_bytes", lambda ids: blocks.to_bytes(blocks.block_ids(ids))
    )


def window_not_pinned() -> Planted:
    """The blocks of a window are not held for decode."""
    return patch.object(block_pinning.PinnedBlocks, "pin", lambda *_: None)


def pins_kept_after_preemption() -> Planted:
    """A request that was preempted keeps the pins of its first blocks."""
    return _replaced(
        prefill.PrefillScheduler,
        "on_step",
        lambda before: lambda self, _preempted, scheduled: before(self, [], scheduled),
    )


@dataclass(frozen=True)
class Bug:
    """How to plant it, and which profiles give it a chance; none named: all."""

    plant: Callable[[], Planted]
    profiles: Sequence[str] = ()


_VERIFYING: Final = ("busy", "late", "lossy")

PLANTED: Final[Mapping[str, Bug]] = {
    "slot cleared after the free": Bug(slot_cleared_last),
    "one generation for all grants": Bug(same_generation),
    "slot read before data landed": Bug(slot_read_early, ("late", "anew")),
    "slot not compared": Bug(slot_not_compared, ("late", "lossy")),
    "readers counted, not named": Bug(readers_counted, ("gentle",)),
    "claim ignored": Bug(claim_ignored, ("gentle",)),
    "former life's renew heard": Bug(former_life_heard, ("anew",)),
    "stale renew number honoured": Bug(stale_renew, ("gentle",)),
    "ended with its first reader": Bug(first_reader_ends, ("gentle",)),
    "no lease for who never asks": Bug(no_lease_for_the_silent),
    "granted offer revoked": Bug(granted_revoked),
    "unclaimed offer never ends": Bug(offers_for_ever),
    "old blocks after preemption": Bug(old_tables_kept, ("gentle", "busy")),
    "released before drained": Bug(released_before_drained),
    "reported before agent is gone": Bug(reported_before_gone, ("late",)),
    "cancelled load not reported": Bug(cancelled_not_reported, ("busy",)),
    "peer dropped while it is read": Bug(peer_dropped_while_read, ("lossy", "all")),
    "load reported twice": Bug(load_reported_twice, ("dying", "all")),
    "offer reported twice": Bug(offer_reported_twice, ("all",)),
    "early end of an offer forgotten": Bug(early_end_forgotten),
    "ended offer published": Bug(ended_offer_published),
    "ended offer prepared again": Bug(ended_offer_prepared, ("all",)),
    "restart leaves slots valid": Bug(slots_left_valid, ("all",)),
    "restart reports before drained": Bug(orphans_not_drained, ("dying",)),
    "restart forgets offers": Bug(offers_lost_silently, ("all",)),
    "digest though released": Bug(digest_though_released, _VERIFYING),
    "bytes not compared": Bug(bytes_not_compared, _VERIFYING),
    "difference ignored": Bug(difference_ignored, _VERIFYING),
    "digested from the prompt's start": Bug(digested_from_the_start, ("gentle", "busy")),
    "one digest for all ranks": Bug(digest_of_one_rank, ("gentle", "busy")),
    "null block offered": Bug(null_block_offered),
    "window not pinned": Bug(window_not_pinned, ("gentle",)),
    "pins kept after preemption": Bug(pins_kept_after_preemption, ("gentle", "busy")),
}
