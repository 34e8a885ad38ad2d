"""Prompts of the tiny model's words: one word is one token, so lengths are exact."""

import random
from collections.abc import Sequence

from harness.cluster.models.files import words

# Short and long, on and beside the edges of a block of 128 tokens.
LENGTHS = (10, 40, 100, 127, 128, 129, 200, 255, 256, 257, 300, 512, 640, 800, 1000, 1280, 1500)
LONGEST = 2000
FIRST_TURN = LENGTHS.index(300)
REPEATED = LENGTHS.index(1000)
NEW_WORDS = 84  # what the user says in the second turn


def random_prompt(length: int, seed: int) -> str:
    """A prompt of that many tokens; another seed gives another prompt."""
    chooser = random.Random(f"{seed}/{length}")  # noqa: S311 - the same prompts every time
    return " ".join(chooser.choices(words(), k=length))


def first_prompts() -> list[str]:
    """The prompts that follow from no answer."""
    return [random_prompt(length, seed=1) for length in (*LENGTHS, LONGEST)]


def later_prompts(first: Sequence[str], answers: Sequence[str]) -> list[str]:
    """A second turn, which extends an earlier prompt and its answer, and a plain repetition."""
    history = f"{first[FIRST_TURN]} {answers[FIRST_TURN].strip()}"
    return [f"{history} {random_prompt(NEW_WORDS, seed=2)}", first[REPEATED]]
