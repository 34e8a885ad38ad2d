"""Random lives of an engine whose cached blocks others read; see test_lives.py."""

from functools import partial
from typing import Final

import pytest

from fuzz.scheduler.lives import ENOUGH, LIVES, MANY_LIVES, live, seeds
from fuzz.scheduler.reads import PLANTED, ReadLife

MAX_LIVES: Final = 400  # in which a planted bug must be found


@pytest.mark.parametrize(
    "count", [LIVES, pytest.param(MANY_LIVES, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_no_wrong_block_is_proven(count: int) -> None:
    counts, failures = live(ReadLife, seeds(count))
    assert not failures, "\n" + "\n".join(failures)
    if count >= ENOUGH:  # of a thousand runs with other seeds, less than one has as few
        assert counts["cached reads proven"] > 20 * count
        assert counts["cached reads fenced"] > 2 * count
        assert counts["grants refused"] > 2 * count
        assert counts["grants that wait for a step"] > 2 * count
        assert counts["labels"] > count // 10
        assert counts["preempted in the step that scheduled them"] > count // 20
        assert counts["steps discarded"] > count // 2


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    for number, seed in enumerate(seeds(MAX_LIVES), 1):
        _, failures = live(partial(ReadLife, plant=PLANTED[bug]), [seed])
        if failures:
            assert "wrong KV is proven" in failures[0]
            print(f"{bug}: found in life {number}")
            return
    pytest.fail(f"{bug} is not found in {MAX_LIVES} lives")
