"""Names: unique, of the right length, and shown only in part."""

import hashlib
from collections.abc import Callable

import pytest

from nixl_kv import ids
from nixl_kv.ids import Incarnation


@pytest.mark.parametrize("make", [ids.new_incarnation, ids.new_nonce, ids.new_claim])
def test_random_names(make: Callable[[], str]) -> None:
    made = {make() for _ in range(1000)}
    assert len(made) == 1000
    for name in made:
        assert len(name) == 32
        assert set(name) <= set("0123456789abcdef")


def test_generations() -> None:
    made = {ids.new_generation() for _ in range(1000)}
    assert len(made) == 1000
    assert {len(generation) for generation in made} == {ids.GENERATION_BYTES} == {16}


def test_a_generation_is_never_the_clear_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids.secrets, "token_bytes", bytes)
    assert any(ids.new_generation())


A, B = Incarnation("a" * 32), Incarnation("b" * 32)


def test_an_engines_incarnation_is_derived_from_its_ranks() -> None:
    expected = hashlib.blake2b(b"a" * 32 + b"b" * 32, digest_size=16).hexdigest()
    assert ids.engine_incarnation([A, B]) == expected
    assert ids.engine_incarnation(rank for rank in (A, B)) == expected


def test_an_engine_lives_anew_with_any_of_its_ranks() -> None:
    lives = [[A], [B], [A, A], [A, B], [B, A], [A, A, A]]
    assert len({ids.engine_incarnation(ranks) for ranks in lives}) == len(lives)


@pytest.mark.parametrize(
    ("secret", "shown"),
    [
        pytest.param("0123456789abcdef" * 2, "01234567", id="nonce"),
        pytest.param("0123", "0123", id="short"),
        pytest.param("", "", id="empty"),
    ],
)
def test_shown(secret: str, shown: str) -> None:
    assert ids.shown(secret) == shown
