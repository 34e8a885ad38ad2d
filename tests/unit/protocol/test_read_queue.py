"""Which reads may be under way: the bounds, the turns, and the lanes that stand still."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.ids import Claim, Endpoint, Rank
from nixl_kv.protocol.read_queue import MAX_BYTES, STALL_S, Key, ReadQueue
from support.records import at, hex32

HALF = MAX_BYTES // 2


def key(number: int) -> Key:
    return Claim(hex32(number)), Rank(0)


def queue_of(*reads: tuple[int, Endpoint, int]) -> ReadQueue:
    """A queue of reads, each (number, endpoint, bytes)."""
    queue = ReadQueue()
    for number, endpoint, num_bytes in reads:
        queue.add(key(number), endpoint, num_bytes)
    return queue


def started(queue: ReadQueue, now: float = 0.0) -> list[int]:
    queue_numbers = [int(claim, 16) for claim, _ in queue.pop_startable(now)]
    queue.check()
    return queue_numbers


def test_the_reads_of_one_load_from_several_ranks_go_together() -> None:
    queue = queue_of((0, at(0), MAX_BYTES))
    queue.add((key(0)[0], Rank(1)), at(1), MAX_BYTES)
    queue.add(key(1), at(1), 1)
    assert started(queue) == [0, 0]
    queue.remove(key(0), 1.0, has_landed=True)
    assert started(queue, 1.0) == []
    queue.remove((key(0)[0], Rank(1)), 2.0, has_landed=True)
    assert started(queue, 2.0) == [1]


def test_ranks_that_hang_lose_their_turns_alone() -> None:
    queue = queue_of((0, at(0), MAX_BYTES), (1, at(0), 1), (2, at(1), MAX_BYTES), (3, at(1), 1))
    assert (started(queue), queue.stalls.next) == ([0], STALL_S)
    assert [started(queue, now) for now in (STALL_S, 2 * STALL_S)] == [[2], []]
    for number in (4, 5):
        queue.add(key(number), at(number), 1)
    assert started(queue, 2 * STALL_S) == [4, 5]
    queue.remove(key(3), 2 * STALL_S, has_landed=False)
    for number in (6, 7):
        queue.add(key(number), at(number), 1)
    assert started(queue, 2 * STALL_S) == [6, 7]


def test_a_waiting_read_advances_with_those_before_it() -> None:
    queue = queue_of((0, at(0), HALF), (1, at(0), HALF), (2, at(0), HALF), (3, at(1), HALF))
    assert started(queue) == [0, 3]
    assert queue.moved_at(key(2)) == 0.0
    queue.remove(key(3), 5.0, has_landed=True)
    assert queue.moved_at(key(2)) == 0.0  # another rank's end says nothing of this one
    queue.remove(key(0), 7.0, has_landed=True)
    started(queue, 7.0)
    assert {queue.moved_at(key(number)) for number in (1, 2)} == {7.0}


def test_a_read_that_waits_behind_one_that_moves_is_not_stuck() -> None:
    queue = queue_of((0, at(0), MAX_BYTES), (1, at(0), MAX_BYTES))
    assert started(queue) == [0]
    queue.note_progress(key(0), 5.0)
    queue.note_progress(key(9), 6.0)
    assert queue.moved_at(key(1)) == 5.0


READS = st.tuples(st.integers(0, 3), st.integers(0, MAX_BYTES + 1))
STEPS = st.lists(
    READS | st.tuples(st.just("end"), st.integers(0, 40), st.booleans()) | st.floats(0, 3),
    max_size=60,
)


@given(STEPS)
def test_the_bounds_hold_and_each_read_begins_once_in_its_turn(steps: list[object]) -> None:
    """Compared with a plain account of the reads under way."""
    queue, now = ReadQueue(), 0.0
    known: dict[Key, tuple[Endpoint, int]] = {}
    under_way: dict[Key, float] = {}
    order: dict[Endpoint, list[Key]] = {}
    progressed: dict[Endpoint, float] = {}
    for number, step in enumerate(steps):
        match step:
            case float():
                now += step
            case ("end", int(which), bool(good)) if known:
                ended = list(known)[which % len(known)]
                endpoint, _ = known.pop(ended)
                queue.remove(ended, now, has_landed=good)
                if ended in under_way:
                    del under_way[ended]
                    if good:
                        progressed[endpoint] = now
                else:
                    order[endpoint].remove(ended)
            case (int(rank), int(num_bytes)):
                known[key(number)] = at(rank), num_bytes
                order.setdefault(at(rank), []).append(key(number))
                queue.add(key(number), at(rank), num_bytes)
        started = list(queue.pop_startable(now))
        for begun in started:
            endpoint, _ = known[begun]
            assert order[endpoint].pop(0) == begun, "out of turn"
            if all(known[other][0] != endpoint for other in under_way):
                progressed[endpoint] = now
            under_way[begun] = now
        queue.check()
        in_lanes: Counter[Endpoint] = Counter()
        num_reads: Counter[Endpoint] = Counter()
        for other in under_way:
            in_lanes[known[other][0]] += known[other][1]
            num_reads[known[other][0]] += known[other][1] > 0  # an empty one blocks no other
        moving = [lane for lane in in_lanes if now < progressed[lane] + STALL_S]
        assert all(in_lanes[lane] <= MAX_BYTES or num_reads[lane] == 1 for lane in in_lanes)
        moved = sum(in_lanes[lane] for lane in moving)
        is_within = moved <= MAX_BYTES or sum(num_reads[lane] for lane in moving) == 1
        # A lane that moves again may exceed the bound, but then no read of any bytes begins.
        assert is_within or all(known[begun][1] == 0 for begun in started)
        assert under_way or not known, "something waits though nothing is under way"
