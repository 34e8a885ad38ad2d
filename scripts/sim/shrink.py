"""Makes a failing schedule short: whatever can be left out is, while the same check still fails."""

from collections.abc import Callable, Sequence
from typing import Final

from sim.run import Outcome, replay

MAX_RUNS: Final = 3000
Replay = Callable[[Sequence[str]], Outcome]


class Shrinker:
    """Delta debugging over lines; the first says what the world is."""

    def __init__(self, outcome: Outcome, *, runs: int = MAX_RUNS, again: Replay = replay) -> None:
        """Take a failing schedule."""
        if outcome.violation is None:
            raise ValueError("this schedule breaks nothing")
        self._check = outcome.violation.check
        self._left = runs
        self._replay = again
        self.best = outcome

    def shrink(self) -> Outcome:
        """As short as it gets, with the smallest numbers."""
        before = None
        while before != self.best.lines and self._left > 0:
            before = self.best.lines
            self._leave_out()
            self._simplify()
        return self.best

    def _try(self, lines: Sequence[str]) -> bool:
        """Run it; keep it if it fails likewise."""
        if self._left <= 0:
            return False
        self._left -= 1
        outcome = self._replay(lines)
        if outcome.violation is None or outcome.violation.check != self._check:
            return False
        self.best = outcome
        return True

    def _leave_out(self) -> None:
        """Ever smaller parts."""
        size = len(self.best.lines) // 2
        while size:
            end = len(self.best.lines)
            while end > 1:
                begin = max(1, end - size)
                lines = self.best.lines
                self._try([*lines[:begin], *lines[end:]])
                end = min(begin, len(self.best.lines))
            size //= 2

    def _simplify(self) -> None:
        """Each number on its own, down to 0 if may be."""
        for place in range(len(self.best.lines) - 1, 0, -1):
            if place < len(self.best.lines):
                self._simplify_line(place)

    def _simplify_line(self, place: int) -> None:
        words = self.best.lines[place].split()
        for position, word in enumerate(words[1:], 1):
            if word.isdecimal() and word != "0" and words[0] != "prompt":
                changed = [*words[:position], "0", *words[position + 1 :]]
                lines = [*self.best.lines]
                lines[place] = " ".join(changed)
                if self._try(lines):
                    return
