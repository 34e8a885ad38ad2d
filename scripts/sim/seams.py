"""Where the simulator touches the code it runs: its clock, its random numbers, its faults."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from nixl_kv import ids
from nixl_kv.connector import decode
from nixl_kv.geometry import digest
from sim.violations import InjectedError


class Clock:
    """Virtual seconds, the same for all."""

    def __init__(self) -> None:
        """Begin somewhere; a monotonic clock's zero means nothing."""
        self.now = 1000.0

    def __call__(self) -> float:
        """As `time.monotonic`."""
        return self.now


class Fuse:
    """Lets the transfer thread of one rank die: at the n-th thing it does.

    That is an event that a machine handles, or something asked of sockets, agents or slots.
    """

    def __init__(self) -> None:
        """Begin without one lit."""
        self.left: int | None = None

    def touch(self) -> None:
        """One thing more is asked.

        Raises:
            InjectedError: if it was the last one.
        """
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise InjectedError("planted by the schedule")

    def guard(self, machine: object, name: str) -> None:
        """A method of a machine may be what the thread dies of."""
        method = getattr(machine, name)

        def guarded(*arguments: Any) -> Any:
            self.touch()
            return method(*arguments)

        setattr(machine, name, guarded)


class SeededSecrets:
    """Stands in for the module `secrets`: a schedule's names are the same each time."""

    def __init__(self, seed: int) -> None:
        """Begin the sequence of this seed."""
        self._random = random.Random(seed)  # noqa: S311 - nobody guesses here

    def token_bytes(self, count: int) -> bytes:
        """As `secrets.token_bytes`."""
        return self._random.randbytes(count)

    def token_hex(self, count: int) -> str:
        """As `secrets.token_hex`."""
        return self._random.randbytes(count).hex()


@contextmanager
def replaced(clock: Clock, seed: int = 0) -> Iterator[None]:
    """Run the schedulers by a virtual clock, and everything with numbers that repeat.

    A digest takes a step for each block: caches are small here, and turns many.
    """
    with (
        patch.object(decode, "random", random.Random(seed)),  # noqa: S311 - nobody guesses here
        patch.object(digest, "STEP_BYTES", 1),
        patch.object(ids, "secrets", SeededSecrets(seed)),
        patch.object(decode, "time", SimpleNamespace(monotonic=clock), create=True),
    ):
        yield
