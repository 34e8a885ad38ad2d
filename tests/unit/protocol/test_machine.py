"""Deadlines, compared with an oracle that scans all of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.protocol.machine import Deadlines

TIMES = st.just(math.inf) | st.integers(0, 20).map(float)
STEPS = st.lists(st.tuples(st.integers(0, 5), TIMES) | st.integers(0, 20).map(float), max_size=60)


@given(STEPS)
def test_the_same_keys_are_due_as_if_all_were_looked_at(
    steps: list[tuple[int, float] | float],
) -> None:
    deadlines = Deadlines[int]()
    oracle: dict[int, float] = {}
    for step in steps:
        if isinstance(step, tuple):
            key, when = step
            deadlines.set(key, when)
            oracle.pop(key, None)
            if when < math.inf:
                oracle[key] = when
        else:
            due = deadlines.pop_due(step)
            assert sorted(due) == sorted(key for key in oracle if oracle[key] <= step)
            assert [oracle[key] for key in due] == sorted(oracle[key] for key in due)
            oracle = {key: when for key, when in oracle.items() if when > step}
        assert len(deadlines._due) == len(oracle)
        assert deadlines.next == min(oracle.values(), default=math.inf)


def test_deadlines_that_are_set_again_take_no_room() -> None:
    deadlines = Deadlines[int]()
    for step in range(10_000):
        deadlines.set(step % 10, step + 100.0)
    assert len(deadlines._heap) <= 2 * 10 + 16 + 1


@pytest.mark.parametrize("when", [math.inf, 5.0])
def test_clear_forgets_all(when: float) -> None:
    deadlines = Deadlines[int]()
    deadlines.set(1, when)
    deadlines.clear()
    assert deadlines.next == math.inf
    assert deadlines.pop_due(9.0) == []
