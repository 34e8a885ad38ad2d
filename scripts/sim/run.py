"""One schedule: a world, its steps, its end, and what came of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias

from nixl_kv.protocol.events import Why
from sim.ending import finish
from sim.seams import Clock, replaced
from sim.steps import perform
from sim.violations import Violation
from sim.watch import Failed, Watch
from sim.world import PREFILL, Shape, World


@dataclass(frozen=True)
class Setting:
    """What a schedule begins with, its first line. `gentle`: every load has to be good."""

    shape: Shape = field(default_factory=Shape)
    gentle: bool = False

    def __str__(self) -> str:
        """As that line."""
        values = asdict(self.shape) | {"gentle": self.gentle}
        return "world " + " ".join(f"{name}={float(value):g}" for name, value in values.items())

    @classmethod
    def parse(cls, line: str) -> "Setting":
        """The same, back.

        Raises:
            ValueError: if it is no such line.
        """
        word, *pairs = line.split()
        if word != "world":
            raise ValueError(f"a schedule begins with 'world', not with {line!r}")
        given = dict(pair.split("=") for pair in pairs)
        gentle = bool(float(given.pop("gentle", "0")))
        return cls(_shape(given), gentle)


def _shape(given: Mapping[str, str]) -> Shape:
    defaults: dict[str, Any] = {each.name: each.default for each in fields(Shape)}
    return Shape(**{n: type(defaults[n])(float(value)) for n, value in given.items()})


@dataclass(frozen=True)
class Outcome:
    """What came of a schedule. Its lines reach to the step that broke a promise."""

    lines: list[str]
    violation: Violation | None
    good: int
    verified: int  # of these
    failed: list[Failed]


class Run:
    """A schedule under way."""

    def __init__(self, setting: Setting, clock: Clock) -> None:
        """Begin its world."""
        self.world = World(setting.shape, clock)
        self.watch = Watch(self.world)
        self.setting = setting
        self.lines: list[str] = []

    def do(self, line: str) -> None:
        """One step, and what must hold after it.

        Raises:
            Violation: if it does not.
        """
        self.lines.append(line)
        word, _, rest = line.partition(" ")
        if word == "end":
            self._end(rest)
        else:
            perform(self.world, line)
            self.watch.look()

    def _end(self, kind: str) -> None:
        finish(self.world, kind, self.watch)
        if self.setting.gentle:
            needless = [f"{failed.request}: {failed.detail}" for failed in self._needless()]
            if needless:
                raise Violation("needless failure", "; ".join(needless))

    def _needless(self) -> list[Failed]:
        """The loads that failed although nothing stood in their way.

        An ask may be denied if there is another one's, or if its offer may have been revoked. What
        is connected while prefill is started again may be lost with the old connections, and a
        read that is stuck is late.
        """
        engine, shape = self.world.engines[PREFILL], self.setting.shape
        if engine is None:
            return []
        excused: set[Why] = set()
        if shape.engines > 1 or shape.share < 1:
            excused.add(Why.DENIED)
        if any(line.startswith(("kill", "stick")) for line in self.lines):
            excused |= set(Why) - {Why.FENCED, Why.LEASE_LOST}
        lives = [f for f in self.watch.failed if f.life == engine.life]
        return [failed for failed in lives if failed.why not in excused]


Source: TypeAlias = Callable[[Run], Iterator[str]]
"""Makes the lines of a run, one after the other."""


def replay(lines: Sequence[str]) -> Outcome:
    """Run a whole schedule, its first line included."""
    return follow(Setting.parse(lines[0]), lambda _: iter(lines[1:]))


def follow(setting: Setting, source: Source) -> Outcome:
    """Run the lines that a source makes while it sees what comes of them."""
    clock = Clock()
    with replaced(clock):
        run = Run(setting, clock)
        violation = None
        try:
            for line in source(run):
                run.do(line)
        except Violation as error:
            violation = error
        watch, lines = run.watch, [str(setting), *run.lines]
        return Outcome(lines, violation, watch.good, watch.verified, watch.failed)


def joined(lines: Iterable[str]) -> str:
    """As a file."""
    return "\n".join(lines)
