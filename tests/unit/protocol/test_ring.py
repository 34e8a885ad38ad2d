"""The invariants of the ring slots that prefill packs into."""

from typing import Any

import pytest

from nixl_kv.errors import LocalProtocolError
from nixl_kv.ids import Rank
from nixl_kv.protocol.prefill import RingBook
from support.records import NONCE, pack_request

HOLDER = NONCE, Rank(0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        pytest.param({"_free": []}, r"ring slots \[0\] used, \[\] free", id="lost"),
        pytest.param(
            {"_free": [0, 1]}, r"ring slots \[0\] used, \[0, 1\] free", id="free and used"
        ),
    ],
)
def test_each_slot_is_used_or_free(change: dict[str, Any], error: str) -> None:
    ring = RingBook(2)
    assert ring.wait(HOLDER, b"route", pack_request())
    assert [slot for _, slot in ring.pop_packable(0.0)] == [0]
    ring.validate()
    for name, value in change.items():
        setattr(ring, name, value)
    with pytest.raises(LocalProtocolError, match=error):
        ring.validate()


def test_no_chunk_waits_beside_free_slots() -> None:
    ring = RingBook(2)
    assert ring.wait(HOLDER, b"route", pack_request())
    with pytest.raises(LocalProtocolError, match=r"waits beside \[0, 1\] free slots"):
        ring.validate()
