"""Schedules that show a rule, or whose outcome was wrong once. `sim.steps` explains their lines."""

import math
from collections.abc import Iterator

import pytest

from harness.local.engine import HAS_STAGED, HAS_VERIFY
from nixl_kv.protocol.load import Load
from sim.schedule import Run, follow, replay
from sim.world import Shape
from support.stepped import Clock

OFFERED = "prefill 8 1; step p *3; turn p.0"
GRANTED = f"{OFFERED}; decode d0 0 0; step d0; turn d0.0"
READING = f"{GRANTED}; deliver 0 *2; turn d0.0; deliver 0; turn p.0; deliver 0; turn d0.0"
LANDED = f"{READING}; land 0 0 *2; turn d0.0"  # and the read of the slot is posted
LEASE_ENDS = "wait 1; turn p.0; step p"
HEARTBEAT = "wait 0.5; turn d0.0; deliver 0 *2; turn p.0; step p; turn d0.0"

KEPT = {  # how its loads end, the good ones first, and the schedule
    # the fence
    "blocks freed during a read": ("fenced", f"world; {READING}; land 0 0; {LEASE_ENDS}"),
    "blocks freed when all bytes are there": ("fenced", f"world; {LANDED}; {LEASE_ENDS}"),
    "blocks freed after the slot was read": ("good", f"world; {LANDED}; land 0 0; {LEASE_ENDS}"),
    "a grant that uses the slot of an earlier one": (
        "good fenced",
        f"""
        world engines=2; {READING}; {LEASE_ENDS}
        {OFFERED}; decode d1 1 0; step d1; turn d1.0; deliver 0 *2; turn d1.0; deliver 0; turn p.0
        """,
    ),
    "a chunk whose writes end after a preemption": (
        "good",
        """
        world late=1; pair 9 p; arrive 0; step p; preempt p 0; step p; decode d0 0 0; step d0
        turn d0.0; deliver 0 *2; turn d0.0; deliver 0; turn p.0
        """,
    ),
    # readers
    "a bit that changes on its way": ("corrupt", f"world verify=1; {READING}; damage"),
    "two readers of one ticket": (
        "good denied",
        f"world engines=2; {GRANTED}; decode d1 0 0; step d1; turn d1.0",
    ),
    "a cancelled read that takes longer than a lease": (
        "dropped",
        f"world gentle=1; {READING}; abort d0 0; step d0" + f"; {HEARTBEAT}" * 6,
    ),
    "a peer that says for ever that it reads": ("", f"world patience=20; {OFFERED}; lie 0"),
    "a peer that says so while prefill computes": (
        "",
        "world patience=20; pair 12 p; lie 0; deliver 0; turn p.0; arrive 0; step p; deliver 0 *9",
    ),
    "one that says so when all caches are full": (
        "good good denied",
        f"""
        world patience=20 share=1 blocks=7; {OFFERED}; lie 0; deliver 0; turn p.0; deliver 0 *2
        turn p.0; prefill 8 1; prefill 8 1; wait 7; turn p.0; step p *2; wait 1.1; step p *3
        turn p.0; step p; turn p.0; step p *2
        decode d0 0 0; decode d0 1 0; decode d0 2 0
        """,
    ),
    "a cache that is reset while it is read": (
        "fenced",
        f"world; {READING}; reset p; step p; turn p.0; step p",
    ),
    # processes
    "a read that hangs when prefill restarts": (
        "good late",
        f"""
        world; {READING}; hang 0; kill p; start p; report 0
        {OFFERED}; decode d0 1 0; step d0; turn d0.0
        """,
    ),
    "prefill that wakes from sleep": (
        "good unreachable",
        f"""
        world; {OFFERED}; sleep p; step p; wait 3; turn p.0; step p; wake p
        decode d0 0 0; {OFFERED}; decode d0 1 0; step d0; turn d0.0
        """,
    ),
    "prefill that falls asleep with an offer": ("unreachable", f"world; {GRANTED}; freeze p"),
    "decode that falls asleep with a load": ("dropped", f"world; {GRANTED}; freeze d0"),
    "decode that falls asleep with a load that was reported": (
        "",
        f"world; {LANDED}; land 0 0; turn d0.0; step d0; freeze d0",
    ),
    "decode that falls asleep before a hint that a load has landed": (
        "good",
        f"world fast=1; {READING}; land 0 0 *2; turn d0.0; land 0 0; turn d0.0; freeze d0",
    ),
    "a thread that dies when it fetches a chunk": (
        "internal",
        """
        world staged=8192; prefill 9 1; step p *2; decode d0 0 0; step d0; turn d0.0; deliver 0 *2
        turn d0.0; deliver 0; turn p.0; deliver 0; turn d0.0 *2; deliver 0; die d0.0 4; turn p.0 *2
        work p.0; turn d0.0; turn p.0; deliver 0; turn d0.0
        """,
    ),
    # what waits
    "a pair whose decode engine starts no read": (
        "recalled",
        "world; pair 17 p; decode d0 9 0; step d0; end prefill drains",
    ),
    "caches full of each other's offers": (
        "good good good good good good recalled recalled",
        """
        world prefills=2 both=1 engines=0 blocks=9 share=1 slots=8
        prefill 8 1 *4; prefill 8 1 p1 *4; step p; step p1; step p; step p1
        decode p 4 0; decode p 5 0; decode p 6 0; decode p 7 0
        decode p1 0 0; decode p1 1 0; decode p1 2 0; decode p1 3 0
        """,
    ),
    "blocks for a load whose peer could not be joined": (
        "unreachable",
        """
        world prefill=2 heads=1 verify=1; prefill 3 1; step p; occupy d0; decode d0 0 0; step d0
        turn d0.0; deliver 0 *2; turn d0.0; end prefill dies
        """,
    ),
    "a read that hangs while others beside it land": (
        "good late late",
        """
        world; prefill 9 4; step p; prefill 13 3; step p; decode d0 0 0; step d0; turn d0.0
        deliver 0; piece p; deliver 0; turn d0.0; deliver 0; turn p.0; deliver 0; turn d0.0; hang 0
        prefill 1 4; piece p; prefill 8 1; decode d0 1 0; step d0; turn d0.0; step p *2
        decode d0 3 0
        """,
    ),
    "seven reads that share a slow link": (
        "good good good good good good good",
        """
        world blocks=60 slots=8 share=1 rate=100 gentle=1; prefill 13 1 *7; step p *3
        decode d0 0 0; decode d0 1 0; decode d0 2 0; decode d0 3 0; decode d0 4 0; decode d0 5 0
        decode d0 6 0
        """,
    ),
    "a short read that waits behind a long one over a slow link": (
        "good good",
        """
        world rate=80 blocks=100 gentle=1; prefill 60 1; prefill 5 1; step p *12; turn p.0
        decode d0 1 0; step d0; turn d0.0; decode d0 0 0
        """,
    ),
}
OF_VLLM = pytest.mark.xfail(strict=True, reason="vLLM 0.33 does not compute it: docs/faults.md")


