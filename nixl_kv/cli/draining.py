"""Lets a running engine take leave: it offers nothing new, and what it has begun is finished."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from nixl_kv.cli import running
from nixl_kv.keys import Keys
from nixl_kv.protocol import messages

LOOK_S: Final = 0.25


@dataclass(frozen=True)
class Left:
    """What is not finished. `silent` are the ranks that do not say, each with why."""

    awaited: int
    offers: int
    loads: int
    silent: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.awaited or self.offers or self.loads or self.silent)

    def __str__(self) -> str:
        counts = (
            f"{self.awaited:,} requests that are not offered yet, "
            f"{self.offers:,} offers, {self.loads:,} loads"
        )
        return "; ".join((counts, *self.silent))


def drain(where: str, keys: Keys | None, timeout_s: float, say: Callable[[str], object]) -> Left:
    """Wait until nothing is left of what the engine at `HOST:PORT` has begun, or time is over.

    Args:
        where: the engine's directory.
        keys: the engine's, if it has any.
        timeout_s: how long to wait, in seconds.
        say: is told what is left, whenever that changes.

    Returns:
        What is left.

    Raises:
        ValueError: if the engine does not answer; names the address.
    """
    until = time.monotonic() + timeout_s
    said = None
    while True:
        left = _left(where, keys)
        if left != said:
            say(str(left))
            said = left
        if not left or time.monotonic() >= until:
            return left
        time.sleep(LOOK_S)


def undo(where: str, keys: Keys | None) -> None:
    """Let the engine at `HOST:PORT` offer again.

    Raises:
        ValueError: if the engine does not answer; names the address.
    """
    running.ask_first(where, partial(running.ask_to_drain, keys=keys, undo=True), option="--at")


def _left(where: str, keys: Keys | None) -> Left:
    """In this order: what is awaited becomes an offer before it is awaited no longer."""
    ask = partial(running.ask_to_drain, keys=keys)
    awaited = running.ask_first(where, ask, option="--at")
    answers = running.rank_statuses(running.describe_at(where, option="--at", keys=keys), keys)
    statuses = [answer for _, answer in answers if isinstance(answer, messages.Status)]
    return Left(
        awaited,
        max((status.totals.get("offers", 0) for status in statuses), default=0),
        max((status.totals.get("loads", 0) for status in statuses), default=0),
        tuple(
            f"rank {number} gives no status: {answer}"
            for number, (_, answer) in enumerate(answers)
            if not isinstance(answer, messages.Status)
        ),
    )
