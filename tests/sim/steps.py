"""The words of a schedule, one step a line, and what each does to the world.

A number picks among what there is at that moment, counted round; a step that has nothing to do does
nothing. So whatever is left out of a schedule, the rest of it can still be run.

    prefill LENGTH STEPS [P]         a prompt comes to prefill (the first, unless one is named)
    decode D TICKET BLOCKS           its ticket comes to decode, which has that many BLOCKS of it
    foreign D TICKET                 the same ticket with another prompt
    step E, piece E                  vLLM's step, or a piece of it
    pause E, resume E                vLLM makes no steps; the transfer threads go on
    sleep E, freeze E                all requests end, or stay, and the cache is discarded
    wake E                           a new life begins
    drain E                          no new request is accepted
    turn R                           a turn of the transfer thread
    abort E N                        a client leaves
    preempt E N                      vLLM frees a request's blocks
    reset E                          the cache is reset, as for new weights
    occupy E, vacate E               others fill the cache
    deliver N, repeat N, lose N      a message
    cut N, report N                  a connection breaks; who had made it learns of that
    refuse R                         the next peer cannot be joined
    mute R N                         the next N messages to endpoints cannot be sent
    land N PIECES                    of a read arrive (0: all), on links without a rate
    hang N, break N                  a read never lands, or fails
    damage                           a bit changes of the next piece that will be compared
    work R, fail R                   agents are made and destroyed, KV is copied, or that fails
    join R, balk R                   a peer is prepared, or that fails, where it is not at once
    kill E, start E                  an engine
    stop X, cont X                   an engine or a rank stands still
    die R N                          the thread dies at the N-th thing that it does next
    wait S                           seconds pass
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from nixl_kv.ids import RequestId
from sim.cache import BLOCK_TOKENS
from sim.engine import Engine
from sim.planes import Faults, Read
from sim.rank import FAILED, RankLife
from sim.vllm import IssuedTicket, Request
from sim.world import PREFILL, World

DIGEST_TURNS: Final = 20
"""A rank has as many in each round: a digest has a step for each block."""

_Item = TypeVar("_Item")
Find = Callable[[World, str], object]
"""The meaning of an argument in a world; None: no such thing, or it does nothing now."""

Step = tuple[Any, ...]
"""The function of a word, and a `Find` for each of its arguments."""


def perform(world: World, line: str) -> None:
    """Do one step; nothing, if an argument means nothing."""
    word, *arguments = line.split()
    if word not in STEPS:
        raise ValueError(f"no such step: {line!r}; there are {', '.join(STEPS)}")
    act, *finds = STEPS[word]
    if word == "prefill" and len(arguments) < len(finds):
        arguments.append(PREFILL)
    meant = [find(world, argument) for find, argument in zip(finds, arguments, strict=True)]
    if not any(each is None for each in meant):
        act(world, *meant)
    world.join_at_once()
    world.fabric.flow()
    for engine in world.alive():
        if engine.directory_control.inbox:
            engine.serve_directory()


# --- what arguments mean


def _pick(items: Sequence[_Item], number: str) -> _Item | None:
    """Count round; None if there is nothing."""
    return items[int(number) % len(items)] if items else None


def _any_of(items: Callable[[World], Sequence[object]]) -> Find:
    return lambda world, number: _pick(items(world), number)


def _number(_world: World, text: str) -> int:
    return int(text)


def _seconds(_world: World, text: str) -> float:
    return float(text)


def _engine(world: World, name: str) -> Engine | None:
    """One that lives and runs."""
    engine = world.engines.get(name)
    return None if engine is None or engine.is_stopped else engine


def _settled(world: World, name: str) -> Engine | None:
    """An engine between two steps: only then vLLM handles requests from outside."""
    engine = _engine(world, name)
    return engine if engine is not None and engine.settle() else None


def _half_awake(world: World, name: str) -> Engine | None:
    """One of whose ranks some run: pieces of its step are theirs."""
    engine = world.engines.get(name)
    return None if engine is None or all(r.is_stopped for r in engine.ranks) else engine


def _life(world: World, name: str) -> str | None:
    """An engine that may be dead."""
    return name if name in world.engines else None


def _ranks(world: World, name: str) -> list[RankLife]:
    """One rank, or all of an engine."""
    return [r for r in world.ranks() if name in (r.seat.name, r.seat.process.name)]


def _running(world: World, name: str) -> RankLife | None:
    return next((r for r in world.ranks() if r.seat.name == name and not r.is_stopped), None)


def _faults(world: World, name: str) -> Faults | None:
    return next((r.faults for r in world.ranks() if r.seat.name == name), None)


_ticket: Final = _any_of(lambda world: world.tickets)
_packet: Final = _any_of(lambda world: world.network.packets)
_working: Final = _any_of(lambda world: world.network.working())
_unreported: Final = _any_of(lambda world: world.network.unreported())
_read: Final = _any_of(lambda world: world.fabric.reads())


# --- vLLM and its clients


def _prefill(world: World, length: int, answer: int, engine: Engine) -> None:
    if engine.is_prefill and engine.takes_requests:
        request_id, prompt = world.new_request_id(engine.name), world.new_prompt(length)
        engine.scheduler.prefill.add(Request(request_id, prompt, steps_left=max(1, answer)))


def _decode(world: World, engine: Engine, ticket: IssuedTicket, num_blocks: int) -> None:
    if engine.name == ticket.engine:
        return  # no router sends a request back to where it comes from
    world.num_used += 1
    local = min(num_blocks, (ticket.prompt.length - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    _add_to_decode(world, engine, ticket, local)


def _foreign(world: World, engine: Engine, ticket: IssuedTicket) -> None:
    prompt = world.new_prompt(ticket.prompt.length)
    _add_to_decode(world, engine, replace(ticket, prompt=prompt), 0)


def _add_to_decode(world: World, engine: Engine, ticket: IssuedTicket, local: int) -> None:
    if engine.is_decode and engine.takes_requests:
        request_id, params = world.new_request_id(engine.name), dict(ticket.params)
        request = Request(request_id, ticket.prompt, params, local=local, steps_left=2)
        engine.scheduler.decode.add(request)


def _on_request(act: Callable[[Engine, Request], None]) -> Step:
    """A step of one request whose client waits."""

    def step(_world: World, engine: Engine, number: int) -> None:
        request = _pick(engine.scheduler.living(), str(number))
        if request is not None:
            act(engine, request)

    return step, _settled, _number


# --- the data plane


def _land(world: World, read: Read, num_pieces: int) -> None:
    if world.fabric.rate or not read.serve():
        return
    request = _verified_by(world, read) if world.is_damage_due else None
    if request is not None:  # damage of other loads stays unseen
        world.is_damage_due, read.is_damaged = False, True
        world.damaged.add(request)
    if num_pieces == 0:
        read.land_all()
    for number in range(num_pieces):
        read.land(number * 7)


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


def _set(attribute: str, value: object = None) -> Callable[..., None]:
    """Set it to this value, or to the step's last argument."""
    return lambda _world, target, *given: setattr(target, attribute, *given or (value,))


