"""Agents that read: one after the other, when a read of the current one does not end."""

import itertools
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from harness.local.caches import Cache, Sizes
from harness.local.engine import MODEL
from harness.local.machines import by_name
from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.errors import PeerLost, TransportError
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import Endpoint, Rank, RequestId
from nixl_kv.protocol.events import (
    AbandonRead,
    Connect,
    Counts,
    DataEvent,
    DropPeer,
    HandshakeDone,
    PeerBroken,
    PeerFits,
    PeerKey,
    PeerRefused,
    PeersMoved,
    ReadDone,
    ReadFailed,
    ReadMoved,
    StartHandshake,
    StartLoad,
    StartRead,
)
from nixl_kv.protocol.messages import Description
from nixl_kv.reading.agent import READING_PAUSE_S, open_transport
from nixl_kv.reading.agents import FIRST_READ_S, GREET_S, Agents
from nixl_kv.reading.peers import RemotePeers
from nixl_kv.reading.turnover import TIDY_S, TRY_AGAIN_S
from nixl_kv.transport.base import Transport
from support.agent_reading import ReadableRank, engine_of
from support.records import D1, D2, PEER, grant
from support.stepped import Background, Clock

R0, R1 = Rank(0), Rank(1)
STOPPED = "it did not end; destroying its NIXL agent stopped it"


class Reading:
    """A decode rank's agents, and a prefill engine of two ranks with half of the heads each."""

    def __init__(self) -> None:
        self.fabric, self.clock, self.background = Fabric(), Clock(), Background(is_held=True)
        half = Sizes(heads=1)
        self.prefill = [ReadableRank(self.fabric, half, first_head=head) for head in range(2)]
        self.cache = Cache(Sizes())
        self.counts = Counts()
        self.transports: list[MemoryTransport] = []
        self.failures: list[str] = []
        self.agents = Agents(
            self._make,
            RemotePeers(self.cache.layout(), R0, MODEL),
            self.counts,
            clock=self.clock,
            make_background=lambda _count: self.background,
        )
        self.agents.open()
        self.description = engine_of(*self.prefill)
        self.join(self.description)
        while self.agents.is_busy:  # that warms up
            assert self.poll() == []
        self.counts.pop()

    def join(self, description: Description, peer: PeerKey = PEER) -> list[DataEvent]:
        """Start a handshake, and make turns until it ends."""
        ended = self.agents.execute(StartHandshake(peer, description))
        while isinstance(ended[-1], PeerFits):
            assert self.agents.is_busy
            ended += self.poll()
        return ended

    def _make(self) -> Transport:
        if self.failures:
            raise TransportError(self.failures.pop())
        self.transports.append(MemoryTransport(self.fabric))
        return self.transports[-1]

    def start(
        self, request: RequestId, rank: Rank = R0, block: int = 7, peer: PeerKey = PEER
    ) -> list[DataEvent]:
        load = StartLoad(request, 0, 4, (Table.of([block]),))
        granted = grant(tables=(Table.of([3]),))
        return self.agents.execute(StartRead(peer, rank, granted, load))

    def poll(self) -> list[DataEvent]:
        """The events of a turn, after all work in the background and all reads of slots."""
        self.background.work()
        ended = self.agents.poll()
        while any(isinstance(event, ReadMoved) for event in ended):
            ended = [event for event in ended if not isinstance(event, ReadMoved)]
            ended += self.agents.poll()
        return ended

    def until(self, kind: type[DataEvent], request: RequestId | None = None) -> list[DataEvent]:
        """All that ends until such an event has come."""
        ended: list[DataEvent] = []
        while not any(
            isinstance(event, kind) and request in (None, getattr(event, "request", None))
            for event in ended
        ):
            ended += self.poll()
        return ended

    def settle(self, turns: int = 0) -> list[DataEvent]:
        """The events of this number of turns; of all until the agents are idle, if it is 0."""
        ended = [event for _ in range(turns) for event in self.poll()]
        while not turns and self.agents.is_busy:
            ended += self.poll()
        return ended

    def abandon_stuck(self, request: RequestId = D1) -> None:
        """Begin a read that does not end, and give it up."""
        self.fabric.reads_hang = True
        self.start(request)
        self.agents.execute(AbandonRead(request, R0))

    @property
    def num_transports(self) -> int:
        """How many transports of this rank are open."""
        return sum(transport.name in self.fabric.transports for transport in self.transports)


@pytest.fixture
def reading() -> Reading:
    return Reading()


