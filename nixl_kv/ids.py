"""Types for the strings and numbers that identify things, so that mypy tells them apart.

Random ids have 120 bits or more from the operating system, so a stranger cannot guess one, and
no two are equal.
"""

import hashlib
import secrets
from collections.abc import Iterable
from typing import Final, NewType

EngineId = NewType("EngineId", str)
"""One vLLM engine, as its operator or vLLM named it. Survives a restart."""

Incarnation = NewType("Incarnation", str)
"""One life of an engine or of a rank: 32 hex digits. Each registration of memory begins one."""

RequestId = NewType("RequestId", str)
"""A request of one engine. Prefill and decode have different ids for the same prompt."""

Nonce = NewType("Nonce", str)
"""One offer, which is a finished prefill: 32 hex digits from the prefill scheduler."""

Claim = NewType("Claim", str)
"""One attempt of a decode engine to read an offer: 32 hex digits, shared by its ranks."""

HintKey = NewType("HintKey", str)
"""The secret of one load, 32 hex digits: only the decode engine knows it, unlike the claim."""

Rank = NewType("Rank", int)
"""A worker of an engine: 0 to pp * tp - 1, pipeline stage major."""

FenceToken = NewType("FenceToken", bytes)
"""A fence token: the 16 bytes in a fence slot while a grant is valid. 15 of them are random."""

Endpoint = NewType("Endpoint", str)
"""A control-plane address, such as `tcp://10.0.0.1:5600`. IPv6 literals have brackets."""

FENCE_TOKEN_BYTES: Final = 16

ANY_INCARNATION: Final = Incarnation("0" * 32)
"""Stands for any incarnation in questions. No engine or ticket has it."""


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(16))


def new_nonce() -> Nonce:
    # Its owner may ask for the blocks, so never log all of it.
    return Nonce(secrets.token_hex(16))


def new_claim() -> Claim:
    return Claim(secrets.token_hex(16))


def new_hint_key() -> HintKey:
    return HintKey(secrets.token_hex(16))


def new_fence_token() -> FenceToken:
    # A token must differ from a cleared slot, which is all zero.
    return FenceToken(b"\x01" + secrets.token_bytes(FENCE_TOKEN_BYTES - 1))


def engine_incarnation(ranks: Iterable[Incarnation]) -> Incarnation:
    """Derive an engine's incarnation from those of its ranks, in rank order; it changes with any.

    Each worker makes its own, because the scheduler cannot reach a worker before the first step.
    """
    digest = hashlib.blake2b("".join(ranks).encode(), digest_size=16)
    return Incarnation(digest.hexdigest())


def short(secret: str) -> str:
    """The part of a nonce, claim or incarnation that logs may show."""
    return secret[:8]


def endpoint_at(host: str, port: int) -> Endpoint:
    return Endpoint(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")


def endpoint_host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
