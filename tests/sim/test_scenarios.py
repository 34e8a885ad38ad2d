"""Stories of a prefill and a decode engine: which one holds which blocks, until when."""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import msgspec
import pytest

from nixl_kv.protocol.events import FailureKind
from nixl_kv.reading import paths
from sim.repeatable import repeatable
from sim.schedule import Run
from sim.steps import round_lines
from sim.world import Shape

OFFER_TTL_S, LEASE_S, HOLD_S, TIMEOUT_S = 3.0, 1.0, 2.0, 4.0
FENCED = "prefill rank 0 took its blocks back during the read (fenced)"
DENIED = "prefill rank 0 denied (denied)"


class Scenario(Run):
    """A schedule that is written while it runs."""

    # --- longer steps

    def offer(self) -> int:
        """A prompt of two blocks is computed, and its ticket is out. Returns its number."""
        number = len(self.world.tickets)
        self.do("prefill 8 1")
        while len(self.world.tickets) == number:
            self.do("step p")
        self.do("step p", "turn p.0")
        return number

    def load(self, ticket: int = 0, engine: str = "d0") -> None:
        """A request comes with a ticket, and gets blocks."""
        self.do(f"decode {engine} {ticket} 0", f"step {engine}", f"turn {engine}.0")

    def park(self) -> None:
        """A request comes to decode, which has no blocks for it: prefill holds the granted ones."""
        self.do("occupy d0")
        self.load(self.offer())
        self.deliver_all()
        assert any(self.valid_slots())

    def turn_all(self) -> None:
        self.do(*[f"turn {rank.seat.name}" for rank in self.world.ranks()])

    def deliver_until(self, kind: str) -> None:
        """Deliver all that is before the first message of a kind, which stays under way."""
        while self.kinds()[0] != kind:
            self.do("deliver 0")
            self.turn_all()

    def deliver_all(self) -> None:
        while self.world.network.packets:
            self.do("deliver 0")
            self.turn_all()

    def start_reading(self) -> None:
        """Up to the moment when a read of the data has been posted; no digest is made yet."""
        self.load(self.offer())
        self.deliver_until("Ask")
        self.do("deliver 0", "turn p.0")
        self.do(f"deliver {self.kinds().index('Grant')}", "turn d0.0")
        assert self.reads() == 1

    def land_all(self) -> None:
        """The data, and the slot after it."""
        self.do("land 0 0", "turn d0.0", "land 0 0", "turn d0.0")
        assert self.reads() == 0

    def prefill_alone(self, seconds: float) -> None:
        """Time passes, and only prefill notices."""
        self.do(f"wait {seconds}", "turn p.0", "step p")

    def rounds(self, count: int, seconds: float = 0.1) -> None:
        """All that is to be done is done, in order, and then time passes."""
        for _ in range(count):
            self.do(*round_lines(self.world), f"wait {seconds}")

    # --- what there is

    def kinds(self) -> list[str]:
        return [msgspec.msgpack.decode(p.payload)[0] for p in self.world.network.packets]

    def reads(self) -> int:
        return len(self.world.fabric.reads())

    def blocks(self, engine: str = "p") -> int:
        life = self.world.engines[engine]
        assert life is not None
        return life.scheduler.blocks.block_pool.num_used

    def valid_slots(self) -> list[bool]:
        rank = next(self.world.ranks())
        return [any(rank.seat.slots.read(slot)) for slot in range(rank.seat.slots.count)]

    @property
    def failures(self) -> list[str]:
        return [str(each.failure) for each in self.invariants.failed]

    @property
    def good(self) -> int:
        return self.invariants.num_good

    @property
    def verified(self) -> int:
        return self.invariants.num_verified


