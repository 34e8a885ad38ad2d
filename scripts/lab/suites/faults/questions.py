"""Prompts for the fault suite, each drawn once, and what a single engine answers to them.

A prompt that no engine has seen is the only one whose KV must be read. The answers are asked once,
before any fault, from an engine without a connector, and kept in a file beside the models.
"""

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from lab.cluster.answers import LIKELY, Question
from lab.cluster.client import Answer, Client
from lab.cluster.prompts import random_prompt
from lab.results import write_json

SEED: Final = 900
AT_A_TIME: Final = 8


@dataclass(frozen=True)
class Kind:
    """Prompts of one length, the length of the answers, and how many there are."""

    name: str
    num_words: int
    answer: int
    count: int


SHORT: Final = Kind("short", num_words=200, answer=16, count=700)
LONG: Final = Kind("long", num_words=1500, answer=16, count=110)
"""The KV of one is 12 MiB: long enough on a slow wire to be hit while it is read."""
TALK: Final = Kind("talk", num_words=300, answer=400, count=50)
"""Decode generates for seconds."""
KINDS: Final = (SHORT, LONG, TALK)


class Questions:
    """Gives out questions."""

    def __init__(self, answers: Mapping[str, Answer], single: Client | None = None) -> None:
        """The answers by prompt; `single` is asked for those that are not known."""
        self._answers = dict(answers)
        self._single = single
        self._prompts = {kind.name: iter(prompts_of(kind)) for kind in KINDS}

    def draw(self, kind: Kind, count: int) -> list[Question]:
        """That many questions that were never drawn.

        Raises:
            RuntimeError: if there are no more.
        """
        prompts = list(itertools.islice(self._prompts[kind.name], count))
        if len(prompts) < count:
            raise RuntimeError(f"all prompts of kind {kind.name!r} are used up")
        missing = {prompt: kind.answer for prompt in prompts if prompt not in self._answers}
        if missing and self._single is None:
            raise RuntimeError(f"no answers to {len(missing)} prompts of kind {kind.name!r}")
        if missing and self._single is not None:
            self._answers |= ask_all(self._single, missing)
        return [Question(prompt, self._answers[prompt]) for prompt in prompts]


def prompts_of(kind: Kind) -> list[str]:
    """All prompts of a kind, the same in every run."""
    return [random_prompt(kind.num_words, SEED + number) for number in range(kind.count)]


def ask_all(single: Client, lengths: Mapping[str, int]) -> dict[str, Answer]:
    """A single engine's answers to prompts, each with the number of tokens to ask for."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = pool.map(
            lambda prompt: single.complete(prompt, lengths[prompt], logprobs=LIKELY), lengths
        )
        return dict(zip(lengths, answers, strict=True))


def load_answers(
    path: Path, single: Callable[[], AbstractContextManager[Client]]
) -> dict[str, Answer]:
    """The answers of the file to all prompts; the single engine is started for what it lacks."""
    known: dict[str, Answer] = {}
    if path.exists():
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, Answer])
    missing = {p: kind.answer for kind in KINDS for p in prompts_of(kind) if p not in known}
    if missing:
        with single() as client:
            known |= ask_all(client, missing)
        write_json(path, known)
    return known
