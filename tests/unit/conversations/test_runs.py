"""A run of blocks that the scheduler seals for its ranks, and that a reader carries between."""

from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.conversations.runs import KEY_BYTES, Run, new_key, open_run, seal
from nixl_kv.protocol.messages import MAX_HASHES, MAX_RUN
from support.records import NONCE, NONCE2

KEY, OTHER_KEY = b"k" * KEY_BYTES, b"o" * KEY_BYTES
numbers = st.integers(0, 2**62)
runs = st.builds(
    lambda ids, **more: Run(ids=b"".join(n.to_bytes(4, "little") for n in ids), **more),
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    first_block=numbers,
    steps=numbers,
    need=numbers,
    epoch=numbers,
)


def a_run(num_blocks: int = 2) -> Run:
    return Run(first_block=3, ids=b"\1\0\0\0" * num_blocks, steps=7, need=6, epoch=1)


@given(runs)
def test_a_run_comes_back(run: Run) -> None:
    assert open_run(seal(run, NONCE, KEY), NONCE, KEY) == run
    assert run.end_block - run.first_block == len(run.block_ids)


def test_the_longest_run_fits_into_an_ask() -> None:
    longest = Run(
        first_block=2**62, ids=bytes(4 * MAX_HASHES), steps=2**62, need=2**62, epoch=2**62
    )
    assert len(seal(longest, NONCE, KEY)) < MAX_RUN


def test_another_offer_another_life_or_no_key_opens_nothing() -> None:
    sealed = seal(a_run(), NONCE, KEY)
    assert open_run(sealed, NONCE2, KEY) is None
    assert open_run(sealed, NONCE, OTHER_KEY) is None
    assert open_run(sealed, NONCE, b"") is None
    assert open_run(seal(a_run(), NONCE, b""), NONCE, b"") is None, "the empty key does not count"
    assert new_key() != new_key()
    assert len(new_key()) == KEY_BYTES


@given(st.integers(0, 200), st.integers(1, 255))
def test_no_byte_can_be_changed(place: int, change: int) -> None:
    sealed = bytearray(seal(a_run(), NONCE, KEY))
    sealed[place % len(sealed)] ^= change
    assert open_run(bytes(sealed), NONCE, KEY) is None
