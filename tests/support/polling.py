"""Waiting for what another thread does, with a limit that no busy machine reaches."""

import time
from collections.abc import Callable

TIMEOUT_S = 60.0
NAP_S = 0.005


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(NAP_S)
