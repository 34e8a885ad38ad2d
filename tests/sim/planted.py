"""Bugs that the simulator has to find, each planted into the running code by replacing functions.

No second defence keeps one from doing harm, or the schedules would be right to pass.
"""

import itertools
import math
import pkgutil
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import pytest
from msgspec import structs

from harness.local.engine import HAS_CONVERSATIONS, HAS_STAGED, HAS_VERIFY
from nixl_kv.connector.decode import DecodeScheduler, ScheduledState
from nixl_kv.connector.prefill import PrefillScheduler
from nixl_kv.early.asks import EarlyAsks, Steps, _Request
from nixl_kv.early.slots import EarlySlots
from nixl_kv.engine.loop import Outstanding
from nixl_kv.ids import EngineId, RequestId
from nixl_kv.protocol import decode, events, messages
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.load import Load, ReadState
from nixl_kv.protocol.prefill import OTHER_PROMPT, Binding, Offer, PrefillMachine
from nixl_kv.reading import turnover
from nixl_kv.reading.turnover import Turnover
from nixl_kv.transport.base import SlotPage

FOREVER: Final = 1e9
LATER: Final = 1 << 30


Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: list[Any] = []
"""Each has its function, the checks that find it, and the profiles of schedules; none: all."""


def breaks(
    *checks: str, in_: str = "", is_quick: bool = False, is_possible: bool = True
) -> Callable[[Plant], Plant]:
    """Add a bug to the list, if this tree can have it. One that is quick is found in a second."""

    def add(plant: Plant) -> Plant:
        marks = () if is_quick else pytest.mark.slow
        if is_possible:
            BUGS.append(pytest.param(plant, checks, in_.split(), id=plant.__name__, marks=marks))
        return plant

    return add


# --- the fence


@breaks("reported while its slot is valid")
def slot_cleared_after_the_free(patch: pytest.MonkeyPatch) -> None:
    end = PrefillMachine._end
    patch.setattr(PrefillMachine, "_end", lambda *given: end(*given)[::-1])


@breaks("wrong bytes", in_="late lossy")
def slot_not_compared(patch: pytest.MonkeyPatch) -> None:
    def on_done(load: Load, read: Any, done: events.ReadDone, now: float) -> list[events.Action]:
        done = structs.replace(done, fence_token=read.grant.fence_token)
        return load.on_read_done(read, done, now)

    patch.setattr(decode, "HANDLERS", {**decode.HANDLERS, events.ReadDone: on_done})


@breaks("reported while its slot is valid", in_="all")
def restart_leaves_slots_valid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPage, "clear_all", lambda _: None)


# --- tickets, messages and leases


@breaks("needless failure", in_="gentle", is_quick=True)
def ticket_read_by_any_claim(patch: pytest.MonkeyPatch) -> None:
    def expects(binding: Binding, _claim: object, reader: Any) -> bool:
        return reader.rank in binding.leases and reader.rank not in binding.ended

    patch.setattr(Binding, "expects", expects)


@breaks("needless failure", in_="gentle", is_quick=True)
def readers_counted_not_named(patch: pytest.MonkeyPatch) -> None:
    """So a release that comes twice ends a second reader."""
    on_release = PrefillMachine._on_release

    def count(
        machine: PrefillMachine, release: Any, route: bytes, now: float
    ) -> list[events.Action]:
        offer = machine.offers.get(release.nonce)
        if offer is None or offer.binding is None:
            return on_release(machine, release, route, now)
        offer.binding.ended.add(offer.binding.readers[0])
        return machine.settle(offer, release, events.OfferEnd.READ)

    patch.setattr(PrefillMachine, "_on_release", count)


@breaks("needless failure", in_="overtaken")
def stale_heartbeat_honoured(patch: pytest.MonkeyPatch) -> None:
    handle = PrefillMachine._on_heartbeat

    def on_heartbeat(machine: PrefillMachine, beat: Any, *more: Any) -> list[events.Action]:
        return handle(machine, structs.replace(beat, number=LATER), *more)

    patch.setattr(PrefillMachine, "_on_heartbeat", on_heartbeat)


@breaks("offer too long", in_="dying lossy")
def no_lease_for_a_reader_that_never_asks(patch: pytest.MonkeyPatch) -> None:
    bind = PrefillMachine._bind

    def bind_one(machine: PrefillMachine, offer: Any, ask: Any, now: float) -> Binding:
        binding = bind(machine, offer, ask, now)
        binding.leases.update({r: FOREVER for r in binding.leases if r != ask.reader.rank})
        return binding

    patch.setattr(PrefillMachine, "_bind", bind_one)


@breaks("offer too long", in_="resting busy")
def granted_offer_never_recalled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillMachine, "recall", lambda *_: [])


# --- reads that are cancelled, or hang


