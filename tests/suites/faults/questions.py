"""Prompts for the fault suite, each drawn once, and what a single engine answers to them.

A prompt that no engine has seen is the only one whose KV must be read.
"""

import itertools
from dataclasses import dataclass
from typing import Final

from harness.cluster.answers import Question, questions_of
from harness.cluster.client import Client
from harness.cluster.prompts import random_prompt

SEED: Final = 900


@dataclass(frozen=True)
class Kind:
    """Prompts of one length, and the length of the answers."""

    num_words: int
    answer: int


SHORT: Final = Kind(num_words=200, answer=16)
LONG: Final = Kind(num_words=1500, answer=16)
"""The KV of one is 12 MiB: long enough on a slow wire to be hit while it is read."""
TALK: Final = Kind(num_words=300, answer=400)
"""Decode generates for seconds."""


class Questions:
    """Gives out questions. Draw them before a fault begins: the single engine takes its time."""

    def __init__(self, single: Client) -> None:
        """Of an engine without a connector."""
        self._single = single
        self._seeds = itertools.count(SEED)

    def draw(self, kind: Kind, count: int) -> list[Question]:
        """That many questions that were never drawn."""
        prompts = [random_prompt(kind.num_words, next(self._seeds)) for _ in range(count)]
        return questions_of(self._single, prompts, kind.answer)
