"""Schedules under which promises were broken once, each for another reason."""

import pytest

from sim.schedule import read_schedule, replay

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

HANGING = ";".join(
    [
        *["decode d0 0 0", "step d0", "turn d0.0", "deliver 0", "piece p", "deliver 0"],
        *["turn d0.0", "deliver 0", "turn p.0", "deliver 0", "turn d0.0", "hang 0"],
        *["prefill 1 4", "piece p", "prefill 8 1", "decode d0 1 0", "step d0", "turn d0.0"],
        *["step p", "step p", "decode d0 3 0"],
    ]
)
"""Of three reads over one link the first hangs, and the others end."""

SCHEDULES = [
    (
        "caches full of each other's offers",
        f"world prefills=2 both=1 engines=0 blocks=9 share=1 slots=8;{OFFERED_EACH_WAY};end calm",
    ),
    (
        "a paused decode that renews",
        f"world;occupy d0;{GRANTED};pause d0;end prefill drains",
    ),
    (
        "a decode without blocks that renews",
        f"world;occupy d0;{GRANTED};end prefill drains",
    ),
    (
        "prefill falls asleep with an offer",
        f"world;{GRANTED};freeze p;end calm",
    ),
    (
        "decode falls asleep with a load",
        f"world;{GRANTED};freeze d0;end calm",
    ),
    (
        "a read that hangs while others beside it land",
        f"world;prefill 9 4;step p;prefill 13 3;step p;{HANGING};end calm",
    ),
    (
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
    (
        "blocks for a load whose peer could not be joined",
        ";".join(
            [
                *["world prefill=2 heads=1 verify=1", "prefill 3 1", "step p", "occupy d0"],
                *["decode d0 0 0", "step d0", "turn d0.0", "deliver 0", "deliver 0", "turn d0.0"],
                "end prefill dies",
            ]
        ),
    ),
    (
        "a thread that dies when it fetches a chunk",
        ";".join(
            [
                *["world staged=8192", "prefill 9 1", "step p", "step p", "decode d0 0 0"],
                *["step d0", "turn d0.0", "deliver 0", "deliver 0", "turn d0.0", "deliver 0"],
                *["turn p.0", "deliver 0", "turn d0.0", "turn d0.0", "deliver 0", "die d0.0 4"],
                *[
                    "turn p.0",
                    "turn p.0",
                    "work p.0",
                    "turn d0.0",
                    "turn p.0",
                    "deliver 0",
                    "turn d0.0",
                ],
                "end calm",
            ]
        ),
    ),
    (
        "a short read that waits behind a long one over a slow link",
        ";".join(
            [
                *["world rate=80 blocks=100 gentle=1", "prefill 60 1", "prefill 5 1"],
                *[*["step p"] * 12, "turn p.0", "decode d0 1 0", "step d0", "turn d0.0"],
                *["decode d0 0 0", "end calm"],
            ]
        ),
    ),
]


PARKED = (
    "world;prefill 5 1;step p;decode d0 0 0;step d0;turn d0.0;deliver 0;deliver 0;turn d0.0;"
    "deliver 0;turn p.0;deliver 0;turn d0.0;land 0 0;turn d0.0;land 0 0;turn d0.0;step d0;"
    "freeze d0;end calm"
)


@pytest.mark.xfail(strict=True, reason="vLLM 0.33 does not compute it again: docs/faults.md")
def test_what_is_reported_when_the_cache_is_discarded_is_computed_again() -> None:
    violation = replay(read_schedule(PARKED)).violation
    assert violation is None, violation


@pytest.mark.parametrize(("title", "text"), SCHEDULES, ids=[title for title, _ in SCHEDULES])
def test_what_was_broken_once_is_kept(title: str, text: str) -> None:
    violation = replay(read_schedule(text)).violation
    assert violation is None, f"{title}: {violation}"
