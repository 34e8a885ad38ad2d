"""Runs random lives, one after the other. A seed is a life."""

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from fuzz.scheduler.life import BrokenPromiseError, Life
from support.seeds import seed_or

SEED: Final = seed_or(1)
LIVES: Final = int(os.environ.get("NIXL_KV_LIVES", "120"))
MANY_LIVES: Final = 20_000
ENOUGH: Final = 100  # lives, in which everything happens
MAX_FAILURES: Final = 5


def seeds(count: int) -> range:
    return range(SEED, SEED + count)


def live(make: Callable[[int], Life], seeds: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """The counts of events, and the broken promises. It stops after MAX_FAILURES."""
    began, counts, failures = time.monotonic(), Counter[str](), list[str]()
    most_overtaken = num_lives = 0
    for seed in seeds:
        life = make(seed)
        num_lives += 1
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
    if num_lives > 1:
        print(
            f"\n{num_lives} lives in {seconds:.0f} s: {dict(sorted(counts.items()))}, "
            f"overtaken up to {most_overtaken} times"
        )
    return counts, failures
