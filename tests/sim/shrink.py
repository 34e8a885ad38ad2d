"""Makes a failing schedule short: whatever can be left out is, while the same check still fails."""

from collections.abc import Sequence
from typing import Final

from sim.ending import ENDINGS
from sim.schedule import Outcome, replay

MAX_RUNS: Final = 3000
CALM: Final = f"end {ENDINGS[0]}"


def shrink(outcome: Outcome) -> Outcome:
    """The shortest schedule that was found, in the plainest world: delta debugging."""
    _, *features = outcome.lines[0].split()
    best, num_runs = [*features, *outcome.lines[1:]], 0
    is_feature = frozenset(features).__contains__

    def run(items: Sequence[str]) -> Outcome:
        world = " ".join(["world", *filter(is_feature, items)])
        return replay([world, *(item for item in items if not is_feature(item))])

    def keep(items: list[str]) -> bool:
        nonlocal best, num_runs
        num_runs += 1
        found, wanted = run(items).violation, outcome.violation
        if found is None or wanted is None or found.check != wanted.check:
            return False
        best = items
        return True

    # The end of a schedule lets all that is under way happen, in order.
    low, high = len(features), len(best)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keep([*best[:middle], CALM]) else (middle + 1, high)
    before = 0
    while len(best) != before and num_runs < MAX_RUNS:
        before, size = len(best), max(1, len(best) // 2)
        while size:
            end = len(best)
            while end > 0 and num_runs < MAX_RUNS:
                begin = max(0, end - size)
                keep(best[:begin] + best[end:])
                end = min(begin, len(best))
            size //= 2
    return run(best)
