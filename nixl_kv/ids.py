"""The scalars that name things, as types, so that a request id cannot be where a nonce belongs.

The random ones have 120 bits or more from the operating system: never guessed, never equal.
"""

import hashlib
import secrets
from collections.abc import Iterable
from typing import Final, NewType

EngineId = NewType("EngineId", str)
"""One vLLM engine, as its operator or vLLM named it. Survives a restart."""

Incarnation = NewType("Incarnation", str)
"""One life of an engine or of one of its ranks: 32 hex digits. Changes with every registration."""

RequestId = NewType("RequestId", str)
"""A request inside one engine. Prefill and decode have different ids for the same prompt."""

Nonce = NewType("Nonce", str)
"""One finished prefill on offer: 32 hex digits, made by the prefill scheduler."""

Claim = NewType("Claim", str)
"""One attempt of a decode engine to read an offer: 32 hex digits, shared by its ranks."""

Rank = NewType("Rank", int)
"""A worker inside its engine, 0 to pp * tp - 1, pipeline stage major."""

Generation = NewType("Generation", bytes)
"""The 16 bytes in a slot for as long as a grant is valid, 15 of them random."""

Endpoint = NewType("Endpoint", str)
"""An address of the control plane, such as `tcp://10.0.0.1:5600`; IPv6 literals have brackets."""

GENERATION_BYTES: Final = 16

ANY_INCARNATION: Final = Incarnation("0" * 32)
"""Whatever incarnation. No engine has it, since theirs are random, and no ticket."""


def new_incarnation() -> Incarnation:
    """A name for the life that begins now."""
    return Incarnation(secrets.token_hex(16))


def new_nonce() -> Nonce:
    """A name for one offer; whoever has it may ask for the blocks, so it is never logged whole."""
    return Nonce(secrets.token_hex(16))


def new_claim() -> Claim:
    """A name for one attempt to read an offer."""
    return Claim(secrets.token_hex(16))


def new_generation() -> Generation:
    """A slot's content for one grant; never all zero, which means 'no grant'."""
    return Generation(b"\x01" + secrets.token_bytes(GENERATION_BYTES - 1))


def engine_incarnation(ranks: Iterable[Incarnation]) -> Incarnation:
    """The engine's incarnation, derived from those of its ranks in rank order.

    Each worker makes its own, because no channel leads from the scheduler to a worker before the
    first step; the engine has a new life as soon as one of them has.
    """
    digest = hashlib.blake2b("".join(ranks).encode(), digest_size=16)
    return Incarnation(digest.hexdigest())


def short(secret: str) -> str:
    """The first digits of a nonce, claim or incarnation, for logs."""
    return secret[:8]


def endpoint_at(host: str, port: int) -> Endpoint:
    """The endpoint of an IP literal and a port."""
    return Endpoint(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")


def endpoint_host(endpoint: str) -> str:
    """The host of an endpoint, without brackets."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
