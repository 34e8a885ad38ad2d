"""The machines call each method of a feature's part at its point.

Each method of `PrefillPart` and of `LoadPart` has a test, because features rely on that point.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Claim, Nonce, Rank, RequestId
from nixl_kv.protocol import messages
from nixl_kv.protocol.decode import DecodeMachine
from nixl_kv.protocol.events import (
    Actions,
    AskDenied,
    ClearSlot,
    LinkBroken,
    LoadEnded,
    OfferEnd,
    OfferEnded,
    OfferGranted,
    PrepareOffer,
    ReadDone,
    Reply,
    Send,
    StartLoad,
    Tick,
    WithdrawOffer,
)
from nixl_kv.protocol.load import ASK_AGAIN_S, Load, LoadPart, RankRead, ReadState
from nixl_kv.protocol.prefill import WITHDRAWN, Offer, PrefillMachine, PrefillPart, RoutedAsk
from support import offers, scripts
from support.offers import (
    FIRST_SLOT,
    PAIR_SLOT,
    PAIR_TOKEN,
    denied,
    ended,
    granted_pair,
    mark_pair,
    prefill_machine,
    prepare_pair,
)
from support.records import (
    CLAIM,
    D1,
    LEASE_S,
    NONCE,
    NONCE2,
    P1,
    RANK_0,
    RIVAL,
    ROUTE,
    answered,
    ask,
    asked,
    cancel_load,
    deny,
    fits,
    grant,
    pack_request,
    prepare_offer,
    publish_offer,
    read_done,
    reader,
    release,
    replied,
    start_load,
)
from support.scripts import AGAIN, EARLY, OTHER_WHOLE, READY, WHOLE, Script, after, loading, play

SIGN: Any = OfferGranted(RequestId("from a part"))
"""An action that no machine returns by itself here."""
ONE_RANK = Rank(0)


pytestmark = pytest.mark.usefixtures("counted_fence_tokens")


@dataclass(frozen=True)
class Happened:
    """An event of a feature, for one read or for none."""

    request: RequestId = D1
    rank: Rank = ONE_RANK


# --- prefill


class RecordingPart(PrefillPart):
    """Records each call by the name of its method; `says` has the answers."""

    def __init__(self, **says: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.says = says
        self.message_handlers = {messages.PackRequest: self._on_message}
        self.event_handlers = {Happened: self._on_event}

    def _note(self, name: str, *about: Any, default: Any = None) -> Any:
        self.calls.append((name, *about))
        return self.says.get(name, [] if default is None else default)

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def _on_message(self, message: messages.PackRequest, route: bytes, now: float) -> Actions:
        return self._note("message", message, route, now)

    def _on_event(self, event: Happened, now: float) -> Actions:
        return self._note("event", event, now)

    @property
    def next_due(self) -> float:  # type: ignore[override]
        return self.says.get("next_due", math.inf)

    def on_tick(self, now: float) -> Actions:
        return self._note("on_tick", now)

    def on_prepared(self, offer: Offer, now: float) -> Actions:
        return self._note("on_prepared", offer.nonce, offer.prepared.computed, now)

    def answer_ask(
        self, ask: messages.Ask, offer: Offer | None, route: bytes, now: float
    ) -> Actions | None:
        is_bound = offer is not None and offer.binding is not None
        self.calls.append(("answer_ask", ask.nonce, offer is not None, is_bound, route, now))
        answer: Actions | None = self.says.get("answer_ask")
        return answer

    def expects(self, nonce: Nonce) -> bool:
        return nonce == self.says.get("expects")

    def pop_asks(self, offer: Offer) -> list[RoutedAsk]:
        return self._note("pop_asks", offer.nonce, offer.written)

    def is_needless(self, offer: Offer) -> bool:
        return bool(self._note("is_needless", offer.nonce, default=False))

    def on_release(self, release: messages.Release, now: float) -> Actions:
        return self._note("on_release", release.nonce, now)

    def on_reader_ended(self, offer: Offer, rank: Rank) -> None:
        self._note("on_reader_ended", offer.nonce, rank)

    def on_freed(self, offer: Offer) -> Actions:
        return self._note("on_freed", offer.nonce, offer.binding)

    def on_withdrawn(self, command: WithdrawOffer) -> Actions:
        return self._note("on_withdrawn", command)

    def on_ended(self, offer: Offer, end: OfferEnd) -> Actions:
        return self._note("on_ended", offer.nonce, end)

    def admit(self, command: PrepareOffer) -> tuple[PrepareOffer, Actions]:
        self.calls.append(("admit", command.nonce))
        change: Callable[[PrepareOffer], PrepareOffer] = self.says.get("admit", lambda same: same)
        changed = change(command)
        return changed, [] if changed is command else [SIGN]

    def on_refused(self, command: PrepareOffer) -> Actions:
        return self._note("on_refused", command)

    def pop_actions(self) -> Actions:
        return self._note("pop_actions")

    def clear(self) -> Actions:
        return self._note("clear")

    def check(self) -> None:
        self._note("check")
        if "check" in self.says:
            raise self.says["check"]


def with_part(script: Script, **says: Any) -> tuple[PrefillMachine, RecordingPart]:
    """A machine after a script, and its part, which records calls from then on."""
    part = RecordingPart()
    machine = prefill_machine(script, parts=(part,))
    part.calls.clear()
    part.says = says
    return machine, part


def test_a_part_knows_its_machine() -> None:
    machine, part = with_part([])
    assert part.machine is machine


def test_a_part_gets_its_messages_with_the_route_back() -> None:
    machine, part = with_part([], message=[SIGN])
    request = pack_request()
    play(machine, [(100.0, asked(request, b"route"), SIGN)])
    assert part.of("message") == [(request, b"route", 100.0)]


def test_a_message_that_no_part_handles_is_denied() -> None:
    play(prefill_machine(), [(asked(pack_request()), *denied("this rank handles no PackRequest"))])


def test_a_part_gets_its_events() -> None:
    machine, part = with_part([], event=[SIGN])
    play(machine, [(100.0, Happened(), SIGN)])
    assert part.of("event") == [(Happened(), 100.0)]
    play(prefill_machine(), [(Happened(),)])  # no part handles it


def test_the_earliest_deadline_of_machine_and_parts_counts() -> None:
    machine, part = with_part(offers.OFFERED)
    own = machine.next_due
    assert own is not None
    part.says["next_due"] = own - 1
    assert machine.next_due == own - 1
    part.says["next_due"] = own + 1
    assert machine.next_due == own
    empty, part = with_part([])
    assert empty.next_due is None
    part.says["next_due"] = 7.0
    assert empty.next_due == 7.0


def test_each_tick_reaches_a_part_after_the_offers_that_are_due() -> None:
    machine, part = with_part(offers.GRANTED, on_tick=[SIGN])
    play(machine, [(100.0 + LEASE_S, Tick(), *offers.EXPIRED, SIGN)])
    assert part.of("on_tick") == [(100.0 + LEASE_S,)]


def test_a_part_hears_of_each_step_that_computes_an_offer() -> None:
    machine, part = with_part([], on_prepared=[SIGN])
    play(machine, [(92.0, prepare_pair(4), SIGN), (93.0, prepare_pair(6), SIGN)])
    assert part.of("on_prepared") == [(NONCE, 4, 92.0), (NONCE, 6, 93.0)]


def test_a_part_may_answer_an_ask_before_the_machine() -> None:
    machine, part = with_part([], answer_ask=[SIGN])
    play(machine, [(100.0, offers.ASK, SIGN)])
    assert part.of("answer_ask") == [(NONCE, False, False, ROUTE, 100.0)]


def test_an_ask_that_a_part_answers_is_bound_already() -> None:
    machine, part = with_part(offers.OFFERED, answer_ask=[SIGN])
    play(machine, [(100.0, offers.ASK, offers.WRITTEN, SIGN)])
    assert part.of("answer_ask") == [(NONCE, True, True, ROUTE, 100.0)]


def test_an_ask_that_no_part_answers_is_granted_or_denied() -> None:
    machine, part = with_part(offers.OFFERED)
    play(machine, [(offers.ASK, offers.WRITTEN, offers.GRANT)])
    assert len(part.of("answer_ask")) == 1
    play(prefill_machine(parts=(RecordingPart(),)), [offers.DENIED_UNKNOWN])


def test_an_ask_that_the_machine_denies_does_not_reach_a_part() -> None:
    machine, part = with_part(offers.GRANTED, answer_ask=[SIGN])
    rival = asked(ask(claim=RIVAL))
    play(machine, [(rival, *denied(offers.NOT_THIS_READER, claim=RIVAL))])
    assert part.of("answer_ask") == []


def test_an_offer_is_expected_if_a_part_expects_it() -> None:
    machine, _ = with_part([], expects=NONCE)
    assert machine.is_expected(NONCE)
    assert not machine.is_expected(NONCE2)
    assert not prefill_machine().is_expected(NONCE)


@pytest.mark.parametrize(
    ("script", "step", "grants"),
    [
        pytest.param(
            offers.PREPARED,
            publish_offer(),
            [offers.WRITTEN, offers.GRANT],
            id="it is pinned, and written before",
        ),
        pytest.param(
            offers.UNWRITTEN,
            offers.MARK,
            [offers.WRITTEN, offers.GRANT],
            id="it is written, and pinned before",
        ),
        pytest.param(
            [(92.0, prepare_pair(4))], mark_pair(4), [granted_pair(4)], id="a part is written"
        ),
    ],
)
def test_asks_that_have_waited_are_granted_when_that_is_possible(
    script: Script, step: Any, grants: Actions
) -> None:
    machine, part = with_part(script, pop_asks=[RoutedAsk(ROUTE, ask())])
    play(machine, [(step, *grants)])
    assert len(part.of("pop_asks")) == 1


def test_an_offer_that_cannot_be_granted_yet_takes_no_asks() -> None:
    machine, part = with_part([(99.0, prepare_offer(is_written=False))])
    play(machine, [(publish_offer(),)])
    assert part.of("pop_asks") == []


def test_a_part_may_end_an_offer_as_it_is_published() -> None:
    machine, part = with_part(offers.PREPARED, is_needless=True)
    play(machine, [(publish_offer(), offers.NOT_NEEDED)])
    assert (part.of("is_needless"), part.of("pop_asks")) == ([(NONCE,)], [])


def test_a_release_of_an_unbound_offer_reaches_a_part() -> None:
    machine, part = with_part([(92.0, prepare_pair(4))], on_release=[SIGN])
    unknown = asked(release(nonce=NONCE2))
    play(machine, [(93.0, offers.RELEASE, SIGN), (unknown, SIGN)])
    assert part.of("on_release") == [(NONCE, 93.0), (NONCE2, 93.0)]


@pytest.mark.parametrize("script", [offers.OFFERED, offers.GRANTED], ids=["offered", "granted"])
def test_other_releases_do_not_reach_a_part(script: Script) -> None:
    machine, part = with_part(script, on_release=[SIGN])
    for _ in range(2):  # the second one is of an offer that has ended
        assert SIGN not in machine.handle(offers.RELEASE, 101.0)
    assert part.of("on_release") == []


def test_a_part_hears_of_the_end_of_each_reader_at_once() -> None:
    machine, part = with_part(offers.BOTH_ASKED)
    play(machine, [(offers.RELEASE,)])
    assert part.calls == [("on_reader_ended", NONCE, 0), ("pop_actions",)]
    play(machine, [(offers.RELEASE_SECOND, *ended(OfferEnd.READ))])
    assert set(part.of("on_reader_ended")) == {(NONCE, 0), (NONCE, 1)}


def test_a_reader_whose_lease_expired_may_read_until_its_offer_ends() -> None:
    second = 101.0, offers.ASK_SECOND, replied(grant(reader=offers.SECOND))
    machine, part = with_part(after(offers.SHARED, second))
    play(machine, [(100.0 + LEASE_S, Tick())])
    assert part.of("on_reader_ended") == []
    play(machine, [(101.0 + LEASE_S, Tick(), *offers.EXPIRED)])
    assert part.of("on_reader_ended") == [(NONCE, 0), (NONCE, 1)]


def test_a_slot_is_free_for_a_part_when_it_is_clear_and_its_readers_have_ended() -> None:
    machine, part = with_part(offers.GRANTED, on_freed=[SIGN])
    end = OfferEnded(NONCE, P1, OfferEnd.READ)
    play(machine, [(offers.RELEASE, ClearSlot(FIRST_SLOT), SIGN, end)])
    names = [call[0] for call in part.calls]
    assert names.index("on_freed") > max(n for n, x in enumerate(names) if x == "on_reader_ended")
    assert part.of("on_freed") == [(NONCE, None)]


def test_the_caller_has_cleared_the_slot_of_a_pair_that_it_withdraws() -> None:
    machine, _ = with_part(offers.IN_PARTS, on_freed=[SIGN])
    play(machine, [(WithdrawOffer(NONCE), SIGN, *denied(WITHDRAWN))])


@pytest.mark.parametrize("script", [[], offers.PREPARED], ids=["never prepared", "prepared"])
@pytest.mark.parametrize("is_final", [True, False])
def test_a_part_hears_of_an_offer_that_is_withdrawn(script: Script, *, is_final: bool) -> None:
    machine, part = with_part(script, on_withdrawn=[SIGN])
    command = WithdrawOffer(NONCE, is_final=is_final)
    play(machine, [(command, SIGN)])
    assert (part.of("on_withdrawn"), part.of("on_ended")) == ([(command,)], [])


def test_a_part_hears_of_an_offer_that_has_ended_after_the_caller() -> None:
    machine, part = with_part(offers.GRANTED, on_ended=[SIGN])
    play(machine, [(offers.RELEASE, *ended(OfferEnd.READ), SIGN)])
    assert part.of("on_ended") == [(NONCE, OfferEnd.READ)]


def test_a_part_admits_each_command_before_the_machine_has_it() -> None:
    def without_slot(command: PrepareOffer) -> PrepareOffer:
        return replace(command, slot=None)

    machine, part = with_part([], admit=without_slot)
    play(machine, [(prepare_pair(4), SIGN)])
    assert machine.offers[NONCE].prepared.slot is None
    names = [call[0] for call in part.calls]
    assert names.index("admit") < names.index("on_prepared")


def test_a_part_hears_of_a_command_that_comes_too_late() -> None:
    machine, part = with_part([], on_refused=[SIGN])
    command = prepare_pair(4)
    assert machine.refuse(command) == [SIGN]
    assert part.calls == [("on_refused", command)]
    assert (command.slot, command.fence_token) == (PAIR_SLOT, PAIR_TOKEN)


def test_the_actions_of_a_part_follow_those_of_each_event() -> None:
    machine, _ = with_part(offers.OFFERED, pop_actions=[SIGN])
    play(machine, [(offers.ASK, offers.WRITTEN, offers.GRANT, SIGN), (Happened(), SIGN)])


def test_a_part_forgets_with_its_machine() -> None:
    machine, part = with_part(offers.GRANTED, clear=[SIGN])
    assert machine.clear() == [SIGN]
    assert machine.begin_life(machine.incarnation) == [SIGN]
    assert part.of("clear") == [(), ()]


def test_a_part_is_checked_with_its_machine() -> None:
    machine, part = with_part(offers.GRANTED)
    machine.check()
    assert part.of("check") == [()]
    part.says["check"] = LocalProtocolError("a broken promise")
    with pytest.raises(LocalProtocolError, match="a broken promise"):
        machine.check()


def test_a_part_finds_offers_by_their_grants() -> None:
    machine, _ = with_part(offers.GRANTED)
    request = pack_request()
    assert machine.granted_to(request) is machine.offers[NONCE]
    assert machine.granted_to(pack_request(claim=RIVAL)) is None
    assert machine.granted_to(pack_request(reader=reader(1))) is None


def test_a_denial_of_a_part_keeps_the_reason_here() -> None:
    machine, _ = with_part(offers.GRANTED)
    request = pack_request()
    reply = Reply(ROUTE, deny())
    assert machine.deny(request, ROUTE, "a reason") == [AskDenied(NONCE, "a reason"), reply]
    assert machine.deny_all([RoutedAsk(ROUTE, ask())], "a reason") == [
        AskDenied(NONCE, "a reason"),
        reply,
    ]


# --- decode


class RecordingLoadPart(LoadPart):
    """Records each call by the name of its method; `says` has the answers."""

    def __init__(self, **says: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.says = says
        self.handlers = {messages.PackReply: self._on_answer, Happened: self._on_event}

    def _note(self, name: str, *about: Any) -> Any:
        self.calls.append((name, *about))
        return self.says.get(name, [])

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def _on_answer(
        self, load: Load, read: RankRead, answer: messages.PackReply, now: float
    ) -> Actions:
        return self._note("answer", load.claim, read.rank, answer.chunk, now)

    def _on_event(self, load: Load, read: RankRead, event: Happened, now: float) -> Actions:
        return self._note("event", load.claim, read.rank, event.rank, now)

    def compares(self, load: Load) -> bool:
        return load.start is not None and bool(self.says.get("compares"))

    def on_blocks(self, load: Load, read: RankRead, now: float) -> Actions:
        return self._note("on_blocks", load.claim, read.rank, now)

    def on_new_grant(self, read: RankRead) -> None:
        self._note("on_new_grant", read.rank, read.state)

    def on_begun(self, load: Load, read: RankRead, part: StartLoad) -> Actions:
        return self._note("on_begun", load.claim, read.state, part)

    def must_prove(self, load: Load, read: RankRead, event: ReadDone) -> bool:
        return bool(self._note("must_prove", load.claim, read.proven, event))

    def prove(self, load: Load, read: RankRead, now: float) -> Actions:
        return self._note("prove", load.claim, read.state, now)

    def is_awaiting(self, read: RankRead) -> bool:
        return read.state is self.says.get("is_awaiting")

    def ask(self, load: Load, read: RankRead, now: float) -> Actions:
        read.ask_again_at = now + ASK_AGAIN_S
        return self._note("ask", load.claim, read.state, now)


def load_with_part(script: Script, **says: Any) -> tuple[DecodeMachine, RecordingLoadPart]:
    """A machine after a script, and its part, which records calls from then on."""
    part = RecordingLoadPart()
    machine = loading(script, part)
    part.calls.clear()
    part.says = says
    return machine, part


def pack_answer() -> Any:
    return answered(
        messages.PackReply(
            incarnation=release().incarnation,
            nonce=NONCE,
            claim=CLAIM,
            reader=reader(),
            chunk=3,
            slot=None,
        )
    )


def test_a_load_part_gets_its_answers() -> None:
    machine, part = load_with_part(scripts.GRANTED, answer=[SIGN])
    play(machine, [(100.0, pack_answer(), SIGN)])
    assert part.of("answer") == [(CLAIM, 0, 3, 100.0)]
    play(loading(scripts.GRANTED), [(pack_answer(),)])  # no part handles it


def test_a_load_part_gets_its_events_of_a_read() -> None:
    machine, part = load_with_part(scripts.READING, event=[SIGN])
    play(machine, [(100.0, Happened(), SIGN), (Happened(rank=Rank(1)),)])
    assert part.of("event") == [(CLAIM, 0, 0, 100.0)]
    play(loading(scripts.READING), [(Happened(),)])  # no part handles it


def test_a_load_part_finds_reads_by_claim_and_rank() -> None:
    machine, part = load_with_part(scripts.GRANTED)
    (load,) = machine.loads
    assert part.find(CLAIM, Rank(0)) is load.reads[Rank(0)]
    assert part.find(CLAIM, Rank(1)) is None
    assert part.find(Claim(RIVAL), Rank(0)) is None


def test_a_load_whose_bytes_a_part_compares_is_verified() -> None:
    machine, _ = load_with_part(scripts.READING, compares=True)
    verified = replace(scripts.GOOD, verified=True)
    play(machine, [(read_done(), scripts.RELEASED, verified)])


def test_a_load_that_shall_be_verified_fails_if_no_part_compares() -> None:
    machine, _ = load_with_part(scripts.GRANTED, compares=False)
    (*_, end) = machine.handle(start_load(verify=True), 110.0)
    assert isinstance(end, LoadEnded)
    assert end.failure is not None
    assert end.failure.detail == "this rank cannot verify loads"


@pytest.mark.parametrize("compares", [False, True])
def test_after_a_preemption_a_load_that_is_compared_reads_all_again(*, compares: bool) -> None:
    part, rest = grant(lease_s=3600.0, num_tokens=4), grant(lease_s=3600.0)
    machine, _ = load_with_part(
        after(
            EARLY,
            (answered(part), READY),
            (110.0, scripts.START, replace(scripts.READ, grant=part, load=start_load_to(4))),
            (read_done(),),
        ),
        compares=compares,
    )
    again = scripts.START if compares else replace(scripts.START, begin=4)
    anew = replace(rest, fence_token=OTHER_WHOLE.fence_token)
    play(machine, [(answered(anew), replace(scripts.READ, grant=anew, load=again))])


def start_load_to(end: int) -> StartLoad:
    return replace(start_load(), end=end)


def test_a_part_hears_of_each_read_once_there_are_blocks() -> None:
    machine, part = load_with_part(scripts.GRANTED, on_blocks=[SIGN])
    play(machine, [(110.0, scripts.START, SIGN, scripts.READ)])
    assert part.of("on_blocks") == [(CLAIM, 0, 110.0)]


def test_a_part_hears_of_the_reads_of_a_peer_that_is_known_after_the_blocks() -> None:
    machine, part = load_with_part(after(scripts.PREPARED, (110.0, scripts.START)))
    part.says["on_blocks"] = [SIGN]
    play(machine, [(111.0, fits(), Send(RANK_0, ask()), SIGN)])
    assert part.of("on_blocks") == [(CLAIM, 0, 111.0)]


def test_a_part_hears_of_a_grant_only_if_one_was_lost() -> None:
    machine, part = load_with_part(EARLY)
    play(machine, [(answered(WHOLE), READY)])
    assert part.of("on_new_grant") == []
    play(machine, [(110.0, scripts.PENDING["queued"]), (answered(WHOLE),)])
    assert part.of("on_new_grant") == [(0, ReadState.ASKING)]


def test_a_part_hears_of_each_read_that_begins() -> None:
    machine, part = load_with_part(scripts.GRANTED, on_begun=[SIGN])
    play(machine, [(scripts.START, scripts.READ, SIGN)])
    assert part.of("on_begun") == [(CLAIM, ReadState.READING, scripts.START)]


def test_a_part_may_have_to_prove_a_landed_load() -> None:
    machine, part = load_with_part(scripts.READING, must_prove=True, prove=[SIGN])
    play(machine, [(111.0, read_done(), SIGN)])
    assert part.of("must_prove") == [(CLAIM, 7, read_done())]
    assert part.of("prove") == [(CLAIM, ReadState.VERIFYING, 111.0)]


def test_without_that_a_read_that_has_landed_is_done() -> None:
    machine, part = load_with_part(scripts.READING)
    play(machine, [(read_done(), scripts.RELEASED, scripts.GOOD)])
    assert len(part.of("must_prove")) == 1
    assert part.of("prove") == []


@pytest.mark.parametrize(
    ("event", "ends"),
    [
        pytest.param(read_done(fence_token=scripts.EMPTY), True, id="the fence token is gone"),
        pytest.param(cancel_load(), False, id="the load is dropped"),
    ],
)
def test_a_part_does_not_prove_a_load_that_the_fence_did_not(event: Any, *, ends: bool) -> None:
    machine, part = load_with_part(scripts.READING, must_prove=True)
    machine.handle(event, 111.0)
    if not ends:
        machine.handle(read_done(), 111.0)
    assert machine.loads == []
    assert part.of("must_prove") == []


def test_a_part_does_not_prove_a_part_of_the_tokens() -> None:
    part_grant = grant(lease_s=3600.0, num_tokens=4)
    machine, part = load_with_part(
        after(
            EARLY,
            (answered(part_grant), READY),
            (110.0, scripts.START, replace(scripts.READ, grant=part_grant, load=start_load_to(4))),
        ),
        must_prove=True,
    )
    play(machine, [(read_done(),)])
    assert part.of("must_prove") == []


def test_a_part_that_awaits_an_answer_asks_again() -> None:
    machine, part = load_with_part(scripts.READING, is_awaiting=ReadState.READING, ask=[SIGN])
    play(machine, [(110.0, Happened())])  # the next deadline is set after each event
    play(machine, [(112.0, Tick(), SIGN), (112.0 + ASK_AGAIN_S - 0.01, Tick())])
    play(machine, [(112.0 + ASK_AGAIN_S, Tick(), SIGN)])
    assert part.of("ask") == [
        (CLAIM, ReadState.READING, 112.0),
        (CLAIM, ReadState.READING, 112.0 + ASK_AGAIN_S),
    ]


def test_a_part_that_awaits_nothing_is_not_asked() -> None:
    machine, part = load_with_part(scripts.READING, ask=[SIGN])
    machine.handle(Tick(), 115.0)
    assert part.of("ask") == []


@pytest.mark.parametrize("state", [None, ReadState.READING])
def test_after_a_broken_link_a_part_asks_again_at_once(state: ReadState | None) -> None:
    machine, part = load_with_part(scripts.READING, is_awaiting=state)
    machine.handle(LinkBroken(RANK_0), 110.5)
    assert bool(part.of("ask")) == (state is not None)


@pytest.mark.parametrize("state", [None, ReadState.READING])
def test_a_denied_read_goes_on_unless_a_part_awaits_an_answer(state: ReadState | None) -> None:
    machine, _ = load_with_part(scripts.READING, is_awaiting=state)
    stops: Sequence[Any] = [] if state is None else [scripts.STOP]
    play(machine, [(answered(deny()), *stops)])


def test_the_machine_asks_itself_while_it_awaits_a_grant() -> None:
    machine, part = load_with_part(EARLY)
    play(machine, [(101.0, Tick(), AGAIN)])
    assert part.of("ask") == []
