"""The loop's clock leaves out the time in which the loop should run but does not."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.engine.clock import MAX_GAP_S, LoopClock


class Machine:
    """Wall time and the thread's CPU time, moved by hand."""

    def __init__(self) -> None:
        self.now, self.used = 1000.0, 5.0
        self.clock = LoopClock(lambda: self.now, work=lambda: self.used)

    def stand_still(self, seconds: float) -> None:
        self.now += seconds

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds

    def wait(self, limit_s: float | None, seconds: float) -> None:
        self.clock.begin_wait(limit_s)
        self.now += seconds
        self.clock.end_wait()


@pytest.mark.parametrize(
    ("steps", "counted_s"),
    [
        ([("wait", 30.0, 30.0), ("wait", None, 500.0), ("wait", 30.0, 10.0)], 540.0),
        ([("wait", 3.0, 28.0)], 3.0 + MAX_GAP_S),
        ([("stand_still", 25.0), ("wait", 5.0, 5.0)], MAX_GAP_S + 5.0),
        ([("compute", 7.0), ("wait", 0, 0)], 7.0),
    ],
    ids=["waits", "a wait that lasts too long", "a turn that stands still", "one that computes"],
)
def test_waits_and_work_count_and_of_other_time_the_beginning(
    steps: list[tuple[Any, ...]], counted_s: float
) -> None:
    machine = Machine()
    machine.wait(0, 0)
    begin = machine.clock()
    for step, *seconds in steps:
        getattr(machine, step)(*seconds)
    assert machine.clock() - begin == counted_s


def test_a_call_of_another_thread_leaves_nothing_out() -> None:
    """Its computing time says nothing about that of the loop, which has computed for an hour."""
    machine = Machine()
    machine.used, other_used = 3600.0, 0.1
    begin = machine.clock()
    machine.clock.begin_wait(30.0)
    machine.now += 10.0
    loop_used, machine.used = machine.used, other_used
    with ThreadPoolExecutor(1) as another:
        assert another.submit(machine.clock).result() - begin == 10.0
    machine.now += 20.0
    machine.used = loop_used
    machine.clock.end_wait()
    assert machine.clock() - begin == 30.0


TURNS = st.lists(
    st.tuples(*[st.floats(0, 50)] * 3, st.none() | st.floats(0, 50)), min_size=1, max_size=20
)


@given(turns=TURNS)
def test_the_clock_never_goes_back_nor_beyond_the_wall_clock(
    turns: list[tuple[float, float, float, float | None]],
) -> None:
    machine = Machine()
    begin, times = machine.now, [machine.clock()]
    for computes, stands, waits, limit in turns:
        machine.compute(computes)
        machine.stand_still(stands)
        machine.wait(limit, waits)
        times.append(machine.clock())
    assert all(earlier <= later + 1e-6 for earlier, later in itertools.pairwise(times))
    assert times[-1] - times[0] <= machine.now - begin + 1e-6
    least = sum(
        computes + min(waits, waits if limit is None else limit)
        for computes, _, waits, limit in turns
    )
    assert times[-1] - times[0] >= least - 1e-6
