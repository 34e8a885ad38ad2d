"""One agent that reads: data and slots, what becomes of them, and what cannot be read."""

from unittest.mock import Mock

import numpy as np
import pytest
from msgspec.structs import replace

from harness.local.memory import MemoryTransport
from nixl_kv.errors import TransportError
from nixl_kv.ids import Endpoint, Rank, RequestId, new_fence_token
from nixl_kv.protocol.events import PeerBroken, ReadDone, ReadFailed, ReadMoved, StopRead
from nixl_kv.reading import agent as read_agent
from nixl_kv.reading.agent import MAX_SLOT_READS, SlotOp
from support.agent_reading import R0, SIZES, Reading
from support.records import D1, PEER

UNKNOWN = replace(PEER, endpoint=Endpoint("tcp://10.0.0.9:5600"))


@pytest.fixture
def reading() -> Reading:
    return Reading()


def test_a_read_ends_when_all_bytes_have_landed(reading: Reading) -> None:
    reading.fabric.polls = 3
    before = reading.cache.view.copy()
    assert reading.start([2, 9], [7, 3], range(8)) == []
    assert reading.agent.poll() == []
    assert reading.agent.poll() == []
    assert np.array_equal(reading.cache.view, before)
    reading.clock.now += 1.5
    num_bytes = reading.cache.blocks([0, 0]).nbytes
    assert reading.agent.poll() == [ReadMoved(D1, R0)]
    for _ in range(2):  # its slot is read
        assert reading.agent.poll() == []
    (event,) = reading.agent.poll()
    assert isinstance(event, ReadDone)
    assert (event.request, event.rank) == (D1, R0)
    assert (event.num_bytes, event.seconds) == (num_bytes, 1.5)
    assert event.num_runs == 2 * SIZES.layers
    expected = reading.prefill.cache.blocks([7, 3])
    assert np.array_equal(reading.cache.blocks([2, 9]), expected)
    assert reading.agent.reads == []
    assert reading.agent.poll() == []


def test_a_read_that_ends_while_it_is_posted_is_known_at_once(reading: Reading) -> None:
    """Shared memory does this."""
    reading.fabric.polls = 0
    (done,) = reading.start([2, 9], [7, 3], range(8))
    assert isinstance(done, ReadDone)
    assert np.array_equal(reading.cache.blocks([2, 9]), reading.prefill.cache.blocks([7, 3]))
    fence_token = new_fence_token()
    reading.prefill.slots.write(3, fence_token)
    assert reading.read_slot(3) == [ReadDone(D1, R0, fence_token=fence_token)]
    assert reading.agent.reads == []
    assert reading.read_slot(3) == [ReadDone(D1, R0, fence_token=fence_token)], (
        "its entry was not free again"
    )


