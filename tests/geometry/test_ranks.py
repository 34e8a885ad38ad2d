"""Which ranks exchange KV with which."""

from dataclasses import FrozenInstanceError

import pytest

from nixl_kv.geometry.ranks import Shape, readers, sources
from nixl_kv.ids import Rank


@pytest.mark.parametrize(
    ("tp", "pp", "size"), [(1, 1, 1), (8, 1, 8), (1, 4, 4), (4, 2, 8), (1024, 1024, 1048576)]
)
def test_size(tp: int, pp: int, size: int) -> None:
    assert Shape(tp, pp).size == size


@pytest.mark.parametrize("value", [-1, 0, 1025])
def test_bounds(value: int) -> None:
    with pytest.raises(ValueError, match=f"^tp is {value}; allowed: 1 to 1024$"):
        Shape(value, 1)
    with pytest.raises(ValueError, match=f"^pp is {value}; allowed: 1 to 1024$"):
        Shape(1, value)


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_equal_engines_pair_rank_by_rank(rank: int) -> None:
    assert sources(Rank(rank)) == (rank,)
    assert readers(Rank(rank)) == (rank,)


def test_a_shape_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Shape(1, 1).tp = 2  # type: ignore[misc]
