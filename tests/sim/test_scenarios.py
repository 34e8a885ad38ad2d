"""Stories of a prefill and a decode engine: which one holds which blocks, until when."""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import msgspec
import pytest

from nixl_kv.protocol import load
from nixl_kv.reading import paths
from sim.repeatable import repeatable
from sim.schedule import Run
from sim.steps import round_lines
from sim.world import Shape

OFFER_TTL_S, LEASE_S = 3.0, 1.0
FENCED = "prefill rank 0 took its blocks back during the read (fenced)"
DENIED = f"prefill rank 0 {load.DENIED} (denied)"


class Scenario(Run):
    """A schedule that is written while it runs."""

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

    def deliver_until(self, kind: str) -> None:
        """Deliver all that is before the first message of a kind, which stays under way."""
        while self.kinds()[0] != kind:
            self.do("deliver 0", *[f"turn {rank.seat.name}" for rank in self.world.ranks()])

    def start_reading(self) -> None:
        """Up to the moment when a read of the data has been posted."""
        self.load(self.offer())
        self.deliver_until("Ask")
        self.do("deliver 0", "turn p.0")
        self.do(f"deliver {self.kinds().index('Grant')}", "turn d0.0")
        assert len(self.world.fabric.reads()) == 1

    def prefill_alone(self, seconds: float) -> None:
        """Time passes, and only prefill notices."""
        self.do(f"wait {seconds}", "turn p.0", "step p")

    def rounds(self, count: int, *, without: tuple[str, ...] = ()) -> None:
        """All that is to be done is done, in order, and then time passes."""
        for _ in range(count):
            lines = [line for line in round_lines(self.world) if not line.startswith(without)]
            self.do(*lines, "wait 0.1")

    def kinds(self) -> list[str]:
        return [msgspec.msgpack.decode(p.payload)[0] for p in self.world.network.packets]

    def blocks(self, engine: str = "p") -> int:
        life = self.world.engines[engine]
        assert life is not None
        return life.scheduler.blocks.block_pool.num_used

    @property
    def failures(self) -> list[str]:
        return [str(each.failure) for each in self.invariants.failed]

    @property
    def good(self) -> int:
        return self.invariants.num_good


Make = Callable[..., Scenario]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a world; at the end of the test all of it ends, and nothing is left behind."""
    scenarios: list[Scenario] = []

    def make_one(**features: int) -> Scenario:
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
    slots = next(two.world.ranks()).seat.slots
    before = [any(slots.read(slot)) for slot in range(slots.count)]
    two.prefill_alone(LEASE_S)
    two.load(two.offer(), engine="d1")
    two.deliver_until("Grant")
    assert [any(slots.read(slot)) for slot in range(slots.count)] == before
    two.do("end calm")
    assert (two.good, two.failures) == (1, [FENCED])


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_load_is_verified_unless_a_bit_changed(make: Make, *, is_damaged: bool) -> None:
    one = make(verify=1)
    one.start_reading()
    one.do(*["damage"] * is_damaged)
    one.rounds(8)
    assert one.invariants.num_verified == 1 - is_damaged
    assert [each.failure.kind.name for each in one.invariants.failed] == ["CORRUPT"] * is_damaged
    assert one.blocks() == 0


# --- readers


def test_a_ticket_is_good_for_one(make: Make) -> None:
    two = make(engines=2)
    two.offer()
    two.load(engine="d0")
    two.load(engine="d1")
    two.do("end calm")
    assert (two.good, two.failures) == (1, [DENIED])


def test_a_read_that_is_cancelled_is_served_to_its_end(one: Scenario) -> None:
    """Its blocks are held on both sides, as long as it takes."""
    one.start_reading()
    one.do("abort d0 0", "step d0")
    one.rounds(100, without=("land", "work"))
    assert (one.blocks(), one.blocks("d0")) == (2, 2)
    assert one.failures == []
    one.do("land 0 0", "turn d0.0")
    assert one.failures == ["dropped (dropped)"]
    one.rounds(2)
    assert (one.blocks(), one.blocks("d0")) == (0, 0)


def test_the_next_life_is_not_disturbed_by_reads_of_the_former(one: Scenario) -> None:
    """They hang, and the rank has its port again."""
    one.start_reading()
    one.do("hang 0", "kill p", "start p", "report 0")
    one.load(one.offer())
    one.rounds(20, without=("land 0",))
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
    assert "has restarted, slept or reset its cache since" in failure
