"""How much is remembered of asks that precede their offer: the bounds are made small."""

import math
from collections.abc import Callable, Iterator

import pytest

from nixl_kv.early.asks import EarlyAsks
from nixl_kv.ids import Claim, Nonce
from support.records import ask, hex32, reader, release

BOUND, MANY = 2, 7

Growth = Iterator[int]
"""The number of entries after each one that is added."""


def early_asks() -> Growth:
    early = EarlyAsks(math.inf)
    for number in range(MANY):
        early.add(ask(nonce=Nonce(hex32(number)), reader=reader(engine=f"d{number}")), b"", 0.0)
        assert len(early) == early.num_asks
        yield len(early)


def early_asks_for_one_offer() -> Growth:
    early = EarlyAsks(math.inf)
    for number in range(MANY):
        early.add(ask(claim=Claim(hex32(number)), reader=reader(engine=f"d{number}")), b"", 0.0)
        yield early.num_asks


def early_releases() -> Growth:
    early = EarlyAsks(math.inf)
    for number in range(MANY):
        early.release(release(nonce=Nonce(hex32(number))), 0.0)
        yield len(early)


def early_asks_that_are_released() -> Growth:
    early = EarlyAsks(math.inf)
    for number in range(MANY):
        early.add(ask(nonce=Nonce(hex32(number))), b"", 0.0)
        early.release(release(nonce=Nonce(hex32(number))), 0.0)
        yield len(early)


def early_asks_of_a_reader() -> Growth:
    early = EarlyAsks(math.inf)
    for number in range(MANY):
        early.add(ask(nonce=Nonce(hex32(number))), b"", 0.0)
        yield early.num_asks


@pytest.mark.parametrize(
    ("name", "fill"),
    [
        ("MAX_ASKS", early_asks),
        ("MAX_ASKS", early_asks_for_one_offer),
        ("MAX_ASKS", early_releases),
        ("MAX_ASKS", early_asks_that_are_released),
        ("MAX_ASKS_OF_READER", early_asks_of_a_reader),
    ],
)
def test_early_asks_grow_to_a_bound(
    name: str, fill: Callable[[], Growth], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"nixl_kv.early.asks.{name}", BOUND)
    sizes = list(fill())
    assert len(sizes) == MANY
    assert max(sizes) == BOUND