def _stop(*, is_stopped: bool) -> Step:
    def step(_world: World, ranks: list[RankLife]) -> None:
        for rank in ranks:
            rank.is_stopped = is_stopped

    return step, _ranks


def _wait(world: World, seconds: float) -> None:
    world.clock.now += seconds


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
        for _ in range(rank.num_waiting):
            yield f"work {rank.seat.name}"
        for _ in range(len(rank.joining)):
            yield f"join {rank.seat.name}"
    for number in range(len(world.fabric.reads()) - 1, -1, -1):
        yield f"land {number} 0"
    for engine in world.alive():
        yield f"step {engine.name}"


STEPS: Final[Mapping[str, Step]] = {
    "prefill": (_prefill, _number, _number, _settled),
    "decode": (_decode, _settled, _ticket, _number),
    "foreign": (_foreign, _settled, _ticket),
    "step": (lambda _, engine: engine.step(), _engine),
    "piece": (lambda _, engine: engine.piece(), _half_awake),
    "abort": _on_request(lambda engine, request: engine.scheduler.abort(request)),
    "preempt": _on_request(lambda engine, request: engine.scheduler.preempt(request)),
    "reset": (lambda _, engine: engine.scheduler.reset(), _engine),
    "pause": (_set("is_paused", value=True), _settled),
    "resume": (_set("is_paused", value=False), _settled),
    "sleep": (lambda _, engine: engine.go_to_sleep(), _settled),
    "freeze": (lambda _, engine: engine.freeze(), _settled),
    "wake": (lambda _, engine: engine.wake(), _settled),
    "drain": (_set("is_draining", value=True), _settled),
    "occupy": (lambda _, engine: engine.scheduler.occupy(), _settled),
    "vacate": (lambda _, engine: engine.scheduler.vacate(), _settled),
    "turn": (lambda _, rank: rank.turn(), _running),
    "die": (_set("dies_after"), _faults, _number),
    "refuse": (_set("refuses_peer", value=True), _faults),
    "mute": (_set("unsent"), _faults, _number),
    "work": (lambda _, rank: rank.work(), _running),
    "fail": (lambda _, rank: rank.work(fail=True), _running),
    "join": (lambda _, rank: rank.joining.work(1), _running),
    "balk": (lambda _, rank: rank.joining.work(1, FAILED), _running),
    "deliver": (lambda world, packet: world.network.deliver(packet), _packet),
    "repeat": (lambda world, packet: world.network.deliver(packet, again=True), _packet),
    "lose": (lambda world, packet: world.network.packets.remove(packet), _packet),
    "cut": (lambda world, link: world.network.cut(link), _working),
    "report": (lambda world, link: world.network.report_loss(link), _unreported),
    "land": (_land, _read, _number),
    "hang": (_set("hangs", value=True), _read),
    "break": (_set("is_broken", value=True), _read),
    "damage": (lambda world: setattr(world, "is_damage_due", True),),
    "kill": (World.kill, _life),
    "start": (World.start, _life),
    "stop": _stop(is_stopped=True),
    "cont": _stop(is_stopped=False),
    "wait": (_wait, _seconds),
}
