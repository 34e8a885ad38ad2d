"""Bounds of values that a client nests: a plain recursion over small values is the oracle."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.errors import TicketRefused
from nixl_kv.protocol.params import (
    MAX_LEVELS,
    MAX_SIZE,
    check_bounds,
    foreign_fields,
    why_unbounded,
)
from support.records import ticket

LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.text("\ud800\n\x1b")),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=60,
)


def levels(value: Any) -> int:
    if isinstance(value, list | dict):
        inner = value if isinstance(value, list) else value.values()
        return 1 + max(map(levels, inner), default=0)
    return 0


def size(value: Any) -> int:
    """The size of all parts of a value; the outermost value itself does not count."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return len(value) + sum(map(size, value))
    if isinstance(value, dict):
        return 2 * len(value) + sum(map(len, value)) + sum(map(size, value.values()))
    return 0


def nested(depth: int, *, in_objects: bool) -> Any:
    value: Any = [] if not in_objects else {}
    for _ in range(depth - 1):
        value = {"a": value} if in_objects else [value]
    return value


@given(JSON, st.integers(0, 6), st.integers(0, 60))
def test_a_value_is_bounded_if_neither_its_levels_nor_its_size_is_too_large(
    value: Any, max_levels: int, max_size: int
) -> None:
    reason = why_unbounded(value, max_levels=max_levels, max_size=max_size)
    assert bool(reason) == (levels(value) > max_levels or size(value) > max_size)
    assert ("levels" in reason) <= (levels(value) > max_levels)
    assert ("characters" in reason) <= (size(value) > max_size)
    assert bool(why_unbounded(value, max_levels=max_levels, max_size=None)) == (
        levels(value) > max_levels
    )


@pytest.mark.parametrize("in_objects", [False, True], ids=["lists", "objects"])
def test_the_depth_is_exact_and_costs_no_recursion(*, in_objects: bool) -> None:
    for depth in range(1, MAX_LEVELS + 1):
        assert why_unbounded(nested(depth, in_objects=in_objects)) == ""
    for depth in (MAX_LEVELS + 1, 50, 1000, 100_000):
        assert "more than 8 levels" in why_unbounded(nested(depth, in_objects=in_objects))


@pytest.mark.parametrize(
    "value",
    [
        "x" * (MAX_SIZE + 1),
        {"x" * (MAX_SIZE + 1): 1},
        [0] * (MAX_SIZE + 1),
        [[]] * (MAX_SIZE + 1),
        ["x" * 1000] * 100,
        {str(number): None for number in range(MAX_SIZE)},
    ],
    ids=["text", "a key", "numbers", "lists", "texts", "fields"],
)
def test_a_large_value_is_refused_soon(value: Any) -> None:
    began = time.process_time()
    assert f"more than {MAX_SIZE} values and characters" in why_unbounded({"a": value})
    assert time.process_time() - began < 1.0
    with pytest.raises(TicketRefused, match="kv_transfer_params: it has more than") as refusal:
        check_bounds({"a": value})
    assert refusal.value.reason == "malformed"


def test_a_value_that_shares_its_parts_is_not_followed_for_ever() -> None:
    value: Any = []
    value.append(value)
    assert why_unbounded(value)
    many: Any = "x"
    for _ in range(40):  # 2**40 characters if it were written
        many = [many, many]
    assert why_unbounded(many)
    many = "x" * 100
    for _ in range(MAX_LEVELS - 1):
        many = [many] * 50
    assert "characters" in why_unbounded(many)


def test_each_ticket_of_ours_is_bounded() -> None:
    largest = ticket(engine="中" * 256, weights="中" * 256, host="1:" * 7 + "1")
    for for_in_tree in (False, True):
        check_bounds(largest.params(b"k" * 32, for_in_tree=for_in_tree))


def test_fields_of_other_connectors_are_told_from_ours() -> None:
    foreign = {"lmcache.tag": [1], "disagg_spec": {"a": 1}, "hidden_states_path": "x", "": 0}
    assert foreign_fields(foreign | ticket().params(None)) == foreign
    assert foreign_fields({**foreign, "deep": nested(20, in_objects=True)}) == {}
    assert foreign_fields("text") == foreign_fields(None) == {}
