"""What is owed to the caller: each report exactly once, whatever comes in which order."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nixl_kv.ids import Nonce, RequestId
from nixl_kv.protocol.events import (
    CancelLoad,
    Command,
    FailureKind,
    LoadEnded,
    OfferEnd,
    OfferEnded,
    RevokeOffer,
    WithdrawOffer,
)
from nixl_kv.transfer.outstanding import Outstanding
from support.records import (
    D1,
    D2,
    NONCE,
    NONCE2,
    P1,
    prepare_load,
    prepare_offer,
    publish_offer,
    start_load,
)

LOST, READ = OfferEnd.LOST, OfferEnd.READ


@dataclass
class Machine:
    """Offers as the prefill machine holds them, and what the caller was told of them."""

    outstanding: Outstanding = field(default_factory=Outstanding)
    held: set[Nonce] = field(default_factory=set)
    reports: list[OfferEnd] = field(default_factory=list)

    def command(self, command: Command) -> bool:
        """As the loop does; whether the machine may have it."""
        is_admitted, report = self.outstanding.admit(command)
        if report is not None:
            self.reports.append(report.end)
        return is_admitted

    def prepare(self) -> None:
        if self.command(prepare_offer()):
            self.held.add(NONCE)

    def publish(self) -> None:
        if self.command(publish_offer()):
            assert NONCE in self.held, "published to a machine that does not hold it"

    def withdraw(self) -> None:
        if self.command(WithdrawOffer(NONCE)):
            self.held.discard(NONCE)

    def end(self) -> None:
        """A reader has read it. Nothing, where the machine holds no such offer."""
        if NONCE in self.held:
            self.held.remove(NONCE)
            report = self.outstanding.settle(OfferEnded(NONCE, P1, READ))
            if isinstance(report, OfferEnded):
                self.reports.append(report.end)

    def restart(self) -> None:
        self.held.clear()
        self.reports += [report.end for report in self.outstanding.lose_machines()]


STEPS: dict[str, Callable[[Machine], None]] = {
    "prepare": Machine.prepare,
    "publish": Machine.publish,
    "withdraw": Machine.withdraw,
    "end": Machine.end,
    "restart": Machine.restart,
}

TABLE = [
    ("prepare", []),
    ("prepare publish", []),
    ("prepare publish end", [READ]),
    ("prepare end publish", [READ]),
    ("prepare end", []),
    ("prepare end end publish", [READ]),
    ("prepare publish restart", [LOST]),
    ("prepare publish restart end", [LOST]),
    ("prepare publish restart restart", [LOST]),
    ("prepare publish end restart", [READ]),
    ("prepare restart", []),
    ("prepare restart publish", [LOST]),
    ("prepare restart end publish", [LOST]),
    ("prepare restart restart publish", [LOST]),
    ("prepare restart prepare publish", [LOST]),
    ("prepare end restart publish", [READ]),
    ("prepare prepare publish end", [READ]),
    ("prepare withdraw", []),
    ("prepare restart withdraw", []),
    ("prepare end withdraw", []),
    ("prepare withdraw restart", []),
    ("prepare restart prepare withdraw", []),
    ("publish", [LOST]),
    ("withdraw", []),
    ("restart", []),
]


@pytest.mark.parametrize(
    ("steps", "reports"), [pytest.param(*row, id=row[0].replace(" ", "-")) for row in TABLE]
)
def test_an_offer_is_reported_once_if_it_was_published(steps: str, reports: list[OfferEnd]) -> None:
    machine = Machine()
    for step in steps.split():
        STEPS[step](machine)
    assert machine.reports == reports


COMMANDS = [
    ("prepare", "publish"),
    ("prepare", "prepare", "publish"),
    ("prepare", "withdraw"),
    ("prepare", "prepare", "withdraw"),
    ("prepare",),
]
"""What the scheduler can say of an offer, in its order; twice after a preemption."""


def interleavings() -> list[tuple[str, ...]]:
    """Each list of commands with up to three ends and restarts anywhere in it."""
    orders: set[tuple[str, ...]] = set()
    for commands in COMMANDS:
        for count in range(4):
            size = len(commands) + count
            for others in itertools.product(("end", "restart"), repeat=count):
                for places in itertools.combinations(range(size), count):
                    chosen = dict(zip(places, others, strict=True))
                    remaining = iter(commands)
                    orders.add(tuple(chosen.get(n) or next(remaining) for n in range(size)))
    return sorted(orders)


def first_end(steps: tuple[str, ...]) -> list[OfferEnd]:
    """Naively: how an offer ends; by a reader, or with the machine that holds it."""
    prepared = steps[steps.index("prepare") :]
    return [{"end": READ, "restart": LOST}[step] for step in prepared if step in ("end", "restart")]


def test_in_every_order_a_published_offer_that_ended_is_reported_once() -> None:
    orders = interleavings()
    assert len(orders) > 300
    for steps in orders:
        machine = Machine()
        for count, step in enumerate(steps, start=1):
            STEPS[step](machine)
            has_ended = "prepare" in steps[:count] and bool(first_end(steps[:count]))
            assert not (has_ended and machine.held), f"{steps}: these blocks may be free by now"
        expected = first_end(steps)[:1] if "publish" in steps else []
        assert machine.reports == expected, steps


def test_offers_are_told_apart_by_their_nonce() -> None:
    """A request may be offered again under the same id."""
    outstanding = Outstanding()
    for nonce in (NONCE, NONCE2):
        outstanding.admit(prepare_offer(nonce=nonce))
    outstanding.admit(publish_offer(NONCE2))
    assert outstanding.settle(OfferEnded(NONCE, P1, READ)) is None
    report = OfferEnded(NONCE2, P1, READ)
    assert outstanding.settle(report) == report


@pytest.mark.parametrize("is_known", [False, True])
def test_a_revocation_reaches_the_machine_only_of_what_is_known(*, is_known: bool) -> None:
    outstanding = Outstanding()
    if is_known:
        outstanding.admit(prepare_offer())
    assert outstanding.admit(RevokeOffer(NONCE)) == (is_known, None)


def test_what_starts_no_report_is_always_admitted() -> None:
    outstanding = Outstanding()
    for command in (prepare_load(), CancelLoad(D1)):
        assert outstanding.admit(command) == (True, None)
    assert len(outstanding) == 0


# --- loads


def ended(request: RequestId) -> LoadEnded:
    return LoadEnded(request, 7, None)


def test_a_load_is_reported_once() -> None:
    outstanding = Outstanding()
    assert outstanding.admit(start_load()) == (True, None)
    assert outstanding.settle(ended(D1)) == ended(D1)
    assert outstanding.settle(ended(D1)) is None


def test_a_load_that_was_not_started_is_not_reported() -> None:
    assert Outstanding().settle(ended(D1)) is None


def test_a_load_whose_machine_is_gone_is_reported_when_nothing_can_write_any_more() -> None:
    outstanding = Outstanding()
    outstanding.admit(start_load(D1, 7))
    outstanding.admit(start_load(D2, 5))
    assert outstanding.drained(lambda _: False) == []
    assert outstanding.lose_machines() == []
    assert outstanding.orphans == {D1, D2}
    (report,) = outstanding.drained(lambda request: request == D1)
    assert (report.request, report.num_tokens) == (D2, 5)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.INTERNAL
    assert outstanding.settle(report) == report
    assert outstanding.orphans == {D1}
    assert repr(outstanding) == "<Outstanding: 1 loads (1 orphans), 0 offers>"


NUMBERS = st.integers(0, 3)


class OutstandingReports(RuleBasedStateMachine):
    """Whatever happens: what is owed follows from sets of what has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.outstanding = Outstanding()
        self.reports: Counter[str] = Counter()
        self.started: set[str] = set()
        self.owned: set[str] = set()  # loads that the machine has
        self.read: set[str] = set()  # loads into whose blocks a read may write
        self.prepared: set[str] = set()
        self.held: set[str] = set()  # offers that the machine has
        self.said: set[str] = set()  # offers that were published or withdrawn
        self.published: set[str] = set()

    def _report(self, report: LoadEnded | OfferEnded | None) -> None:
        if report is not None:
            self.reports[report.request] += 1

    @rule(number=NUMBERS)
    def start_load(self, number: int) -> None:
        request = f"d{number}"
        if request not in self.started:
            self.outstanding.admit(start_load(RequestId(request)))
            for requests in (self.started, self.owned, self.read):
                requests.add(request)

    @rule(number=NUMBERS)
    def end_read(self, number: int) -> None:
        self.read.discard(f"d{number}")

    @rule(number=NUMBERS)
    def end_load(self, number: int) -> None:
        """The machine ends what it has, when nothing reads it any more."""
        request = f"d{number}"
        if request in self.owned - self.read:
            self.owned.remove(request)
            self._report(self.outstanding.settle(ended(RequestId(request))))

    @rule(number=NUMBERS)
    def prepare_offer(self, number: int) -> None:
        offer = f"p{number}"
        if offer not in self.said:
            command = prepare_offer(nonce=Nonce(offer), request=RequestId(offer))
            is_admitted, _ = self.outstanding.admit(command)
            assert is_admitted is (offer not in self.prepared or offer in self.held)
            self.prepared.add(offer)
            self.held.update([offer] if is_admitted else [])

    @rule(number=NUMBERS, is_published=st.booleans())
    def publish_or_withdraw(self, number: int, *, is_published: bool) -> None:
        offer = f"p{number}"
        if offer not in self.prepared - self.said:
            return
        self.said.add(offer)
        command: Command = WithdrawOffer(Nonce(offer))
        if is_published:
            command = publish_offer(Nonce(offer), RequestId(offer))
            self.published.add(offer)
        is_admitted, report = self.outstanding.admit(command)
        assert is_admitted is (offer in self.held)
        self._report(report)
        self.held.difference_update([] if is_published else [offer])

    @rule(number=NUMBERS)
    def end_offer(self, number: int) -> None:
        offer = f"p{number}"
        if offer in self.held:
            self.held.remove(offer)
            end = OfferEnded(Nonce(offer), RequestId(offer), READ)
            self._report(self.outstanding.settle(end))

    @rule()
    def restart(self) -> None:
        self.owned.clear()
        self.held.clear()
        for lost in self.outstanding.lose_machines():
            self._report(lost)

    @rule()
    def turn(self) -> None:
        for orphan in self.outstanding.drained(self.read.__contains__):
            self._report(self.outstanding.settle(orphan))

    @invariant()
    def nothing_is_reported_twice_or_too_early(self) -> None:
        assert max(self.reports.values(), default=1) == 1
        assert self.reports.keys() <= self.started | self.published
        assert not self.reports.keys() & (self.owned | self.read | self.held)

    def teardown(self) -> None:
        """In the end all has been reported."""
        self.read.clear()
        for number in range(4):
            self.end_load(number)
            self.end_offer(number)
        self.turn()
        assert self.reports.keys() == self.started | self.published
        assert len(self.outstanding) == len(self.prepared - self.said)


TestOutstandingReports = OutstandingReports.TestCase
