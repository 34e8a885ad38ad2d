"""Prefill and decode machines together: by hand, and through whatever days hypothesis thinks of."""

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_records import decode
from protocol_world import (
    BAD_DAY,
    BUSY_DAY,
    CLEAR,
    GOOD_DAY,
    LATE_DAY,
    LEASE_S,
    OFFER_TTL_S,
    TIMEOUT_S,
    Step,
    World,
)

from nixl_kv.protocol.messages import Ask, Grant, Message, Proof, Prove


@pytest.fixture
def world() -> Iterator[World]:
    """One prefill rank, two decode engines; whatever a test does, nothing is left behind."""
    made = World()
    yield made
    made.end()


def offer(world: World) -> int:
    """A prompt was computed, and its ticket is out. Returns its number."""
    world.compute()
    world.publish(0)
    return len(world.offered) - 1


def start(world: World, offered: int = 0, engine: int = 0, *, verify: bool = False) -> None:
    """A request arrives and gets blocks."""
    world.load(engine, world.fetch(engine, world.offered[offered].ticket), verify=verify)


def obey(world: World) -> None:
    while any(rank.commands for rank in world.decode):
        world.obey(0)


def until(world: World, kind: type[Message]) -> None:
    """Deliver all before the first message of a kind, which stays under way."""
    obey(world)
    while not isinstance(decode(world.packets[0].payload), kind):
        world.deliver(0)


def under_way(world: World) -> list[str]:
    return [type(decode(packet.payload)).__name__ for packet in world.packets]


def prefill_alone(world: World, seconds: float) -> None:
    """Time passes, and only prefill notices."""
    world.now += seconds
    world.tick(len(world.decode))


def read_until_reading(world: World) -> None:
    """Up to the moment when the read of the data has begun."""
    until(world, Grant)
    world.deliver(0)
    assert [read.slot for read in world.decode[0].reads] == [None]


# Without faults


def test_a_prompt_is_read(world: World) -> None:
    offer(world)
    start(world)
    world.calm()
    assert world.outcomes() == [None]
    assert world.prefill[0].sent == Counter(["p1"])
    assert world.prefill[0].slots == [CLEAR] * 3


def test_what_waits_for_blocks_is_kept_for_it(world: World) -> None:
    offer(world)
    wanted = world.fetch(0, world.offered[0].ticket)
    for _ in range(600):
        world.calm(0.1)
    world.load(0, wanted)
    world.calm()
    assert world.outcomes() == [None]


def test_a_prompt_that_is_not_needed_is_freed_at_once(world: World) -> None:
    offer(world)
    world.fetch(0, world.offered[0].ticket)
    world.calm()
    world.abort(0)
    world.calm()
    assert world.prefill[0].sent == Counter(["p1"])


def test_a_prompt_that_nobody_wants_is_freed_in_time(world: World) -> None:
    offer(world)
    world.calm(OFFER_TTL_S - 0.01)
    assert world.prefill[0].sent == Counter()
    world.calm()
    assert world.prefill[0].sent == Counter(["p1"])


# The fence


def test_blocks_that_are_taken_back_during_a_read_spoil_it(world: World) -> None:
    offer(world)
    start(world)
    read_until_reading(world)
    world.land(0)
    prefill_alone(world, LEASE_S)
    assert world.prefill[0].memory == ["used again"] * 2
    world.calm()
    assert world.outcomes() == ["prefill rank 0 took its blocks back while they were read"]


def test_blocks_that_are_taken_back_before_the_check_spoil_it(world: World) -> None:
    """The bytes are right, but nobody knows."""
    offer(world)
    start(world)
    read_until_reading(world)
    world.land(0)
    world.land(0)
    world.finish(0)
    prefill_alone(world, LEASE_S)
    world.calm()
    assert world.outcomes() == ["prefill rank 0 took its blocks back while they were read"]


def test_blocks_that_are_taken_back_after_the_check_do_not_matter(world: World) -> None:
    offer(world)
    start(world)
    read_until_reading(world)
    world.land(0)
    world.land(0)
    world.finish(0)
    world.land(0)
    prefill_alone(world, LEASE_S)
    assert world.prefill[0].sent == Counter(["p1"])
    world.finish(0)
    assert world.outcomes() == [None]