def test_only_the_first_agent_rehearses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal serves the whole process."""
    rehearse = Mock()
    monkeypatch.setattr(MemoryTransport, "rehearse", rehearse)
    reading = Reading()
    rehearse.assert_called_once()
    reading.abandon_stuck()
    while reading.num_transports < 2:
        reading.poll()
    rehearse.assert_called_once()


# --- actions of the decode machine


OTHER = replace(PEER, endpoint=Endpoint("tcp://10.0.0.9:5600"))


def test_no_call_is_made_of_an_agent_to_which_a_peer_is_being_added(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait until the end of that; and between two of them reads are looked at."""
    reading.fabric.polls = 100
    reading.start(D1)
    transport, calls = reading.agents.current.transport, Mock()
    for name in ("add_peer", "read", "poll", "prepare", "drop_peer"):
        calls.attach_mock(Mock(wraps=getattr(transport, name)), name)
        monkeypatch.setattr(transport, name, getattr(calls, name))
    peers = [replace(PEER, endpoint=Endpoint(f"tcp://10.0.2.{n}:5600")) for n in range(3)]
    for peer in peers:
        reading.agents.execute(StartHandshake(peer, reading.description))
    reading.agents.poll()
    calls.reset_mock()
    reading.start(D2, block=8)
    reading.agents.execute(DropPeer(peers[2]))
    for _ in range(3):
        assert reading.agents.poll() == []
    assert calls.mock_calls == [], "a peer is being added"
    joined: list[DataEvent] = []
    while len(joined) < 2:
        joined += reading.poll()
    assert joined == [HandshakeDone(peer) for peer in peers[:2]]
    names = [name for name, _, _ in calls.mock_calls]
    adds = [place for place, name in enumerate(names) if name == "add_peer"]
    assert len(adds) == 4
    for one, next_one in itertools.pairwise(adds):
        assert "poll" in names[one:next_one]
    assert {read.request for read in reading.agents.current.reads} >= {D1, D2}


def test_a_read_waits_for_the_join_which_is_counted_in_seconds(reading: Reading) -> None:
    reading.agents.execute(StartHandshake(OTHER, reading.description))
    assert reading.start(D1, peer=OTHER) == []
    assert reading.agents.poll() == []
    reading.clock.now += 0.25
    assert {type(event) for event in reading.until(ReadDone)} == {HandshakeDone, ReadDone}
    assert reading.counts.seconds["first_contact_seconds", "handshake"] == [0.25]


@pytest.mark.parametrize("steps", range(4))
def test_a_peer_that_is_dropped_is_not_joined(reading: Reading, steps: int) -> None:
    reading.agents.execute(DropPeer(PEER))  # which has the same agents
    reading.agents.execute(StartHandshake(OTHER, reading.description))
    for step in range(steps):
        assert (reading.poll if step % 2 else reading.agents.poll)() == []
    reading.agents.execute(DropPeer(OTHER))
    assert reading.settle(6) == []
    assert reading.agents.current.ranks.num_left == 2, "its connections stay open"
    assert not reading.agents.is_busy


def test_reads_fail_with_the_join_that_they_wait_for(reading: Reading) -> None:
    name = reading.prefill[1].transport.name
    reading.fabric.lost_peers.add(name)
    reading.agents.execute(StartHandshake(OTHER, reading.description))
    assert reading.start(D1, R1, peer=OTHER) == []
    reason = f"no peer {name!r} on the fabric"
    failed = ReadFailed(D1, R1, reason)
    assert reading.until(ReadFailed) == [PeerRefused(OTHER, reason), failed]
    assert reading.start(D2, peer=OTHER) == [ReadFailed(D2, R0, "engine 'prefill' is gone")]


def test_a_read_that_waits_can_be_abandoned_at_once(reading: Reading) -> None:
    reading.agents.execute(StartHandshake(OTHER, reading.description))
    for request in (D1, D2):
        assert reading.start(request, peer=OTHER) == []
    abandoned = reading.agents.execute(AbandonRead(D1, R0))
    assert abandoned == [ReadFailed(D1, R0, "it could not begin in time")]
    reading.agents.forget_peers()
    assert reading.settle(6) == []
    assert not reading.agents.is_busy


