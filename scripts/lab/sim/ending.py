"""The end of every schedule: no faults any more, and within a bound everything is over.

    calm             everybody goes on
    decode dies      all decode engines die: prefill's blocks are free within the lease, or within
                     the offer's time if nobody had asked
    prefill dies     every load ends
    prefill sleeps   the same while prefill stands still; then it wakes up

A read that hangs goes on doing so: only the end of its agent ends it. When all is over, no thread
waits for anything but messages.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lab.sim.engine import Engine
from lab.sim.invariants import Invariants
from lab.sim.rank import RankLife
from lab.sim.repeatable import Violation
from lab.sim.steps import perform, round_lines
from lab.sim.vllm import Status
from lab.sim.world import PREFILL, World
from nixl_kv.config import Config
from nixl_kv.protocol.decode.load import DRAIN_S
from nixl_kv.protocol.peers import KEPT_S, State
from nixl_kv.transfer.agents import TRY_AGAIN_S
from nixl_kv.transfer.loop import LINGER_S, LINK_KEPT_S

PAUSE_S: Final = 0.1  # between two rounds
SLACK_S: Final = 1.0
ALL_S: Final = 60.0
IDLE_ROUNDS: Final = 4 + math.ceil(2 * LINK_KEPT_S / LINGER_S)
"""The last commands are submitted, carried out, and what they sent is handled; then all wait."""
ENDINGS: Final = ("calm", "decode dies", "prefill dies", "prefill sleeps")


@dataclass(frozen=True)
class Allowed:
    """For how many seconds a request may hold blocks for the other side."""

    load: float
    offer: float

    @classmethod
    def of(cls, config: Config, *, has_readers: bool) -> "Allowed":
        """A load: its time, the drain, making an agent and destroying one, each perhaps twice.

        An offer: until somebody asks; if somebody may, that one's load and a lease.
        """
        load = config.request_timeout_s + DRAIN_S + 2 * TRY_AGAIN_S + SLACK_S
        offer = max(config.offer_ttl_s, config.lease_s) + SLACK_S
        return cls(load, offer + (load + config.lease_s if has_readers else 0))


def end(world: World, ending: str, invariants: Invariants) -> None:
    """End a schedule in one of these ways.

    Raises:
        Violation: if something is left, or took too long.
        ValueError: if there is no such way.
    """
    if ending not in ENDINGS:
        raise ValueError(f"a schedule ends in one of {', '.join(ENDINGS)}, not {ending!r}")
    _end_faults(world)
    dying = {"decode dies": [n for n in world.engines if n != PREFILL], "prefill dies": [PREFILL]}
    for name in dying.get(ending, ()):
        world.kill(name)
    if ending == "prefill sleeps":
        _sleep(world, is_stopped=True)
        _wait_until_over(world, invariants, asleep=PREFILL)
        _sleep(world, is_stopped=False)
    _wait_until_over(world, invariants)
    _check_idle(world, invariants)


def _end_faults(world: World) -> None:
    """Nothing stands still, nothing is about to fail, and others free their blocks."""
    for rank in world.ranks():
        rank.is_stopped, rank.faults.dies_after, rank.faults.refuses_peer = False, None, False
    for engine in world.alive():
        engine.settle()
        engine.scheduler.vacate()


def _sleep(world: World, *, is_stopped: bool) -> None:
    engine = world.engines[PREFILL]
    for rank in () if engine is None else engine.ranks:
        rank.is_stopped = is_stopped


def _wait_until_over(world: World, invariants: Invariants, *, asleep: str = "") -> None:
    """Rounds until nothing is left."""
    start, since = world.clock.now, dict[str, float]()
    has_readers = any(engine.name != PREFILL for engine in world.alive())
    allowed = Allowed.of(world.environment.config, has_readers=has_readers)
    _round(world, invariants)  # for what was commanded, and nobody has yet
    while True:
        awake = [engine for engine in world.alive() if engine.name != asleep]
        left = [item for engine in awake for item in _left(engine)]
        if not left:
            return
        if world.clock.now > start + ALL_S:
            raise Violation("not over", f"after {ALL_S:g} s: {'; '.join(left)}")
        for engine in awake:
            _check_time(engine, since, world.clock.now, allowed)
        _round(world, invariants)
        world.clock.now += PAUSE_S


def _round(world: World, invariants: Invariants) -> None:
    for line in round_lines(world):
        perform(world, line)
        invariants.check()


def _check_time(engine: Engine, since: dict[str, float], now: float, allowed: Allowed) -> None:
    """Blocks that are held for the other side are held for so long and no longer."""
    for request in engine.scheduler.requests.values():
        if not (request.is_finished or request.status is Status.WAITING_FOR_REMOTE_KVS):
            continue
        kind, limit = ("offer", allowed.offer) if engine.name == PREFILL else ("load", allowed.load)
        seconds = now - since.setdefault(request.request_id, now)
        if seconds > limit:
            detail = f"{request.request_id} after {seconds:.1f} s; allowed: {limit:g}"
            raise Violation(f"{kind} too long", detail)


def _check_idle(world: World, invariants: Invariants) -> None:
    """Each thread waits for messages, and for the time when it forgets a peer: it uses no CPU."""
    for _ in range(IDLE_ROUNDS):
        _round(world, invariants)
        world.clock.now += LINGER_S
    for rank in world.ranks():
        if rank.control.wait_s is not None and rank.control.wait_s < KEPT_S / 2:
            raise Violation("not idle", f"{rank.seat.name} wakes after {rank.control.wait_s} s")


def _left(engine: Engine) -> Iterator[str]:
    """What an engine still has that it should not."""
    if engine.scheduler.requests:
        yield repr(engine)
    num_used = engine.scheduler.blocks.block_pool.num_used
    if num_used:
        yield f"{engine.name}: {num_used} blocks"
    for rank in engine.ranks:
        yield from (f"{rank.seat.name}: {item}" for item in _left_on(rank))


def _left_on(rank: RankLife) -> Iterator[str]:
    parts = rank.parts
    if rank.seat.slots.any_valid:
        yield "a valid slot"
    if parts.prefill.offers.all():
        yield repr(parts.prefill.offers)
    for load in parts.decode.loads.all():
        yield f"a load that waits for {load.waits_for}"
    for peer in parts.decode.peers.all():
        if peer.state is not State.READY:
            yield f"{peer.key}, {peer.state.name}"
    if len(rank.loop.outstanding):
        yield repr(rank.loop.outstanding)
    if parts.agents.is_busy:
        yield repr(parts.agents)
    if parts.digests:
        yield repr(parts.digests)
