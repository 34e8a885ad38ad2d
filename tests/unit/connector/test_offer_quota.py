"""Unclaimed offers hold no more than their share of the cache, the oldest going first."""

from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.connector.pressure import Pressure
from nixl_kv.ids import Nonce, RequestId


def offered(pressure: Pressure, number: int, blocks: set[int]) -> None:
    pressure.offer(RequestId(f"p{number}"), Nonce(f"nonce{number}"), blocks)


def test_nothing_goes_while_there_is_room() -> None:
    pressure = Pressure(100, 0.5)
    offered(pressure, 1, set(range(50)))
    assert pressure.revocable() == []


def test_the_oldest_go_until_the_rest_fits_and_each_is_told_once() -> None:
    pressure = Pressure(100, 0.5)
    for number in range(4):
        offered(pressure, number, set(range(number * 20, number * 20 + 20)))
    assert pressure.revocable() == ["nonce0", "nonce1"]
    assert pressure.revocable() == []


def test_what_has_ended_counts_no_more() -> None:
    pressure = Pressure(100, 0.5)
    offered(pressure, 0, set(range(40)))
    offered(pressure, 1, set(range(40, 80)))
    pressure.ended(["p0", "unknown"])
    assert pressure.revocable() == []


def test_a_block_of_several_offers_counts_once() -> None:
    """A common prefix: to revoke one of them frees nothing of it."""
    pressure = Pressure(10, 0.5)
    for number in range(9):
        offered(pressure, number, {1, 2, 3, 4})
    assert pressure.revocable() == []
    offered(pressure, 9, {1, 2, 3, 4, 5, 6})
    assert pressure.revocable() == [f"nonce{number}" for number in range(9)]


def test_a_prompt_longer_than_the_share_is_offered_all_the_same() -> None:
    pressure = Pressure(10, 0.2)
    offered(pressure, 0, set(range(9)))
    assert pressure.revocable() == []
    offered(pressure, 1, {9})
    assert pressure.revocable() == ["nonce0"]


steps = st.lists(
    st.one_of(
        st.sets(st.integers(1, 30), min_size=1, max_size=12),  # an offer of these blocks
        st.integers(0, 20),  # that offer has ended
    ),
    max_size=40,
)


@given(steps=steps, share=st.floats(0.05, 1))
def test_the_rest_fits_whatever_happens(steps: list[set[int] | int], share: float) -> None:
    pressure = Pressure(30, share)
    held: dict[str, set[int]] = {}
    for number, step in enumerate(steps):
        if isinstance(step, int):
            pressure.ended([f"p{step}"])
            held.pop(f"nonce{step}", None)
        else:
            offered(pressure, number, step)
            held[f"nonce{number}"] = step
        for nonce in pressure.revocable():
            assert nonce == next(iter(held)), "an older one stayed"
            del held[nonce]
        assert len(held) <= 1 or len(set.union(*held.values())) <= int(30 * share)
