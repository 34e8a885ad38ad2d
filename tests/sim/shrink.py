"""Makes a failing schedule short: whatever can be left out is, while the same check still fails."""

from collections.abc import Sequence
from typing import Final

from sim.ending import ENDINGS
from sim.schedule import Outcome, replay

MAX_RUNS: Final = 3000
CALM: Final = f"end {ENDINGS[0]}"


def shrink(outcome: Outcome) -> Outcome:
    """The shortest schedule that was found, in the plainest world."""
    shrinker, before = _Shrinker(outcome), None
    while before != shrinker.best.lines and shrinker.runs_left > 0:
        before = shrinker.best.lines
        shrinker.end_early()
        shrinker.leave_out()
        shrinker.simplify_setting()
    return shrinker.best


class _Shrinker:
    """Delta debugging over lines; the first says what the world is."""

    def __init__(self, outcome: Outcome) -> None:
        self.best, self.runs_left = outcome, MAX_RUNS

    def end_early(self) -> None:
        """The end of a schedule lets all that is under way happen, in order."""
        low, high = 1, len(self.best.lines) - 1
        while low < high:
            middle = (low + high) // 2
            if self._try([*self.best.lines[:middle], CALM]):
                high = middle
            else:
                low = middle + 1

    def leave_out(self) -> None:
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

    def simplify_setting(self) -> None:
        """Each of the world's features, left out, is as in the plainest one."""
        word, *features = self.best.lines[0].split()
        for feature in features:
            fewer = [each for each in self.best.lines[0].split()[1:] if each != feature]
            self._try([" ".join([word, *fewer]), *self.best.lines[1:]])

    def _try(self, lines: Sequence[str]) -> bool:
        """Run it; keep it if it fails likewise."""
        if self.runs_left <= 0:
            return False
        self.runs_left -= 1
        outcome, before = replay(lines), self.best.violation
        if outcome.violation is None or before is None or outcome.violation.check != before.check:
            return False
        self.best = outcome
        return True
