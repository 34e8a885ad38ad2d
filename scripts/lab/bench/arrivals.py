"""When requests arrive, and how long they are: by a Poisson process, or as recorded.

A recorded list has a JSON object a line, see `Arrival`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from lab.cluster.models.files import SPECIALS, words

STEEPNESS: Final = 1.25
"""The density of prompt lengths is x to the power of minus this: the mean of 1,024 to 16,384 is
4.8 thousand."""


@dataclass(frozen=True)
class Arrival:
    """One request."""

    second: float
    prompt_tokens: int
    answer_tokens: int


def poisson(
    rate: float, seconds: float, lengths: tuple[int, int], answer_tokens: int, seed: int
) -> list[Arrival]:
    """So many a second on average, for so long; prompts between two lengths, short ones most."""
    chooser = random.Random(seed)  # noqa: S311 - the same each time
    arrivals, now = [], chooser.expovariate(rate)
    while now < seconds:
        arrivals.append(Arrival(now, _length(chooser.random(), *lengths), answer_tokens))
        now += chooser.expovariate(rate)
    return arrivals


def _length(place: float, low: int, high: int) -> int:
    """The length below which this share of all prompts is."""
    power = 1 - STEEPNESS
    first, last = float(low) ** power, float(high) ** power
    return round(math.pow(first + place * (last - first), 1 / power))


def recorded(path: Path) -> list[Arrival]:
    """What a file says, in its order.

    Raises:
        ValueError: if a line is none.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=Arrival) for line in lines if line.strip()]


def prompts(arrivals: Sequence[Arrival], seed: int) -> list[list[int]]:
    """A prompt of token ids for each; no two begin alike."""
    return [prompt(one.prompt_tokens, f"{seed}/{n}") for n, one in enumerate(arrivals)]


def prompt(length: int, seed: str) -> list[int]:
    """So many token ids of the vocabulary that all our models have."""
    chooser = random.Random(seed)  # noqa: S311 - the same each time
    return chooser.choices(range(len(SPECIALS), len(SPECIALS) + len(words())), k=length)
