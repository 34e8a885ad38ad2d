"""The scalars that name things, as types, so that a request id cannot stand where a nonce belongs.

All random ones are 128 bits from the operating system: they are never guessed and never collide.
"""

import hashlib
import secrets
from collections.abc import Iterable
from typing import NewType

EngineId = NewType("EngineId", str)
"""One vLLM engine, as its operator or vLLM named it. Survives a restart."""

Incarnation = NewType("Incarnation", str)
"""One life of an engine or of one of its ranks: 32 hex digits. Changes with every registration."""

RequestId = NewType("RequestId", str)
"""A request inside one engine. Prefill and decode have different ids for the same prompt."""

Nonce = NewType("Nonce", str)
"""One finished prefill on offer: 32 hex digits, made by the prefill scheduler."""

Claim = NewType("Claim", str)
"""One attempt of a decode engine to take an offer: 32 hex digits, shared by its ranks."""

Rank = NewType("Rank", int)
"""A worker inside its engine, 0 to pp * tp - 1, pipeline stage major."""

Generation = NewType("Generation", bytes)
"""16 random bytes that stand in a slot for as long as a grant holds."""

GENERATION_BYTES = 16


def new_incarnation() -> Incarnation:
    """A name for the life that begins now."""
    return Incarnation(secrets.token_hex(16))


def new_nonce() -> Nonce:
    """A name for one offer; whoever has it may ask for the blocks, so it is never logged whole."""
    return Nonce(secrets.token_hex(16))


def new_claim() -> Claim:
    """A name for one attempt to take an offer."""
    return Claim(secrets.token_hex(16))


def new_generation() -> Generation:
    """A slot's content for one grant; never all zero, which means 'no grant'."""
    return Generation(b"\x01" + secrets.token_bytes(GENERATION_BYTES - 1))


def engine_incarnation(ranks: Iterable[Incarnation]) -> Incarnation:
    """The engine's incarnation, derived from those of its ranks in rank order.

    Each worker makes its own, because no channel leads from the scheduler to a worker before the
    first step; the engine lives anew as soon as one of them does.
    """
    digest = hashlib.blake2b("".join(ranks).encode(), digest_size=16)
    return Incarnation(digest.hexdigest())


def shown(secret: str) -> str:
    """The first digits of a nonce or claim, for logs."""
    return secret[:8]
