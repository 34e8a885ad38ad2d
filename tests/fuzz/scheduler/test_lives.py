"""Random lives of vLLM's own scheduler with this connector. A seed is a life.

NIXL_KV_SEED=381 NIXL_KV_LIVES=1 pytest -s -k some tests/fuzz/scheduler     one life again
NIXL_KV_LIVES=5000 pytest -s -k some tests/fuzz/scheduler                   more, from seed 1 on
"""

from functools import partial
from typing import Final

import pytest

from fuzz.scheduler.life import PLANTED, Life
from fuzz.scheduler.lives import ENOUGH, LIVES, MANY_LIVES, live, seeds

MAX_LIVES: Final = 400  # in which a planted bug must be found


@pytest.mark.parametrize(
    "count", [LIVES, pytest.param(MANY_LIVES, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_lives_break_no_promise(count: int) -> None:
    counts, failures = live(Life, seeds(count))
    assert not failures, "\n" + "\n".join(failures)
    if count >= ENOUGH:  # of a thousand runs with other seeds, less than one has as few
        assert min(counts[event] for event in ("offers read", "loads", "reset")) > count // 2
        assert counts["weights replaced"] > count // 10
        assert counts["loads told between steps"] > count // 10
        assert counts["prompts offered in parts"] > 2 * count
        assert counts["pairs preempted"] > count // 10
        assert counts["steps discarded"] > count // 4


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    plant, draw = PLANTED[bug]
    for number, seed in enumerate(seeds(MAX_LIVES), 1):
        _, failures = live(partial(Life, draw=draw, plant=plant), [seed])
        if failures:
            assert "decode reads" in failures[0] or "decode may read" in failures[0]
            print(f"{bug}: found in life {number}")
            return
    pytest.fail(f"{bug} is not found in {MAX_LIVES} lives")
