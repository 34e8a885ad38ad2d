"""The peers of one rank: whether they fit, which of their ranks are read, and how."""

from dataclasses import replace

import msgspec
import pytest

from harness.local.caches import Cache, Sizes
from harness.local.engine import MODEL
from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.config import Config
from nixl_kv.errors import IncompatiblePeer, LocalProtocolError, TransportError
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.geometry.match import Route
from nixl_kv.ids import Endpoint, Rank
from nixl_kv.protocol.events import PeerKey
from nixl_kv.protocol.messages import Description
from nixl_kv.reading.agent import SAMPLE_BYTES, sample_rows
from nixl_kv.reading.peers import (
    SHOWN_MISMATCHES,
    TRANSITIONS,
    Ended,
    RankEvent,
    Ranks,
    RankState,
    RemotePeers,
    RemoteRank,
)
from nixl_kv.transport.base import ListHandle, PeerName, Rows
from support.agent_reading import ReadableRank, engine_of
from support.records import PEER
from support.stepped import Background

SIZES = Sizes()
HALF = replace(SIZES, heads=1)
OTHER = msgspec.structs.replace(PEER, endpoint=Endpoint("tcp://10.0.0.9:5600"))


def peers_of(cache: Cache, model: dict[str, str] | None = None, **options: object) -> RemotePeers:
    return RemotePeers(cache.layout(), Rank(0), model or MODEL, **options)  # type: ignore[arg-type]


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def cache() -> Cache:
    return Cache(SIZES)


@pytest.fixture
def described(fabric: Fabric) -> Description:
    """An engine of one rank."""
    return engine_of(ReadableRank(fabric, SIZES))


# --- whether they fit


def refusal(peers: RemotePeers, description: Description) -> str:
    """Why this engine cannot be read; empty if it can."""
    try:
        peers.check(description)
    except IncompatiblePeer as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("differing", "more"),
    [(1, ""), (SHOWN_MISMATCHES, ""), (SHOWN_MISMATCHES + 3, "; and 3 more")],
)
def test_another_model_is_refused_with_both_values_of_some_facts(
    cache: Cache, described: Description, differing: int, more: str
) -> None:
    here, there = (dict.fromkeys((f"fact {n}" for n in range(differing)), x) for x in "12")
    shown = [f"fact {n} is '1' here and '2' there" for n in range(min(differing, SHOWN_MISMATCHES))]
    assert refusal(peers_of(cache, here), msgspec.structs.replace(described, model=there)) == (
        f"engine 'prefill' cannot be read: {'; '.join(shown)}{more}"
    )


def test_one_engine_is_read_by_those_with_its_extras_and_those_without(
    cache: Cache, described: Description
) -> None:
    there = msgspec.structs.replace(described, extras={"draft": "one"})
    one, two = (peers_of(cache, extras={"draft": name}) for name in ("one", "two"))
    assert refusal(peers_of(cache), there) == refusal(one, there) == ""
    assert refusal(two, there).endswith("cannot be read: draft is 'two' here and 'one' there")
    assert refusal(one, described).endswith("draft is 'one' here and None there")


def test_all_ranks_of_this_engine_are_compared(described: Description) -> None:
    """A rank with half of the heads does not fit alone, and does with the other half."""
    halves = [Cache(HALF, first_head=head) for head in range(2)]
    peers = peers_of(halves[0])
    assert "number of KV heads" in refusal(peers, described)
    peers.set_layouts(tuple(half.layout() for half in halves))
    assert refusal(peers, described) == ""


def test_a_description_leads_only_to_allowed_hosts(cache: Cache, described: Description) -> None:
    """The engine may be on an allowed host, and a rank of it on another one."""
    inside, outside = (
        peers_of(cache, allowed=Config.parse({"peers": [cidr]}, {}).allowed_hosts)
        for cidr in ("10.0.0.0/24", "10.0.1.0/24")
    )
    assert refusal(inside, described) == ""
    assert refusal(outside, described) == (
        f"engine 'prefill' has a rank at {described.ranks[0].endpoint}; "
        "allowed by 'peers': 10.0.1.0/24"
    )


