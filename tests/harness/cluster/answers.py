"""The answers of a single engine, and how those of other engines compare with them."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Literal

from harness.cluster.client import Answer, Client
from harness.cluster.engines import CPU_DTYPE

AT_A_TIME: Final = 8
LIKELY: Final = 5
"""For how many tokens to ask the single engine for log probabilities, with each token."""
TIES: Final[Mapping[str, float]] = {"float32": 0.001, "float16": 0.05, "bfloat16": 0.2}
"""How much less likely the token of another engine may be for the two to be a tie that rounding
decides, by --dtype. Wrong KV gives one of thousands of tokens, which are all much less likely."""

Likeness = Literal["same", "tie", "other"]


@dataclass(frozen=True)
class Question:
    """A prompt and a single engine's answer to it, with the log probabilities of LIKELY."""

    prompt: str
    expected: Answer

    @classmethod
    def of(cls, single: Client, prompt: str, num_tokens: int) -> "Question":
        """Ask the single engine."""
        return cls(prompt, single.complete(prompt, num_tokens, logprobs=LIKELY))

    @property
    def num_tokens(self) -> int:
        """How many tokens to ask for."""
        return len(self.expected.tokens)

    def cut(self, num_tokens: int) -> "Question":
        """The same for fewer tokens: a greedy answer begins the same however long it gets."""
        answer = self.expected
        tokens, likely = answer.tokens[:num_tokens], answer.likely[:num_tokens]
        return replace(self, expected=replace(answer, tokens=tokens, likely=likely))

    def compare(self, answer: Answer, dtype: str = CPU_DTYPE, tie: float | None = None) -> Likeness:
        """How another engine's answer compares; one of another length is another one."""
        if len(answer.tokens) != self.num_tokens:
            return "other"
        return likeness(self.expected, answer, TIES[dtype] if tie is None else tie)


def questions_of(single: Client, prompts: Sequence[str], num_tokens: int) -> list[Question]:
    """One for each prompt; the single engine is asked several at a time."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(lambda prompt: Question.of(single, prompt, num_tokens), prompts))


def likeness(expected: Answer, answer: Answer, tie: float) -> Likeness:
    """Where two answers part, both tokens may have been equally likely: then it is a tie."""
    tokens = zip(expected.tokens, answer.tokens, expected.likely, strict=True)
    for wanted, given, likely in tokens:
        if wanted != given:
            return "tie" if likely[wanted] - likely.get(given, -math.inf) <= tie else "other"
    return "same"