@breaks("reported while a read can write")
def released_before_drained(patch: pytest.MonkeyPatch) -> None:
    cancel, handle = Load.cancel, DecodeMachine.handle

    def cancel_at_once(load: Load, *given: Any) -> list[events.Action]:
        actions = cancel(load, *given)
        for read in load.reads.values():
            if read.state is ReadState.DRAINING:
                read.state = ReadState.FAILED
                actions.append(load.release(read))
        return actions

    def ignore_ended(machine: DecodeMachine, event: Any, now: float) -> list[events.Action]:
        load = machine._by_request.get(event.request) if hasattr(event, "rank") else None
        read = None if load is None else load.reads.get(event.rank)
        has_ended = read is not None and read.state is ReadState.FAILED
        return [] if has_ended else handle(machine, event, now)

    patch.setattr(Load, "cancel", cancel_at_once)
    patch.setattr(DecodeMachine, "handle", ignore_ended)


@breaks("reported while a read can write", in_="late")
def reported_before_the_agent_is_gone(patch: pytest.MonkeyPatch) -> None:
    def close(agents: Turnover, agent: Any) -> None:
        agents._close_on.submit(agent.close)
        closed: Future[None] = Future()
        closed.set_result(None)
        agents._closing.append(turnover._Closing(agent, closed, agents._clock()))

    patch.setattr(Turnover, "_close", close)


@breaks("needless failure", in_="backlog", is_quick=True)
def late_while_it_waits_for_its_turn(patch: pytest.MonkeyPatch) -> None:
    def late_at(load: Load, read: Any) -> float:
        return max(load.since, read.moved_at) + load.timeout_s

    patch.setattr(Load, "_late_at", late_at)


# --- bytes


@breaks("wrong bytes", "granted before it is written", in_="gentle busy")
def blocks_from_before_a_preemption_offered(patch: pytest.MonkeyPatch) -> None:
    prepare = PrefillScheduler._prepare

    def prepare_once(scheduler: PrefillScheduler, offer: Any) -> None:
        if not offer.nonce:
            prepare(scheduler, offer)

    def on_free(scheduler: PrefillScheduler, request: Any) -> None:
        scheduler._forget(request)
        if request in scheduler._awaited:
            scheduler._release(scheduler._awaited[request])

    patch.setattr(PrefillScheduler, "_prepare", prepare_once)
    patch.setattr(PrefillScheduler, "_why_not_offered", lambda *_: "")
    patch.setattr(PrefillScheduler, "on_free", on_free)


@breaks("wrong bytes", in_="busy late lossy", is_possible=HAS_VERIFY)
def difference_between_digests_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("nixl_kv.verify.queue.describe_difference", lambda *_: None)


@breaks("KV from before a reset", in_="resting")
def loads_from_before_a_reset_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeScheduler, "reset_cache", lambda _: None)


# --- pair tickets, and offers that are granted while they are computed


@breaks("overwritten while its slot is valid", in_="early")
def slot_of_a_preempted_pair_stays_valid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EarlySlots, "clear", lambda slots, nonce: slots.publish(nonce))


@breaks("granted before it is written", in_="early", is_quick=True)
def pair_granted_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    prepare = PrefillMachine._prepare

    def prepare_as_written(machine: PrefillMachine, offer: Any, now: float) -> list[events.Action]:
        actions = prepare(machine, offer, now)
        machine.offers[offer.nonce].written = offer.computed or offer.num_tokens
        return actions

    patch.setattr(PrefillMachine, "_prepare", prepare_as_written)


@breaks("granted before it is written", in_="early")
def writes_of_a_former_life_count(patch: pytest.MonkeyPatch) -> None:
    """A step's writes end after a preemption, when the offer has been prepared again."""
    withdraw = PrefillScheduler._withdraw

    def withdraw_in_one_life(scheduler: PrefillScheduler, offer: Any, **given: Any) -> None:
        attempt = offer.attempt
        withdraw(scheduler, offer, **given)
        offer.attempt = attempt

    patch.setattr(PrefillScheduler, "_withdraw", withdraw_in_one_life)


@breaks("wrong bytes", in_="early")
def fence_of_a_part_not_compared(patch: pytest.MonkeyPatch) -> None:
    def on_done(load: Load, read: Any, done: events.ReadDone, now: float) -> list[events.Action]:
        is_part = load.start is not None and read.part.end < load.start.end
        token = read.fence_token if is_part else done.fence_token
        return load.on_read_done(read, structs.replace(done, fence_token=token), now)

    patch.setattr(decode, "HANDLERS", {**decode.HANDLERS, events.ReadDone: on_done})