def test_each_rank_has_an_endpoint_of_its_own(fabric: Fabric, cache: Cache) -> None:
    engine, _ = two_halves(fabric)
    same = msgspec.structs.replace(engine.ranks[1], endpoint=engine.ranks[0].endpoint)
    twice = msgspec.structs.replace(engine, ranks=(engine.ranks[0], same))
    assert "has several ranks at one endpoint" in refusal(peers_of(cache), twice)


# --- lists that an agent has prepared


class CountingTransport(MemoryTransport):
    """Keeps whom it knows, and fails for the rank that a test names."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self.known: list[PeerName] = []
        self.refused = ""

    def add_peer(self, metadata: bytes) -> PeerName:
        self.known.append(super().add_peer(metadata))
        return self.known[-1]

    def drop_peer(self, peer: PeerName) -> None:
        self.known = [name for name in self.known if name != peer]

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> ListHandle:
        if peer == self.refused:
            raise TransportError("no such memory")
        return super().prepare(rows, memory, peer)


def two_halves(fabric: Fabric) -> tuple[Description, list[ReadableRank]]:
    ranks = [ReadableRank(fabric, HALF, seed=head, first_head=head) for head in range(2)]
    return engine_of(*ranks), ranks


class Preparing:
    """One agent's peers, of which `described` has two ranks with half of the heads each."""

    def __init__(self, fabric: Fabric, cache: Cache) -> None:
        self.described, self.halves = two_halves(fabric)
        self.background, self.is_reading = Background(is_held=True), False
        self.ready: list[int] = []
        self.ended: list[Ended] = []
        self.transport, self.peers = CountingTransport(fabric), peers_of(cache)
        self.transport.register(cache.layout().spans[0], "DRAM", 0)
        self.prepared = Ranks(
            self.transport,
            self.peers,
            self.background,
            is_reading=lambda _name: self.is_reading,
            on_ready=lambda rank: self.ready.append(rank.rank),
        )

    def prepare(self, peer: PeerKey = PEER) -> None:
        self.prepared.prepare(peer, self.described, self.peers.routes(self.described))

    def step(self) -> None:
        """Make a turn, and the background's work before the next one."""
        self.ended += self.prepared.collect()
        self.prepared.begin_next()
        self.background.work()

    def run(self) -> list[Ended]:
        """All steps."""
        while self.prepared.is_busy:
            self.step()
        return self.ended


@pytest.fixture
def preparing(fabric: Fabric, cache: Cache) -> Preparing:
    return Preparing(fabric, cache)


def test_all_ranks_that_are_read_are_prepared(preparing: Preparing) -> None:
    prepared = preparing.prepared
    preparing.prepare()
    assert prepared.is_preparing(PEER)
    assert not prepared.is_preparing(OTHER)
    assert preparing.run() == [Ended(PEER)]
    assert not prepared.is_preparing(PEER)
    assert preparing.ready == [0, 1]
    assert preparing.transport.known == [rank.transport.name for rank in preparing.halves]
    for number, rank in enumerate(preparing.halves):
        one = prepared.find(PEER, Rank(number))
        assert one is not None
        assert (one.state, one.name) == (RankState.READY, rank.transport.name)
        assert one.route.share == {f"layer.{layer}": (number, number + 1) for layer in range(3)}
    prepared.drop(PEER)
    for missing in (OTHER, PEER):
        assert prepared.find(missing, Rank(0)) is None


def test_one_rank_is_planned_while_one_is_added(preparing: Preparing) -> None:
    """So each has a thread; and a rank can be read before the next one is added."""
    preparing.prepare()
    for _ in range(2):
        preparing.prepared.begin_next()
        assert len(preparing.background) == 2, "one is planned, one is added"
        assert preparing.prepared.is_adding
    preparing.background.work()
    assert not preparing.prepared.is_adding
    assert preparing.prepared.collect() == []
    assert preparing.ready == [0]
    assert preparing.run() == [Ended(PEER)]


def test_a_peer_of_which_nothing_is_read_is_prepared_at_once(preparing: Preparing) -> None:
    preparing.prepared.prepare(PEER, preparing.described, [Route(Rank(0), ())])
    assert preparing.prepared.collect() == [Ended(PEER)]


