"""Which loads are verified."""

from types import SimpleNamespace
from typing import Any

import pytest
from protocol_records import hex32, ticket

from nixl_kv.config import Config
from nixl_kv.connector.trust import Trust
from nixl_kv.protocol import events
from nixl_kv.protocol.ticket import context_hash

decode = pytest.importorskip("nixl_kv.connector.decode")

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def request(number: int) -> Any:
    return SimpleNamespace(
        request_id=f"d{number}",
        num_prompt_tokens=len(PROMPT),
        prompt_token_ids=PROMPT,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
    )


def loads(count: int, share: float) -> list[bool]:
    """Whether each of so many loads is verified."""
    scheduler = decode.DecodeScheduler([4], Trust.of(Config.parse({}, {})), verify=share)
    for number in range(count):
        made, nonce = request(number), hex32(number)
        offered = ticket(
            remote_host="127.0.0.1", nonce=nonce, context=context_hash(nonce, PROMPT, [])
        )
        scheduler.arrived(made, offered.params())
        load, _ = scheduler.matched(made, 0)
        scheduler.allocated(made, [[1, 2]], load)
    return [each.verify for each in scheduler.take() if isinstance(each, events.Load)]


def test_none_are_by_default() -> None:
    assert loads(200, Config().verify) == [False] * 200


def test_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the largest number that there is."""
    monkeypatch.setattr(decode.random, "random", lambda: 1.0 - 2**-53)
    assert loads(200, 1.0) == [True] * 200


def test_none_are_by_the_smallest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.random, "random", lambda: 0.0)
    assert loads(1, 0.0) == [False]


def test_a_share_of_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([0.24, 0.25, 0.9, 0.0])
    monkeypatch.setattr(decode.random, "random", lambda: next(numbers))
    assert loads(4, 0.25) == [True, False, False, True]
