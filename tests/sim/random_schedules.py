"""Random schedules: a profile says what may happen and how often, a seed what does.

By hand, as is `shrink`, since it was measured: 15 planted bugs that this finds in seconds, 20 s of
CPU time each. This found all; hypothesis 6.170, which drew the same choices, 9. What both found was
shortened to 10 steps here (median, 3 s), and to 42 there (15 s). Where hypothesis drew whole lines
without looking at the world it found 4 of 6, and left 125 steps.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from harness.local.engine import HAS_VERIFY
from sim.ending import ENDINGS
from sim.schedule import MANY_SLOTS, Outcome, Run, follow
from sim.steps import (
    DECODE_ENGINE,
    PREFILL_ENGINE,
    STEPS,
    Draw,
    choice,
    one_of,
    rank_where,
    round_lines,
)
from sim.world import PREFILL, Shape, World


def _weights(*texts: str) -> dict[str, float]:
    """How often each of these happens, beside the others."""
    pairs = [each.strip().rsplit(maxsplit=1) for text in texts for each in text.split(",")]
    return {word: float(weight) for word, weight in pairs}


EVERY_DAY: Final = (
    "prefill 4, step 14, piece 8, decode 5, turn 40, deliver 34, land 22, work 3, join 6, "
    "round 1.5, wait briefly 4, written 8"
)
BUSY: Final = "abort 3, preempt 1, occupy 0.5, vacate 1, foreign 0.5"
NETWORK: Final = "repeat 4, lose 3, cut 0.7, report 2"
GENTLE: Final = "repeat 4, occupy 0.3, vacate 1, preempt 5, wait briefly 10"
DEADLY: Final = (
    "kill 0.3, start 1.5, stop 1, cont 3, hang 0.7, break 0.4, refuse 0.3, damage 0.5, fail 0.3, "
    "die 0.6, mute 0.5, wait 3"
)
STALLED: Final = "stall 0.5, unstall 1.5, wait 2"
EARLY: Final = "pair 6, arrive 8, prefill 2"
RESTING: Final = "pause 0.7, resume 2, reset 0.7, sleep 0.4, wake 2, drain 0.05"
CHATS: Final = "prefill 6, chat 20, overlap 6, turn 60, deliver 50, preempt 2"
IN_STEP: Final = "prefill 5, decode once 8, beat 8"
"""No rank is slow: everything that can be done is done, and then time passes."""

SHAPES: Final = (
    Shape(),
    Shape(1, 1, prefills=2),
    Shape(1, 2),
    Shape(2, 1),
    Shape(1, 1, prefills=2, both=True, engines=0, blocks=60),
    Shape(2, 2),
    Shape(2, 1, prefills=2),
    Shape(1, 1, engines=2),
    Shape(2, 3, heads=6),
    Shape(2, 2, engines=2),
    Shape(1, 2, engines=2),
    Shape(1, 1, engines=2, prefills=2),
    Shape(2, 1, heads=1),
    Shape(3, 2, heads=6, prefills=2),
    Shape(1, 1, tcp=True),
    Shape(2, 1, prefills=2, both=True, blocks=60),
    Shape(1, 2, window=5),
    Shape(1, 2, prefills=3),
    Shape(2, 1, prefills=2, window=6),
    Shape(2, 2, engines=2, prefills=2),
    Shape(1, 1, prefills=2, tcp=True),
    Shape(1, 1, prefills=3, both=True, engines=0, blocks=60, window=5),
)
SHAPES_WITH_CACHES: Final = tuple(
    replace(shape, content=3, blocks=min(shape.blocks, 20))
    for shape in (
        Shape(),
        Shape(1, 1, engines=2),
        Shape(2, 1, engines=2),
        Shape(1, 2, prefills=2),
        Shape(1, 1, prefills=2, both=True, engines=0, blocks=20),
        Shape(2, 2, prefills=2, both=True, engines=0, blocks=20),
        Shape(1, 1, prefills=2, tcp=True),
        Shape(1, 1, engines=2, rate=1000.0),
    )
)
FEATURES: Final[Sequence[tuple[float, str, Sequence[float]]]] = (
    (0.3, "apart", (1,)),
    (0.25, "staged", (1024, 8192)),
    (0.3, "fast", (1,)),
    (0.3, "late", (1,)),
)
"""Further features of a world and how often it has them, unless its schedules are gentle."""


@dataclass(frozen=True)
class Profile:
    """How often each step happens, in which worlds. `gentle`: every load has to be good."""

    weights: Mapping[str, float]
    shapes: Sequence[Shape] = SHAPES
    gentle: bool = False
    endings: Sequence[str] = ENDINGS
    num_steps: int = 150  # with two engines


PATIENCE_S: Final = 20.0  # longer than any load of an honest engine here

PROFILES: Final[Mapping[str, Profile]] = {
    "gentle": Profile(_weights(EVERY_DAY, GENTLE), gentle=True),
    "leaving": Profile(_weights(EVERY_DAY, GENTLE, "abort 5"), gentle=True),
    "staged": Profile(
        _weights(EVERY_DAY, GENTLE, "lose 1, repeat 2, abort 2, preempt 1, work 8"),
        shapes=[
            Shape(1, 1, staged=1024),
            Shape(2, 1, staged=1024, engines=2),
            Shape(1, 2, staged=512, blocks=60),
        ],
    ),
    "overtaken": Profile(
        _weights(EVERY_DAY, "prefill 8, decode 10, deliver 25, wait briefly 16"),
        shapes=[Shape(1, decode, prefills=each) for each in (1, 2) for decode in (1, 2)],
        gentle=True,
    ),
    "anew": Profile(
        _weights(EVERY_DAY, GENTLE, "prefill 6, decode 8, hang 6, kill p 0.7, start 20, report 20"),
        gentle=True,
    ),
    "early": Profile(_weights(EVERY_DAY, GENTLE, EARLY), gentle=True),
    "stalled": Profile(_weights(EVERY_DAY, BUSY, EARLY, STALLED, "resume 1, pause 0.5, preempt 3")),
    "foreign": Profile(_weights(EVERY_DAY, EARLY, "foreign 8")),
    "early, faults": Profile(
        _weights(EVERY_DAY, BUSY, EARLY, NETWORK, DEADLY, RESTING, "preempt 4, abort 4")
    ),
    "busy": Profile(_weights(EVERY_DAY, BUSY, "repeat 2, damage 1")),
    "late": Profile(_weights(EVERY_DAY, BUSY, "wait 5, hang 1, fail 0.2, damage 1")),
    "lossy": Profile(
        _weights(EVERY_DAY, BUSY, NETWORK, "wait 1, damage 1, refuse 0.3, mute 0.7, balk 0.3")
    ),
    "dying": Profile(
        _weights(EVERY_DAY, "abort 1, preempt 3, repeat 2, wait 0.5, die d 4, die p 3")
    ),
    "resting": Profile(_weights(EVERY_DAY, BUSY, RESTING, "wait 1")),
    "frozen": Profile(_weights(EVERY_DAY, BUSY, "freeze 1, wake 4, wait 1")),
    "stuck": Profile(
        # Agents are being destroyed when ranks stop: no round, which ends all that.
        _weights(
            "prefill 3, decode 4, step 10, turn 60, deliver 60, hang 15, wait 6, work 1.5",
            "fail 0.1, freeze 0.7, wake 4",
        ),
        shapes=[Shape(), Shape(1, 2), Shape(2, 1)],
        num_steps=500,
    ),
    "slow": Profile(
        _weights(EVERY_DAY, BUSY, "beat 0.5, wait 4, hang 0.3, break 0.3"),
        shapes=[replace(shape, rate=rate) for rate in (150.0, 1000.0) for shape in SHAPES],
    ),
    "all": Profile(_weights(EVERY_DAY, BUSY, NETWORK, DEADLY, RESTING)),
    "meeting": Profile(
        _weights(IN_STEP, "occupy 0.5, vacate 0.3"),
        shapes=[Shape(3, 1, prefills=4, heads=3, blocks=60, apart=True)],
        gentle=True,
        num_steps=400,
    ),
    "crossed": Profile(
        _weights(IN_STEP, "prefill 24, decode once 24"),
        shapes=[
            Shape(1, 1, prefills=2, both=True, engines=0, blocks=9, slots=16, share=1.0),
            Shape(2, 1, prefills=2, both=True, engines=0, blocks=9, slots=16),
            Shape(1, 1, prefills=3, both=True, engines=0, blocks=7, slots=16),
        ],
        endings=ENDINGS[:1],
        num_steps=400,
    ),
    "backlog": Profile(
        _weights(IN_STEP, "prefill 12, decode once 16"),
        shapes=[
            Shape(rate=100, blocks=100),
            Shape(1, 2, rate=200, blocks=100),
            Shape(1, 1, prefills=2, rate=100, blocks=100),
        ],
        gentle=True,
        num_steps=400,
    ),
    "long": Profile(
        # One read takes longer than a timeout.
        _weights(IN_STEP, "prefill long 2, decode once 8"),
        shapes=[
            Shape(rate=70, blocks=100),
            Shape(1, 2, rate=160, blocks=100),
            Shape(rate=150, blocks=100, staged=1024),
        ],
        gentle=True,
        num_steps=300,
    ),
    "lying": Profile(
        _weights(EVERY_DAY, BUSY, EARLY, "lie 4, wait 2, reset 0.3"),
        shapes=[
            replace(shape, patience=PATIENCE_S, fast=True)
            for shape in (Shape(), Shape(2, 1), Shape(1, 2, blocks=20), Shape(1, 1, prefills=2))
        ],
    ),
    "chatting": Profile(
        _weights(EVERY_DAY, BUSY, CHATS, "repeat 3, reset 0.7"), shapes=SHAPES_WITH_CACHES
    ),
    "chatting, faults": Profile(
        _weights(EVERY_DAY, BUSY, CHATS, EARLY, NETWORK, DEADLY, RESTING, "freeze 0.2"),
        shapes=SHAPES_WITH_CACHES,
    ),
    "told": Profile(
        _weights(
            EVERY_DAY,
            "prefill 8, decode once 12, turn 120, deliver 120, repeat 40, land 60",
            "reset 1, abort 1, round 2, forge 4",
        ),
        shapes=[Shape(each, 2, fast=True) for each in (1, 2)],
    ),
}
VERIFY: Final = (0.5, 0.0, 1.0, 0.0) if HAS_VERIFY else (0.0,)
"""Shares of the loads that are verified."""
LATE: Final = 0.5  # how many of the gentle worlds have writes that end late
SLOW: Final = 0.2  # how much of its steps a slow engine does; mostly one is
MAX_NAPS: Final = 14  # of a gentle schedule, together less than a lease
MORE_STEPS: Final = 40  # for each engine beyond the second


def run_random(seed: int, profiles: Sequence[str] = ()) -> Outcome:
    """Run a schedule of one of these profiles, or of all; its world follows from the seed too."""
    names = profiles or tuple(PROFILES)
    number, pick = divmod(seed, len(names))
    profile = PROFILES[names[pick]]
    rounds, kind = divmod(number, len(profile.shapes))
    shape = replace(profile.shapes[kind], verify=VERIFY[(rounds + pick) % len(VERIFY)])
    if profile.gentle:
        share = 1.0 if rounds % 3 != 0 else 0.2  # of the cache, which all offers may hold
        features = {"fast": rounds % 2 == 1, "late": _random(seed, "world").random() < LATE}
        shape = replace(shape, slots=MANY_SLOTS, share=share, gentle=True, **features)
    else:
        shape = _with_features(shape, _random(seed, "world"))
    return follow(shape, lambda run: _random_lines(run, profile, _random(seed, "lines")))


def _random(seed: int, purpose: str) -> random.Random:
    return random.Random(f"{purpose} {seed}")  # noqa: S311 - not a secret


def _with_features(shape: Shape, rng: random.Random) -> Shape:
    features = {
        name: type(getattr(shape, name))(rng.choice(values))
        for share, name, values in FEATURES
        if rng.random() < share
    }
    return replace(shape, **features)


def _random_lines(run: Run, profile: Profile, rng: random.Random) -> Iterator[str]:
    """The lines of a schedule, to its end."""
    words, num_naps = list(profile.weights), 0
    num_steps = profile.num_steps + MORE_STEPS * (len(run.world.engines) - 2)
    slow = "none" if "beat" in profile.weights else rng.choice(["none", *run.world.engines])
    while len(run.lines) < num_steps:
        (word,) = rng.choices(words, list(profile.weights.values()))
        num_naps += word == "wait briefly"
        if run.world.shape.gentle and word == "wait briefly" and num_naps > MAX_NAPS:
            continue
        yield from _lines(run, word, rng, slow)
    yield f"end {ENDINGS[0] if run.world.shape.gentle else rng.choice(profile.endings)}"


def _lines(run: Run, word: str, rng: random.Random, slow: str) -> Iterator[str]:
    if word == "round":
        yield from round_lines(run.world)
        return
    if word == "beat":
        yield from _beat(run.world)
        return
    verb, *_ = word.split()
    uses_once = run.world.shape.gentle and len(run.world.decodes()) == 1
    name = "decode once" if word == "decode" and uses_once else word
    draws = VARIANTS.get(name) or [kind.draw for kind in STEPS[verb][1:]]
    drawn = [draw(run.world, rng) for draw in draws]
    is_skipped = verb in ("step", "piece") and drawn == [slow] and rng.random() > SLOW
    if None not in drawn and not is_skipped:
        yield " ".join([verb, *map(str, drawn)])


def _beat(world: World) -> Iterator[str]:
    """A round, and then time passes; prefill notices that before it receives newer messages."""
    yield from round_lines(world)
    yield "wait 0.1"
    for rank in list(world.ranks()):
        if rank.seat.is_prefill:
            yield f"turn {rank.seat.name}"


def _great_length(world: World, rng: random.Random) -> int | None:
    """The length of a long prompt, if the world has no other."""
    is_first = all(not engine.scheduler.requests for engine in world.alive())
    return rng.choice((40, 50, 60)) if is_first else None


def _next_ticket(world: World, _rng: random.Random) -> int | None:
    """Each is used once, in the order in which they came."""
    number = world.num_used
    return number if number < len(world.tickets) else None


VARIANTS: Final[Mapping[str, Sequence[Draw]]] = {
    "prefill long": (_great_length, one_of(1).draw, PREFILL_ENGINE.draw),
    "decode once": (DECODE_ENGINE.draw, _next_ticket, one_of(0, 0, 0, 1).draw),
    "wait briefly": (one_of(0.06).draw,),
    "kill p": (choice(lambda _world: [PREFILL]),),
    "die p": (rank_where(lambda rank: rank.seat.is_prefill), one_of(*range(4)).draw),
    "die d": (rank_where(lambda rank: not rank.seat.is_prefill), one_of(*range(8)).draw),
}
"""Words of the profiles whose arguments are others than those that `STEPS` draws."""
