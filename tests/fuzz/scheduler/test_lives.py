"""Random lives of vLLM's own scheduler with this connector. A seed is a life.

NIXL_KV_SEED=381 NIXL_KV_LIVES=1 pytest -s -k some tests/fuzz/scheduler     one life again
NIXL_KV_LIVES=5000 pytest -s -k some tests/fuzz/scheduler                   more, from seed 1 on
"""

import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import Iterator

import pytest

from fuzz.scheduler.life import BrokenPromiseError, Life
from support.seeds import seed_or

SEED = seed_or(1)
LIVES = int(os.environ.get("NIXL_KV_LIVES", "120"))
MANY_LIVES = 20_000
ENOUGH = 100  # in so many lives everything happens
MAX_FAILURES = 5


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Lives log thousands of lines, and a connector changes our logger."""
    logger = logging.getLogger("nixl_kv")
    before = logger.handlers, logger.level, logger.propagate
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.mark.parametrize(
    "count", [LIVES, pytest.param(MANY_LIVES, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_lives_break_no_promise(count: int) -> None:
    began, counts, failures = time.monotonic(), Counter[str](), list[str]()
    most_overtaken = 0
    for seed in range(SEED, SEED + count):
        life = Life(seed)
        try:
            life.run()
        except BrokenPromiseError as error:
            failures.append(f"seed {seed}: {error}; {life.configuration}")
        except Exception:  # noqa: BLE001 - vLLM would end the engine
            failures.append(f"seed {seed}: {traceback.format_exc(limit=-6)} {life.configuration}")
        most_overtaken = max(most_overtaken, life.counts.pop("most overtaken", 0))
        counts += life.counts
        if len(failures) == MAX_FAILURES:
            break
    seconds = time.monotonic() - began
    print(
        f"\n{count} lives from seed {SEED} in {seconds:.0f} s: {dict(sorted(counts.items()))}, "
        f"overtaken up to {most_overtaken} times"
    )
    assert not failures, "\n" + "\n".join(failures)
    if count >= ENOUGH:
        assert min(counts[event] for event in ("offers read", "loads", "reset")) > count // 2
        assert counts["weights replaced"] > count // 10
        assert counts["loads told between steps"] > count // 5
        assert counts["prompts offered in parts"] > 2 * count
        assert counts["pairs preempted"] > count // 10
        assert counts["steps discarded"] > count // 2
