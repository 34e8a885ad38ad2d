"""Prompts of the tiny model's words: one word is one token, so lengths are exact."""

import random

from harness.cluster.models.files import words

NEW_WORDS = 84  # what the user says in the second turn


def random_prompt(length: int, seed: int) -> str:
    """A prompt of that many tokens; another seed gives another prompt."""
    chooser = random.Random(f"{seed}/{length}")  # noqa: S311 - the same prompts every time
    return " ".join(chooser.choices(words(), k=length))
