"""All schedules of a small alphabet, to a depth, from a few scenes.

A schedule is run from its beginning each time: nothing is copied. Two that lead to the same state
are continued once; what counts as the state is all that the loop with its machines, the scheduler,
the network and the reads hold, with random names in the order in which they appear and times as
distances from now. Bytes do not count: they follow from who has which block.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import msgspec
import numpy as np

from harness.local.memory import MemoryTransport
from harness.local.memory_control import MemoryControl
from nixl_kv.config import AllowedHosts
from nixl_kv.engine.event_log import EventLog
from nixl_kv.engine.serving import Serving
from nixl_kv.errors import LimitedLog
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.plan import IndexBuffer
from nixl_kv.protocol.messages import Description, RankDescription
from nixl_kv.reading.peers import RemoteRank
from nixl_kv.transport.base import SlotPage
from sim.cache import KnownPrompt, RankCache
from sim.data_plane import Read
from sim.faults import Faults
from sim.rank import RankLife
from sim.scenes import Scene
from sim.schedule import Outcome, Run, follow, read_schedule
from sim.world import World

SECRET: Final = re.compile(r"[0-9a-f]{32}")
CLOCK_AT_LEAST: Final = 500.0  # a number as large as this is a time
OPAQUE: Final = (
    # the same throughout a scene, but for where memory is
    AllowedHosts,
    CacheLayout,
    Description,
    Executor,
    Faults,
    KnownPrompt,
    MemoryControl,
    MemoryTransport,
    np.ndarray,
    RemoteRank,
    RankCache,
    RankDescription,
    SlotPage,
    # decides nothing
    EventLog,
    IndexBuffer,
    LimitedLog,
    Serving,  # ranks do not check here whether they can be read
)
"""What is no part of the state, or is looked at by itself."""

LEFT_OUT: Final = frozenset(
    {"_agent", "_counts", "counts", "free_slots", "seconds", "started_at"}  # `_agent` holds the op
)
"""Attributes that decide nothing."""


@dataclass
class Explored:
    """What came of a scene."""

    scene: Scene
    depth: int
    num_schedules: int = 0  # that were run
    num_states: int = 0
    num_known: int = 0  # schedules that led to a state that was known
    violations: list[Outcome] = field(default_factory=list)

    @property
    def shortest_violation(self) -> Outcome | None:
        """One of those with the fewest steps."""
        return min(self.violations, key=lambda each: len(each.lines), default=None)


class Explorer:
    """Breadth first: what breaks a promise shows in a shortest schedule."""

    def __init__(self, scene: Scene) -> None:
        """Explore this scene; each new state is also led to its end."""
        self.alphabet = read_schedule(scene.alphabet)
        self._scene = scene
        self._known: set[bytes] = set()

    def explore(self, depth: int, max_schedules: int) -> Explored:
        """All schedules to a depth, or as many as that."""
        explored = Explored(self._scene, depth)
        paths: list[tuple[str, ...]] = [()]
        for _ in range(depth):
            paths = [
                longer for path in paths for longer in self._continue(path, explored, max_schedules)
            ]
        return explored

    def _continue(
        self, path: tuple[str, ...], explored: Explored, max_schedules: int
    ) -> Iterator[tuple[str, ...]]:
        for step in self.alphabet:
            if explored.num_schedules >= max_schedules:
                return
            longer = (*path, step)
            explored.num_schedules += 1
            if self._is_new(longer, explored):
                explored.num_states += 1
                yield longer

    def _is_new(self, path: tuple[str, ...], explored: Explored) -> bool:
        """Run it, and, if it leads to a state of its own, to its end."""
        states: list[bytes] = []

        def source(run: Run) -> Iterator[str]:
            yield from read_schedule(self._scene.begin)
            yield from path
            states.append(state(run.world))
            if states[0] not in self._known:
                yield self._scene.end

        outcome = follow(self._scene.setting, source)
        if outcome.violation is not None:
            explored.violations.append(outcome)
            return False
        is_new = states[0] not in self._known
        explored.num_known += not is_new
        self._known.add(states[0])
        return is_new


def state(world: World) -> bytes:
    """A digest of all that decides what happens next."""
    now, parts = world.clock.now, []
    for name, engine in world.engines.items():
        parts.append(name)
        if engine is not None:
            parts += [_canonical(engine.scheduler, now), str(engine.num_pieces)]
            parts.append(f"{engine.is_paused} {engine.is_asleep} {engine.is_going_to_sleep}")
            parts += [_rank(rank, now) for rank in engine.ranks]
    for packet in world.network.packets:
        payload = b"" if b"Description" in packet.payload else packet.payload
        parts.append(f"{packet.link.endpoint} {packet.link.is_broken} {payload!r}")
    for link in world.network.links.values():
        parts.append(f"{link.endpoint} {link.is_open} {link.is_broken}")
    for read in world.fabric.reads():
        flags = read.is_broken, read.hangs, read.is_forgotten
        parts.append(f"{read.transport.name} {len(read.pieces)} {flags}")
    names: dict[str, str] = {}
    text = SECRET.sub(lambda m: names.setdefault(m[0], f"#{len(names)}"), "\n".join(parts))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _rank(rank: RankLife, now: float) -> str:
    slots, faults = rank.seat.slots, rank.faults
    parts = (
        rank.loop,
        rank.control.inbox,
        (rank.is_stopped, rank.has_died, faults.dies_after, faults.refuses_peer, faults.unsent),
        [len(each.waiting) for each in (rank.background, rank.joining, rank.copying)],
        [slots.read(number) for number in range(slots.count)],
    )
    return " ".join(_canonical(part, now) for part in parts)


def _canonical(value: Any, now: float) -> str:
    """Any object, by what it holds."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return f"{value - now:.3f}" if abs(value) > CLOCK_AT_LEAST else f"{value:.3f}"
    if isinstance(value, Future):
        return f"done: {value.done()}"
    if isinstance(value, Read):
        return f"read {value.number}"
    if value is None or isinstance(value, (str, int, Enum, itertools.count)):
        return str(value)
    if callable(value) or isinstance(value, (*OPAQUE, Iterator)):
        return type(value).__name__
    return _composite(value, now)


def _composite(value: Any, now: float) -> str:
    if isinstance(value, Mapping):
        pairs = ((_canonical(k, now), _canonical(v, now)) for k, v in value.items())
        return f"{{{','.join(map(':'.join, pairs))}}}"
    if isinstance(value, (set, frozenset)):
        return f"({','.join(sorted(_canonical(each, now) for each in value))})"
    if isinstance(value, Iterable):
        return f"[{','.join(_canonical(each, now) for each in value)}]"
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else vars(value)
    held = {name: getattr(value, name) for name in names if name not in LEFT_OUT}
    return type(value).__name__ + _canonical(held, now)
