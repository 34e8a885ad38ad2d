"""How many prefill and decode engines a load needs, from two figures that were measured.

Prefill works through tokens: requests that exceed its speed wait, and so do their first tokens.
Decode generates many answers at once: with each further one, the gap between two tokens grows.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from nixl_kv.cli.tables import open_console, print_line

PREFILL_SHARE: Final = 0.7
"""A queue in front of prefill delays each first token. Of prompts of 5,000 tokens, a prefill engine
that was busy for 64 % of the time answered 87 % within 0.5 s, and all within 1 s. With 89 % it
answered 51 % and 99 %, and with 102 % 17 % and 39 % (docs/benchmarks/goodput-h200.json)."""


ROUNDING: Final = 1e-9


class Load(msgspec.Struct, frozen=True):
    """Requests per second, and the tokens of a prompt and of an answer."""

    rate: float
    prompt: float
    answer: float


class Capacity(msgspec.Struct, frozen=True):
    """The limits of one prefill engine and of one decode engine, with prompts of this length."""

    prefill_tokens: float
    """Tokens per second that the prefill engine computes if it never waits for a request."""
    decode_streams: float
    """Answers that the decode engine generates at once without a longer mean gap than this."""
    gap_ms: float
    """The mean time between two tokens of an answer, in milliseconds."""


class Ratio(msgspec.Struct, frozen=True):
    """The engines that a load needs."""

    load: Load
    capacity: Capacity

    @property
    def prefill_tokens(self) -> float:
        """Tokens of prompts per second."""
        return self.load.rate * self.load.prompt

    @property
    def streams(self) -> float:
        """Answers that are generated at once if each takes as long as the gap allows."""
        return self.load.rate * self.load.answer * self.capacity.gap_ms / 1e3

    @property
    def prefill_needed(self) -> float:
        """Prefill engines; a fraction is a part of an engine."""
        return self.prefill_tokens / (PREFILL_SHARE * self.capacity.prefill_tokens)

    @property
    def decode_needed(self) -> float:
        """Decode engines; a fraction is a part of an engine."""
        return self.streams / self.capacity.decode_streams

    @property
    def prefill(self) -> int:
        return max(1, math.ceil(self.prefill_needed - ROUNDING))

    @property
    def decode(self) -> int:
        return max(1, math.ceil(self.decode_needed - ROUNDING))

    @property
    def prefill_for_each_decode(self) -> float:
        """In a deployment so large that fractions do not count."""
        return self.prefill_needed / self.decode_needed


def ratio_from(options: Mapping[str, float | None]) -> Ratio:
    """The ratio for the options of `nixl-kv plan` by name; None: not given.

    Raises:
        ValueError: an option is missing, or is not a number above 0.
    """
    missing = [name for name, value in options.items() if value is None]
    if missing:
        raise ValueError(
            f"missing: {', '.join(missing)}; to find out how many engines a load needs, give all "
            f"of {', '.join(options)}. `scripts/bench goodput` measures the last three"
        )
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value:g}; allowed: numbers above 0")
    rate, prompt, answer, prefill_tokens, decode_streams, gap_ms = given.values()
    return Ratio(Load(rate, prompt, answer), Capacity(prefill_tokens, decode_streams, gap_ms))


def as_json(ratio: Ratio) -> dict[str, Any]:
    """All figures, for `--json`."""
    return {
        "prefill": ratio.prefill,
        "decode": ratio.decode,
        "prefill_needed": ratio.prefill_needed,
        "decode_needed": ratio.decode_needed,
        "prefill_tokens_per_second": ratio.prefill_tokens,
        "answers_at_once": ratio.streams,
    }


def print_ratio(ratio: Ratio) -> None:
    console = open_console()
    for line in _lines(ratio):
        print_line(console, line)


def _lines(ratio: Ratio) -> Iterator[str]:
    capacity = ratio.capacity
    engines = _count(ratio.prefill, "prefill engine"), _count(ratio.decode, "decode engine")
    yield f"{' and '.join(engines)} ({ratio.prefill}:{ratio.decode})"
    yield (
        f"Prefill: {ratio.prefill_tokens:,.0f} prompt tokens per second need "
        f"{ratio.prefill_needed:.2g} engines, because one computes {capacity.prefill_tokens:,.0f} "
        f"and should be busy for {PREFILL_SHARE:.0%} of the time: a queue delays each first token."
    )
    yield (
        f"Decode: {ratio.streams:,.3g} answers at once need {ratio.decode_needed:.2g} engines, "
        f"because one generates {capacity.decode_streams:,.3g} with a gap of "
        f"{capacity.gap_ms:g} ms."
    )
    more = ratio.prefill_for_each_decode
    sides = ("prefill", "decode") if more >= 1 else ("decode", "prefill")
    yield (
        f"More such requests need {max(more, 1 / more):.2g} {sides[0]} engines for each "
        f"{sides[1]} engine."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