def test_a_reader_that_hangs_for_ever_loses_the_blocks_and_uses_no_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode's own time-outs do not work, and its read lands when others have the blocks."""
    monkeypatch.setattr(Load, "deadline", math.inf)

    def lines(run: Run) -> Iterator[str]:
        yield from steps_of(READING)
        read, *_ = run.world.fabric.reads()
        read.hangs = True
        (prefill,) = run.world.prefills()
        while prefill.scheduler.blocks.block_pool.num_used:
            assert run.world.clock.now - read_at < 30.0
            yield from steps_of(HEARTBEAT)
        assert run.world.clock.now - read_at >= 20.0, "an honest reader may need that"
        yield from steps_of("prefill 8 1; step p *3")
        read.hangs = False
        yield "end calm"

    read_at = Clock().now
    outcome = follow(Shape(patience=20.0), lines)
    assert outcome.violation is None
    assert outcome.ends == ["fenced"]


def steps_of(text: str) -> Iterator[str]:
    """The steps between semicolons, as often as `*N` says."""
    for step in text.strip().replace("\n", ";").split(";"):
        line, _, count = step.strip().partition(" *")
        yield from [line] * int(count or 1)


def lines_of(text: str) -> Iterator[str]:
    """Calm at the end if no other is named."""
    yield from steps_of(text)
    if "end " not in text:
        yield "end calm"


def is_possible(text: str) -> bool:
    """Whether this tree has the features of the schedule's world."""
    shape = Shape.parse(next(lines_of(text)))
    return (HAS_STAGED or not shape.staged) and (HAS_VERIFY or not shape.verify)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        pytest.param(*kept, id=title, marks=OF_VLLM if "was reported" in title else ())
        for title, kept in KEPT.items()
        if is_possible(kept[1])
    ],
)
def test_a_kept_schedule_ends_as_it_should(ends: str, text: str) -> None:
    outcome = replay(list(lines_of(text)))
    assert outcome.violation is None
    assert " ".join(outcome.ends) == ends
