"""How many prefill and decode engines a load needs, from two figures that were measured.

Prefill works through tokens: requests that exceed its speed wait, and so do their first tokens.
Decode generates many answers at once: with each further one, the gap between two tokens grows.
"""

import math
from typing import Final

import msgspec

PREFILL_SHARE: Final = 0.7
"""How much of its tokens per second a prefill engine should compute. Requests arrive at random: at
75 % of its speed, a prefill engine let 60 % of the requests begin within 1 s, at 50 % 99 %."""


class Load(msgspec.Struct, frozen=True):
    """Requests per second, and the tokens of a prompt and of an answer."""

    rate: float
    prompt: int
    answer: int


class Capacity(msgspec.Struct, frozen=True):
    """What one prefill engine and one decode engine can do, with prompts of this length."""

    prefill_tokens: float
    """Tokens per second that the prefill engine computes if it never waits for a request."""
    decode_streams: float
    """Answers that the decode engine generates at once without a longer mean gap than this."""
    gap_ms: float
    """The mean time between two tokens of an answer, in milliseconds."""


class Ratio(msgspec.Struct, frozen=True):
    """Engines that a load needs; fractions say how much of the last one it needs."""

    prefill_tokens: float
    """Tokens of prompts per second."""
    streams: float
    """Answers that are generated at once, at the longest gap that is allowed."""
    prefill_needed: float
    decode_needed: float

    @property
    def prefill(self) -> int:
        return max(1, math.ceil(self.prefill_needed - ROUNDING))

    @property
    def decode(self) -> int:
        return max(1, math.ceil(self.decode_needed - ROUNDING))

    @property
    def prefill_for_each_decode(self) -> float:
        """What a larger deployment needs."""
        return self.prefill_needed / self.decode_needed


ROUNDING: Final = 1e-9


def ratio_for(load: Load, capacity: Capacity) -> Ratio:
    """The engines for a load."""
    tokens = load.rate * load.prompt
    # An answer takes `answer` gaps, and so many seconds' requests are generated at once.
    streams = load.rate * load.answer * capacity.gap_ms / 1e3
    return Ratio(
        prefill_tokens=tokens,
        streams=streams,
        prefill_needed=tokens / (PREFILL_SHARE * capacity.prefill_tokens),
        decode_needed=streams / capacity.decode_streams,
    )
