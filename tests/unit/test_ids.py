"""Ids are unique and have the right length; logs show only a part of them."""

import hashlib
from collections.abc import Callable

import pytest

from nixl_kv import ids
from nixl_kv.ids import Incarnation


@pytest.mark.parametrize("make", [ids.new_incarnation, ids.new_nonce, ids.new_claim])
def test_random_names_are_32_hex_digits_and_never_equal(make: Callable[[], str]) -> None:
    names = {make() for _ in range(1000)}
    assert len(names) == 1000
    for name in names:
        assert len(name) == 32
        assert set(name) <= set("0123456789abcdef")


def test_fence_tokens_are_16_bytes_and_never_equal() -> None:
    tokens = {ids.new_fence_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert {len(token) for token in tokens} == {ids.FENCE_TOKEN_BYTES} == {16}


def test_a_fence_token_is_never_the_clear_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids.secrets, "token_bytes", bytes)
    assert any(ids.new_fence_token())


A, B = Incarnation("a" * 32), Incarnation("b" * 32)


def test_an_engines_incarnation_is_derived_from_its_ranks() -> None:
    expected = hashlib.blake2b(b"a" * 32 + b"b" * 32, digest_size=16).hexdigest()
    assert ids.engine_incarnation([A, B]) == expected
    assert ids.engine_incarnation(rank for rank in (A, B)) == expected


def test_logs_show_at_most_eight_digits() -> None:
    assert [ids.short(text) for text in ("0123456789abcdef" * 2, "0123")] == ["01234567", "0123"]


@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        pytest.param("10.0.0.1", 5600, "tcp://10.0.0.1:5600", id="IPv4"),
        pytest.param("::1", 1, "tcp://[::1]:1", id="IPv6"),
        pytest.param("fd00::7", 65535, "tcp://[fd00::7]:65535", id="IPv6 and a long port"),
    ],
)
def test_an_endpoint_is_written_as_zmq_reads_it(host: str, port: int, endpoint: str) -> None:
    assert ids.endpoint_at(host, port) == endpoint
    assert ids.endpoint_host(endpoint) == host