def test_another_agent_goes_on_with_the_join(reading: Reading) -> None:
    """Also a peer that the one before had joined is prepared, when it is read."""
    reading.abandon_stuck()
    reading.agents.poll()
    reading.agents.execute(StartHandshake(OTHER, reading.description))
    reading.background.work()
    reading.fabric.reads_hang = False
    reading.until(HandshakeDone)
    assert len(reading.transports) == 2
    assert reading.start(D2) == []
    reading.until(ReadDone, D2)


def test_a_peer_whose_first_read_breaks_has_not_joined(reading: Reading) -> None:
    """Also if another peer is read meanwhile; the next handshake prepares it anew."""
    ranks = [ReadableRank(reading.fabric, Sizes(heads=1), first_head=head) for head in range(2)]
    events = reading.agents.execute(StartHandshake(OTHER, engine_of(*ranks)))
    reading.poll()
    reading.background.work()  # its first rank is added, and the connection breaks
    reading.fabric.lost_peers.add(ranks[0].transport.name)
    events += reading.agents.poll()
    reading.background.work()  # so is its second one, which has not been polled yet
    events += reading.start(D1)
    events += reading.settle(20)
    of_other = [event for event in events if getattr(event, "peer", None) == OTHER]
    assert [type(event) for event in of_other] == [PeerFits, PeerBroken]
    assert not reading.agents.is_busy
    reading.agents.execute(DropPeer(OTHER, is_dead=True))
    reading.settle(6)
    reading.fabric.lost_peers.clear()
    assert reading.join(engine_of(*ranks), OTHER)[-1] == HandshakeDone(OTHER)
    reading.start(D2, peer=OTHER)
    assert [type(event) for event in reading.until(ReadDone)] == [ReadDone]


