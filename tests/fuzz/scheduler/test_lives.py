"""Random lives of vLLM's own scheduler with this connector. A seed is a life.

NIXL_KV_SEED=381 NIXL_KV_LIVES=1 pytest -s -k some tests/fuzz/scheduler     one life again
NIXL_KV_LIVES=5000 pytest -s -k some tests/fuzz/scheduler                   more, from seed 1 on
"""

import pytest

from fuzz.scheduler.life import Life
from fuzz.scheduler.lives import ENOUGH, LIVES, MANY_LIVES, live, seeds


@pytest.mark.parametrize(
    "count", [LIVES, pytest.param(MANY_LIVES, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_lives_break_no_promise(count: int) -> None:
    counts, failures = live(Life, seeds(count))
    assert not failures, "\n" + "\n".join(failures)
    if count >= ENOUGH:
        assert min(counts[event] for event in ("offers read", "loads", "reset")) > count // 2
        assert counts["weights replaced"] > count // 10
        assert counts["loads told between steps"] > count // 5
        assert counts["prompts offered in parts"] > 2 * count
        assert counts["pairs preempted"] > count // 10
        assert counts["steps discarded"] > count // 2
