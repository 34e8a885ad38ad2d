"""The matrix's prompts, the answers of a single engine, and how others compare with them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pd.client import Answer, Client
from pd.prompts import NEW_WORDS, random_prompt

# Shorter than a block, on and beside the edges of blocks of 64, 96 and 128, and many blocks.
LENGTHS: Final = (5, 64, 127, 128, 129, 192, 300, 1100)
CONTINUED: Final = (300, 1100)  # which of them get a second turn
ANSWER_TOKENS = 16
LIKELY = 5
WANT_TICKET: Final = {"do_remote_decode": True, "do_remote_prefill": False}
# How much less likely the token of another engine may be for the two to be a tie that rounding
# decides. Wrong KV gives one of thousands of tokens, which are all much less likely.
TIES: Final[Mapping[str, float]] = {"float32": 0.001, "float16": 0.05, "bfloat16": 0.2}

Likeness = Literal["same", "tie", "other"]


@dataclass(frozen=True)
class Asked:
    """A prompt and what a single engine answered."""

    prompt: str
    answer: Answer


def ask_single(client: Client, seed: int) -> list[Asked]:
    """The prompts of a cell, each cell having its own, and the answers to them.

    The last ones extend an earlier prompt and its answer, as a second turn does.
    """
    first = {length: random_prompt(length, seed) for length in LENGTHS}
    asked = {length: Asked(prompt, _answer(client, prompt)) for length, prompt in first.items()}
    later = [
        f"{asked[length].prompt} {asked[length].answer.text.strip()} "
        f"{random_prompt(NEW_WORDS, seed)}"
        for length in CONTINUED
    ]
    return [*asked.values(), *(Asked(prompt, _answer(client, prompt)) for prompt in later)]


def ask_apart(prefill: Client, decode: Client, prompts: Sequence[str]) -> list[Answer]:
    """As a router asks: prefill first, then decode with prefill's ticket as it is."""
    answers = []
    for prompt in prompts:
        ticket = prefill.ticket(prompt, WANT_TICKET)
        if ticket is None:
            raise RuntimeError(f"{prefill.url}: no ticket for {len(prompt.split())} tokens")
        answers.append(decode.complete(prompt, ANSWER_TOKENS, kv_transfer_params=ticket))
    return answers


def likeness(expected: Answer, answer: Answer, tie: float) -> Likeness:
    """Where two answers part, both tokens may have been equally likely: then it is a tie."""
    pairs = zip(expected.tokens, answer.tokens, expected.likely, strict=True)
    for wanted, got, likely in pairs:
        if wanted != got:
            return "tie" if likely[wanted] - likely.get(got, -math.inf) <= tie else "other"
    return "same"


def _answer(client: Client, prompt: str) -> Answer:
    return client.complete(prompt, ANSWER_TOKENS, logprobs=LIKELY)
