"""Unclaimed offers hold no more than their share of the cache, the oldest being revoked first."""

from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.connector.offer_quota import OfferQuota
from nixl_kv.geometry.layout import block_ids
from nixl_kv.ids import Nonce, RequestId


def add(quota: OfferQuota, number: int, blocks: set[int]) -> None:
    quota.add(RequestId(f"p{number}"), Nonce(f"nonce{number}"), block_ids(list(blocks)))


def test_nothing_is_revoked_while_there_is_room() -> None:
    quota = OfferQuota(100, 0.5)
    add(quota, 1, set(range(50)))
    assert quota.pop_excess() == []
    assert repr(quota) == "<OfferQuota: 50 of 50 blocks>"


def test_the_oldest_are_revoked_until_the_rest_fits_and_each_once() -> None:
    quota = OfferQuota(100, 0.5)
    for number in range(4):
        add(quota, number, set(range(number * 20, number * 20 + 20)))
    assert quota.pop_excess() == ["nonce0", "nonce1"]
    assert quota.pop_excess() == []


def test_offers_that_have_ended_count_no_more() -> None:
    quota = OfferQuota(100, 0.5)
    add(quota, 0, set(range(40)))
    add(quota, 1, set(range(40, 80)))
    quota.remove([RequestId("p0"), RequestId("unknown")])
    assert quota.pop_excess() == []


def test_a_block_of_several_offers_counts_once() -> None:
    """A common prefix: to revoke one of them frees nothing of it."""
    quota = OfferQuota(10, 0.5)
    for number in range(9):
        add(quota, number, {1, 2, 3, 4})
    assert quota.pop_excess() == []
    add(quota, 9, {1, 2, 3, 4, 5, 6})
    assert quota.pop_excess() == [f"nonce{number}" for number in range(9)]


def test_a_prompt_longer_than_the_share_is_offered_all_the_same() -> None:
    quota = OfferQuota(10, 0.2)
    add(quota, 0, set(range(9)))
    assert quota.pop_excess() == []
    add(quota, 1, {9})
    assert quota.pop_excess() == ["nonce0"]


def test_a_prefill_may_begin_while_offers_leave_room_or_hold_nothing() -> None:
    quota = OfferQuota(10, 0.5)
    assert quota.has_room(9)
    quota.expect(RequestId("p0"), 3)
    assert (quota.has_room(2), quota.has_room(3)) == (True, False)
    add(quota, 0, {1, 2})  # it holds less than was expected
    assert (quota.has_room(3), quota.has_room(4)) == (True, False)
    quota.expect(RequestId("p1"), 3)
    quota.expect(RequestId("p1"), 3)  # again, after a preemption
    assert not quota.has_room(1)
    quota.remove([RequestId("p1")])
    assert quota.has_room(3)


def test_what_was_revoked_holds_its_blocks_until_it_has_ended() -> None:
    """It may be claimed."""
    quota = OfferQuota(10, 0.5)
    add(quota, 0, {1, 2, 3, 4})
    add(quota, 1, {5, 6, 7, 8})
    assert quota.pop_excess() == ["nonce0"]
    assert not quota.has_room(1)
    quota.remove([RequestId("p0")])
    assert quota.has_room(1)
    assert len(quota) > 0
    quota.remove([RequestId("p1")])
    assert len(quota) == 0


steps = st.lists(
    st.one_of(
        st.sets(st.integers(1, 30), min_size=1, max_size=12),  # an offer of these blocks
        st.integers(0, 20),  # that offer has ended
    ),
    max_size=40,
)


@given(steps=steps, share=st.floats(0.05, 1))
def test_the_rest_fits_whatever_happens(steps: list[set[int] | int], share: float) -> None:
    quota = OfferQuota(31, share)
    held: dict[str, set[int]] = {}
    for number, step in enumerate(steps):
        if isinstance(step, int):
            quota.remove([RequestId(f"p{step}")])
            held.pop(f"nonce{step}", None)
        else:
            add(quota, number, step)
            held[f"nonce{number}"] = step
        for nonce in quota.pop_excess():
            assert nonce == next(iter(held)), "an older one stayed"
            del held[nonce]
        assert len(held) <= 1 or len(set.union(*held.values())) <= int(31 * share)