def test_the_slot_of_another_grant_is_no_proof(world: World) -> None:
    """Taken back, and given to the next prompt, in the same slot."""
    offer(world)
    start(world)
    read_until_reading(world)
    prefill_alone(world, LEASE_S)
    start(world, offer(world), engine=1)
    until(world, Grant)
    assert [slot != CLEAR for slot in world.prefill[0].slots] == [False, False, True]
    world.calm()
    assert world.outcomes() == ["prefill rank 0 took its blocks back while they were read", None]


# Proofs

CORRUPT = "what was read from prefill rank 0 is not what it has: a block"


def land_all(world: World) -> None:
    """The data, and the slot after it."""
    for _ in range(3):
        world.land(0)
    world.finish(0)
    world.land(0)
    world.finish(0)
    assert world.decode[0].reads == []


def test_a_read_is_proven(world: World) -> None:
    offer(world)
    start(world, verify=True)
    world.calm()
    assert world.outcomes() == [None]
    assert world.decode[0].loaded["d0"].verified
    assert world.prefill[0].sent == Counter(["p1"])


def test_it_is_asked_for_while_the_bytes_are_under_way(world: World) -> None:
    offer(world)
    start(world, verify=True)
    read_until_reading(world)
    assert under_way(world) == ["Prove"]


def test_what_was_damaged_on_its_way_is_not_used(world: World) -> None:
    offer(world)
    start(world, verify=True)
    read_until_reading(world)
    world.land(0)
    world.damage(0)
    world.calm()
    assert world.outcomes() == [CORRUPT]
    assert world.prefill[0].sent == Counter(["p1"])


@pytest.mark.parametrize("kind", [Prove, Proof], ids=["question", "answer"])
def test_a_proof_that_is_lost_is_asked_for_again(world: World, kind: type[Message]) -> None:
    offer(world)
    start(world, verify=True)
    read_until_reading(world)
    if kind is Proof:
        world.deliver(0)
        for _ in range(3):
            world.digest(0)
    assert under_way(world) == [kind.__name__]
    world.lose(0)
    land_all(world)
    for _ in range(12):
        world.calm()
    assert world.outcomes() == [None]
    assert world.decode[0].loaded["d0"].verified


@pytest.mark.parametrize("seen", range(3))
def test_a_proof_of_blocks_that_were_taken_back_is_void(world: World, seen: int) -> None:
    """However much of them it had seen."""
    offer(world)
    start(world, verify=True)
    read_until_reading(world)
    land_all(world)
    world.deliver(0)
    for _ in range(seen):
        world.digest(0)
    prefill_alone(world, LEASE_S)
    assert world.prefill[0].memory == ["used again"] * 2
    for _ in range(3 - seen):
        world.digest(0)
    assert under_way(world) == ["Deny"]
    world.calm()
    assert world.outcomes() == ["prefill rank 0 denied: gone"]


def test_a_read_that_is_aborted_while_it_is_proven_is_given_back_at_once(world: World) -> None:
    offer(world)
    start(world, verify=True)
    read_until_reading(world)
    land_all(world)
    world.abort(0)
    obey(world)
    assert world.outcomes() == ["dropped"]
    assert under_way(world) == ["Prove", "Abort"]
    world.deliver(1)
    assert world.prefill[0].sent == Counter(["p1"])
    world.deliver(0)
    assert under_way(world) == ["Deny"]


def test_who_was_not_granted_gets_no_proof(world: World) -> None:
    offer(world)
    start(world, verify=True)
    start(world, engine=1, verify=True)
    world.calm()
    assert world.outcomes() == [None, "prefill rank 0 denied: gone"]


# Readers that do not want any more


def test_a_read_that_is_aborted_is_served_to_its_end(world: World) -> None:
    """Its blocks are held on both sides, as long as it takes."""
    offer(world)
    start(world)
    read_until_reading(world)
    world.abort(0)
    for _ in range(100):
        obey(world)
        while world.packets:
            world.deliver(0)
        world.now += 0.1
        for pick in range(3):
            world.tick(pick)
    assert world.prefill[0].sent == Counter()
    assert world.outcomes() == []
    world.calm()
    world.calm()
    assert world.prefill[0].sent == Counter(["p1"])
    assert world.outcomes() == ["dropped"]