@pytest.mark.parametrize("is_added", [False, True], ids=["not added", "its list is refused"])
def test_a_rank_that_cannot_be_prepared_leaves_nothing_of_its_engine(
    fabric: Fabric, preparing: Preparing, *, is_added: bool
) -> None:
    name = preparing.halves[1].transport.name
    if is_added:
        preparing.transport.refused = name
    else:
        fabric.lost_peers.add(name)
    preparing.prepare()
    reason = "no such memory" if is_added else f"no peer {name!r} on the fabric"
    assert preparing.run() == [Ended(PEER, reason)]
    assert preparing.prepared.num_left == 1 + is_added, "connections stay open"
    assert preparing.prepared.find(PEER, Rank(0)) is None


def test_a_forgotten_peer_keeps_its_connections_and_uses_them_again(preparing: Preparing) -> None:
    for _ in range(3):
        preparing.prepare()
        preparing.run()
        assert preparing.prepared.num_left == 0
        preparing.prepared.drop(PEER)
        preparing.run()
        assert preparing.prepared.num_left == 2
    assert len(set(preparing.transport.known)) == 2


def test_a_lost_peer_is_dropped_by_the_transport_once_nothing_reads_it(
    preparing: Preparing,
) -> None:
    """Each life that has its ranks prepares them anew."""
    third = msgspec.structs.replace(PEER, endpoint=Endpoint("tcp://10.0.0.8:5600"))
    for peer in (PEER, third):
        preparing.prepare(peer)
    preparing.run()
    preparing.prepared.drop(OTHER, is_lost=True)
    preparing.run()
    assert len(preparing.transport.known) == 4
    preparing.is_reading = True
    preparing.prepared.drop(PEER, is_lost=True)
    preparing.step()
    assert len(preparing.transport.known) == 4, "it is being read"
    assert not preparing.prepared.is_busy
    preparing.is_reading = False
    preparing.run()
    assert preparing.transport.known == []
    assert preparing.prepared.num_left == 2, "only the end of the agent closes its connections"
    assert preparing.prepared.find(third, Rank(0)) is None


def test_a_peer_that_comes_back_while_it_is_still_read_stays(preparing: Preparing) -> None:
    preparing.prepare()
    preparing.run()
    preparing.is_reading = True
    preparing.prepared.drop(PEER)
    preparing.prepare()
    preparing.step()
    preparing.is_reading = False
    assert preparing.run()[-1] == Ended(PEER)
    assert preparing.prepared.find(PEER, Rank(1)) is not None
    assert set(preparing.transport.known) == {
        rank.agent.decode() for rank in preparing.described.ranks
    }


def test_nothing_is_added_after_the_end(preparing: Preparing) -> None:
    preparing.prepare()
    preparing.prepared.begin_next()
    preparing.prepared.close()
    preparing.background.work()
    assert preparing.prepared.collect() == []
    assert preparing.prepared.find(PEER, Rank(0)) is None


def test_heads_that_no_rank_has_have_no_route(fabric: Fabric, preparing: Preparing) -> None:
    with pytest.raises(ValueError, match="KV head 1"):
        preparing.peers.routes(engine_of(ReadableRank(fabric, HALF)))


def test_a_piece_of_each_region_is_the_sample(cache: Cache) -> None:
    (span,) = cache.layout().spans
    layout = replace(cache.layout(), spans=(span, Span(span.address, 10)))
    rows = sample_rows(layout, SAMPLE_BYTES)
    length = min(SAMPLE_BYTES, span.length)
    assert rows.tolist() == [[span.address, length, 0, length, 1], [span.address, 10, 0, 10, 1]]


def test_an_event_that_a_state_does_not_allow_is_an_error(preparing: Preparing) -> None:
    (route, _) = preparing.peers.routes(preparing.described)
    rank = RemoteRank(PEER, route, preparing.described.ranks[0], RankState.READY)
    refused = next(event for event in RankEvent if event not in TRANSITIONS[RankState.READY])
    with pytest.raises(LocalProtocolError, match=f"{refused.name} in state READY"):
        rank.move(refused)
