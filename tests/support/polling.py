"""Waiting for what another thread does, with a limit that no busy machine reaches."""

import time
from collections.abc import Callable

from nixl_kv.ids import Endpoint
from nixl_kv.transport.zmq import ZmqControl

TIMEOUT_S = 60.0
NAP_S = 0.005


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(NAP_S)


def hear_of_loss(control: ZmqControl, endpoint: Endpoint) -> None:
    """Until ZMQ has told of the loss of a link, which is not reported yet."""
    caller = control._caller
    assert caller is not None

    def is_lost() -> bool:
        caller._watch()
        return bool(caller.links[endpoint].failure)

    wait_until(is_lost)