Make = Callable[..., Scenario]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a world; at the end of the test all of it ends, and nothing is left behind."""
    scenarios: list[Scenario] = []

    def make_one(**features: float) -> Scenario:
        scenarios.append(Scenario(Shape(**features)))  # type: ignore[arg-type]
        return scenarios[-1]

    with repeatable(), patch.object(paths, "SLICE_RUNS", 1 << 14):  # a read is one slice
        yield make_one
        for scenario in scenarios:
            scenario.do("end calm")


@pytest.fixture
def one(make: Make) -> Scenario:
    """One prefill rank and one decode rank."""
    return make()


@pytest.fixture
def verifying(make: Make) -> Scenario:
    """The same, and every load is verified."""
    return make(verify=1.0)


# --- without faults


def test_what_waits_for_blocks_of_decode_is_held_and_recalled_in_the_end(one: Scenario) -> None:
    one.park()
    one.rounds(9, seconds=HOLD_S / 10)
    assert one.blocks() == 2
    one.rounds(4, seconds=HOLD_S / 10)
    assert one.blocks() == 0
    one.do("vacate d0", "end calm")
    assert one.failures == [
        "prefill rank 0 recalled its blocks before decode had its own (recalled)"
    ]


def test_an_offer_that_is_not_needed_is_freed_at_once(one: Scenario) -> None:
    one.park()
    assert one.blocks() == 2
    one.do("abort d0 0")
    one.rounds(3, seconds=0)
    assert one.blocks() == 0


def test_an_offer_that_nobody_wants_is_freed_in_time(one: Scenario) -> None:
    one.offer()
    one.prefill_alone(OFFER_TTL_S - 0.01)
    assert one.blocks() == 2
    one.prefill_alone(0.05)
    assert one.blocks() == 0


# --- the fence


@pytest.mark.parametrize(
    ("landed", "failures"),
    [
        pytest.param(["land 0 1"], [FENCED], id="during a read"),
        pytest.param(
            ["land 0 0", "turn d0.0"], [FENCED], id="right bytes, before the slot is read"
        ),
        pytest.param(["land 0 0", "turn d0.0", "land 0 0"], [], id="after the slot was read"),
    ],
)
def test_a_read_is_good_if_its_blocks_are_freed_after_the_slot_was_read(
    one: Scenario, landed: list[str], failures: list[str]
) -> None:
    one.start_reading()
    one.do(*landed)
    one.prefill_alone(LEASE_S)
    assert one.blocks() == 0
    one.do("end calm")
    assert (one.good, one.failures) == (1 - len(failures), failures)


def test_the_slot_of_another_grant_does_not_prove_a_read(make: Make) -> None:
    """Blocks are freed, and given to the next prompt, whose grant has the same slot."""
    two = make(engines=2)
    two.start_reading()
    before = two.valid_slots()
    two.prefill_alone(LEASE_S)
    two.load(two.offer(), engine="d1")
    two.deliver_until("Grant")
    assert two.valid_slots() == before
    two.do("end calm")
    assert (two.good, two.failures) == (1, [FENCED])


# --- digests


def test_a_digest_that_is_asked_for_before_the_blocks_is_asked_for_again(
    verifying: Scenario,
) -> None:
    verifying.load(verifying.offer())
    verifying.deliver_until("Ask")
    verifying.do("deliver 1", "turn p.0")
    assert verifying.kinds() == ["Ask"]
    verifying.do("end calm")
    assert (verifying.verified, verifying.failures) == (1, [])


def test_damaged_bytes_are_not_used(verifying: Scenario) -> None:
    verifying.start_reading()
    verifying.do("damage")
    verifying.rounds(8)
    assert [each.failure.kind for each in verifying.invariants.failed] == [FailureKind.CORRUPT]
    assert verifying.blocks() == 0


@pytest.mark.parametrize("kind", ["DigestRequest", "DigestReply"])
def test_a_digest_that_is_lost_is_asked_for_again(verifying: Scenario, kind: str) -> None:
    verifying.start_reading()
    if kind == "DigestReply":
        verifying.do("deliver 0")
        while not verifying.kinds():
            verifying.do("turn p.0")
    assert verifying.kinds() == [kind]
    verifying.do("lose 0")
    verifying.land_all()
    verifying.do("end calm")
    assert (verifying.verified, verifying.failures) == (1, [])


@pytest.mark.parametrize("turns", range(1, 4))
def test_a_digest_of_blocks_that_were_freed_is_not_sent(verifying: Scenario, turns: int) -> None:
    """However much of them it had covered."""
    verifying.start_reading()
    verifying.land_all()
    verifying.do("deliver 0")
    verifying.do(*["turn p.0"] * turns)
    assert verifying.kinds() == []
    verifying.do(f"wait {LEASE_S}")
    while not verifying.kinds():
        verifying.do("turn p.0")
    assert verifying.kinds() == ["Deny"]
    verifying.do("end calm")
    assert verifying.failures == [DENIED]


def test_a_load_that_is_cancelled_while_it_is_verified_is_released_at_once(
    verifying: Scenario,
) -> None:
    verifying.start_reading()
    verifying.land_all()
    verifying.do("abort d0 0", "step d0", "turn d0.0")
    assert verifying.failures == ["dropped (dropped)"]
    assert verifying.kinds() == ["DigestRequest", "Release"]
    verifying.do("deliver 1", "turn p.0", "step p")
    assert verifying.blocks() == 0
    verifying.do("deliver 0", "turn p.0")
    assert verifying.kinds() == ["Deny"]


# --- readers that leave


def test_a_read_that_is_cancelled_is_served_to_its_end(one: Scenario) -> None:
    """Its blocks are held on both sides, as long as it takes."""
    one.start_reading()
    one.do("abort d0 0", "step d0")
    for _ in range(100):
        one.deliver_all()
        one.turn_all()
        one.do("step p", "step d0", "wait 0.1")
    assert (one.blocks(), one.blocks("d0")) == (2, 2)
    assert one.failures == []
    one.do("land 0 0", "turn d0.0")
    assert one.failures == ["dropped (dropped)"]
    one.rounds(2)
    assert (one.blocks(), one.blocks("d0")) == (0, 0)


def test_a_release_that_overtakes_its_ask_ends_the_offer(one: Scenario) -> None:
    one.load(one.offer())
    one.deliver_until("Ask")
    one.do("abort d0 0", "step d0", "turn d0.0")
    one.do("deliver 1", "turn p.0", "step p")
    assert one.blocks() == 0
    one.do("deliver 0", "turn p.0")
    assert one.kinds() == ["Deny"]


def test_a_lease_that_runs_out_fails_what_waits_for_blocks(one: Scenario) -> None:
    one.park()
    one.prefill_alone(LEASE_S)
    assert one.blocks() == 0
    one.rounds(3)
    one.do("vacate d0", "end calm")
    assert one.failures == ["prefill rank 0 let the lease run out (lease_lost)"]


# --- messages that are lost, or come twice


@pytest.mark.parametrize("kind", ["Ask", "Grant"])
def test_what_is_lost_before_the_grant_is_asked_again(one: Scenario, kind: str) -> None:
    one.load(one.offer())
    one.deliver_until(kind)
    one.do("lose 0")
    assert one.kinds() == []
    one.do("end calm")
    assert (one.good, one.failures) == (1, [])


@pytest.mark.parametrize("is_aborted", [False, True], ids=["read", "aborted"])
def test_a_release_that_is_lost_costs_a_lease(one: Scenario, *, is_aborted: bool) -> None:
    one.start_reading()
    one.do(*["abort d0 0", "step d0", "turn d0.0"] if is_aborted else [])
    one.do("land 0 0", "turn d0.0", "land 0 0", "turn d0.0")
    assert one.kinds() == ["Release"]
    one.do("lose 0")
    one.prefill_alone(LEASE_S - 0.01)
    assert one.blocks() == 2
    one.prefill_alone(0.05)
    assert one.blocks() == 0


def test_messages_that_come_twice_do_no_harm(one: Scenario) -> None:
    one.load(one.offer())
    while one.kinds():
        one.do("repeat 0")
        one.turn_all()
        one.do("deliver 0")
        one.turn_all()
    one.do("end calm")
    assert (one.good, one.failures) == (1, [])


# --- several readers


def test_a_ticket_is_good_for_one(make: Make) -> None:
    two = make(engines=2)
    two.offer()
    two.load(engine="d0")
    two.load(engine="d1")
    two.do("end calm")
    assert (two.good, two.failures) == (1, [DENIED])


# --- lives


def test_a_restart_of_prefill_ends_what_is_not_read(one: Scenario) -> None:
    one.park()
    one.do("kill p", "start p")
    one.rounds(4)
    one.do("vacate d0", "end calm")
    (failure,) = one.failures
    assert failure.endswith("(lease_lost)"), "its successor at the same endpoint says so"


def test_the_next_life_is_not_disturbed_by_reads_of_the_former(one: Scenario) -> None:
    """They hang, and the rank has its port again."""
    one.start_reading()
    one.do("hang 0", "kill p", "start p", "report 0")
    one.load(one.offer())
    for _ in range(20):
        one.do(*[line for line in round_lines(one.world) if not line.startswith("land 0")])
        one.do("wait 0.1")
    assert (one.good, one.failures) == (1, [])
    one.do("end calm")
    assert len(one.failures) == 1


# --- vLLM pauses and sleeps


def test_a_read_ends_while_vllm_pauses(one: Scenario) -> None:
    """Prefill has its blocks back; decode's request goes on when vLLM does."""
    one.start_reading()
    one.do("pause d0")
    one.rounds(5)
    assert (one.blocks(), one.good, one.blocks("d0")) == (0, 1, 2)
    one.do("resume d0")
    one.rounds(3)
    assert one.blocks("d0") == 0


def test_an_engine_sleeps_when_its_offers_have_ended_and_wakes_to_another_life(
    one: Scenario,
) -> None:
    one.offer()
    engine = one.world.engines["p"]
    assert engine is not None
    one.do("sleep p", "step p")
    assert not engine.is_asleep
    one.do(f"wait {OFFER_TTL_S}", "turn p.0", "step p")
    assert engine.is_asleep
    before = engine.description.incarnation
    one.do("wake p")
    assert engine.description.incarnation != before
    one.load(0)
    one.load(one.offer())
    one.do("end calm")
    assert one.good == 1
    (failure,) = one.failures
    assert failure.startswith("incarnation is ")