def test_a_read_that_begins_right_after_a_break_uses_a_new_connection(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode's queue starts the next load in the turn in which a read breaks."""
    reading.fabric.reads_hang = True
    reading.start(D1)
    reading.fabric.lost_peers.add(reading.prefill[0].transport.name)
    broken = reading.agents.poll()
    assert {type(event) for event in broken} == {ReadFailed, PeerBroken}
    reading.fabric.lost_peers.clear()
    reading.fabric.reads_hang = False
    added = Mock(wraps=reading.transports[0].add_peer)
    monkeypatch.setattr(reading.transports[0], "add_peer", added)
    events = reading.start(D2)
    events += reading.settle(20)
    assert [type(event) for event in events] == [ReadDone]
    assert added.call_count == len(reading.prefill)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_peer_whose_first_read_breaks_each_time_fails_what_is_read_of_it(
    reading: Reading, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = 2 // num_ranks
    ranks = [
        ReadableRank(reading.fabric, Sizes(heads=heads), first_head=n * heads)
        for n in range(num_ranks)
    ]
    assert reading.join(engine_of(*ranks), OTHER)[-1] == HandshakeDone(OTHER)
    reading.settle()
    added = Mock(wraps=reading.transports[0].add_peer)
    monkeypatch.setattr(reading.transports[0], "add_peer", added)
    fail = Mock(side_effect=PeerLost("it was reset"))
    monkeypatch.setattr(reading.transports[0], "read", fail)
    for _ in range(2):
        events = reading.start(D2, peer=OTHER)
        events += reading.settle(20)
        assert {type(event) for event in events} == {ReadFailed, PeerBroken}
        assert len(events) == 2, "one for the connection"
    assert added.call_count == num_ranks, "when it was read for the second time"


@pytest.mark.parametrize("is_read", [False, True])
def test_a_peer_whose_connection_broke_is_proven_anew(reading: Reading, *, is_read: bool) -> None:
    """Once the reads over the broken connection have ended."""
    reading.fabric.reads_hang = True
    reading.start(D1)
    reading.start(D2, R1)
    reading.fabric.lost_peers.add(reading.prefill[0].transport.name)
    broken = reading.agents.poll()
    assert {type(event) for event in broken} == {ReadFailed, PeerBroken}
    reading.fabric.lost_peers.clear()
    assert reading.agents.execute(Connect(PEER, ())) == []
    if is_read:
        assert reading.settle(6) == [], "the other rank is still read"
    reading.fabric.reads_hang = False
    ended = reading.until(HandshakeDone)
    assert [type(event) for event in ended] == [ReadDone, HandshakeDone]
    assert not reading.agents.is_busy
    reading.start(D1)
    assert [type(event) for event in reading.until(ReadDone)] == [ReadDone]


def begin_join(reading: Reading) -> None:
    """Until the first reads of the peer's ranks go on, which do not end."""
    reading.fabric.reads_hang = True
    reading.agents.execute(StartHandshake(OTHER, reading.description))
    while len(reading.agents.current.warm_ups) < 4:  # data and a slot of each rank
        assert reading.poll() == []


def test_a_first_read_that_never_ends_breaks_the_peer_and_costs_nothing_else(
    reading: Reading,
) -> None:
    begin_join(reading)
    for _ in range(int(FIRST_READ_S / GREET_S) - 1):
        reading.clock.now += GREET_S
        assert reading.poll() == [PeersMoved((OTHER,))], "so that prefill serves the read"
        assert reading.poll() == []
    assert reading.agents.pause_s > READING_PAUSE_S, "it takes long, so it is looked at rarely"
    reading.clock.now += GREET_S
    (broken,) = reading.poll()
    assert isinstance(broken, PeerBroken)
    assert broken.reason == "its first read has not ended in 30 s"
    assert not reading.agents.is_busy, "no one waits for it any longer"
    reading.agents.execute(DropPeer(OTHER, is_dead=True))
    assert reading.poll() == []
    assert not reading.agents.is_busy
    reading.fabric.reads_hang = False
    assert reading.poll() == []
    assert reading.agents.current.warm_ups == []
    assert by_name(reading.counts)["first_contact_seconds warm_up"] == 4


def test_a_first_read_of_a_former_attempt_does_not_keep_the_next_one(reading: Reading) -> None:
    """It may never end, and NIXL cannot abort it."""
    begin_join(reading)
    reading.agents.execute(DropPeer(OTHER))
    reading.poll()
    former = list(reading.agents.current.warm_ups)
    reading.fabric.reads_hang = False
    for read in former:
        read.op.poll = list  # type: ignore[method-assign]
    assert reading.join(reading.description, OTHER)[-1] == HandshakeDone(OTHER)
    assert reading.agents.current.warm_ups[:4] == former


def test_a_first_read_whose_state_is_unknown_breaks_the_peer(reading: Reading) -> None:
    begin_join(reading)
    for read in reading.agents.current.warm_ups:
        read.op.poll = Mock(side_effect=TransportError("its state is 'odd'"))  # type: ignore[method-assign]
    assert reading.poll() == [PeerBroken(OTHER, "its state is 'odd'")]
    assert not reading.agents.is_busy


def test_an_agent_on_which_nothing_but_a_warm_up_goes_on_is_destroyed(reading: Reading) -> None:
    begin_join(reading)
    reading.agents.execute(DropPeer(OTHER))
    reading.abandon_stuck()
    assert reading.until(ReadFailed) == [ReadFailed(D1, R0, STOPPED)]


def forget_some(reading: Reading, count: int) -> None:
    """Meet other engines, and forget them."""
    for number in range(count):
        peer = replace(PEER, endpoint=Endpoint(f"tcp://10.0.1.{number}:5600"))
        engine = engine_of(ReadableRank(reading.fabric, Sizes()))
        assert reading.join(engine, peer)[-1] == HandshakeDone(peer)
        reading.agents.execute(DropPeer(peer))
    reading.settle()


@pytest.mark.parametrize("count", [1, 3])
def test_an_agent_with_unused_connections_is_replaced(reading: Reading, count: int) -> None:
    """Its reads end there, and the new one knows its peers before it is used."""
    first, started = reading.agents.current, reading.clock.now
    forget_some(reading, count)
    polls, reading.fabric.polls = reading.fabric.polls, 1_000_000
    assert reading.start(D1) == []
    (long,) = first.reads
    reading.fabric.polls = polls
    told: list[DataEvent] = []
    while reading.agents.current is first:
        assert reading.clock.now <= started + 2 * TIDY_S
        if not reading.agents.polled[1:] and len(reading.background) == 0:
            reading.clock.now = reading.agents.next_due or 0.0
        told += reading.poll()
    assert reading.clock.now >= started + TIDY_S
    assert told == [PeersMoved((PEER,))]
    assert reading.agents.is_read(D1)
    assert reading.num_transports == 2
    assert reading.start(D2, block=8) == []
    assert [read.request for read in reading.agents.current.reads] == [D2], "no peer is added first"
    long.op._posted[0].polls_left = 0  # type: ignore[attr-defined]
    ended = reading.settle()
    assert {event.request for event in ended if isinstance(event, ReadDone)} == {D1, D2}
    assert reading.num_transports == 1
    assert by_name(reading.counts).get("replaced_agents departed_peers") == 1
    reading.clock.now += TIDY_S
    reading.poll()
    assert reading.agents.next_due is None, "nothing is left to look for"


@pytest.mark.parametrize(
    ("per_left", "num_left", "is_replaced"),
    [(1, 1, False), (1, 2, True), (2, 1, True), (10, 1, True)],
)
def test_an_agent_is_kept_while_many_ranks_would_be_added_again_for_few_that_left(
    reading: Reading,
    monkeypatch: pytest.MonkeyPatch,
    per_left: int,
    num_left: int,
    is_replaced: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """Two ranks are read; `per_left` of them may be added again for each that left."""
    monkeypatch.setattr("nixl_kv.reading.turnover.READ_PER_LEFT", per_left)
    first, ends_at = reading.agents.current, reading.clock.now + 4 * TIDY_S
    forget_some(reading, num_left)
    while reading.clock.now < ends_at:
        reading.clock.now += TIDY_S / 4
        reading.settle(6)
    assert (reading.agents.current is not first) == is_replaced
    assert (reading.agents.next_due is None) == is_replaced, "it may pay later"


def test_a_read_that_does_not_end_takes_the_agent_that_is_being_prepared(reading: Reading) -> None:
    forget_some(reading, 2)
    reading.clock.now = reading.agents.next_due or 0.0
    while len(reading.agents.polled) == 1:
        reading.poll()
    reading.abandon_stuck()
    assert ReadFailed(D1, R0, STOPPED) in reading.until(ReadFailed)
    assert reading.num_transports == 1


# --- a read that does not end


def test_an_agent_that_cannot_be_made_or_destroyed_is_tried_again_later(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    reading.failures = ["second", "no memory"]
    reading.fabric.closes_fail = True
    reading.abandon_stuck()
    for _ in range(2):
        reading.agents.poll()
        assert reading.poll() == []
        assert reading.agents.is_read(D1)
        assert reading.agents.poll() == []
        assert len(reading.background) == 0, "it waits before it tries again"
        reading.clock.now += TRY_AGAIN_S
    words = "cannot create a NIXL agent: no memory; blocks stay held until a retry succeeds"
    assert words in caplog.text
    reading.agents.poll()
    reading.poll()
    assert reading.settle(3) == []
    words = "cannot destroy a NIXL agent: this transport does not end; its blocks stay held"
    assert words not in caplog.text
    reading.clock.now += TRY_AGAIN_S
    assert reading.poll() == []
    assert words in caplog.text
    assert reading.agents.is_read(D1)
    reading.fabric.closes_fail = False
    assert reading.poll() == [ReadFailed(D1, R0, STOPPED)]
    assert by_name(reading.counts) == {"replaced_agents stuck_read": 1}


@pytest.mark.parametrize("has_begun", [False, True], ids=["waiting", "running"])
def test_an_agent_that_is_being_made_is_not_left_behind(
    reading: Reading, *, has_begun: bool
) -> None:
    """It registers the cache's memory."""
    reading.abandon_stuck()
    reading.agents.poll()
    opening = reading.agents.turnover._opening
    assert opening is not None
    if has_begun:
        opening.set_running_or_notify_cancel()
        with pytest.raises(TransportError, match="a NIXL agent is being created"):
            reading.agents.close()
        assert not reading.agents.is_read(D1), "its agent is gone"
        opening.set_result(open_transport(reading._make, reading.cache.layout()))
        assert reading.num_transports == 1
    reading.agents.close()
    assert reading.num_transports == 0
    assert opening.cancelled() is not has_begun


def test_a_closed_agent_reads_nothing(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that does not end keeps no other one."""
    reading.fabric.reads_hang = True
    reading.start(D1, R1)
    reading.start(D2, block=8)
    reading.agents.execute(AbandonRead(D2, R0))
    while len(reading.agents.polled) < 2:
        reading.poll()
    _, old = reading.agents.polled
    closed, error = Mock(), TransportError("it is still referred to")
    monkeypatch.setattr(reading.agents.peers.paths[0], "close", closed)
    with monkeypatch.context() as failing:
        failing.setattr(old, "close", Mock(side_effect=error))
        with pytest.raises(TransportError, match="it is still referred to"):
            reading.agents.close()
    assert reading.agents.polled == [old]
    closed.assert_not_called()
    assert reading.agents.is_read(D2)
    reading.agents.close()
    assert not reading.agents.is_read(D2)
    assert reading.num_transports == 0
    closed.assert_called_once()