@breaks("load too long", "not over", in_="stalled")
def an_answer_counts_as_progress(patch: pytest.MonkeyPatch) -> None:
    """Prefill's transfer thread answers, although no step of its engine ends."""
    on_pending, on_grant = Load.on_pending, Load.on_grant

    def pending_moves(load: Load, read: Any, pending: Any, now: float) -> list[events.Action]:
        actions = on_pending(load, read, structs.replace(pending, state="queued"), now)
        load.told_at = read.moved_at = now
        return actions

    def grant_moves(load: Load, read: Any, grant: Any, now: float) -> list[events.Action]:
        actions = on_grant(load, read, grant, now)
        read.moved_at = now
        return actions

    moved: dict[type, Any] = {messages.Pending: pending_moves, messages.Grant: grant_moves}
    patch.setattr(decode, "HANDLERS", {**decode.HANDLERS, **moved})


@breaks("not over", "load too long", in_="stalled")
def a_hung_engine_looks_alive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Steps, "is_stalled", lambda *_: False)


@breaks("wrong bytes", in_="foreign")
def pair_granted_for_another_prompt(patch: pytest.MonkeyPatch) -> None:
    why = PrefillMachine._why_denied

    def why_denied(machine: PrefillMachine, ask: Any, offer: Any) -> str:
        reason = why(machine, ask, offer)
        return "" if reason == OTHER_PROMPT else reason

    patch.setattr(PrefillMachine, "_why_denied", why_denied)
    patch.setattr(EarlyAsks, "expect", _expect_any)
    patch.setattr(EarlyAsks, "is_other", lambda *_: False)


def _expect_any(early: EarlyAsks, event: events.ExpectOffer, _now: float) -> list[events.Asked]:
    pair = early._requests.setdefault(event.nonce, _Request())
    pair.expected, pair.state, pair.known_by = event, "queued", math.inf
    return []


@breaks("needless failure", in_="early")
def pair_given_up_by_who_reads_another_copy(patch: pytest.MonkeyPatch) -> None:
    release = EarlyAsks.release

    def give_up(early: EarlyAsks, message: messages.Release, now: float) -> None:
        release(early, structs.replace(message, complete=False), now)

    patch.setattr(EarlyAsks, "release", give_up)


@breaks("needless failure", "granted in two ways", "not over", in_="early")
def pair_slot_given_twice(patch: pytest.MonkeyPatch) -> None:
    def free(slots: EarlySlots, report: events.EarlySlotFree) -> None:
        if report.slot is not None:
            slots._free.append(report.slot)

    patch.setattr(EarlySlots, "free", free)


# --- loads whose end the scheduler hears between its steps


@breaks("wrong bytes", "unexpected report", in_="told")
def landed_ranks_counted_not_named(patch: pytest.MonkeyPatch) -> None:
    """So a message that comes twice ends a load that has landed on one rank."""
    take, numbers = DecodeScheduler.take_landed, itertools.count()

    def count(decode: DecodeScheduler, hints: Any, engine: EngineId, num_ranks: int) -> Any:
        renamed = []
        for hint in hints:
            number = next(numbers)
            names = {"rank": number % num_ranks, "incarnation": str(number)}
            renamed.append(structs.replace(hint, reader=structs.replace(hint.reader, **names)))
        return take(decode, renamed, engine, num_ranks)

    patch.setattr(DecodeScheduler, "take_landed", count)


@breaks("KV from before a reset", in_="told")
def landed_before_a_reset(patch: pytest.MonkeyPatch) -> None:
    take = DecodeScheduler.take_landed

    def take_all(decode: DecodeScheduler, *given: Any) -> dict[RequestId, int | None]:
        loads = decode._loads.values()
        retracted = [load for load in loads if load.state is ScheduledState.RETRACTED]
        for load in retracted:
            load.state = ScheduledState.STARTED
        landed = take(decode, *given)
        for load in retracted:
            load.state = ScheduledState.RETRACTED
        return landed

    patch.setattr(DecodeScheduler, "take_landed", take_all)


@breaks("ended twice", "unexpected report", in_="told")
def told_loads_reported_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeScheduler, "pop_told", lambda *_: set())


@breaks("secret told to a peer", in_="told", is_quick=True)
def secret_of_a_load_in_its_asks(patch: pytest.MonkeyPatch) -> None:
    fields = Load.fields
    patch.setattr(Load, "fields", lambda load, read: {**fields(load, read), "claim": load.hint_key})


