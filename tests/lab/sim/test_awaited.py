"""Schedules of what the code does not keep yet; they pass when it does, and then say so."""

from collections.abc import Iterator

import pytest

from lab.sim.awaited import AWAITED
from lab.sim.random_schedules import DEFAULT_PROFILES, PROFILES, RandomSchedule
from lab.sim.schedule import follow, read_schedule, replay

OFFERED_EACH_WAY = ";".join(
    [
        *["prefill 8 1"] * 4,
        *["prefill 8 1 p1"] * 4,
        *["step p", "step p1"] * 2,
        *[f"decode p {ticket} 0" for ticket in range(4, 8)],
        *[f"decode p1 {ticket} 0" for ticket in range(4)],
    ]
)
"""Four prompts on each of two engines, a quarter of the cache each, and the other decodes them."""

GRANTED = "prefill 8 1;step p;step p;step p;turn p.0;decode d0 0 0;step d0;turn d0.0"

SCHEDULES = [
    (
        "crossed",
        "caches full of each other's offers",
        f"world prefills=2 both=1 engines=0 blocks=9 share=1 slots=8;{OFFERED_EACH_WAY};end calm",
    ),
    (
        "prefill drains",
        "a paused decode that renews",
        f"world;occupy d0;{GRANTED};pause d0;end prefill drains",
    ),
    (
        "prefill drains",
        "a decode without blocks that renews",
        f"world;occupy d0;{GRANTED};end prefill drains",
    ),
    (
        "frozen",
        "prefill falls asleep with an offer",
        f"world;{GRANTED};freeze p;end calm",
    ),
    (
        "frozen",
        "decode falls asleep with a load",
        f"world;{GRANTED};freeze d0;end calm",
    ),
    (
        "backlog",
        "seven reads that share a slow link",
        ";".join(
            [
                "world blocks=60 slots=8 share=1 rate=100 gentle=1",
                *["prefill 13 1"] * 7,
                *["step p"] * 3,
                *[f"decode d0 {ticket} 0" for ticket in range(7)],
                "end calm",
            ]
        ),
    ),
]


def schedules() -> Iterator[object]:
    """Each is expected to break a promise as long as its name is awaited."""
    for name, title, text in SCHEDULES:
        marks = [pytest.mark.xfail(reason="awaited", strict=True)] if name in AWAITED else []
        yield pytest.param(text, id=title, marks=marks)


@pytest.mark.parametrize("text", list(schedules()))
def test_what_was_awaited_is_kept(text: str) -> None:
    violation = replay(read_schedule(text)).violation
    assert violation is None, str(violation)


@pytest.mark.parametrize("name", sorted(AWAITED & set(PROFILES)))
def test_random_schedules_show_what_is_awaited(name: str) -> None:
    """Within a few seeds; so they will show it when somebody breaks it again."""
    schedules = (RandomSchedule.of(seed, [name]) for seed in range(20))
    assert any(follow(each.setting, each).violation is not None for each in schedules)
    assert name not in DEFAULT_PROFILES


def test_all_that_is_awaited_has_a_schedule() -> None:
    assert {name for name, _, _ in SCHEDULES} >= AWAITED
