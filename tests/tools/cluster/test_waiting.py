"""Waiting: what was seen last is what counts, and time ends it."""

import pytest

from harness.cluster.waiting import look_until, wait_or_fail, wait_until


@pytest.mark.parametrize(
    ("timeout_s", "seen"),
    [pytest.param(60.0, 3, id="until it is good"), pytest.param(-1.0, 0, id="one look at least")],
)
def test_the_last_look_is_returned(timeout_s: float, seen: int) -> None:
    looks = iter(range(10))
    assert look_until(lambda: next(looks), lambda n: n == 3, timeout_s, interval_s=0.0) == seen


def test_what_does_not_come_about_is_said_or_raised() -> None:
    assert not wait_until(lambda: False, -1.0)
    with pytest.raises(TimeoutError, match=r"^too late$"):
        wait_or_fail(lambda: False, -1.0, "too late")
    wait_or_fail(lambda: True, -1.0, "too late")
