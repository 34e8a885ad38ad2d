"""The end of every schedule: no faults any more, and within a bound everything is over.

    calm             everybody goes on
    decode dies      all decode engines die: prefill's blocks are free within the lease, or within
                     the offer's time if nobody had asked
    prefill dies     every load ends
    prefill sleeps   the same while prefill stands still; then it wakes up

A read that was stuck stays so: only the end of its agent ends it.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from sim.engine import Engine
from sim.rank import RankLife, Times
from sim.steps import perform, round_lines
from sim.violations import Violation
from sim.watch import Watch
from sim.world import BLOCKS, PREFILL, World

PAUSE_S: Final = 0.1  # between two rounds
DRAIN_S: Final = 1.0
AGAIN_S: Final = 1.0  # after an agent could not be made or destroyed
SLACK_S: Final = 1.0
ALL_S: Final = 60.0
KINDS: Final = ("calm", "decode dies", "prefill dies", "prefill sleeps")


def bounds(times: Times, *, readers: bool) -> Mapping[str, float]:
    """How long a request may hold blocks for the other side, by side.

    A load: its time, the drain, making an agent and destroying one, each perhaps twice. An offer:
    until somebody asks; if somebody may, that one's load and a lease.
    """
    load = times.timeout + DRAIN_S + 2 * AGAIN_S + SLACK_S
    offer = max(times.offer_ttl, times.lease) + SLACK_S
    return MappingProxyType({"load": load, "offer": offer + (load + times.lease if readers else 0)})


def finish(world: World, kind: str, watch: Watch) -> None:
    """End a schedule in one of these ways.

    Raises:
        Violation: if something is left, or took too long.
        ValueError: if there is no such way.
    """
    if kind not in KINDS:
        raise ValueError(f"a schedule ends in one of {', '.join(KINDS)}, not {kind!r}")
    _wake(world)
    dying = {"decode dies": [n for n in world.engines if n != PREFILL], "prefill dies": [PREFILL]}
    for name in dying.get(kind, ()):
        world.kill(name)
    if kind == "prefill sleeps":
        _sleep(world, stopped=True)
        _wait_for(world, watch, asleep=True)
        _sleep(world, stopped=False)
    _wait_for(world, watch, asleep=False)
    watch.look()


def _wake(world: World) -> None:
    """Nothing stands still, nothing is about to fail, and others leave their blocks."""
    for rank in world.ranks():
        rank.stopped, rank.fuse.left = False, None
    for engine in world.alive():
        engine.settle()
        engine.side.vacate()


def _sleep(world: World, *, stopped: bool) -> None:
    engine = world.engines[PREFILL]
    for rank in () if engine is None else engine.ranks:
        rank.stopped = stopped


def _wait_for(world: World, watch: Watch, *, asleep: bool) -> None:
    """Rounds until nothing is left."""
    began, since = world.clock.now, dict[str, float]()
    readers = any(engine.name != PREFILL for engine in world.alive())
    allowed = bounds(world.around.times, readers=readers)
    while True:
        awake = [e for e in world.alive() if not (asleep and e.name == PREFILL)]
        left = [told for engine in awake for told in _left(engine)]
        if not left:
            return
        if world.clock.now > began + ALL_S:
            raise Violation("not over", f"after {ALL_S:g} s: {'; '.join(left)}")
        for engine in awake:
            _time(engine, since, world.clock.now, allowed=allowed)
        for line in round_lines(world):
            perform(world, line)
            watch.look()
        world.clock.now += PAUSE_S


def _time(
    engine: Engine, since: dict[str, float], now: float, *, allowed: Mapping[str, float]
) -> None:
    """Blocks that are held for the other side are held for so long and no longer."""
    for request in engine.side.requests.values():
        waits = request.finished or request.status.name == "WAITING_FOR_REMOTE_KVS"
        if not waits:
            continue
        kind = "offer" if engine.name == PREFILL else "load"
        begun = since.setdefault(request.request_id, now)
        if now > begun + allowed[kind]:
            told = f"{request.request_id} after {now - begun:.1f} s; allowed: {allowed[kind]:g}"
            raise Violation(f"{kind} too long", told)


def _left(engine: Engine) -> Iterator[str]:
    """What an engine still has that it should not."""
    if engine.side.requests:
        yield repr(engine)
    used = BLOCKS - 1 - engine.side.book.block_pool.free
    if used:
        yield f"{engine.name}: {used} blocks"
    for rank in engine.ranks:
        yield from (f"{rank.seat.name}: {told}" for told in _left_on(rank))


def _left_on(rank: RankLife) -> Iterator[str]:
    machinery, slots = rank.machinery, rank.seat.slots
    offers, requests = machinery.sender.offers, machinery.receiver.requests
    if any(any(slots.read(slot)) for slot in range(slots.count)):
        yield "a slot stands"
    if offers.timed or offers.granted or "none" not in repr(offers):
        yield repr(offers)
    if len(requests) or machinery.receiver.busy:
        yield f"{requests!r} {machinery.receiver.directory!r}"
    agents = machinery.data.agents
    works = ((agents, agents.busy), (rank.digests, rank.digests.patience is not None))
    yield from (repr(work) for work, busy in works if busy)
    yield from _held(rank.reports)


def _held(reports: Any) -> Iterator[str]:
    """Ids that a worker would remember for ever."""
    for name in ("_loading", "_pinned", "_sent_early"):
        if getattr(reports, name, None):
            yield f"reports{name} {sorted(getattr(reports, name))}"
