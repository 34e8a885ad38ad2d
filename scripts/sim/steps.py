"""The words of a schedule, one step a line, and what each does to the world.

A number picks among what there is at that moment, counted round; a step that finds nothing to do
does nothing. So whatever is left out of a schedule, the rest of it can still be run.

    prompt LENGTH STEPS  prefill gets a request         ask D TICKET BLOCKS   decode gets one, of
    step E, piece E     vLLM's step, or a piece of it                         which it has blocks
    turn R              the transfer thread's turn      foreign D TICKET      the same with another
    abort E N           a client leaves                                       prompt
    preempt E N         vLLM takes its blocks away      occupy E, vacate E    others fill the cache
    deliver N, repeat N, lose N      a message          cut N, learn N        a connection
    land N PIECES       of a read arrive (0: all)      stick N, break N      it never will, it fails
    flip                a bit of the next piece that will be compared is another one
    work R, spoil R     agents are made and destroyed, or that fails
    kill E, start E     an engine                       stop X, cont X        an engine or a rank
    die R N             the thread dies at the N-th thing that it does next
    wait S              seconds pass
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from nixl_kv.ids import RequestId
from sim.decode_side import DecodeSide
from sim.engine import Engine
from sim.fabric import Read
from sim.memory import TOKENS
from sim.prefill_side import PrefillSide
from sim.rank import RankLife
from sim.vllm import Request
from sim.world import PREFILL, World

DIGEST_TURNS: Final = 20
"""Of a rank in each round: a digest has a step for each block, and does not wait for anything."""

_Item = TypeVar("_Item")
Step = Callable[[World, Sequence[str]], None]


def perform(world: World, line: str) -> None:
    """Do one step.

    Raises:
        Violation: if a promise is broken.
        ValueError: if there is no such step.
    """
    word, *arguments = line.split()
    if word not in STEPS:
        raise ValueError(f"no such step: {line!r}; there are {', '.join(STEPS)}")
    STEPS[word](world, arguments)


def one(items: Sequence[_Item], pick: str) -> _Item | None:
    """Count round; None if there is nothing."""
    return items[int(pick) % len(items)] if items else None


def _engine(world: World, name: str) -> Engine | None:
    """One that lives and runs."""
    engine = world.engines.get(name)
    return None if engine is None or engine.stopped else engine


def _rank(world: World, name: str) -> RankLife | None:
    return next((rank for rank in world.ranks() if rank.seat.name == name), None)


def _quiet(world: World, name: str) -> Engine | None:
    """An engine between two steps: only then does vLLM take in what comes from outside."""
    engine = _engine(world, name)
    return engine if engine is not None and engine.settle() else None


# --- vLLM and its clients


def _prompt(world: World, arguments: Sequence[str]) -> None:
    engine = _quiet(world, PREFILL)
    if engine is not None and isinstance(engine.side, PrefillSide):
        name = world.request_id(PREFILL)
        engine.side.add(_request(world, name, arguments))


def _request(world: World, name: str, arguments: Sequence[str]) -> Request:
    length, answer = map(int, arguments)
    return Request(name, world.prompt(length), steps_left=max(1, answer))


def _ask(world: World, arguments: Sequence[str]) -> None:
    engine, ticket = _quiet(world, arguments[0]), one(world.router.tickets, arguments[1])
    if engine is not None and ticket is not None and isinstance(engine.side, DecodeSide):
        world.router.asked += 1
        params, prompt = ticket
        local = min(int(arguments[2]), (prompt.length - 1) // TOKENS) * TOKENS
        name = world.request_id(engine.name)
        engine.side.add(Request(name, prompt, dict(params), local=local, steps_left=2))


def _foreign(world: World, arguments: Sequence[str]) -> None:
    engine, ticket = _quiet(world, arguments[0]), one(world.router.tickets, arguments[1])
    if engine is not None and ticket is not None and isinstance(engine.side, DecodeSide):
        prompt = world.prompt(ticket[1].length)
        name = world.request_id(engine.name)
        engine.side.add(Request(name, prompt, dict(ticket[0]), steps_left=2))


def _step(world: World, arguments: Sequence[str]) -> None:
    engine = _engine(world, arguments[0])
    if engine is not None:
        engine.step()


def _piece(world: World, arguments: Sequence[str]) -> None:
    engine = world.engines.get(arguments[0])
    if engine is not None and not all(rank.stopped for rank in engine.ranks):
        engine.piece()


def _abort(world: World, arguments: Sequence[str]) -> None:
    engine = _quiet(world, arguments[0])
    request = None if engine is None else one(engine.side.living(), arguments[1])
    if engine is not None and request is not None:
        engine.side.abort(request)


def _preempt(world: World, arguments: Sequence[str]) -> None:
    engine = _quiet(world, arguments[0])
    request = None if engine is None else one(engine.side.living(), arguments[1])
    if engine is not None and request is not None:
        engine.side.preempt(request)


def _occupy(world: World, arguments: Sequence[str]) -> None:
    engine = _quiet(world, arguments[0])
    if engine is not None:
        engine.side.occupy()


def _vacate(world: World, arguments: Sequence[str]) -> None:
    engine = _quiet(world, arguments[0])
    if engine is not None:
        engine.side.vacate()


# --- the transfer thread


def _turn(world: World, arguments: Sequence[str]) -> None:
    rank = _rank(world, arguments[0])
    if rank is not None and not rank.stopped:
        rank.turn()


def _die(world: World, arguments: Sequence[str]) -> None:
    rank = _rank(world, arguments[0])
    if rank is not None:
        rank.fuse.left = int(arguments[1])


def _work(world: World, arguments: Sequence[str]) -> None:
    rank = _rank(world, arguments[0])
    if rank is not None and not rank.stopped:
        rank.background.work()


def _spoil(world: World, arguments: Sequence[str]) -> None:
    rank = _rank(world, arguments[0])
    if rank is not None and not rank.stopped:
        rank.background.work(fail=True)


# --- the network


def _deliver(world: World, arguments: Sequence[str]) -> None:
    packet = one(world.network.packets, arguments[0])
    if packet is not None:
        world.network.deliver(packet)


def _repeat(world: World, arguments: Sequence[str]) -> None:
    packet = one(world.network.packets, arguments[0])
    if packet is not None:
        world.network.deliver(packet, again=True)


def _lose(world: World, arguments: Sequence[str]) -> None:
    packet = one(world.network.packets, arguments[0])
    if packet is not None:
        world.network.packets.remove(packet)


def _cut(world: World, arguments: Sequence[str]) -> None:
    link = one(world.network.usable(), arguments[0])
    if link is not None:
        world.network.cut(link)


def _learn(world: World, arguments: Sequence[str]) -> None:
    link = one(world.network.unlearned(), arguments[0])
    if link is not None:
        world.network.learn(link)


# --- the data plane


def _land(world: World, arguments: Sequence[str]) -> None:
    read = one(world.fabric.alive(), arguments[0])
    if read is None or not read.served:
        return
    _damage(world, read)
    if arguments[1] == "0":
        read.land_all()
    for pick in range(int(arguments[1])):
        read.land(pick * 7)


def _stick(world: World, arguments: Sequence[str]) -> None:
    read = one(world.fabric.alive(), arguments[0])
    if read is not None:
        read.stuck = True


def _break(world: World, arguments: Sequence[str]) -> None:
    read = one(world.fabric.alive(), arguments[0])
    if read is not None:
        read.broken = True


def _flip(world: World, arguments: Sequence[str]) -> None:
    del arguments
    world.damage.due = True


def _damage(world: World, read: Read) -> None:
    """Only if it is for a load that is verified: others have to believe what lands."""
    request = _verifying(world, read)
    if world.damage.due and request is not None:
        world.damage.due, read.flips = False, True
        world.damage.requests.add(request)


def _verifying(world: World, read: Read) -> str | None:
    """The request whose data it reads, if that is to be verified."""
    for engine in world.alive():
        for rank in engine.ranks:
            begin, end = rank.seat.memory.span
            if not begin <= read.into[0] < end:
                continue
            block = rank.seat.memory.block_at(read.into[0])
            owner = engine.side.book.block_pool.blocks[block].owner or ""
            request = rank.machinery.receiver.requests.get(RequestId(owner))
            load = None if request is None else request.load
            return owner if load is not None and load.verify else None
    return None


# --- processes and time


def _kill(world: World, arguments: Sequence[str]) -> None:
    world.kill(arguments[0])


def _start(world: World, arguments: Sequence[str]) -> None:
    world.start(arguments[0])


def _stop(world: World, arguments: Sequence[str]) -> None:
    _halt(world, arguments[0], stopped=True)


def _cont(world: World, arguments: Sequence[str]) -> None:
    _halt(world, arguments[0], stopped=False)


def _halt(world: World, name: str, *, stopped: bool) -> None:
    for rank in world.ranks():
        if name in (rank.seat.name, rank.seat.engine.name):
            rank.stopped = stopped


def _wait(world: World, arguments: Sequence[str]) -> None:
    world.clock.now += float(arguments[0])


def _turns(rank: RankLife) -> Iterator[str]:
    """One, and those that its digests take."""
    yield f"turn {rank.seat.name}"
    for _ in range(DIGEST_TURNS):
        if rank.digests.patience is not None and not rank.died:
            yield f"turn {rank.seat.name}"


def round_lines(world: World) -> Iterator[str]:
    """Everything that is under way, in order, and every thread, and every scheduler."""
    for _ in range(len(world.network.packets)):
        yield "deliver 0"
    for _ in world.network.unlearned():
        yield "learn 0"
    for rank in list(world.ranks()):
        yield from _turns(rank)
        if rank.background.waiting:
            yield f"work {rank.seat.name}"
    for number in range(len(world.fabric.alive()) - 1, -1, -1):
        yield f"land {number} 0"
    for engine in world.alive():
        yield f"step {engine.name}"


STEPS: Final[Mapping[str, Step]] = {
    "prompt": _prompt,
    "ask": _ask,
    "foreign": _foreign,
    "step": _step,
    "piece": _piece,
    "abort": _abort,
    "preempt": _preempt,
    "occupy": _occupy,
    "vacate": _vacate,
    "turn": _turn,
    "die": _die,
    "work": _work,
    "spoil": _spoil,
    "deliver": _deliver,
    "repeat": _repeat,
    "lose": _lose,
    "cut": _cut,
    "learn": _learn,
    "land": _land,
    "stick": _stick,
    "break": _break,
    "flip": _flip,
    "kill": _kill,
    "start": _start,
    "stop": _stop,
    "cont": _cont,
    "wait": _wait,
}
