"""Random schedules: a profile says what may happen and how often, a seed what does.

By hand, as is `shrink`, since it was measured: 15 planted bugs that this finds in seconds, 20 s of
CPU time each. This found all; hypothesis 6.170, which drew the same choices, 9. What both found was
shortened to 10 steps here (median, 3 s), and to 42 there (15 s). Where hypothesis drew whole lines
without looking at the world it found 4 of 6, and left 125 steps.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lab.sim.ending import ENDINGS
from lab.sim.rank import RankLife
from lab.sim.schedule import Run, Setting
from lab.sim.steps import round_lines
from lab.sim.world import PREFILL, Shape, World

Draw = Callable[[World, random.Random], object]
"""One argument of a step; None if there is nothing to choose from."""

EVERY_DAY: Final[Mapping[str, float]] = {
    "prefill": 4,
    "step": 14,
    "piece": 8,
    "decode": 5,
    "turn": 40,
    "deliver": 34,
    "land": 22,
    "work": 3,
    "round": 1.5,
    "wait briefly": 4,
}
BUSY: Final[Mapping[str, float]] = {
    "abort": 3,
    "preempt": 1,
    "occupy": 0.5,
    "vacate": 1,
    "foreign": 0.5,
}
NETWORK: Final[Mapping[str, float]] = {"repeat": 4, "lose": 3, "cut": 0.7, "report": 2}
GENTLE: Final[Mapping[str, float]] = {
    "repeat": 4,
    "occupy": 0.3,
    "vacate": 1,
    "preempt": 5,
    "wait briefly": 10,
}
DEADLY: Final[Mapping[str, float]] = {
    "kill": 0.3,
    "start": 1.5,
    "stop": 1,
    "cont": 3,
    "hang": 0.7,
    "break": 0.4,
    "refuse": 0.3,
    "damage": 0.5,
    "fail": 0.3,
    "die": 0.6,
    "wait": 3,
}
PROFILES: Final[Mapping[str, Mapping[str, float]]] = {
    "gentle": {**EVERY_DAY, **GENTLE},
    "leaving": {**EVERY_DAY, **GENTLE, "abort": 5},
    "anew": {
        **EVERY_DAY,
        **GENTLE,
        "prefill": 6,
        "decode": 8,
        "hang": 6,
        "kill p": 0.7,
        "start": 20,
        "report": 20,
    },
    "busy": {**EVERY_DAY, **BUSY, "repeat": 2, "damage": 1},
    "late": {**EVERY_DAY, **BUSY, "wait": 5, "hang": 1, "fail": 0.2, "damage": 1},
    "lossy": {**EVERY_DAY, **BUSY, **NETWORK, "wait": 1, "damage": 1, "refuse": 0.3},
    "dying": {
        **EVERY_DAY,
        "abort": 1,
        "preempt": 3,
        "repeat": 2,
        "wait": 0.5,
        "die d": 4,
        "die p": 3,
    },
    "all": {**EVERY_DAY, **BUSY, **NETWORK, **DEADLY},
}
GENTLE_PROFILES: Final = ("gentle", "leaving", "anew")
SHAPES: Final = (
    Shape(),
    Shape(1, 2),
    Shape(2, 1),
    Shape(2, 2),
    Shape(1, 1, engines=2),
    Shape(2, 2, engines=2),
    Shape(1, 2, engines=2),
    Shape(2, 1, heads=1),
    Shape(1, 1, tcp=True),
    Shape(1, 2, window=5),
)
NUM_STEPS: Final = 150
VERIFY: Final = (0.5, 0.0, 1.0, 0.0)
"""Shares of the loads that are verified."""
SLOW: Final = 0.2  # how much of its steps a slow engine does; mostly one is
MAX_NAPS: Final = 14  # of a gentle schedule, together less than a lease


@dataclass(frozen=True)
class RandomSchedule:
    """The lines of one seed."""

    seed: int
    profile: str
    setting: Setting

    @classmethod
    def of(cls, seed: int) -> "RandomSchedule":
        """Shape and profile follow from the seed too."""
        names = list(PROFILES)
        number, pick = divmod(seed, len(names))
        rounds = number // len(SHAPES)
        shape = replace(SHAPES[number % len(SHAPES)], verify=VERIFY[(rounds + pick) % len(VERIFY)])
        return cls(seed, names[pick], setting(names[pick], shape, all_offers=rounds % 3 != 0))

    def __call__(self, run: Run) -> Iterator[str]:
        """See `schedule.Source`."""
        rng = random.Random(self.seed)  # noqa: S311 - nobody guesses here
        return random_lines(run, self.profile, rng)


def setting(profile: str, shape: Shape, *, all_offers: bool) -> Setting:
    """What a schedule of a profile starts with. `all_offers`: none is revoked in a gentle one."""
    if profile not in GENTLE_PROFILES:
        return Setting(shape)
    return Setting(replace(shape, slots=16, share=1.0 if all_offers else 0.2), gentle=True)


def random_lines(run: Run, profile: str, rng: random.Random) -> Iterator[str]:
    """The lines of a schedule, to its end."""
    weights = PROFILES[profile]
    words, num_naps = list(weights), 0
    slow = rng.choice(["none", *run.world.engines])
    while len(run.lines) < NUM_STEPS:
        (word,) = rng.choices(words, list(weights.values()))
        num_naps += word == "wait briefly"
        if run.setting.gentle and word == "wait briefly" and num_naps > MAX_NAPS:
            continue
        yield from _lines(run, word, rng, slow)
    yield f"end {ENDINGS[0] if run.setting.gentle else rng.choice(ENDINGS)}"


def _lines(run: Run, word: str, rng: random.Random, slow: str) -> Iterator[str]:
    if word in ("step", "piece"):
        engine = rng.choice(list(run.world.engines))
        is_skipped = engine == slow and rng.random() > SLOW
        yield from [] if is_skipped else [f"{word} {engine}"]
    elif word == "round":
        yield from round_lines(run.world)
    else:
        uses_once = run.setting.gentle and run.setting.shape.engines == 1
        name = "decode once" if word == "decode" and uses_once else word
        drawn = [draw(run.world, rng) for draw in ARGUMENTS[name]]
        if None not in drawn:
            yield " ".join([word.split(maxsplit=1)[0], *map(str, drawn)])


def _one_of(*values: object) -> Draw:
    return lambda _world, rng: rng.choice(values)


def _below(count: int) -> Draw:
    return lambda _world, rng: rng.randrange(count)


def _any_of(items: Callable[[World], Sequence[object]]) -> Draw:
    """The number of one of them."""

    def draw(world: World, rng: random.Random) -> int | None:
        count = len(items(world))
        return rng.randrange(count) if count else None

    return draw


def _engine(world: World, rng: random.Random) -> str:
    return rng.choice(list(world.engines))


def _dead_engine(world: World, rng: random.Random) -> str | None:
    dead = [name for name, engine in world.engines.items() if engine is None]
    return rng.choice(dead) if dead else None


def _decode_engine(world: World, rng: random.Random) -> str:
    return rng.choice([name for name in world.engines if name != PREFILL])


def _rank_where(is_chosen: Callable[[RankLife], object]) -> Draw:
    def draw(world: World, rng: random.Random) -> str | None:
        names = [rank.seat.name for rank in world.ranks() if is_chosen(rank)]
        return rng.choice(names) if names else None

    return draw


_rank: Final = _rank_where(lambda _rank: True)
_rank_with_agents: Final = _rank_where(lambda rank: rank.background.waiting)


def _mostly(share: float, first: Draw, other: Draw) -> Draw:
    """The first; sometimes, or if there is none, the other."""

    def draw(world: World, rng: random.Random) -> object:
        drawn = first(world, rng) if rng.random() < share else None
        return other(world, rng) if drawn is None else drawn

    return draw


_packet: Final = _mostly(
    0.6,
    lambda world, _rng: 0 if world.network.packets else None,
    _any_of(lambda world: world.network.packets),
)
_read: Final = _any_of(lambda world: world.fabric.reads())


def _length(world: World, rng: random.Random) -> int | None:
    """Of a prompt, if prefill has not many already."""
    engine = world.engines[PREFILL]
    has_many = engine is not None and len(engine.scheduler.requests) > 3  # noqa: PLR2004
    return None if has_many else rng.choice((1, 3, 4, 5, 8, 9, 13))


def _recent_ticket(world: World, rng: random.Random) -> int | None:
    """One of the last, which may have been used."""
    count = len(world.router.tickets)
    return max(0, count - rng.choice((1, 1, 1, 2, 2, 3))) if count else None


def _next_ticket(world: World, _rng: random.Random) -> int | None:
    """Each is used once, in the order in which they came."""
    number = world.router.num_used
    return number if number < len(world.router.tickets) else None


ARGUMENTS: Final[Mapping[str, Sequence[Draw]]] = {
    "prefill": (_length, _one_of(1, 1, 1, 2, 3, 4)),
    "decode": (_decode_engine, _recent_ticket, _one_of(0, 0, 0, 0, 1, 9)),
    "decode once": (_decode_engine, _next_ticket, _one_of(0, 0, 0, 1)),
    "foreign": (_decode_engine, _recent_ticket),
    "turn": (_mostly(0.8, _rank_where(lambda rank: rank.has_work), _rank),),
    "deliver": (_packet,),
    "land": (_read, _one_of(0, 0, 1, 2)),
    "work": (_rank_with_agents,),
    "fail": (_rank_with_agents,),
    "wait briefly": (_one_of(0.06),),
    "wait": (_one_of(0.1, 0.3, 0.6, 1.1, 2.1, 3.5, 5.5),),
    "abort": (_engine, _below(4)),
    "preempt": (_engine, _below(4)),
    "occupy": (_engine,),
    "vacate": (_engine,),
    "repeat": (_packet,),
    "lose": (_packet,),
    "cut": (_any_of(lambda world: world.network.working()),),
    "report": (_any_of(lambda world: world.network.unreported()),),
    "refuse": (_rank,),
    "kill p": (_one_of(PREFILL),),
    "kill": (_engine,),
    "start": (_dead_engine,),
    "stop": (_mostly(0.7, _engine, _rank),),
    "cont": (_mostly(0.7, _engine, _rank),),
    "hang": (_read,),
    "break": (_read,),
    "damage": (),
    "die": (_rank, _below(12)),
    "die p": (_rank_where(lambda rank: rank.seat.is_prefill), _below(4)),
    "die d": (_rank_where(lambda rank: not rank.seat.is_prefill), _below(8)),
}
"""Of each word of the profiles, its step's arguments. Where one is None, there is no step."""