def test_a_read_that_is_late_is_given_up_when_it_has_ended(world: World) -> None:
    offer(world)
    start(world)
    read_until_reading(world)
    world.now += TIMEOUT_S
    world.tick(0)
    assert world.outcomes() == []
    world.calm()
    assert world.outcomes() == ["no KV within 4 s"]


def test_a_grant_that_comes_after_the_abort_is_given_back_at_once(world: World) -> None:
    offer(world)
    world.fetch(0, world.offered[0].ticket)
    until(world, Ask)
    world.abort(0)
    obey(world)
    assert under_way(world) == ["Ask", "Abort"]
    world.lose(1)
    world.deliver(0)
    assert under_way(world) == ["Grant"]
    world.deliver(0)
    assert under_way(world) == ["Abort"]
    world.deliver(0)
    assert world.prefill[0].sent == Counter(["p1"])


def test_an_abort_that_overtakes_its_ask_ends_the_offer(world: World) -> None:
    offer(world)
    world.fetch(0, world.offered[0].ticket)
    until(world, Ask)
    world.abort(0)
    obey(world)
    world.deliver(1)
    assert world.prefill[0].sent == Counter(["p1"])
    world.deliver(0)
    assert under_way(world) == ["Deny"]


# Messages that are lost


@pytest.mark.parametrize("kind", [Ask, Grant], ids=["ask", "grant"])
def test_what_is_lost_before_the_grant_is_asked_again(world: World, kind: type[Message]) -> None:
    offer(world)
    start(world)
    until(world, kind)
    world.lose(0)
    assert under_way(world) == []
    for _ in range(11):
        world.calm()
    assert world.outcomes() == [None]


@pytest.mark.parametrize("aborted", [False, True], ids=["done", "abort"])
def test_a_last_word_that_is_lost_costs_a_lease(world: World, *, aborted: bool) -> None:
    offer(world)
    start(world)
    read_until_reading(world)
    if aborted:
        world.abort(0)
        obey(world)
    for _ in range(4):
        world.land(0)
        world.finish(0)
    while world.packets:
        world.lose(0)
    prefill_alone(world, LEASE_S - 0.01)
    assert world.prefill[0].sent == Counter()
    prefill_alone(world, 0.01)
    assert world.prefill[0].sent == Counter(["p1"])


def test_a_last_word_that_is_lost_costs_less_if_the_reader_renews_others(world: World) -> None:
    offer(world)
    world.fetch(0, world.offered[0].ticket)
    start(world, offer(world))
    obey(world)
    while world.packets:
        world.deliver(0)
    for _ in range(3):
        world.land(0)
        world.finish(0)
    assert under_way(world) == ["Done"]
    world.lose(0)
    world.tick(0)
    assert under_way(world) == ["Renew"]
    world.deliver(0)
    assert world.prefill[0].sent == Counter(["p2"])


def test_messages_that_come_twice_do_no_harm(world: World) -> None:
    offer(world)
    start(world)
    obey(world)
    while world.packets:
        world.repeat(0)
        world.deliver(0)
    world.calm()
    assert world.outcomes() == [None]


# Several readers


def test_a_ticket_is_good_for_one(world: World) -> None:
    offer(world)
    start(world, engine=0)
    start(world, engine=1)
    world.calm()
    assert world.outcomes() == [None, "prefill rank 0 denied: gone"]


def test_the_one_that_came_too_late_takes_nothing_from_the_first(world: World) -> None:
    offer(world)
    start(world, engine=0)
    read_until_reading(world)
    world.fetch(1, world.offered[0].ticket)
    world.abort(1)
    obey(world)
    while world.packets:
        world.deliver(0)
    assert world.prefill[0].sent == Counter()
    world.calm()
    assert world.outcomes() == [None]


