"""When each of many things is due, so that time costs what is due and not what is held."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class Deadlines(Generic[_Key]):
    """One deadline for each key, in monotonic seconds.

    To set one costs O(log n). Entries that were set anew or removed stay in the heap until their
    time comes, or until they are more than half of it.
    """

    def __init__(self) -> None:
        self._due: dict[_Key, float] = {}
        self._heap: list[tuple[float, int, _Key]] = []
        self._count = 0  # so that keys are never compared

    def __len__(self) -> int:
        return len(self._due)

    @property
    def next(self) -> float | None:
        """The earliest deadline; None if there is none."""
        while self._heap and self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def get(self, key: _Key) -> float | None:
        """The deadline of a key, if it has one."""
        return self._due.get(key)

    def set(self, key: _Key, when: float | None) -> None:
        """Give a key this deadline instead of any other; None for no deadline."""
        if self._due.get(key) == when:
            return
        if when is None:
            del self._due[key]
        else:
            self._due[key] = when
            self._count += 1
            heapq.heappush(self._heap, (when, self._count, key))
        if len(self._heap) > 2 * len(self._due) + 16:
            self._heap = [entry for entry in self._heap if not self._is_stale(entry)]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> list[_Key]:
        """The keys whose time has come, earliest first; they have no deadline any more."""
        due: list[_Key] = []
        while (when := self.next) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            due.append(key)
        return due

    def clear(self) -> None:
        """Forget all keys."""
        self._due.clear()
        self._heap.clear()

    def _is_stale(self, entry: tuple[float, int, _Key]) -> bool:
        when, _, key = entry
        return self._due.get(key) != when
