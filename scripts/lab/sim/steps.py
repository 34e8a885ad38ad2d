"""The words of a schedule, one step a line, and what each does to the world.

A number picks among what there is at that moment, counted round; a step that has nothing to do does
nothing. So whatever is left out of a schedule, the rest of it can still be run.

    prefill LENGTH STEPS             a prompt comes to prefill
    decode D TICKET BLOCKS           its ticket comes to decode, which has so many blocks of it
    foreign D TICKET                 the same ticket with another prompt
    step E, piece E                  vLLM's step, or a piece of it
    turn R                           a turn of the transfer thread
    abort E N                        a client leaves
    preempt E N                      vLLM frees a request's blocks
    occupy E, vacate E               others fill the cache
    deliver N, repeat N, lose N      a message
    cut N, report N                  a connection breaks; who had made it learns of that
    refuse R                         the next peer cannot be joined
    land N PIECES                    of a read arrive (0: all)
    hang N, break N                  a read never lands, or fails
    damage                           a bit changes of the next piece that will be compared
    work R, fail R                   agents are made and destroyed, or that fails
    kill E, start E                  an engine
    stop X, cont X                   an engine or a rank stands still
    die R N                          the thread dies at the N-th thing that it does next
    wait S                           seconds pass
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from lab.sim.cache import BLOCK_TOKENS
from lab.sim.data_plane import Read
from lab.sim.engine import Engine
from lab.sim.rank import RankLife
from lab.sim.schedulers import DecodeEngineScheduler, IssuedTicket, PrefillEngineScheduler
from lab.sim.vllm import Request
from lab.sim.world import PREFILL, World
from nixl_kv.ids import RequestId
from nixl_kv.transport.memory_control import MemoryLink, Packet

DIGEST_TURNS: Final = 20
"""Of a rank in each round: a digest has a step for each block, and waits for nothing."""

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
    for engine in world.alive():
        engine.serve_directory()


def pick(items: Sequence[_Item], number: str) -> _Item | None:
    """Count round; None if there is nothing."""
    return items[int(number) % len(items)] if items else None


def _engine(world: World, name: str) -> Engine | None:
    """One that lives and runs."""
    engine = world.engines.get(name)
    return None if engine is None or engine.is_stopped else engine


def _settled(world: World, name: str) -> Engine | None:
    """An engine between two steps: only then does vLLM handle what comes from outside."""
    engine = _engine(world, name)
    return engine if engine is not None and engine.settle() else None


def _on_engine(act: Callable[[Engine], object]) -> Step:
    """A step of one engine, between two steps of its own."""

    def step(world: World, arguments: Sequence[str]) -> None:
        engine = _settled(world, arguments[0])
        if engine is not None:
            act(engine)

    return step


def _on_request(act: Callable[[Engine, Request], None]) -> Step:
    """A step of one request whose client waits."""

    def step(world: World, arguments: Sequence[str]) -> None:
        engine = _settled(world, arguments[0])
        request = None if engine is None else pick(engine.scheduler.living(), arguments[1])
        if engine is not None and request is not None:
            act(engine, request)

    return step


def _on_rank(act: Callable[[RankLife], None]) -> Step:
    """A step of one rank that does not stand still."""

    def step(world: World, arguments: Sequence[str]) -> None:
        rank = _rank(world, arguments[0])
        if rank is not None and not rank.is_stopped:
            act(rank)

    return step


def _on_packet(act: Callable[[World, Packet], None]) -> Step:
    """A step of one message."""

    def step(world: World, arguments: Sequence[str]) -> None:
        packet = pick(world.network.packets, arguments[0])
        if packet is not None:
            act(world, packet)

    return step


def _on_link(
    choices: Callable[[World], list[MemoryLink]], act: Callable[[World, MemoryLink], None]
) -> Step:
    """A step of one connection."""

    def step(world: World, arguments: Sequence[str]) -> None:
        link = pick(choices(world), arguments[0])
        if link is not None:
            act(world, link)

    return step


def _rank(world: World, name: str) -> RankLife | None:
    return next((rank for rank in world.ranks() if rank.seat.name == name), None)


# --- vLLM and its clients


def _prefill(world: World, arguments: Sequence[str]) -> None:
    engine = _settled(world, PREFILL)
    if engine is None or not isinstance(engine.scheduler, PrefillEngineScheduler):
        return
    length, answer = map(int, arguments)
    request_id, prompt = world.new_request_id(PREFILL), world.new_prompt(length)
    engine.scheduler.add(Request(request_id, prompt, steps_left=max(1, answer)))


def _decode(world: World, arguments: Sequence[str]) -> None:
    name, number, blocks = arguments
    ticket = pick(world.router.tickets, number)
    if ticket is not None and _settled(world, name) is not None:
        world.router.num_used += 1
        local = min(int(blocks), (ticket.prompt.length - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        _add_to_decode(world, name, ticket, local)


def _foreign(world: World, arguments: Sequence[str]) -> None:
    name, number = arguments
    ticket = pick(world.router.tickets, number)
    if ticket is not None and _settled(world, name) is not None:
        prompt = world.new_prompt(ticket.prompt.length)
        _add_to_decode(world, name, IssuedTicket(ticket.params, prompt), 0)


def _add_to_decode(world: World, name: str, ticket: IssuedTicket, local: int) -> None:
    engine = world.engines[name]
    if engine is not None and isinstance(engine.scheduler, DecodeEngineScheduler):
        request_id, params = world.new_request_id(name), dict(ticket.params)
        request = Request(request_id, ticket.prompt, params, local=local, steps_left=2)
        engine.scheduler.add(request)


def _step(world: World, arguments: Sequence[str]) -> None:
    engine = _engine(world, arguments[0])
    if engine is not None:
        engine.step()


def _piece(world: World, arguments: Sequence[str]) -> None:
    engine = world.engines.get(arguments[0])
    if engine is not None and not all(rank.is_stopped for rank in engine.ranks):
        engine.piece()


# --- the transfer thread


def _die(world: World, arguments: Sequence[str]) -> None:
    rank = _rank(world, arguments[0])
    if rank is not None:
        rank.faults.dies_after = int(arguments[1])


def _refuse(rank: RankLife) -> None:
    rank.faults.refuses_peer = True


# --- the data plane


def _land(world: World, arguments: Sequence[str]) -> None:
    read = pick(world.fabric.reads(), arguments[0])
    if read is None or not read.serve():
        return
    if world.damage.is_due:
        _damage(world, read)
    if arguments[1] == "0":
        read.land_all()
    for number in range(int(arguments[1])):
        read.land(number * 7)


def _hang(world: World, arguments: Sequence[str]) -> None:
    read = pick(world.fabric.reads(), arguments[0])
    if read is not None:
        read.hangs = True


def _break(world: World, arguments: Sequence[str]) -> None:
    read = pick(world.fabric.reads(), arguments[0])
    if read is not None:
        read.is_broken = True


def _plan_damage(world: World, arguments: Sequence[str]) -> None:
    del arguments
    world.damage.is_due = True


def _damage(world: World, read: Read) -> None:
    """Only if it is for a load that is verified: nobody notices it in others."""
    request = _verified_by(world, read)
    if request is not None:
        world.damage.is_due, read.is_damaged = False, True
        world.damage.requests.add(request)


def _verified_by(world: World, read: Read) -> RequestId | None:
    """The request whose data it reads, if that is to be verified."""
    for engine in world.alive():
        for rank in engine.ranks:
            block = rank.seat.cache.block_at(read.addresses[0])
            if block is not None:
                owner = engine.scheduler.blocks.block_pool.blocks[block].owner
                load = rank.loads.get(owner or RequestId(""))
                return owner if load is not None and load.verify else None
    return None


# --- processes and time


def _on_life(act: Callable[[World, str], None]) -> Step:
    """A step of one engine that may be dead."""

    def step(world: World, arguments: Sequence[str]) -> None:
        if arguments[0] in world.engines:
            act(world, arguments[0])

    return step


def _stop(*, is_stopped: bool) -> Step:
    def step(world: World, arguments: Sequence[str]) -> None:
        for rank in world.ranks():
            if arguments[0] in (rank.seat.name, rank.seat.process.name):
                rank.is_stopped = is_stopped

    return step


def _wait(world: World, arguments: Sequence[str]) -> None:
    world.clock.now += float(arguments[0])


def _turns(rank: RankLife) -> Iterator[str]:
    """One, and those that its digests need."""
    yield f"turn {rank.seat.name}"
    for _ in range(DIGEST_TURNS):
        if rank.parts.digests and not rank.has_died:
            yield f"turn {rank.seat.name}"


def round_lines(world: World) -> Iterator[str]:
    """Everything that is under way, in order, and every thread, and every scheduler."""
    for _ in range(len(world.network.packets)):
        yield "deliver 0"
    for _ in world.network.unreported():
        yield "report 0"
    for rank in list(world.ranks()):
        yield from _turns(rank)
        if rank.background.waiting:
            yield f"work {rank.seat.name}"
    for number in range(len(world.fabric.reads()) - 1, -1, -1):
        yield f"land {number} 0"
    for engine in world.alive():
        yield f"step {engine.name}"


STEPS: Final[Mapping[str, Step]] = {
    "prefill": _prefill,
    "decode": _decode,
    "foreign": _foreign,
    "step": _step,
    "piece": _piece,
    "abort": _on_request(lambda engine, request: engine.scheduler.abort(request)),
    "preempt": _on_request(lambda engine, request: engine.scheduler.preempt(request)),
    "occupy": _on_engine(lambda engine: engine.scheduler.occupy()),
    "vacate": _on_engine(lambda engine: engine.scheduler.vacate()),
    "turn": _on_rank(RankLife.turn),
    "die": _die,
    "refuse": _on_rank(_refuse),
    "work": _on_rank(lambda rank: rank.background.work()),
    "fail": _on_rank(lambda rank: rank.background.work(fail=True)),
    "deliver": _on_packet(lambda world, packet: world.network.deliver(packet)),
    "repeat": _on_packet(lambda world, packet: world.network.deliver(packet, again=True)),
    "lose": _on_packet(lambda world, packet: world.network.packets.remove(packet)),
    "cut": _on_link(
        lambda world: world.network.working(), lambda world, link: world.network.cut(link)
    ),
    "report": _on_link(
        lambda world: world.network.unreported(),
        lambda world, link: world.network.report_loss(link),
    ),
    "land": _land,
    "hang": _hang,
    "break": _break,
    "damage": _plan_damage,
    "kill": _on_life(World.kill),
    "start": _on_life(World.start),
    "stop": _stop(is_stopped=True),
    "cont": _stop(is_stopped=False),
    "wait": _wait,
}
