"""The words of a schedule, one step a line, and what each does to the world.

A number picks among what there is at that moment, counted round; a step that has nothing to do does
nothing. So whatever is left out of a schedule, the rest of it can still be run.

    prefill LENGTH STEPS [P]         a prompt comes to prefill (the first, unless one is named)
    pair LENGTH P, id LENGTH P       its ticket, or an id for it, is out before the prompt arrives
    arrive N                         the prompt of one of them comes to prefill
    decode D TICKET BLOCKS           its ticket comes to decode, which has that many BLOCKS of it
    foreign D TICKET                 another prompt, with a ticket for it that names this offer
    chat D E N                       a prompt comes to decode, of which E has cached blocks
    overlap R N                      R's next grant of cached blocks overlaps N pieces of a step
    step E, piece E                  vLLM's step, or a piece of it
    pause E, resume E                vLLM makes no steps; the transfer threads go on, and know that
    stall E, unstall E               the same, but the transfer threads do not know
    sleep E, freeze E                all requests end, or stay, and the cache is discarded
    wake E                           a new life begins
    drain E                          no new request is accepted
    written R                        the oldest writes on its GPU's stream end (worlds with `late`)
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
    join R, balk R                   a peer or a pack is prepared, or that fails, beside the thread
    kill E, start E                  an engine
    stop X, cont X                   an engine or a rank stands still
    die R N                          the thread dies at the N-th thing that it does next
    lie TICKET                       a peer asks for it, and says for ever that it reads
    forge D                          a peer says that all loads of an engine have landed
    wait S                           seconds pass
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

from msgspec import structs

from nixl_kv.ids import RequestId, new_nonce
from nixl_kv.protocol.ticket import SealedTicket, Ticket
from sim.cache import BLOCK_TOKENS
from sim.engine import Engine
from sim.liars import Liar, forge
from sim.planes import Faults, Read
from sim.rank import RankLife
from sim.vllm import IssuedTicket, Request
from sim.world import PREFILL, World

DIGEST_TURNS: Final = 20
"""A rank has as many in each round: a digest has a step for each block."""

MAX_PROMPTS: Final = 4  # that one prefill engine has at the same time, in random schedules

_Item = TypeVar("_Item")
Find = Callable[[World, str], object]
Draw = Callable[[World, Random], object]


class Argument(NamedTuple):
    find: Find  # the object that a text names in a world; None: none, or it does nothing now
    draw: Draw  # a text for a random schedule; None: there is nothing to choose from


Step = tuple[Any, ...]
"""The function of a word, and its arguments."""


def perform(world: World, line: str) -> None:
    """Do one step; nothing, if an argument means nothing."""
    word, *arguments = line.split()
    if word not in STEPS:
        raise ValueError(f"no such step: {line!r}; there are {', '.join(STEPS)}")
    act, *kinds = STEPS[word]
    if word == "prefill" and len(arguments) < len(kinds):
        arguments.append(PREFILL)
    meant = [kind.find(world, text) for kind, text in zip(kinds, arguments, strict=True)]
    if not any(each is None for each in meant):
        act(world, *meant)
    world.join_at_once()
    world.fabric.flow()
    for engine in world.alive():
        if engine.directory_control.inbox:
            engine.serve_directory()
    for liar in world.liars:
        liar.act()


# --- arguments


def choice(items: Callable[[World], Sequence[object]]) -> Draw:
    """One of these, or None."""

    def draw(world: World, rng: Random) -> object:
        chosen = items(world)
        return rng.choice(chosen) if chosen else None

    return draw


def _mostly(share: float, first: Draw, other: Draw) -> Draw:
    """The first; sometimes, or if that is None, the other."""

    def draw(world: World, rng: Random) -> object:
        drawn = first(world, rng) if rng.random() < share else None
        return other(world, rng) if drawn is None else drawn

    return draw


def one_of(*values: float) -> Argument:
    """A number."""
    kind = type(values[0])
    return Argument(lambda _world, text: kind(text), choice(lambda _world: values))


def _pick(items: Sequence[_Item], number: str) -> _Item | None:
    """Count round; None if there is nothing."""
    return items[int(number) % len(items)] if items else None


def _nth(items: Callable[[World], Sequence[object]], draw: Draw | None = None) -> Argument:
    """One of them, by its number."""
    return Argument(
        lambda world, number: _pick(items(world), number),
        draw or choice(lambda world: range(len(items(world)))),
    )


def _length(world: World, rng: Random) -> int | None:
    """The length of a prompt, unless the prefill engines have many already."""
    prefills = world.prefills()
    num_requests = sum(len(engine.scheduler.requests) for engine in prefills)
    if prefills and num_requests >= MAX_PROMPTS * len(prefills):
        return None
    return rng.choice((1, 3, 4, 5, 8, 9, 13, 17))


def _recent_ticket(world: World, rng: Random) -> int | None:
    """One of the last, which may have been used."""
    count = len(world.tickets)
    return max(0, count - rng.choice((1, 1, 1, 2, 2, 3))) if count else None


def _early_packet(world: World, rng: Random) -> int | None:
    """Mostly the first."""
    is_first, packets = rng.random() < 0.6, world.network.packets
    if not packets:
        return None
    return 0 if is_first else rng.randrange(len(packets))


LENGTH: Final = Argument(lambda _world, text: int(text), _length)
TICKET: Final = _nth(lambda world: world.tickets, _recent_ticket)
PACKET: Final = _nth(lambda world: world.network.packets, _early_packet)
READ: Final = _nth(lambda world: world.fabric.reads())


def _running(world: World, name: str) -> Engine | None:
    """An engine that lives and runs."""
    engine = world.engines.get(name)
    return None if engine is None or engine.is_stopped else engine


def _settled(world: World, name: str) -> Engine | None:
    """An engine between two steps: only then vLLM handles requests from outside."""
    engine = _running(world, name)
    return engine if engine is not None and engine.settle() else None


def _half_awake(world: World, name: str) -> Engine | None:
    """One of whose ranks some run: pieces of its step are theirs."""
    engine = world.engines.get(name)
    return None if engine is None or all(r.is_stopped for r in engine.ranks) else engine


def _life(world: World, name: str) -> str | None:
    """An engine that may be dead."""
    return name if name in world.engines else None


def _engine_where(is_chosen: Callable[[Engine], object]) -> Draw:
    return choice(lambda world: [each.name for each in world.alive() if is_chosen(each)])


_any_engine: Final = choice(lambda world: list(world.engines))
_dead_engine: Final = choice(lambda world: [n for n, life in world.engines.items() if not life])
PREFILL_ENGINE: Final = Argument(_settled, choice(lambda world: world.shape.prefill_names))
DECODE_ENGINE: Final = Argument(_settled, choice(lambda world: world.shape.decode_names))
ENGINE: Final = Argument(_settled, _any_engine)


def rank_where(is_chosen: Callable[[RankLife], object]) -> Draw:
    return choice(lambda world: [rank.seat.name for rank in world.ranks() if is_chosen(rank)])


def _rank(world: World, name: str) -> RankLife | None:
    return next((r for r in world.ranks() if r.seat.name == name and not r.is_stopped), None)


def _ranks(world: World, name: str) -> list[RankLife]:
    """One rank, or all of an engine."""
    return [r for r in world.ranks() if name in (r.seat.name, r.seat.process.name)]


def _faults(world: World, name: str) -> Faults | None:
    return next((r.faults for r in world.ranks() if r.seat.name == name), None)


_any_rank: Final = rank_where(lambda _rank: True)
TURNING: Final = Argument(_rank, _mostly(0.8, rank_where(lambda rank: rank.has_work), _any_rank))
WRITING: Final = Argument(
    lambda world, name: next(iter(_ranks(world, name)), None),  # also while its process is stopped
    rank_where(lambda rank: len(rank.stream)),
)
WORKING: Final = Argument(_rank, rank_where(lambda rank: rank.num_waiting))
JOINING: Final = Argument(_rank, rank_where(lambda rank: len(rank.joining)))
FAULTS: Final = Argument(_faults, _any_rank)
STILL: Final = Argument(_ranks, _mostly(0.7, _any_engine, _any_rank))


# --- vLLM and its clients


def _prefill(world: World, length: int, answer: int, engine: Engine) -> None:
    if engine.is_prefill and engine.takes_requests:
        request_id, prompt = world.new_request_id(engine.name), world.new_prompt(length)
        engine.scheduler.prefill.add(Request(request_id, prompt, steps_left=max(1, answer)))


def _pair(world: World, length: int, engine: Engine) -> None:
    """The router gets a ticket before the request arrives at prefill."""
    address = engine.scheduler.prefill.admission.address
    if not engine.is_prefill or address is None:
        return
    prompt, nonce = world.new_prompt(length), new_nonce()
    request = Request(world.new_request_id(engine.name), prompt, is_early=True)
    context, media = request.connector_prompt.hashes(nonce)
    ticket = Ticket(
        **asdict(address),
        nonce=nonce,
        num_tokens=length,
        context=context,
        media=media,
        is_early=True,
    )
    world.pairs[ticket.nonce] = request.request_id
    world.arriving.append((engine.name, request, ticket))
    world.tickets.append(IssuedTicket(ticket.params(None), prompt, engine.name))


def arrive(world: World, arriving: tuple[str, Request, Ticket]) -> None:
    world.arriving.remove(arriving)
    name, request, ticket = arriving
    engine = world.engines.get(name)
    if engine is not None and engine.takes_requests:
        engine.scheduler.prefill.add(request, ticket.nonce)


def _decode(world: World, engine: Engine, ticket: IssuedTicket, num_blocks: int) -> None:
    if engine.name == ticket.engine:
        return  # no router sends a request back to where it comes from
    world.num_used += 1
    # vLLM's own cache has none of it, if the simulator follows the cache's contents.
    num_blocks = 0 if world.shape.content else num_blocks
    local = min(num_blocks, (ticket.prompt.length - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    _add_to_decode(world, engine, ticket, local)


def _lie(world: World, issued: IssuedTicket) -> None:
    ticket = SealedTicket.parse(issued.params).open()
    engine = world.engines[issued.engine]
    if engine is not None and engine.description.incarnation == ticket.incarnation:
        liar = Liar(len(world.liars), world)
        world.liars.append(liar)
        liar.ask(engine, ticket)


def _foreign(world: World, engine: Engine, ticket: IssuedTicket) -> None:
    prompt = world.new_prompt(ticket.prompt.length)
    named = SealedTicket.parse(ticket.params).open()
    request = Request(world.new_request_id(engine.name), prompt)
    context, media = request.connector_prompt.hashes(named.nonce)
    forged = structs.replace(named, context=context, media=media).params(None)
    _add_to_decode(world, engine, replace(ticket, prompt=prompt, params=forged), 0)


def _chat(world: World, engine: Engine, owner: Engine, number: int) -> None:
    """The directory of the owner has just answered; nothing holds the blocks."""
    cache, address = owner.prefix_cache, owner.scheduler.prefill.admission.address
    if engine is owner or cache is None or address is None or owner.is_asleep:
        return
    prompt = _pick(list(cache.prompts.values()), str(number))
    found = None if prompt is None else cache.find(prompt)
    if prompt is None or found is None or not (engine.is_decode and engine.takes_requests):
        return
    world.found[found.offer] = found
    request = Request(world.new_request_id(engine.name), prompt, steps_left=2)
    hashed = request.connector_prompt.hashes(found.offer, num_tokens=found.num_tokens)
    ticket = Ticket(
        **asdict(address), nonce=found.offer, num_tokens=found.num_tokens, context=hashed[0]
    )
    request.kv_transfer_params = ticket.params(None)
    engine.scheduler.decode.add(request, found.sealed)


def _overlap(world: World, rank: RankLife, num_pieces: int) -> None:
    """The step thread runs while the transfer thread writes a fence slot."""

    def run() -> None:
        engine = world.engines[rank.seat.process.name]
        if engine is not None and rank in engine.ranks:
            for _ in range(num_pieces):
                engine.piece()

    rank.seat.slots.before_write = run


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

    return step, ENGINE, one_of(*range(4))


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

    return step, STILL


def _wait(world: World, seconds: float) -> None:
    world.advance(seconds)


def _turns(rank: RankLife) -> Iterator[str]:
    """One, and those that its digests need."""
    yield f"turn {rank.seat.name}"
    for _ in range(DIGEST_TURNS):
        if any(map(len, rank.parts.workers)) and not rank.has_died:
            yield f"turn {rank.seat.name}"


def round_lines(world: World) -> Iterator[str]:
    """Everything that is under way, in order, and every thread, and every scheduler."""
    for _ in range(len(world.network.packets)):
        yield "deliver 0"
    for _ in world.network.unreported():
        yield "report 0"
    for rank in list(world.ranks()):
        for _ in range(len(rank.stream)):
            yield f"written {rank.seat.name}"
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
    "prefill": (_prefill, LENGTH, one_of(1, 1, 1, 2, 3, 4), PREFILL_ENGINE),
    "pair": (_pair, LENGTH, PREFILL_ENGINE),
    "arrive": (arrive, _nth(lambda world: world.arriving)),
    "decode": (_decode, DECODE_ENGINE, TICKET, one_of(0, 0, 0, 0, 1, 9)),
    "foreign": (_foreign, DECODE_ENGINE, TICKET),
    "chat": (_chat, DECODE_ENGINE, Argument(_running, _any_engine), one_of(*range(8))),
    "overlap": (_overlap, Argument(_rank, _any_rank), one_of(1, 2, 3, 5)),
    "lie": (_lie, TICKET),
    "forge": (lambda world, engine: forge(engine, list(world.told)), DECODE_ENGINE),
    "step": (lambda _, engine: engine.step(), Argument(_running, _any_engine)),
    "piece": (lambda _, engine: engine.piece(), Argument(_half_awake, _any_engine)),
    "abort": _on_request(lambda engine, request: engine.scheduler.abort(request)),
    "preempt": _on_request(lambda engine, request: engine.scheduler.preempt(request)),
    "reset": (lambda _, engine: engine.reset(), Argument(_running, _any_engine)),
    "pause": (lambda _, engine: engine.pause(is_paused=True), ENGINE),
    "stall": (_set("is_stalled", value=True), ENGINE),
    "unstall": (
        _set("is_stalled", value=False),
        Argument(_settled, _engine_where(lambda engine: engine.is_stalled)),
    ),
    "resume": (
        lambda _, engine: engine.pause(is_paused=False),
        Argument(_settled, _engine_where(lambda engine: engine.is_paused)),
    ),
    "sleep": (lambda _, engine: engine.go_to_sleep(), ENGINE),
    "freeze": (
        lambda _, engine: engine.freeze(),
        Argument(_settled, _engine_where(lambda engine: not engine.loses_loads_if_frozen)),
    ),
    "wake": (
        lambda _, engine: engine.wake(),
        Argument(_settled, _engine_where(lambda e: e.is_asleep or e.is_going_to_sleep)),
    ),
    "drain": (_set("is_draining", value=True), ENGINE),
    "occupy": (lambda _, engine: engine.scheduler.occupy(), ENGINE),
    "vacate": (lambda _, engine: engine.scheduler.vacate(), ENGINE),
    "written": (lambda _, rank: rank.stream.end(keep=len(rank.stream) - 1), WRITING),
    "turn": (lambda _, rank: rank.turn(), TURNING),
    "die": (_set("dies_after"), FAULTS, one_of(*range(12))),
    "refuse": (_set("refuses_peer", value=True), FAULTS),
    "mute": (_set("unsent"), FAULTS, one_of(1, 1, 2, 5)),
    "work": (lambda _, rank: rank.work(), WORKING),
    "fail": (lambda _, rank: rank.work(fail=True), WORKING),
    "join": (lambda _, rank: rank.join(), JOINING),
    "balk": (lambda _, rank: rank.join(fail=True), JOINING),
    "deliver": (lambda world, packet: world.network.deliver(packet), PACKET),
    "repeat": (lambda world, packet: world.network.deliver(packet, again=True), PACKET),
    "lose": (lambda world, packet: world.network.packets.remove(packet), PACKET),
    "cut": (
        lambda world, link: world.network.cut(link),
        _nth(lambda world: world.network.working()),
    ),
    "report": (
        lambda world, link: world.network.report_loss(link),
        _nth(lambda world: world.network.unreported()),
    ),
    "land": (_land, READ, one_of(0, 0, 1, 2)),
    "hang": (_set("hangs", value=True), READ),
    "break": (_set("is_broken", value=True), READ),
    "damage": (lambda world: setattr(world, "is_damage_due", True),),
    "kill": (World.kill, Argument(_life, _any_engine)),
    "start": (World.start, Argument(_life, _dead_engine)),
    "stop": _stop(is_stopped=True),
    "cont": _stop(is_stopped=False),
    "wait": (_wait, one_of(0.1, 0.3, 0.6, 1.1, 2.1, 3.5, 5.5)),
}
