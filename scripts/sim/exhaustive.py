"""All schedules of a small alphabet, to a depth, from a few scenes.

A schedule is run from its beginning each time: nothing is copied. Two that lead to the same state
are continued once; what counts as the state is all that the machines, the scheduler sides, the
workers, the network and the reads hold, with random names in the order in which they appear and
times as distances from now. Bytes do not count: they follow from who has which block.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from sim.run import Outcome, Run, Setting, follow
from sim.world import World

SECRET: Final = re.compile(r"[0-9a-f]{32}")
PACKET: Final = re.compile(rb"[0-9a-f]{32}")
LEFT_OUT: Final = frozenset(
    {
        "_m",
        "_seldom",
        "_stats",
        "_clock",
        "_household",
        "_home",
        "_checks",
        "_free_checks",
        "_scratch",
        "_indices",
        "_transport",
        "transport",
        "_background",
        "_timings",
        "_counts",
        "_make",
        "_trust",
        "names",
        "observer",
        "kv",
        # the same throughout a scene, but for where memory stands
        "memories",
        "description",
        "layout",
        "layouts",
        "siblings",
        "routes",
        "peers",
        "pairs",
        "into",
    }
)
DEEPEST: Final = 14


@dataclass(frozen=True)
class Scene:
    """Where to begin, and what may happen then, any of it at any time."""

    name: str
    setting: Setting
    begin: Sequence[str]
    alphabet: Sequence[str]
    end: str = "end calm"


@dataclass
class Explored:
    """What came of a scene."""

    scene: Scene
    depth: int
    schedules: int = 0  # that were run
    states: int = 0
    pruned: int = 0  # that led to a state that was known
    violations: list[Outcome] = field(default_factory=list)


class Explorer:
    """Breadth first: what breaks a promise is found by a shortest schedule."""

    def __init__(self, scene: Scene, *, ends: bool = True) -> None:
        """Explore this scene; `ends`: each new state is also led to its end."""
        self._scene = scene
        self._ends = ends
        self._seen: set[bytes] = set()

    def explore(self, depth: int, *, most: int = 10**9) -> Explored:
        """All schedules to a depth, or as many as `most`."""
        found = Explored(self._scene, depth)
        level: list[tuple[str, ...]] = [()]
        for _ in range(depth):
            level = [path for begun in level for path in self._continue(begun, found, most)]
        return found

    def _continue(
        self, begun: tuple[str, ...], found: Explored, most: int
    ) -> Iterator[tuple[str, ...]]:
        for step in self._scene.alphabet:
            if found.schedules >= most:
                return
            path = (*begun, step)
            found.schedules += 1
            if self._is_new(path, found):
                found.states += 1
                yield path

    def _is_new(self, path: tuple[str, ...], found: Explored) -> bool:
        """Run it, and, if it leads to a state of its own, to its end."""
        states: list[bytes] = []

        def source(run: Run) -> Iterator[str]:
            yield from self._scene.begin
            yield from path
            states.append(state(run.world))
            if self._ends and states[0] not in self._seen:
                yield self._scene.end

        outcome = follow(self._scene.setting, source)
        if outcome.violation is not None:
            found.violations.append(outcome)
            return False
        new = states[0] not in self._seen
        found.pruned += not new
        self._seen.add(states[0])
        return new


def state(world: World) -> bytes:
    """A digest of all that decides what happens next."""
    now, told = world.clock.now, []
    for name, engine in world.engines.items():
        told.append(name)
        if engine is None:
            continue
        told.append(_canonical(engine.side, now))
        told.append(str(len(engine._pieces)))  # noqa: SLF001 - how far its step is
        told += [_rank(rank, now) for rank in engine.ranks]
    for packet in world.network.packets:
        payload = b"" if b"Description" in packet.payload else packet.payload
        told.append(f"{packet.link.endpoint} {packet.link.broken} {payload!r}")
    for link in world.network.links.values():
        told.append(f"{link.endpoint} {link.open} {link.broken}")
    for read in world.fabric.alive():
        told.append(f"{read.transport.name} {len(read.pairs)} {read.broken} {read.stuck}")
    names: dict[str, str] = {}
    text = SECRET.sub(lambda m: names.setdefault(m[0], f"#{len(names)}"), "\n".join(told))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _rank(rank: Any, now: float) -> str:
    machinery = rank.machinery
    held = (
        machinery.sender,
        machinery.receiver,
        rank.loop,
        machinery.data.agents,
        rank.reports,
        list(rank.commands),
        list(rank.results),
        rank.control.inbox,
        (rank.stopped, rank.died, rank.fuse.left, len(rank.background.waiting)),
        [bytes(rank.seat.slots.read(n)).hex() for n in range(rank.seat.slots.count)],
    )
    return " ".join(_canonical(each, now) for each in held)


def _canonical(value: Any, now: float, depth: int = 0) -> str:
    """Any object, by what it holds."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return f"{value - now:.3f}" if abs(value) > 500 else f"{value:.3f}"  # noqa: PLR2004
    if value is None or isinstance(value, (str, int, Enum)):
        return str(value)
    if depth > DEEPEST or callable(value):
        return type(value).__name__
    return _composite(value, now, depth + 1)


def _composite(value: Any, now: float, depth: int) -> str:
    if isinstance(value, Mapping):
        pairs = ((_canonical(k, now, depth), _canonical(v, now, depth)) for k, v in value.items())
        return f"{{{','.join(map(':'.join, pairs))}}}"
    if isinstance(value, (set, frozenset)):
        return f"({','.join(sorted(_canonical(each, now, depth) for each in value))})"
    if hasattr(value, "__struct_fields__"):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return _canonical(fields, now, depth)
    if isinstance(value, Iterator):
        return repr(value)
    if isinstance(value, Iterable):
        return f"[{','.join(_canonical(each, now, depth) for each in value)}]"
    return _object(value, now, depth)


def _object(value: Any, now: float, depth: int) -> str:
    """One of ours by its attributes, any other by its type."""
    ours = type(value).__module__.partition(".")[0] in ("nixl_kv", "sim")
    kept = vars(value).items() if ours and hasattr(value, "__dict__") else ()
    held = {name: each for name, each in kept if name not in LEFT_OUT}
    return type(value).__name__ + _canonical(held, now, depth)


def shortest(explored: Explored) -> Outcome | None:
    """One of those with the fewest steps."""
    return min(explored.violations, key=lambda each: len(each.lines), default=None)
