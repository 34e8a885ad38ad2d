"""Ids are unique and have the right length; logs show only a part of them."""

import hashlib
import re
from collections.abc import Callable

import pytest

from nixl_kv import ids
from nixl_kv.ids import Incarnation


@pytest.mark.parametrize("make", [ids.new_incarnation, ids.new_nonce, ids.new_claim])
def test_random_names_are_32_hex_digits_and_never_equal(make: Callable[[], str]) -> None:
    names = {make() for _ in range(1000)}
    assert len(names) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


def test_a_fence_token_is_never_the_clear_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids.secrets, "token_bytes", bytes)
    assert any(ids.new_fence_token())


def test_an_engines_incarnation_is_derived_from_its_ranks() -> None:
    expected = hashlib.blake2b(b"a" * 32 + b"b" * 32, digest_size=16).hexdigest()
    assert ids.engine_incarnation(Incarnation(each * 32) for each in "ab") == expected


def test_logs_show_at_most_eight_digits() -> None:
    assert [ids.short(text) for text in ("0123456789abcdef" * 2, "0123")] == ["01234567", "0123"]


@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        pytest.param("10.0.0.1", 5600, "tcp://10.0.0.1:5600", id="IPv4"),
        pytest.param("fd00::7", 65535, "tcp://[fd00::7]:65535", id="IPv6"),
    ],
)
def test_an_endpoint_is_written_as_zmq_reads_it(host: str, port: int, endpoint: str) -> None:
    assert ids.endpoint_at(host, port) == endpoint
    assert ids.endpoint_host(endpoint) == host
