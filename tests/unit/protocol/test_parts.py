"""Points at which the machines call a feature's part, and that no feature's own tests show.

Those of `early`, `conversations`, `verify` and `reading/staged` show the others.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import messages
from nixl_kv.protocol.decode import CANNOT_VERIFY
from nixl_kv.protocol.events import (
    Actions,
    LoadEnded,
    OfferEnd,
    OfferGranted,
    PrepareOffer,
    Tick,
)
from nixl_kv.protocol.load import LoadPart, RankRead
from nixl_kv.protocol.prefill import Offer, PrefillMachine, PrefillPart
from support import offers, scripts
from support.offers import (
    PAIR_SLOT,
    PAIR_TOKEN,
    denied,
    ended,
    prefill_machine,
    prepare_pair,
)
from support.records import (
    LEASE_S,
    NONCE,
    ROUTE,
    answered,
    asked,
    grant,
    pack_request,
    replied,
    start_load,
)
from support.scripts import EARLY, READY, WHOLE, Script, after, loading, play

SIGN: Any = OfferGranted(RequestId("from a part"))
"""An action that no machine returns by itself here."""

pytestmark = pytest.mark.usefixtures("counted_fence_tokens")


# --- prefill


class RecordingPart(PrefillPart):
    """Records each call by the name of its method; `says` has the answers."""

    def __init__(self, **says: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.says = says

    def _note(self, name: str, *about: Any) -> Any:
        self.calls.append((name, *about))
        return self.says.get(name, [])

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    @property
    def next_due(self) -> float:  # type: ignore[override]
        return self.says.get("next_due", math.inf)

    def answer_ask(
        self, ask: messages.Ask, offer: Offer | None, route: bytes, now: float
    ) -> Actions | None:
        is_bound = offer is not None and offer.binding is not None
        self.calls.append(("answer_ask", ask.nonce, is_bound, route, now))
        answer: Actions | None = self.says.get("answer_ask")
        return answer

    def on_prepared(self, offer: Offer, now: float) -> Actions:
        return self._note("on_prepared", offer.nonce, now)

    def on_release(self, release: messages.Release, now: float) -> Actions:
        return self._note("on_release", release.nonce, now)

    def on_reader_ended(self, offer: Offer, rank: Rank) -> None:
        self._note("on_reader_ended", offer.nonce, rank)

    def admit(self, command: PrepareOffer) -> tuple[PrepareOffer, Actions]:
        self.calls.append(("admit", command.nonce))
        change: Callable[[PrepareOffer], PrepareOffer] = self.says.get("admit", lambda same: same)
        changed = change(command)
        return changed, [] if changed is command else [SIGN]

    def on_refused(self, command: PrepareOffer) -> Actions:
        return self._note("on_refused", command)


def with_part(script: Script, **says: Any) -> tuple[PrefillMachine, RecordingPart]:
    """A machine after a script, and its part, which records calls from then on."""
    part = RecordingPart()
    machine = prefill_machine(script, parts=(part,))
    part.calls.clear()
    part.says = says
    return machine, part


def test_a_message_that_no_part_handles_is_denied() -> None:
    play(prefill_machine(), [(asked(pack_request()), *denied("this rank handles no PackRequest"))])


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


def test_an_ask_that_a_part_answers_is_bound_already() -> None:
    machine, part = with_part(offers.OFFERED, answer_ask=[SIGN])
    play(machine, [(100.0, offers.ASK, offers.WRITTEN, SIGN)])
    assert part.of("answer_ask") == [(NONCE, True, ROUTE, 100.0)]


@pytest.mark.parametrize("script", [offers.OFFERED, offers.GRANTED], ids=["offered", "granted"])
def test_other_releases_do_not_reach_a_part(script: Script) -> None:
    machine, part = with_part(script, on_release=[SIGN])
    for _ in range(2):  # the second one is of an offer that has ended
        assert SIGN not in machine.handle(offers.RELEASE, 101.0)
    assert part.of("on_release") == []


def test_a_part_hears_of_the_end_of_each_reader_at_once() -> None:
    machine, part = with_part(offers.BOTH_ASKED)
    play(machine, [(offers.RELEASE,)])
    assert part.calls == [("on_reader_ended", NONCE, 0)]
    play(machine, [(offers.RELEASE_SECOND, *ended(OfferEnd.READ))])
    assert set(part.of("on_reader_ended")) == {(NONCE, 0), (NONCE, 1)}


def test_a_reader_whose_lease_expired_may_read_until_its_offer_ends() -> None:
    second = 101.0, offers.ASK_SECOND, replied(grant(reader=offers.SECOND))
    machine, part = with_part(after(offers.SHARED, second))
    play(machine, [(100.0 + LEASE_S, Tick())])
    assert part.of("on_reader_ended") == []
    play(machine, [(101.0 + LEASE_S, Tick(), *offers.EXPIRED)])
    assert part.of("on_reader_ended") == [(NONCE, 0), (NONCE, 1)]


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


# --- decode


class CountingPart(LoadPart):
    """Notes the reads that prefill has granted anew."""

    def __init__(self) -> None:
        self.granted_anew: list[Rank] = []

    def on_new_grant(self, read: RankRead) -> None:
        self.granted_anew.append(read.rank)


def test_a_part_hears_of_a_grant_only_if_one_was_lost() -> None:
    part = CountingPart()
    machine = loading(EARLY, part)
    play(machine, [(answered(WHOLE), READY)])
    assert part.granted_anew == []
    play(machine, [(110.0, scripts.PENDING["queued"]), (answered(WHOLE),)])
    assert part.granted_anew == [0]


def test_a_load_that_shall_be_verified_fails_if_no_part_compares() -> None:
    (*_, end) = loading(scripts.GRANTED).handle(start_load(verify=True), 110.0)
    assert isinstance(end, LoadEnded)
    assert end.failure == CANNOT_VERIFY
