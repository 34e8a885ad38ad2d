"""Waiting for something to become true."""

import time
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 0.2


def wait_until(
    condition: Callable[[], bool],
    timeout_s: float,
    *,
    on_wait: Callable[[float], None] | None = None,
    interval_s: float = INTERVAL_S,
) -> bool:
    """Ask until it is true; False when time is over. `on_wait` gets the seconds passed."""
    begin = time.monotonic()
    while not condition():
        passed = time.monotonic() - begin
        if passed > timeout_s:
            return False
        if on_wait is not None:
            on_wait(passed)
        time.sleep(interval_s)
    return True
