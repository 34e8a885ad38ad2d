"""One schedule: a world, its steps, its end, and what came of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from unittest.mock import patch

from nixl_kv.protocol import prefill
from nixl_kv.protocol.events import FailureKind
from sim.cache import BLOCK_TOKENS
from sim.ending import end
from sim.invariants import Invariants
from sim.repeatable import Violation, repeatable
from sim.steps import perform
from sim.world import Shape, World

MANY_SLOTS: Final = 16
"""There are never more offers at the same time."""
NOT_BEGUN: Final = "prefill has not begun to compute the request"


@dataclass(frozen=True)
class Outcome:
    """The lines of a schedule, up to the step that broke a promise, and how its loads ended."""

    lines: list[str]
    violation: Violation | None
    ends: list[str]  # `good`, or the kind of the failure


class Run:
    def __init__(self, shape: Shape) -> None:
        self.lines: list[str] = []
        self.world = World(shape)
        self.invariants = Invariants(self.world, is_served=self._is_served)
        self._started_at = self._ended_at = self.world.clock.now

    def do(self, line: str) -> None:
        """A step, and what must hold after it."""
        self.lines.append(line)
        word, _, rest = line.partition(" ")
        if word == "end":
            self._ended_at = self.world.clock.now
            end(self.world, rest, self.invariants)
            self._check_needless()
        else:
            perform(self.world, line)
            self.invariants.check()

    def _has(self, *words: str) -> bool:
        return any(line.startswith(words) for line in self.lines)

    def _is_served(self) -> bool:
        """Whether no lease can have run out, and no engine has died."""
        return self.world.shape.gentle and not self._has("kill", "hang")

    def _check_needless(self) -> None:
        """In a gentle schedule no load fails that nothing stood in the way of.

        An ask may be denied if there is another one's, if its offer may have been revoked or have
        run out of time, or if there are few slots; a grant recalled if it may be old, or others
        wait for blocks. A restart of prefill may break new connections together with the old
        ones, and a read that hangs is late.
        """
        shape, lives = self.world.shape, [e.description for e in self.world.prefills()]
        if not self.world.shape.gentle:
            return
        excused: set[FailureKind] = set()
        seconds = self._ended_at - self._started_at
        is_old = seconds > self.world.config.offer_ttl_s / 2
        is_crowded = self.world.num_tokens > shape.blocks * BLOCK_TOKENS
        if len(self.world.decodes()) > 1 or shape.share < 1 or shape.slots < MANY_SLOTS:
            excused.add(FailureKind.DENIED)
        if is_old or self._has("occupy"):
            excused |= {FailureKind.DENIED, FailureKind.RECALLED}
        if is_crowded:
            excused.add(FailureKind.RECALLED)
        if self._has("abort"):
            excused.add(FailureKind.DROPPED)
        if self._has("kill", "hang"):
            excused |= set(FailureKind) - {FailureKind.FENCED, FailureKind.LEASE_LOST}
        needless = [
            f"{each.request}: {each.failure}"
            for each in self.invariants.failed
            if each.incarnation in {life.incarnation for life in lives}
            and each.failure.kind not in excused
            # Offers that no engine reads hold the blocks of a small prefill engine.
            and not (is_crowded and NOT_BEGUN in each.failure.detail)
        ]
        if needless:
            raise Violation("needless failure", "; ".join(needless))
        for rank in self.world.ranks():
            if rank.counts["replaced_agents stuck_read"] and not self._has("kill", "hang"):
                raise Violation("needless recycling", f"of an agent of {rank.seat.name}")


Source: TypeAlias = Callable[[Run], Iterator[str]]
"""Makes the lines of a run, one after the other, from what came of those before."""


def follow(shape: Shape, source: Source) -> Outcome:
    reading_s = shape.patience or prefill.READING_S
    with (
        repeatable(),
        patch.object(prefill, "READING_S", reading_s),
        patch.object(prefill, "READING_WANTED_S", reading_s / 3),
    ):
        run = Run(shape)
        violation = None
        try:
            for line in source(run):
                run.do(line)
        except Violation as error:
            violation = error
        ends = ["good"] * run.invariants.num_good
        ends += [each.failure.kind.value for each in run.invariants.failed]
        return Outcome([str(shape), *run.lines], violation, ends)


def replay(lines: Sequence[str]) -> Outcome:
    return follow(Shape.parse(lines[0]), lambda _: iter(lines[1:]))
