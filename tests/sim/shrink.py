"""Makes a failing schedule short: whatever can be left out is, while the same check still fails."""

from collections.abc import Callable, Sequence
from typing import Final

from sim.ending import ENDINGS
from sim.schedule import Outcome, replay

MAX_RUNS: Final = 3000
CALM: Final = f"end {ENDINGS[0]}"
Replay = Callable[[Sequence[str]], Outcome]


class Shrinker:
    """Delta debugging over lines; the first says what the world is."""

    def __init__(self, outcome: Outcome, *, runs: int = MAX_RUNS, replay: Replay = replay) -> None:
        """Start with a failing schedule."""
        if outcome.violation is None:
            raise ValueError("this schedule breaks nothing")
        self._check = outcome.violation.check
        self._runs_left = runs
        self._replay = replay
        self._best = outcome

    def shrink(self) -> Outcome:
        """As short as it gets, in the plainest world, with the smallest numbers."""
        before = None
        while before != self._best.lines and self._runs_left > 0:
            before = self._best.lines
            self._end_early()
            self._leave_out()
            self._simplify_setting()
            self._simplify_numbers()
        return self._best

    def _try(self, lines: Sequence[str]) -> bool:
        """Run it; keep it if it fails likewise."""
        if self._runs_left <= 0:
            return False
        self._runs_left -= 1
        outcome = self._replay(lines)
        if outcome.violation is None or outcome.violation.check != self._check:
            return False
        self._best = outcome
        return True

    def _end_early(self) -> None:
        """The end of a schedule lets all that is under way happen, in order."""
        low, high = 1, len(self._best.lines) - 1
        while low < high:
            middle = (low + high) // 2
            if self._try([*self._best.lines[:middle], CALM]):
                high = middle
            else:
                low = middle + 1

    def _leave_out(self) -> None:
        """Ever smaller parts."""
        size = len(self._best.lines) // 2
        while size:
            end = len(self._best.lines)
            while end > 1:
                begin = max(1, end - size)
                lines = self._best.lines
                self._try([*lines[:begin], *lines[end:]])
                end = min(begin, len(self._best.lines))
            size //= 2

    def _simplify_setting(self) -> None:
        """Each of the world's features, left out, is as in the plainest one."""
        word, *features = self._best.lines[0].split()
        for feature in features:
            fewer = [each for each in self._best.lines[0].split()[1:] if each != feature]
            self._try([" ".join([word, *fewer]), *self._best.lines[1:]])

    def _simplify_numbers(self) -> None:
        """Each number on its own, down to 0 if may be."""
        for place in range(len(self._best.lines) - 1, 0, -1):
            if place < len(self._best.lines):
                self._simplify_line(place)

    def _simplify_line(self, place: int) -> None:
        words = self._best.lines[place].split()
        for position, word in enumerate(words[1:], 1):
            if word.isdecimal() and word != "0" and words[0] != "prefill":
                changed = [*words[:position], "0", *words[position + 1 :]]
                lines = [*self._best.lines]
                lines[place] = " ".join(changed)
                if self._try(lines):
                    return
