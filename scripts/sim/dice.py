"""Random schedules: a profile says what may happen and how often, a seed what does."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from sim.ending import KINDS
from sim.run import Run, Setting
from sim.steps import round_lines
from sim.world import PREFILL, Shape, World

Roll = Callable[[World, random.Random], str | None]

EVERY_DAY: Final[Mapping[str, float]] = {
    "prompt": 4,
    "step": 14,
    "piece": 8,
    "ask": 5,
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
NETWORK: Final[Mapping[str, float]] = {"repeat": 4, "lose": 3, "cut": 0.7, "learn": 2}
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
    "stick": 0.7,
    "break": 0.4,
    "flip": 0.5,
    "spoil": 0.3,
    "die": 0.6,
    "wait": 3,
}
PROFILES: Final[Mapping[str, Mapping[str, float]]] = {
    "gentle": {**EVERY_DAY, **GENTLE},
    "anew": {
        **EVERY_DAY,
        **GENTLE,
        "prompt": 6,
        "ask": 8,
        "stick": 2,
        "kill p": 0.7,
        "start": 8,
        "learn": 6,
    },
    "busy": {**EVERY_DAY, **BUSY, "repeat": 2, "flip": 1},
    "late": {**EVERY_DAY, **BUSY, "wait": 5, "stick": 1, "spoil": 0.2, "flip": 1},
    "lossy": {**EVERY_DAY, **BUSY, **NETWORK, "wait": 1, "flip": 1},
    "dying": {**EVERY_DAY, "abort": 1, "preempt": 1, "repeat": 2, "wait": 0.5, "die d": 4},
    "all": {**EVERY_DAY, **BUSY, **NETWORK, **DEADLY},
}
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
)
STEPS: Final = 150
VERIFIED: Final = (0.5, 0.0, 1.0, 0.0)
"""Shares of the loads that are verified."""
OFTEN_SLOW: Final = 0.2  # how much of its steps a slow engine makes; mostly one is
MAX_NAPS: Final = 14  # of a gentle schedule, together less than a lease


@dataclass(frozen=True)
class Dice:
    """The lines of one seed."""

    seed: int
    profile: str
    setting: Setting

    @classmethod
    def of(cls, seed: int) -> "Dice":
        """Shape and profile follow from the seed too."""
        names = list(PROFILES)
        number, pick = divmod(seed, len(names))
        profile, shape = names[pick], SHAPES[number % len(SHAPES)]
        gentle = profile in ("gentle", "anew")
        rounds = number // len(SHAPES)
        shape = replace(shape, verify=VERIFIED[(rounds + pick) % len(VERIFIED)])
        if gentle:
            share = 0.2 if rounds % 3 == 0 else 1.0
            shape = replace(shape, slots=16, share=share)
        return cls(seed, profile, Setting(shape, gentle=gentle))

    @property
    def once(self) -> bool:
        """Whether each ticket is used once."""
        return self.setting.gentle and self.setting.shape.engines == 1

    def __call__(self, run: Run) -> Iterator[str]:
        """See `run.Source`."""
        rng = random.Random(self.seed)  # noqa: S311 - nobody guesses here
        weights = PROFILES[self.profile]
        words, naps = list(weights), 0
        slow = rng.choice(["none", *run.world.engines])
        while len(run.lines) < STEPS:
            (word,) = rng.choices(words, list(weights.values()))
            naps += word == "nap"
            if self.setting.gentle and word == "nap" and naps > MAX_NAPS:
                continue
            yield from self._lines(word, run.world, rng, slow=slow)
        yield f"end {KINDS[0] if self.setting.gentle else rng.choice(KINDS)}"

    def _lines(self, word: str, world: World, rng: random.Random, *, slow: str) -> Iterator[str]:
        if word in ("step", "piece"):
            engine = _any_engine(world, rng)
            skipped = engine == slow and rng.random() > OFTEN_SLOW
            yield from [] if skipped else [f"{word} {engine}"]
        elif word == "round":
            yield from round_lines(world)
        elif word == "ask" and self.once:
            yield from _ask_anew(world, rng)
        else:
            line = ROLLS[word](world, rng)
            yield from [] if line is None else [line]


def _ask_anew(world: World, rng: random.Random) -> Iterator[str]:
    """A ticket is used once, in the order in which they came."""
    used = world.router.asked
    if used < len(world.router.tickets):
        yield f"ask {_decode(world, rng)} {used} {rng.choice((0, 0, 0, 1))}"


def _decode(world: World, rng: random.Random) -> str:
    return rng.choice([name for name in world.engines if name != PREFILL])


def _any_engine(world: World, rng: random.Random) -> str:
    return rng.choice(list(world.engines))


def _engine_line(word: str) -> Roll:
    return lambda world, rng: f"{word} {_any_engine(world, rng)}"


def _member_line(word: str) -> Roll:
    return lambda world, rng: f"{word} {_any_engine(world, rng)} {rng.randrange(4)}"


def _rank(world: World, rng: random.Random) -> str | None:
    ranks = [rank.seat.name for rank in world.ranks()]
    return rng.choice(ranks) if ranks else None


def _rank_line(word: str) -> Roll:
    def roll(world: World, rng: random.Random) -> str | None:
        name = _rank(world, rng)
        return None if name is None else f"{word} {name}"

    return roll


def _turn(world: World, rng: random.Random) -> str | None:
    """Mostly of one that has something to do."""
    busy = [rank.seat.name for rank in world.ranks() if rank.busy]
    if busy and rng.random() < 0.8:  # noqa: PLR2004
        return f"turn {rng.choice(busy)}"
    return _rank_line("turn")(world, rng)


def _work(word: str) -> Roll:
    def roll(world: World, rng: random.Random) -> str | None:
        waiting = [rank.seat.name for rank in world.ranks() if rank.background.waiting]
        return f"{word} {rng.choice(waiting)}" if waiting else None

    return roll


def _packet_line(word: str) -> Roll:
    """Mostly the oldest."""

    def roll(world: World, rng: random.Random) -> str | None:
        count = len(world.network.packets)
        pick = 0 if rng.random() < 0.6 else rng.randrange(max(count, 1))  # noqa: PLR2004
        return f"{word} {pick}" if count else None

    return roll


def _read_line(word: str) -> Roll:
    def roll(world: World, rng: random.Random) -> str | None:
        count = len(world.fabric.alive())
        pieces = f" {rng.choice((0, 0, 1, 2))}" if word == "land" else ""
        return f"{word} {rng.randrange(count)}{pieces}" if count else None

    return roll


def _prompt(world: World, rng: random.Random) -> str | None:
    engine = world.engines[PREFILL]
    many = engine is not None and len(engine.side.requests) > 3  # noqa: PLR2004
    length, answer = rng.choice((1, 3, 4, 5, 8, 9, 13)), rng.choice((1, 1, 1, 2, 3, 4))
    return None if many else f"prompt {length} {answer}"


def _ask(world: World, rng: random.Random) -> str | None:
    """Mostly with one of the last tickets, which may have been used."""
    count = len(world.router.tickets)
    pick = max(0, count - rng.choice((1, 1, 1, 2, 2, 3)))
    local = rng.choice((0, 0, 0, 0, 1, 9))
    return f"ask {_decode(world, rng)} {pick} {local}" if count else None


def _foreign(world: World, rng: random.Random) -> str | None:
    count = len(world.router.tickets)
    return f"foreign {_decode(world, rng)} {count - 1}" if count else None


def _stop(word: str) -> Roll:
    """Mostly a whole engine."""

    def roll(world: World, rng: random.Random) -> str | None:
        whole = rng.random() < 0.7  # noqa: PLR2004
        return f"{word} {_any_engine(world, rng)}" if whole else _rank_line(word)(world, rng)

    return roll


def _die(world: World, rng: random.Random) -> str | None:
    name = _rank(world, rng)
    return None if name is None else f"die {name} {rng.randrange(12)}"


def _wait(world: World, rng: random.Random) -> str | None:
    del world
    return f"wait {rng.choice((0.1, 0.3, 0.6, 1.1, 2.1, 3.5, 5.5))}"


ROLLS: Final[Mapping[str, Roll]] = {
    "prompt": _prompt,
    "ask": _ask,
    "turn": _turn,
    "deliver": _packet_line("deliver"),
    "land": _read_line("land"),
    "work": _work("work"),
    "nap": lambda _world, _rng: "wait 0.06",
    "abort": _member_line("abort"),
    "preempt": _member_line("preempt"),
    "occupy": _engine_line("occupy"),
    "vacate": _engine_line("vacate"),
    "foreign": _foreign,
    "repeat": _packet_line("repeat"),
    "lose": _packet_line("lose"),
    "cut": lambda world, rng: f"cut {rng.randrange(8)}" if world.network.usable() else None,
    "learn": lambda world, _rng: "learn 0" if world.network.unlearned() else None,
    "kill p": lambda _world, _rng: f"kill {PREFILL}",
    "kill": _engine_line("kill"),
    "start": lambda world, _rng: _start(world),
    "stop": _stop("stop"),
    "cont": _stop("cont"),
    "stick": _read_line("stick"),
    "break": _read_line("break"),
    "flip": lambda world, _rng: None if world.damage.due else "flip",
    "spoil": _work("spoil"),
    "die": _die,
    "die d": lambda world, rng: f"die {_decode(world, rng)}.0 {rng.randrange(8)}",
    "wait": _wait,
}


def _start(world: World) -> str | None:
    dead = [name for name, engine in world.engines.items() if engine is None]
    return f"start {dead[0]}" if dead else None
