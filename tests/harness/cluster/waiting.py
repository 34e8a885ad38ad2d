"""Waiting for something to become true."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

INTERVAL_S: Final = 0.2

_Seen = TypeVar("_Seen")


def wait_until(
    condition: Callable[[], bool], timeout_s: float, *, interval_s: float = INTERVAL_S
) -> bool:
    """Ask until it is true; False after the timeout."""
    return look_until(condition, bool, timeout_s, interval_s=interval_s)


def wait_or_fail(
    condition: Callable[[], bool],
    timeout_s: float,
    otherwise: str,
    *,
    interval_s: float = INTERVAL_S,
) -> None:
    """Raise a TimeoutError that says `otherwise` if it does not become true in time."""
    if not wait_until(condition, timeout_s, interval_s=interval_s):
        raise TimeoutError(otherwise)


def look_until(
    look: Callable[[], _Seen],
    is_good: Callable[[_Seen], bool],
    timeout_s: float,
    *,
    interval_s: float = INTERVAL_S,
) -> _Seen:
    """Look until `is_good` accepts the result, or until the timeout; return the last result."""
    begin = time.monotonic()
    while not is_good(seen := look()):
        if time.monotonic() - begin > timeout_s:
            break
        time.sleep(interval_s)
    return seen
