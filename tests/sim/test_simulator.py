"""Random schedules find nothing in the code as it is, and each planted bug.

By seed: a profile says what may happen and how often. Every promise is checked after each step, and
at the end, when the faults have ended. A schedule that breaks one is shown as short as it gets; put
it into test_kept.py to run it again. The module `steps` says what its lines mean.

NIXL_KV_SECONDS=600 pytest -m "not slow" tests/sim                    for ten minutes
NIXL_KV_SEED=10000 NIXL_KV_SECONDS=0 pytest -m "not slow" tests/sim    one seed
"""

import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence

import pytest

from sim.planted import BUGS, Plant, slot_cleared_after_the_free
from sim.random_schedules import PROFILES, run_random
from sim.schedule import replay
from sim.shrink import shrink
from support.seeds import seed_or

SEED = seed_or(0)
SECONDS = float(os.environ.get("NIXL_KV_SECONDS", "15"))
MANY_SECONDS = 20 * 60.0
MAX_SCHEDULES = 1000
"""For each planted bug; the slowest takes about 200."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "seconds", [SECONDS, pytest.param(MANY_SECONDS, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_random_schedules_break_no_promise(seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    for seed in itertools.count(SEED):
        outcome = run_random(seed)
        if outcome.violation is not None:
            shortest = "\n    ".join(["", *shrink(outcome).lines])
            raise AssertionError(f"seed {seed}: {outcome.violation}{shortest}")
        if time.monotonic() >= ends_at:
            return


@pytest.mark.parametrize(("plant", "checks", "profiles"), BUGS)
def test_random_schedules_find_a_planted_bug(
    plant: Plant, checks: Sequence[str], profiles: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    outcomes = (run_random(seed, profiles) for seed in range(MAX_SCHEDULES))
    violation = next((each.violation for each in outcomes if each.violation), None)
    assert violation is not None
    assert violation.check in checks


def test_a_failing_schedule_is_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_cleared_after_the_free(monkeypatch)
    words = (line.split()[0] for line in shrink(run_random(0)).lines)
    # A long prompt takes several steps.
    assert [word for word, _ in itertools.groupby(words)] == [
        "world",
        "prefill",
        "step",
        "decode",
        "end",
    ]


@pytest.mark.parametrize("seed", range(0, len(PROFILES), 5))
def test_a_schedule_is_the_same_each_time(seed: int) -> None:
    first = run_random(seed)
    assert replay(first.lines) == run_random(seed) == first