def test_of_a_turn_only_so_much_data_is_known_at_once(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one would follow the other for as long as some wait, and nothing else be done."""
    num_bytes = reading.cache.blocks([0, 0]).nbytes
    monkeypatch.setattr(read_agent, "AT_ONCE_BYTES", 2 * num_bytes + 1)
    reading.agent.poll()
    reading.fabric.polls = 0
    known = [len(reading.start([2, 9], [7, 3], range(8))) for _ in range(4)]
    assert known == [1, 1, 0, 0]
    assert len(reading.agent.poll()) == 2
    assert len(reading.start([2, 9], [7, 3], range(8))) == 1


@pytest.mark.parametrize(
    ("local", "remote", "words"),
    [
        ([2], [7, 3], "block table has 1 entries"),
        ([2, 9], [7], "block table has 1 entries"),
        ([2, 10], [7, 3], "block id 10"),
        ([2, 9], [7, 99], "block id 99"),
        ([2, 9], [-1, 3], "absent"),
    ],
)
def test_a_read_that_cannot_be_posted_fails_at_once(
    reading: Reading, local: list[int], remote: list[int], words: str
) -> None:
    (event,) = reading.start(local, remote, range(8))
    assert isinstance(event, ReadFailed)
    assert words in event.reason
    assert reading.agent.reads == []


def test_a_peer_that_was_dropped_cannot_be_read(reading: Reading) -> None:
    reason = "engine 'prefill' is gone"
    assert reading.start([2], [7], range(4), peer=UNKNOWN) == [ReadFailed(D1, R0, reason)]
    assert reading.read_slot(3, UNKNOWN) == [ReadFailed(D1, R0, reason)]
    assert len(reading.agent.free_entries) == MAX_SLOT_READS


def test_a_slot_is_read_into_an_entry_that_was_cleared(reading: Reading) -> None:
    """Otherwise a former read's token could prove a read that never happened."""
    first, second = new_fence_token(), new_fence_token()
    reading.prefill.slots.write(3, first)
    assert reading.read_slot(3) == []
    assert reading.agent.poll() == [ReadDone(D1, R0, fence_token=first)]
    reading.fabric.polls = 2
    assert reading.read_slot(3) == []
    (read,) = reading.agent.reads
    assert isinstance(read.op, SlotOp)
    assert reading.agent.slots.read(read.op._entry) == bytes(16)
    reading.prefill.slots.write(3, second)
    assert reading.agent.poll() == []
    assert reading.agent.poll() == [ReadDone(D1, R0, fence_token=second)]


def test_entries_for_slots_are_bounded_and_used_again(reading: Reading) -> None:
    reading.agent.free_entries = [1]
    reading.fabric.reads_hang = True
    assert reading.read_slot(0) == []
    (failed,) = reading.read_slot(0)
    assert isinstance(failed, ReadFailed)
    assert str(MAX_SLOT_READS) in failed.reason
    reading.fabric.reads_hang = False
    assert len(reading.agent.poll()) == 1
    assert reading.read_slot(0) == []
    (failed,) = reading.read_slot(8)
    assert isinstance(failed, ReadFailed), "the peer does not have that slot"
    assert len(reading.agent.free_entries) == 0


@pytest.mark.parametrize("kind", ["data", "slot"])
def test_a_read_in_an_unknown_state_ends_with_its_agent(
    reading: Reading, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes may still land: NIXL says 'not found' of a read whose peer was removed, and goes on."""
    reading.fabric.polls = 4
    assert (reading.start([2], [7], range(4)) if kind == "data" else reading.read_slot(3)) == []
    fail = Mock(side_effect=TransportError("not found"))
    monkeypatch.setattr(reading.agent.transport, "poll", fail)
    for _ in range(3):
        assert reading.agent.poll() == []
    (read,) = reading.agent.reads
    assert read.is_abandoned
    fail.assert_called_once()
    reason = "not found; destroying its NIXL agent stopped it"
    assert reading.agent.fail_all() == [ReadFailed(D1, R0, reason)]


def test_reads_of_a_peer_that_dies_fail(reading: Reading) -> None:
    """And so do those that begin later, at once."""
    reading.fabric.reads_hang = True
    reading.start([2], [7], range(4))
    reading.read_slot(3)
    reading.fabric.lost_peers.add(reading.prefill.transport.name)
    events = reading.agent.poll()
    assert [type(event) for event in events] == [ReadFailed, ReadFailed, PeerBroken]
    assert "is gone" in str(events[0])
    for (event,) in (reading.start([2, 9], [7, 3], range(8)), reading.read_slot(3)):
        assert isinstance(event, ReadFailed)
    assert reading.agent.reads == []
    assert len(reading.agent.free_entries) == MAX_SLOT_READS


def test_an_unwanted_read_ends_when_its_posted_parts_have_landed(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it goes piece by piece; else all of it lands, as if it were wanted."""
    stop = Mock(side_effect=[False, True])  # of the second one there was more to be asked for
    monkeypatch.setattr(MemoryTransport, "stop", stop)
    reading.fabric.polls = 1
    reading.start([2, 9], [7, 3], range(8))
    reading.agent.stop(StopRead(D1, Rank(1)))
    reading.agent.stop(StopRead(RequestId("d2"), R0))
    stop.assert_not_called()
    reading.agent.stop(StopRead(D1, R0))
    (done,) = reading.agent.poll()
    assert isinstance(done, ReadDone)
    reading.fabric.polls = 3
    reading.start([2, 9], [7, 3], range(8))
    reading.agent.stop(StopRead(D1, R0))
    reading.agent.stop(StopRead(D1, R0))
    reading.clock.now += 50.0
    assert [reading.agent.poll() for _ in range(2)] == [[], []]
    assert reading.agent.poll() == [ReadFailed(D1, R0, "no longer wanted")]
    assert stop.call_count == 2
    reading.read_slot(3)
    reading.agent.stop(StopRead(D1, R0))
    assert len(reading.agent.poll()) == 0
