"""Agents that read: one after the other, when a read of the current one does not end."""

import logging
from collections import defaultdict

import pytest
from msgspec.structs import replace

from lab.local.caches import Cache, Sizes
from lab.local.engine import MODEL
from nixl_kv.errors import LocalProtocolError, TransportError
from nixl_kv.geometry.blocks import Table
from nixl_kv.ids import Endpoint, Rank, RequestId, new_generation
from nixl_kv.protocol.events import (
    AbandonRead,
    DataEvent,
    DropPeer,
    JoinPeer,
    PeerJoined,
    PeerKey,
    PeerRefused,
    ReadDone,
    ReadFailed,
    ReadSlot,
    SlotRead,
    StartLoad,
    StartRead,
)
from nixl_kv.protocol.messages import Description
from nixl_kv.transfer.agents import TRY_AGAIN_S, Agents
from nixl_kv.transfer.remote_peers import RemotePeers
from nixl_kv.transport.base import PeerName, Transport
from nixl_kv.transport.memory import Fabric, MemoryTransport
from support.readable import ReadableRank, engine_of
from support.records import D1, D2, PEER, grant
from support.stepped import Background, Clock

R0, R1 = Rank(0), Rank(1)
D3 = RequestId("d3")
STOPPED = "it did not end, and was stopped with its agent"


class Reading:
    """A decode rank's agents, and a prefill engine of two ranks with half of the heads each."""

    def __init__(self) -> None:
        self.fabric, self.clock, self.background = Fabric(), Clock(), Background(is_held=True)
        half = Sizes(heads=1)
        self.prefill = [ReadableRank(self.fabric, half, first_head=head) for head in range(2)]
        self.cache = Cache(Sizes())
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.transports: list[MemoryTransport] = []
        self.failures: list[str] = []
        self.agents = Agents(
            self._make,
            RemotePeers(self.cache.layout(), R0, MODEL),
            self.counts,
            clock=self.clock,
            opening=self.background,
            closing=self.background,
        )
        self.agents.open()
        self.description = engine_of(*self.prefill)
        self.joined = self.join(self.description)

    def join(self, description: Description) -> DataEvent:
        """What comes of it, after as many turns as it takes."""
        assert self.agents.execute(JoinPeer(PEER, description)) == []
        ended: list[DataEvent] = []
        while not ended:
            assert self.agents.is_joining
            ended = self.agents.poll()
        assert not self.agents.is_joining
        (event,) = ended
        return event

    def _make(self) -> Transport:
        if self.failures:
            raise TransportError(self.failures.pop())
        self.transports.append(MemoryTransport(self.fabric))
        return self.transports[-1]

    def start(self, request: RequestId, rank: Rank = R0, block: int = 7) -> list[DataEvent]:
        load = StartLoad(request, 0, 4, (Table.of([block]),))
        granted = grant(tables=(Table.of([3]),))
        return self.agents.execute(StartRead(PEER, rank, granted, load))

    def poll(self) -> list[DataEvent]:
        """What has ended, when all that goes on in the background is done."""
        self.background.work()
        return self.agents.poll()

    @property
    def num_transports(self) -> int:
        """Of this rank, that are not closed."""
        return sum(transport.name in self.fabric.transports for transport in self.transports)


@pytest.fixture
def reading() -> Reading:
    return Reading()


# --- actions of the decode machine


def test_a_peer_that_fits_is_joined_with_its_routes(reading: Reading) -> None:
    joined = reading.joined
    assert isinstance(joined, PeerJoined)
    assert joined.peer == PEER
    assert {route.remote_rank: route.readers for route in joined.routes} == {0: (0,), 1: (0,)}


def test_a_peer_that_does_not_fit_is_refused_in_words(reading: Reading) -> None:
    other = engine_of(ReadableRank(reading.fabric, Sizes(heads=4)))
    refused = reading.join(other)
    assert isinstance(refused, PeerRefused)
    assert "number of KV heads" in refused.reason


