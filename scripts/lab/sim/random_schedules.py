"""Random schedules: a profile says what may happen and how often, a seed what does."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lab.sim.ending import ENDINGS
from lab.sim.schedule import Run, Setting
from lab.sim.steps import round_lines
from lab.sim.world import PREFILL, Shape, World

MakeLine = Callable[[World, random.Random], str | None]
"""A line with this word; None if it would do nothing."""

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
    "nap": 4,
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
    "nap": 10,
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
    "dying": {**EVERY_DAY, "abort": 1, "preempt": 1, "repeat": 2, "wait": 0.5, "die d": 4},
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
        num_naps += word == "nap"
        if run.setting.gentle and word == "nap" and num_naps > MAX_NAPS:
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
        make = _decode_once if word == "decode" and uses_once else LINES[word]
        line = make(run.world, rng)
        yield from [] if line is None else [line]


def _with_engine(word: str) -> MakeLine:
    return lambda world, rng: f"{word} {rng.choice(list(world.engines))}"


def _with_request(word: str) -> MakeLine:
    return lambda world, rng: f"{word} {rng.choice(list(world.engines))} {rng.randrange(4)}"


def _with_rank(word: str) -> MakeLine:
    def make(world: World, rng: random.Random) -> str | None:
        ranks = [rank.seat.name for rank in world.ranks()]
        return f"{word} {rng.choice(ranks)}" if ranks else None

    return make


def _with_packet(word: str) -> MakeLine:
    """Mostly the oldest."""

    def make(world: World, rng: random.Random) -> str | None:
        count = len(world.network.packets)
        number = 0 if rng.random() < 0.6 else rng.randrange(max(1, count))  # noqa: PLR2004
        return f"{word} {number}" if count else None

    return make


def _with_one_of(word: str, items: Callable[[World], Sequence[object]]) -> MakeLine:
    def make(world: World, rng: random.Random) -> str | None:
        count = len(items(world))
        return f"{word} {rng.randrange(count)}" if count else None

    return make


def _with_agents(word: str) -> MakeLine:
    """Of a rank whose agents are made or destroyed."""

    def make(world: World, rng: random.Random) -> str | None:
        ranks = [rank.seat.name for rank in world.ranks() if rank.background.waiting]
        return f"{word} {rng.choice(ranks)}" if ranks else None

    return make


def _turn(world: World, rng: random.Random) -> str | None:
    """Mostly of one that has something to do."""
    busy = [rank.seat.name for rank in world.ranks() if rank.has_work]
    if busy and rng.random() < 0.8:  # noqa: PLR2004
        return f"turn {rng.choice(busy)}"
    return _with_rank("turn")(world, rng)


def _land(world: World, rng: random.Random) -> str | None:
    count = len(world.fabric.reads())
    return f"land {rng.randrange(count)} {rng.choice((0, 0, 1, 2))}" if count else None


def _prefill(world: World, rng: random.Random) -> str | None:
    engine = world.engines[PREFILL]
    has_many = engine is not None and len(engine.scheduler.requests) > 3  # noqa: PLR2004
    length, answer = rng.choice((1, 3, 4, 5, 8, 9, 13)), rng.choice((1, 1, 1, 2, 3, 4))
    return None if has_many else f"prefill {length} {answer}"


def _decode(world: World, rng: random.Random) -> str | None:
    """Mostly with one of the last tickets, which may have been used."""
    count = len(world.router.tickets)
    number = max(0, count - rng.choice((1, 1, 1, 2, 2, 3)))
    local = rng.choice((0, 0, 0, 0, 1, 9))
    return f"decode {_decode_engine(world, rng)} {number} {local}" if count else None


def _decode_once(world: World, rng: random.Random) -> str | None:
    """A ticket is used once, in the order in which they came."""
    number = world.router.num_used
    if number >= len(world.router.tickets):
        return None
    return f"decode {_decode_engine(world, rng)} {number} {rng.choice((0, 0, 0, 1))}"


def _foreign(world: World, rng: random.Random) -> str | None:
    count = len(world.router.tickets)
    return f"foreign {_decode_engine(world, rng)} {count - 1}" if count else None


def _decode_engine(world: World, rng: random.Random) -> str:
    return rng.choice([name for name in world.engines if name != PREFILL])


def _stop(word: str) -> MakeLine:
    """Mostly a whole engine."""

    def make(world: World, rng: random.Random) -> str | None:
        is_whole = rng.random() < 0.7  # noqa: PLR2004
        return (_with_engine(word) if is_whole else _with_rank(word))(world, rng)

    return make


def _die(world: World, rng: random.Random) -> str | None:
    line = _with_rank("die")(world, rng)
    return None if line is None else f"{line} {rng.randrange(12)}"


def _start(world: World, rng: random.Random) -> str | None:
    del rng
    dead = [name for name, engine in world.engines.items() if engine is None]
    return f"start {dead[0]}" if dead else None


LINES: Final[Mapping[str, MakeLine]] = {
    "prefill": _prefill,
    "decode": _decode,
    "foreign": _foreign,
    "turn": _turn,
    "deliver": _with_packet("deliver"),
    "land": _land,
    "work": _with_agents("work"),
    "fail": _with_agents("fail"),
    "nap": lambda _world, _rng: "wait 0.06",
    "wait": lambda _world, rng: f"wait {rng.choice((0.1, 0.3, 0.6, 1.1, 2.1, 3.5, 5.5))}",
    "abort": _with_request("abort"),
    "preempt": _with_request("preempt"),
    "occupy": _with_engine("occupy"),
    "vacate": _with_engine("vacate"),
    "repeat": _with_packet("repeat"),
    "lose": _with_packet("lose"),
    "cut": _with_one_of("cut", lambda world: world.network.working()),
    "report": _with_one_of("report", lambda world: world.network.unreported()),
    "refuse": _with_rank("refuse"),
    "kill p": lambda _world, _rng: f"kill {PREFILL}",
    "kill": _with_engine("kill"),
    "start": _start,
    "stop": _stop("stop"),
    "cont": _stop("cont"),
    "hang": _with_one_of("hang", lambda world: world.fabric.reads()),
    "break": _with_one_of("break", lambda world: world.fabric.reads()),
    "damage": lambda world, _rng: None if world.damage.is_due else "damage",
    "die": _die,
    "die d": lambda world, rng: f"die {_decode_engine(world, rng)}.0 {rng.randrange(8)}",
}
