"""The end of every schedule: faults end, and all requests end within a bound.

    calm             everybody goes on
    decode dies      all decode engines die: prefill's blocks are free within the lease, or within
                     the offer's time if no rank had asked
    prefill dies     every load ends
    prefill sleeps   the same while prefill's processes stand still; then they go on
    prefill hangs    its transfer threads go on, but no step begins: every load ends
    prefill drains   prefill takes no new request, and vLLM pauses on decode, where the transfer
                     threads go on: prefill's blocks are free all the same; then decode resumes

Where all engines both prefill and decode, the first is the prefill engine here, the last decodes.
A read that hangs ends with its agent alone. After that, each thread waits for messages only.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from harness.local.engine import part_of
from nixl_kv.early.part import EarlyPart
from nixl_kv.early.slots import EarlySlots
from nixl_kv.engine.loop import Parts
from nixl_kv.protocol.load import DRAIN_S
from nixl_kv.protocol.peers import KEPT_S, PeerState
from nixl_kv.protocol.prefill import RECALL_S
from nixl_kv.reading.turnover import TRY_AGAIN_S
from nixl_kv.transport.base import LINGER_S, LINK_KEPT_S
from sim.cache import CONTENT
from sim.engine import Engine
from sim.invariants import Invariants
from sim.rank import HOLD_S, RankLife
from sim.repeatable import Violation
from sim.steps import arrive, perform, round_lines
from sim.world import World

PAUSE_S: Final = 0.1  # between two rounds
SLACK_S: Final = 1.0
ALL_S: Final = 60.0
LONGEST_LOAD: Final = 8  # in rounds: a grant, a few chunks, the slot, a digest
ROUNDING_S: Final = 1e-6  # the clock is a sum of tenths
IDLE_ROUNDS: Final = 4 + math.ceil(2 * LINK_KEPT_S / LINGER_S)
"""Enough to submit the last commands, carry them out, and handle the messages that they sent."""
ENDINGS: Final = (
    "calm",
    "decode dies",
    "prefill dies",
    "prefill sleeps",
    "prefill hangs",
    "prefill drains",
)


def _allowed(world: World) -> tuple[float, float]:
    """For how many seconds a load and an offer may hold blocks for the other side.

    A load: its timeout, the drain, making an agent and destroying one, each perhaps twice, and the
    reads that it waits for. One of these may be of another prefill engine, and time out first. An
    offer: until a rank asks, until that one begins to read, and then its load and a lease.
    """
    config = world.config
    num_bytes = world.shape.heads * CONTENT * world.num_tokens
    queue_s = num_bytes / world.shape.rate if world.shape.rate else 0.0
    load = config.request_timeout_s + DRAIN_S + 2 * TRY_AGAIN_S + SLACK_S + queue_s
    load += LONGEST_LOAD * PAUSE_S
    if world.shape.prefills > 1:
        load += config.request_timeout_s
    read = load
    if world.liars:
        read = max(load, world.shape.patience)
    granted = HOLD_S + RECALL_S + read + config.lease_s
    offer = max(config.offer_ttl_s, config.lease_s) + SLACK_S
    return load, offer + (granted if world.decodes() or world.liars else 0)


def end(world: World, ending: str, invariants: Invariants) -> None:
    """End a schedule in one of these ways."""
    _end_faults(world)
    prefills, decodes = _sides(world)
    for name in {"decode dies": decodes, "prefill dies": prefills}.get(ending, ()):
        world.kill(name)
    if ending == "prefill sleeps":
        _do(world, "stop", prefills)
        _wait_until_over(world, invariants, others=prefills)
        _do(world, "cont", prefills)
    if ending == "prefill hangs":
        _do(world, "stall", prefills)
        load_s, offer_s = _allowed(world)
        # Also loads that wait for prefill without blocks: decode learns that prefill hangs.
        most_s = offer_s if world.shape.both else load_s
        _wait_until_over(world, invariants, others=prefills, all_s=most_s)
        _do(world, "unstall", prefills)
    if ending == "prefill drains":
        _do(world, "drain", prefills)
        decodes = [name for name in decodes if not _computes_pair(world, name)]
        _do(world, "pause", decodes)
        _wait_until_over(world, invariants, others=decodes)
        _do(world, "resume", decodes)
    _wait_until_over(world, invariants)
    _check_idle(world, invariants)


def _sides(world: World) -> tuple[list[str], list[str]]:
    """The names of the engines that prefill here, and of those that decode."""
    names = list(world.engines)
    if world.shape.both:
        return names[:1], names[-1:]
    return world.shape.prefill_names, names[world.shape.prefills :]


def _computes_pair(world: World, name: str) -> bool:
    """Whether decode may wait for a step of this engine, as long as its threads answer."""
    engine = world.engines[name]
    requests = engine.scheduler.prefill.requests if engine and engine.is_prefill else {}
    return any(request.is_early for request in requests.values())


def _do(world: World, word: str, engines: list[str]) -> None:
    for name in engines:
        perform(world, f"{word} {name}")


def _end_faults(world: World) -> None:
    """Nothing stands still, nothing is about to fail, and others free their blocks."""
    for rank in world.ranks():
        rank.is_stopped, rank.faults.dies_after, rank.faults.refuses_peer = False, None, False
        rank.faults.unsent = 0
    while world.arriving:
        arrive(world, world.arriving[0])
    for engine in world.alive():
        engine.settle()
        engine.scheduler.vacate()
        engine.pause(is_paused=False)
        engine.is_stalled = False
        engine.wake()


def _wait_until_over(
    world: World, invariants: Invariants, *, others: Sequence[str] = (), all_s: float = ALL_S
) -> None:
    """Rounds until nothing is left, but on some engines, of which nothing is asked."""
    since = dict[str, float]()
    limits = _allowed(world)
    until = world.clock.now + all_s + limits[0]
    _round(world, invariants)  # for commands that no rank has yet
    while True:
        asked = [engine for engine in world.alive() if engine.name not in others]
        left = [item for engine in asked for item in _left(engine)]
        if not left:
            return
        if world.clock.now > until:
            raise Violation("not over", "; ".join(left))
        for engine in asked:
            _check_time(engine, since, world.clock.now, *limits)
        _round(world, invariants)
        world.advance(PAUSE_S)


def _round(world: World, invariants: Invariants) -> None:
    for line in round_lines(world):
        perform(world, line)
        invariants.check()


def _check_time(
    engine: Engine, since: dict[str, float], now: float, load_s: float, offer_s: float
) -> None:
    """Blocks that are held for the other side are held for so long and no longer."""
    for request in engine.scheduler.requests.values():
        if engine.scheduler.is_offer(request):
            kind, limit = "offer", offer_s
        elif engine.scheduler.is_load(request):
            kind, limit = "load", load_s
        else:
            continue
        seconds = now - since.setdefault(request.request_id, now)
        if seconds > limit + ROUNDING_S:
            detail = f"{request.request_id} after {seconds:.1f} s; allowed: {limit:g}"
            raise Violation(f"{kind} too long", detail)


def _check_idle(world: World, invariants: Invariants) -> None:
    """Each thread waits for messages, and for the time when it forgets a peer: it uses no CPU."""
    for count in range(2 * IDLE_ROUNDS):
        # An agent may just be replaced, to close its connections to ranks that left. The new one
        # opens links, which close a few seconds later.
        is_changing = any(
            rank.parts.agents.is_busy or rank.loop._look_at_links_at is not None
            for rank in world.ranks()
        )
        _round(world, invariants)
        world.advance(LINGER_S)
        if count >= IDLE_ROUNDS and not is_changing:
            break
    for rank in world.ranks():
        # To close connections of the dead, or to try peers again.
        is_paused = rank.parts.decode.peers.num_in[PeerState.UNUSABLE] > 0
        if rank.loop.parts.agents.next_due is not None or is_paused:
            continue
        if rank.control.wait_s is not None and rank.control.wait_s < KEPT_S / 2:
            raise Violation("not idle", f"{rank.seat.name} wakes after {rank.control.wait_s} s")


def _left(engine: Engine) -> Iterator[str]:
    if engine.scheduler.requests:
        yield repr(engine)
    num_used = engine.scheduler.blocks.block_pool.num_used
    if num_used:
        yield f"{engine.name}: {num_used} blocks"
    for rank in engine.ranks:
        yield from (f"{rank.seat.name}: {item}" for item in _left_on(rank))


def _left_on(rank: RankLife) -> Iterator[str]:
    parts, is_prefill = rank.parts, rank.seat.is_prefill
    if rank.seat.slots.any_valid:
        yield "a valid slot"
    if parts.prefill.offers or (is_prefill and len(part_of(parts, EarlyPart).asks)):
        yield repr(parts.prefill)
    if is_prefill and len(slots := part_of(parts, EarlySlots)) < slots.num_slots:
        yield "the fence slot of a pair"
    for load in parts.decode.loads:
        yield f"a load that waits for {load.waits_for}"
    for peer in parts.decode.peers.known.values():
        # The failures of an unusable peer are remembered for ten minutes; its memory is not.
        if peer.state is not PeerState.READY and (
            peer.state is not PeerState.UNUSABLE or peer.description
        ):
            yield f"{peer.key}, {peer.state.name}"
    if len(rank.loop.outstanding):
        yield repr(rank.loop.outstanding)
    if parts.agents.is_busy:
        yield repr(parts.agents)
    yield from _left_in_rings(parts)


def _left_in_rings(parts: Parts) -> Iterator[str]:
    for worker in parts.workers:
        if len(worker):
            yield f"{len(worker)} {worker.name}"
    for feature in parts.features:
        ring = getattr(feature.prefill, "ring", None)  # only of the staged path
        if ring is not None and any(ring.slots):
            yield f"{sum(map(bool, ring.slots))} slots that were packed"
    for path in parts.agents.peers.paths:
        # Only a path that reads into a ring has these.
        slots, staging = getattr(path, "slots", None), getattr(path, "staging", None)
        if slots is not None and staging is not None and len(slots) < staging.ring.num_slots:
            yield f"{staging.ring.num_slots - len(slots)} slots that were read"
