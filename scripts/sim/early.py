"""A planted bug that takes more than a line: the slot is read together with the data."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from nixl_kv.protocol import events


class EarlyChecks:
    """Posts the slot's read with the data's, which it overtakes, and answers the check by it."""

    def __init__(self, kind: Any) -> None:
        """Stand in for methods of `ReadAgent`."""
        self._start, self._check = kind.start, kind.check
        self._found: dict[tuple[str, int], Any] = {}

    @classmethod
    @contextmanager
    def planted(cls, kind: Any) -> Iterator[None]:
        """For as long as the context lasts."""
        early = cls(kind)
        with (
            patch.object(kind, "start", lambda *args: early.start(*args)),  # noqa: PLW0108 - binds
            patch.object(kind, "check", lambda *args: early.check(*args)),  # noqa: PLW0108 - binds
        ):
            yield

    def start(self, agent: Any, action: Any) -> Any:
        """Both reads at once; the short one is the first to land."""
        ended = self._start(agent, action)
        key = (action.load.request, action.source)
        if ended is None and not self._check(
            agent, events.CheckSlot(action.peer, action.source, key[0], action.grant.slot)
        ):
            read = agent.running.pop()
            read.handle.land_all()
            generation = agent._scratch.read(read.check)  # noqa: SLF001 - a bug would
            agent._free_checks.append(read.check)  # noqa: SLF001
            if not read.handle.pairs:
                self._found[key] = events.SlotRead(*key, generation)
        return ended

    def check(self, agent: Any, action: Any) -> Any:
        """What was found then."""
        key = (action.request, action.source)
        return self._found.pop(key) if key in self._found else self._check(agent, action)