def test_slots_that_are_all_granted_cost_a_computation(world: World) -> None:
    for _ in range(4):
        world.fetch(0, world.offered[offer(world)].ticket)
    world.calm()
    for wanted in world.wanted[0]:
        world.load(0, wanted)
    world.calm()
    assert world.outcomes() == [None, None, None, "prefill rank 0 denied: gone"]


# Lives


def test_a_ticket_of_a_former_life_is_refused(world: World) -> None:
    offer(world)
    world.restart()
    start(world)
    world.calm()
    assert world.outcomes() == ["another life"]


def test_a_restart_ends_what_is_not_read(world: World) -> None:
    offer(world)
    world.fetch(0, world.offered[0].ticket)
    world.calm()
    world.restart()
    for _ in range(3):
        world.calm()
    world.load(0, world.wanted[0][0])
    world.calm()
    assert world.outcomes() == ["prefill rank 0 let the lease run out"]


def test_the_next_life_is_not_disturbed_by_reads_of_the_former(world: World) -> None:
    """They are stuck, and the rank has its port again."""
    offer(world)
    start(world)
    read_until_reading(world)
    world.restart()
    world.cut(4)
    wanted = world.fetch(0, world.offered[offer(world)].ticket)
    for _ in range(10):
        obey(world)
        while world.packets:
            world.deliver(0)
        world.now += 0.1
        world.tick(0)
    world.load(0, wanted)
    world.calm()
    assert world.outcomes() == ["reading prefill rank 0 failed: broken", None]


# Any day


SHAPES = [
    pytest.param((1, 1), id="one reads one"),
    pytest.param((2, 1), id="one reads two"),
    pytest.param((1, 2), id="two read one"),
    pytest.param((2, 2), id="two read two"),
]
days = st.binary(min_size=100, max_size=400)
one_patch_for_all = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    """The numbers of prefill ranks and of decode ranks; each of these reads all of those."""
    sources, readers = request.param
    return sources, readers


def live(world: World, steps: Sequence[Step], day: bytes) -> None:
    for which, pick in zip(day[::2], day[1::2], strict=False):
        steps[which % len(steps)](world, pick)


@pytest.mark.parametrize("shape", SHAPES, indirect=True)
@settings(deadline=None, suppress_health_check=one_patch_for_all, max_examples=100)
@given(day=days)
def test_on_a_bad_day_nothing_is_wrong_and_nothing_is_left(
    shape: tuple[int, int], day: bytes
) -> None:
    world = World(sources=shape[0], readers=shape[1])
    live(world, BAD_DAY, day)
    world.end()


@pytest.mark.parametrize("shape", SHAPES, indirect=True)
@settings(deadline=None, suppress_health_check=one_patch_for_all, max_examples=50)
@given(day=days)
def test_on_a_late_day_no_stale_byte_is_used(shape: tuple[int, int], day: bytes) -> None:
    world = World(sources=shape[0], readers=shape[1], slots=64)
    live(world, LATE_DAY, day)
    world.end()


@pytest.mark.parametrize("shape", SHAPES, indirect=True)
@settings(deadline=None, suppress_health_check=one_patch_for_all, max_examples=50)
@given(day=days)
def test_on_a_good_day_every_load_is_good(shape: tuple[int, int], day: bytes) -> None:
    world = World(sources=shape[0], readers=shape[1], slots=64)
    world.gentle = True
    live(world, GOOD_DAY, day)
    for engine, of_engine in enumerate(world.wanted):
        for wanted in of_engine:
            if not wanted.loading:
                world.load(engine, wanted, verify=True)
    world.end()
    assert set(world.outcomes()) <= {None}


@pytest.mark.parametrize("shape", SHAPES, indirect=True)
@settings(deadline=None, suppress_health_check=one_patch_for_all, max_examples=50)
@given(day=days)
def test_on_a_busy_day_every_read_is_served_to_its_end(shape: tuple[int, int], day: bytes) -> None:
    """A read whose owner stops taking part may hang."""
    world = World(sources=shape[0], readers=shape[1], slots=64)
    world.gentle = True
    live(world, BUSY_DAY, day)
    world.end()
    assert set(world.outcomes(dropped=False)) <= {None}
