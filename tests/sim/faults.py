"""Faults that the schedule plans for the transfer thread of one rank."""

from collections.abc import Callable
from typing import Any


class InjectedError(Exception):
    """A bug of our own somewhere in the transfer thread, which the schedule put there."""


class Faults:
    """Lets the thread die at the n-th thing that it does, refuse the next peer, or fail to send.

    A thing is an event that a machine handles, or a call of sockets, agents, digests or slots.
    """

    def __init__(self) -> None:
        self.dies_after: int | None = None
        self.refuses_peer = False
        self.unsent = 0  # messages to endpoints that cannot be sent, from the next one on

    def touch(self) -> None:
        if self.dies_after is None:
            return
        self.dies_after -= 1
        if self.dies_after < 0:
            self.dies_after = None
            raise InjectedError("planned by the schedule")

    def guard(self, owner: object, name: str) -> None:
        """A method of an object may be what the thread dies of."""
        method: Callable[..., Any] = getattr(owner, name)

        def guarded(*args: Any) -> Any:
            self.touch()
            return method(*args)

        setattr(owner, name, guarded)