def test_a_turn_joins_one_rank_of_one_peer(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes up to 140 ms; between two of them leases are renewed."""
    added: list[bytes] = []
    transport = reading.agents.current.transport
    add_peer = transport.add_peer

    def add(agent: bytes) -> PeerName:
        added.append(agent)
        return add_peer(agent)

    monkeypatch.setattr(transport, "add_peer", add)
    peers = [replace(PEER, endpoint=Endpoint(f"tcp://10.0.0.{n}:5600")) for n in range(3)]
    for peer in peers:
        reading.agents.execute(JoinPeer(peer, reading.description))
    joined: list[PeerKey] = []
    while reading.agents.is_joining:
        before = len(added)
        joined += [e.peer for e in reading.agents.poll() if isinstance(e, PeerJoined)]
        assert len(added) - before <= 1
    assert joined == peers
    assert len(added) == 6


@pytest.mark.parametrize("steps", [0, 1])
def test_a_peer_that_is_dropped_is_not_joined(
    reading: Reading, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[str] = []
    transport = reading.agents.current.transport
    monkeypatch.setattr(transport, "drop_peer", dropped.append)
    other = replace(PEER, endpoint=Endpoint("tcp://10.0.0.9:5600"))
    reading.agents.execute(JoinPeer(other, reading.description))
    for _ in range(steps):
        assert reading.agents.poll() == []
    reading.agents.execute(DropPeer(other))
    assert not reading.agents.is_joining
    assert len(dropped) == steps, "of each rank that was added"
    assert reading.poll() == []


def test_a_peer_that_is_still_read_stays_with_the_agent_that_reads_it(reading: Reading) -> None:
    """After a restart nobody else knows of that read, and only the agent's end stops it."""
    (agent,) = reading.agents.polled
    reading.fabric.reads_hang = True
    reading.start(D1)
    reading.agents.execute(DropPeer(PEER))
    assert repr(agent.peers) == "<PreparedPeers: 2 of prefill>"
    assert reading.start(D2) == [ReadFailed(D2, R0, "engine 'prefill' is gone")]
    reading.fabric.reads_hang = False
    (done,) = reading.agents.poll()
    assert isinstance(done, ReadDone)
    reading.agents.execute(DropPeer(PEER))
    assert repr(agent.peers) == "<PreparedPeers: none>"


def test_reads_of_data_and_slots_end(reading: Reading) -> None:
    generation = new_generation()
    reading.prefill[1].slots.write(2, generation)
    assert not reading.agents.is_busy
    assert reading.start(D1) == []
    assert reading.agents.execute(ReadSlot(PEER, R1, D2, 2)) == []
    assert reading.agents.is_busy
    assert reading.agents.is_read(D1)
    assert reading.agents.is_read(D2)
    done, slot = reading.poll()
    assert isinstance(done, ReadDone)
    assert slot == SlotRead(D2, R1, generation)
    assert not reading.agents.is_busy
    assert not reading.agents.is_read(D1)


def test_a_rank_without_an_agent_reads_nothing() -> None:
    cache, clock = Cache(Sizes()), Clock()
    agents = Agents(
        lambda: MemoryTransport(Fabric()),
        RemotePeers(cache.layout(), R0, MODEL),
        defaultdict(float),
        clock=clock,
        opening=Background(),
        closing=Background(),
    )
    assert agents.poll() == []
    assert not agents.is_busy
    with pytest.raises(LocalProtocolError, match="no agent to read with"):
        agents.execute(ReadSlot(PEER, R0, D1, 0))
    agents.close()


# --- a read that does not end


def test_a_stuck_read_fails_only_on_the_proof_that_its_agent_is_gone(reading: Reading) -> None:
    reading.fabric.reads_hang = True
    reading.start(D1)
    reading.agents.execute(AbandonRead(D1, R0))
    for _ in range(3):
        assert reading.agents.poll() == []  # another agent is being made
        assert len(reading.background) == 1
    assert reading.poll() == []  # it is used from now on; the first one is being destroyed
    assert reading.num_transports == 2
    assert reading.agents.is_read(D1)
    assert reading.agents.is_busy
    assert reading.agents.poll() == []
    assert reading.poll() == [ReadFailed(D1, R0, STOPPED)]
    assert reading.num_transports == 1
    assert not reading.agents.is_read(D1)
    assert not reading.agents.is_busy
    assert reading.counts == {"agents_recycled": 1}


def test_only_the_read_from_that_rank_is_abandoned(reading: Reading) -> None:
    reading.fabric.reads_hang = True
    reading.start(D1, R0)
    reading.start(D1, R1, block=8)
    reading.start(D2, R0, block=9)
    reading.agents.execute(AbandonRead(D1, R1))
    (agent,) = reading.agents.polled
    assert [read.is_abandoned for read in agent.reads] == [False, True, False]
    reading.agents.abandon(D1)
    assert [read.is_abandoned for read in agent.reads] == [True, True, False]


def test_other_reads_go_on_with_both_agents(reading: Reading) -> None:
    """A healthy read keeps its agent alive, until it has ended itself."""
    reading.fabric.hanging_peers.add(reading.prefill[0].transport.name)
    reading.fabric.polls = 3
    reading.start(D1, R0)
    reading.start(D2, R1, block=8)
    reading.agents.execute(AbandonRead(D1, R0))
    reading.agents.poll()
    assert reading.poll() == []
    reading.start(D3, R1, block=9)
    assert len(reading.agents.polled) == 2
    ended: list[DataEvent] = []
    while len(ended) < 2:
        assert reading.num_transports == 2
        ended += reading.agents.poll()
    assert {event.request for event in ended if isinstance(event, ReadDone)} == {D2, D3}
    reading.agents.poll()
    assert reading.poll() == [ReadFailed(D1, R0, STOPPED)]


def test_an_abandoned_read_that_ends_all_the_same_is_reported(reading: Reading) -> None:
    """Its agent is replaced nevertheless, with nothing left to fail."""
    reading.fabric.reads_hang = True
    reading.start(D1)
    reading.agents.execute(AbandonRead(D1, R0))
    reading.agents.poll()
    reading.fabric.reads_hang = False
    (done,) = reading.agents.poll()
    assert isinstance(done, ReadDone)
    for _ in range(3):
        assert reading.poll() == []
    assert not reading.agents.is_busy
    assert reading.num_transports == 1


def test_an_agent_that_cannot_be_made_is_tried_again_later(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    reading.failures = ["second", "no memory"]
    reading.fabric.reads_hang = True
    reading.start(D1)
    reading.agents.execute(AbandonRead(D1, R0))
    for _ in range(2):
        with caplog.at_level(logging.ERROR):
            reading.agents.poll()
            assert reading.poll() == []
        assert reading.agents.is_read(D1)
        assert reading.agents.poll() == []
        assert len(reading.background) == 0, "it waits before it tries again"
        reading.clock.now += TRY_AGAIN_S
    assert "no other NIXL agent: no memory; blocks stay held, trying again" in caplog.text
    reading.agents.poll()
    reading.poll()
    assert reading.poll() == [ReadFailed(D1, R0, STOPPED)]


def test_an_agent_that_is_not_gone_is_destroyed_again_later(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    reading.fabric.reads_hang = reading.fabric.closes_fail = True
    reading.start(D1)
    reading.agents.execute(AbandonRead(D1, R0))
    reading.agents.poll()
    reading.poll()
    for _ in range(3):
        assert reading.poll() == []
    assert reading.agents.is_read(D1)
    reading.clock.now += TRY_AGAIN_S
    with caplog.at_level(logging.ERROR):
        assert reading.poll() == []
    assert "a NIXL agent is not gone: this transport does not end; blocks stay held" in caplog.text
    assert reading.agents.is_read(D1)
    reading.fabric.closes_fail = False
    assert reading.poll() == [ReadFailed(D1, R0, STOPPED)]
    assert reading.counts == {"agents_recycled": 1}


def test_what_is_closed_reads_nothing_any_more(reading: Reading) -> None:
    reading.fabric.reads_hang = True
    reading.start(D1)
    reading.agents.close()
    assert reading.num_transports == 0
