"""Prompts for the fault suite, each drawn once, and what a single engine answers to them.

A prompt that no engine has seen is the only one whose KV must be read. The answers are asked once,
before any fault, from an engine without a connector, and kept in a file beside the models.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pd.asking import LIKELY
from pd.client import Answer, Client
from pd.prompts import random_prompt

SEED: Final = 900
AT_A_TIME: Final = 8


@dataclass(frozen=True)
class Kind:
    """Prompts of one length, the length of the answers, and how many there are."""

    name: str
    words: int
    answer: int
    count: int


SHORT: Final = Kind("short", words=200, answer=16, count=700)
LONG: Final = Kind("long", words=1500, answer=16, count=110)
"""The KV of one takes 12 MiB: long enough on a slow wire to be hit while it is read."""
TALK: Final = Kind("talk", words=300, answer=400, count=50)
"""Decode generates for seconds."""
KINDS: Final = (SHORT, LONG, TALK)


@dataclass(frozen=True)
class Question:
    """A prompt and what a single engine answers."""

    prompt: str
    expected: Answer

    @property
    def tokens(self) -> int:
        """How many to ask for."""
        return len(self.expected.tokens)

    def cut(self, tokens: int) -> "Question":
        """The same for fewer tokens: a greedy answer begins the same however long it gets."""
        answer = self.expected
        return replace(
            self,
            expected=replace(answer, tokens=answer.tokens[:tokens], likely=answer.likely[:tokens]),
        )


class Deck:
    """Gives out questions."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        """The answers by prompt; what has none is not drawn."""
        self._answers = answers
        self._drawn: dict[str, Iterator[str]] = {}

    def draw(self, kind: Kind, count: int) -> list[Question]:
        """That many questions that were never drawn.

        Raises:
            RuntimeError: if there are no more.
        """
        answered = (prompt for prompt in prompts_of(kind) if prompt in self._answers)
        prompts = self._drawn.setdefault(kind.name, answered)
        drawn = [prompt for prompt, _ in zip(prompts, range(count), strict=False)]
        if len(drawn) < count:
            raise RuntimeError(f"all answered prompts of kind {kind.name!r} are used up")
        return [Question(prompt, self._answers[prompt]) for prompt in drawn]


def prompts_of(kind: Kind) -> list[str]:
    """All prompts of a kind, the same in every run."""
    return [random_prompt(kind.words, SEED + number) for number in range(kind.count)]


def load_answers(
    path: Path, kinds: Sequence[Kind], single: Callable[[], AbstractContextManager[Client]]
) -> dict[str, Answer]:
    """The answers of the file; the single engine is started for those that it lacks."""
    known = _read(path)
    missing = {p: kind.answer for kind in kinds for p in prompts_of(kind) if p not in known}
    if missing:
        with single() as client, ThreadPoolExecutor(AT_A_TIME) as pool:
            asked = pool.map(
                lambda prompt: client.complete(prompt, missing[prompt], logprobs=LIKELY), missing
            )
            known |= dict(zip(missing, asked, strict=True))
        _write(path, known)
    return known


def _read(path: Path) -> dict[str, Answer]:
    if not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {
        prompt: Answer(**fields | {key: tuple(fields[key]) for key in ("tokens", "likely")})
        for prompt, fields in kept.items()
    }


def _write(path: Path, answers: Mapping[str, Answer]) -> None:
    text = json.dumps({prompt: asdict(answer) for prompt, answer in answers.items()})
    scratch = path.with_suffix(".making")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)  # whole or not at all
