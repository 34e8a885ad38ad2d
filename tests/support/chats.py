"""Conversations with engines, as token ids: the answers, and how much of a prompt is computed.

vLLM's text of an answer leaves out special tokens, so its tokens could not be found again in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx

from harness.cluster.client import COMPLETIONS, DIRECT, TIMEOUT_S, Client
from harness.cluster.engines import MODEL_NAME, EngineSpec, Role
from harness.cluster.metrics import COMPUTED_TOKENS, PREFIX, PROMPT_TOKENS, CountersSince
from harness.cluster.waiting import wait_until
from support.engines import EVENT_S, expect_free

VOCABULARY: Final = range(10, 4000)
FOUND_TOKENS: Final = f"{PREFIX}found_tokens_total"
SOUGHT: Final[Mapping[str, str]] = {
    outcome: f"{PREFIX}sought_requests_total{{outcome={outcome}}}"
    for outcome in ("read", "none", "late", "refused", "lost")
}

Tokens = list[int]
Params = Mapping[str, Any]
"""The `kv_transfer_params` of a request or of an answer."""


def words(turn: int, count: int, seed: int = 0) -> Tokens:
    """Some tokens that no other turn has in this order."""
    step = 7919 * (seed + 1)
    return [VOCABULARY[(turn * 1009 + place * step) % len(VOCABULARY)] for place in range(count)]


@dataclass(frozen=True)
class Said:
    """The answer of an engine."""

    tokens: Tokens
    cached: int  # tokens of the prompt, by `usage`
    params: Params | None
    computed: float = 0.0  # tokens of the prompt, where they were counted


def say(engine: Client, prompt: Tokens, count: int, params: Params | None = None) -> Said:
    """Ask for a greedy answer of `count` tokens."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **({} if params is None else {"kv_transfer_params": dict(params)}),
    }
    with httpx.Client(base_url=engine.url, timeout=TIMEOUT_S, **DIRECT) as client:
        reply = client.post(COMPLETIONS, json=body).raise_for_status().json()
    details = reply["usage"].get("prompt_tokens_details") or {}
    tokens = reply["choices"][0]["token_ids"]
    return Said(tokens, details.get("cached_tokens") or 0, reply.get("kv_transfer_params"))


def say_counted(engine: Client, prompt: Tokens, count: int, params: Params | None = None) -> Said:
    """The same, with the prompt tokens that the engine computed. No other client may ask it."""
    since = CountersSince(engine)
    said = say(engine, prompt, count, params)
    changed = since.wait_for(PROMPT_TOKENS, len(prompt), EVENT_S)
    return replace(said, computed=changed[COMPUTED_TOKENS])


def forget(engine: Client) -> None:
    """Empty an engine's own prefix cache, which vLLM does only while nothing holds blocks."""
    expect_free(engine)
    assert wait_until(engine.reset_prefix_cache, EVENT_S), f"{engine.url} keeps its cache"


def conversing(
    base: EngineSpec, name: str, role: Role, *, is_insecure: bool = False, **fields: Any
) -> EngineSpec:
    """An engine with `conversations`, whose own prefix cache a test may empty."""
    config = {**base.connector_config, "conversations": "on", "insecure": is_insecure}
    return replace(
        base,
        name=name,
        role=role,
        extra_args=(*base.extra_args, "--enable-prompt-tokens-details"),
        extra_env={**base.extra_env, "VLLM_SERVER_DEV_MODE": "1"},
        connector_config=config,
        **fields,
    )


def patient(spec: EngineSpec) -> EngineSpec:
    """The engine waits long for other engines' answers: few cores answer late."""
    patience = ("--scheduler-cls", "support.patient_reader.HookedScheduler")
    return replace(spec, module="support.patient_reader", extra_args=(*spec.extra_args, *patience))