@breaks("wrong bytes", "unexpected report", "unexpected end", in_="told")
def hints_believed_of_who_knows_the_claim(patch: pytest.MonkeyPatch) -> None:
    new_request, take = DecodeScheduler.on_new_request, DecodeScheduler.take_landed
    by_claim: dict[str, Any] = {}

    def note(decode: DecodeScheduler, *given: Any, **options: Any) -> None:
        new_request(decode, *given, **options)
        prepare = decode._commands[-1]
        if isinstance(prepare, events.PrepareLoad):
            by_claim[prepare.claim] = prepare.hint_key

    def take_any(decode: DecodeScheduler, hints: Any, *given: Any) -> Any:
        keys = [(hint, by_claim.get(hint.hint_key, hint.hint_key)) for hint in hints]
        return take(decode, [structs.replace(hint, hint_key=key) for hint, key in keys], *given)

    patch.setattr(DecodeScheduler, "on_new_request", note)
    patch.setattr(DecodeScheduler, "take_landed", take_any)


# --- peers that lie


@breaks("offer too long", "not over", in_="lying", is_quick=True)
def reader_believed_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Offer, "has_read_for", lambda *_: False)


@breaks("wrong bytes", "good bytes called corrupt", in_="staged", is_possible=HAS_STAGED)
def chunk_read_before_it_is_packed(patch: pytest.MonkeyPatch) -> None:
    book = "nixl_kv.reading.staged.ring.RingBook"
    find: Callable[..., tuple[int, bool] | None] = pkgutil.resolve_name(f"{book}.find")

    def find_packed(*given: Any) -> tuple[int, bool] | None:
        found = find(*given)
        return found and (found[0], True)

    patch.setattr(f"{book}.find", find_packed)


# --- cached blocks, which nothing pins


def _slots() -> Any:
    return pkgutil.resolve_name("nixl_kv.conversations.slots.ContentSlots")


def _index() -> Any:
    return pkgutil.resolve_name("nixl_kv.conversations.index.ContentIndex")


OVERWRITTEN: Final = (
    "overwritten while its slot is valid",
    "other KV while its slot is valid",
    "wrong bytes",
)
AFTER_A_RESET: Final = "valid after a reset"


def in_caches(*checks: str, is_quick: bool = True) -> Callable[[Plant], Plant]:
    return breaks(*checks, in_="chatting", is_quick=is_quick, is_possible=HAS_CONVERSATIONS)


@in_caches(*OVERWRITTEN)
def reuse_before_the_grant_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_slots(), "is_stale", lambda *_: False)


@in_caches(*OVERWRITTEN, AFTER_A_RESET)
def reuse_looked_at_before_the_blocks_are_registered(patch: pytest.MonkeyPatch) -> None:
    kind = _slots()
    opens, is_stale = kind.open, kind.is_stale

    def open_after_a_look(slots: Any, run: Any, offer: Any) -> Any:
        if is_stale(slots, run):
            return None
        with patch.context() as during:
            during.setattr(kind, "is_stale", lambda *_: False)
            return opens(slots, run, offer)

    patch.setattr(kind, "open", open_after_a_look)


@in_caches(*OVERWRITTEN)
def slots_of_reused_blocks_stay_valid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_slots(), "_holding", lambda *_: [])


@in_caches(*OVERWRITTEN, is_quick=False)
def cached_blocks_granted_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_slots(), "is_written", lambda *_: True)


@in_caches(AFTER_A_RESET)
def epoch_of_cached_blocks_not_compared(patch: pytest.MonkeyPatch) -> None:
    kind = _slots()
    take, opens, is_stale = kind._take, kind.open, kind.is_stale

    def in_one_epoch(run: Any) -> Any:
        return structs.replace(run, epoch=0)

    patch.setattr(kind, "_take", lambda s, taken: take(s, structs.replace(taken, epoch=0)))
    patch.setattr(kind, "open", lambda s, run, offer: opens(s, in_one_epoch(run), offer))
    patch.setattr(kind, "is_stale", lambda s, run: is_stale(s, in_one_epoch(run)))


@in_caches("unexpected report")
def ends_of_cached_offers_reported(patch: pytest.MonkeyPatch) -> None:
    settle = Outstanding.settle

    def settle_all(outstanding: Outstanding, report: Any) -> bool:
        is_owed = settle(outstanding, report)
        if not is_owed and isinstance(report, events.OfferEnded):
            outstanding._results.append(report)
        return is_owed

    patch.setattr(Outstanding, "settle", settle_all)


@in_caches(*OVERWRITTEN)
def reused_blocks_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_index(), "on_taken", lambda *_: None)
    patch.setattr(_index(), "on_hashed", _hash_all)


def _hash_all(index: Any, _request: object, blocks: Any, _parent: object) -> None:
    for block in blocks:
        index._epoch.born[block] = index._built + 1


@in_caches(*OVERWRITTEN, is_quick=False)
def blocks_found_before_they_are_filled(patch: pytest.MonkeyPatch) -> None:
    def hash_at_once(index: Any, _request: object, blocks: Any, _parent: object) -> None:
        for block in blocks:
            index._epoch.born[block] = 0

    patch.setattr(_index(), "on_hashed", hash_at_once)
