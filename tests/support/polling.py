"""Waiting for what another thread does, with a limit that no busy machine reaches."""

from collections.abc import Callable

from harness.cluster.waiting import wait_or_fail
from nixl_kv.ids import Endpoint
from nixl_kv.transport.zmq import ZmqControl

TIMEOUT_S = 60.0


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    wait_or_fail(
        lambda: bool(condition()), timeout_s, f"not within {timeout_s:g} s", interval_s=0.005
    )


def hear_of_loss(control: ZmqControl, endpoint: Endpoint) -> None:
    """Wait until ZMQ has told of the loss of a link, which is not reported yet."""
    caller = control._caller
    assert caller is not None

    def is_lost() -> bool:
        caller._watch()
        return bool(caller.links[endpoint].failure)

    wait_until(is_lost)
