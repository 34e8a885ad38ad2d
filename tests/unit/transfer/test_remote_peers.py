"""The peers of one rank: whether they fit, which of their ranks are read, and how."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from lab.local.caches import Cache, Sizes
from lab.local.engine import MODEL
from nixl_kv.config import AllowedHosts, Config
from nixl_kv.errors import IncompatiblePeer, PeerLost, TransportError
from nixl_kv.geometry.layout import Memory, Span
from nixl_kv.ids import Endpoint, Rank
from nixl_kv.protocol.messages import Description
from nixl_kv.transfer.remote_peers import SHOWN_MISMATCHES, PreparedPeers, RemotePeers
from nixl_kv.transport.base import ListHandle, PeerName, Rows
from nixl_kv.transport.memory import Fabric, MemoryTransport
from support.readable import ReadableRank, engine_of
from support.records import PEER

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


# --- whether they fit


def test_an_engine_of_the_same_model_fits(fabric: Fabric, cache: Cache) -> None:
    peers_of(cache).check(engine_of(ReadableRank(fabric, SIZES)))


def test_another_model_is_refused_with_both_values(fabric: Fabric, cache: Cache) -> None:
    peers = peers_of(cache, {**MODEL, "dtype": "float16"})
    described = engine_of(ReadableRank(fabric, SIZES))
    there = msgspec.structs.replace(described, model={**MODEL, "dtype": "bfloat16"})
    with pytest.raises(IncompatiblePeer) as error:
        peers.check(there)
    assert str(error.value) == (
        "engine 'prefill' cannot be read: dtype is 'float16' here and 'bfloat16' there"
    )


def test_one_engine_is_read_by_those_with_its_extras_and_those_without(
    fabric: Fabric, cache: Cache
) -> None:
    described = engine_of(ReadableRank(fabric, SIZES))
    there = msgspec.structs.replace(described, extras={"draft": "one"})
    peers_of(cache).check(there)
    peers_of(cache, extras={"draft": "one"}).check(there)
    with pytest.raises(IncompatiblePeer) as error:
        peers_of(cache, extras={"draft": "two"}).check(there)
    assert str(error.value).endswith("cannot be read: draft is 'two' here and 'one' there")
    with pytest.raises(IncompatiblePeer, match="draft is 'one' here and None there"):
        peers_of(cache, extras={"draft": "one"}).check(described)


def test_layouts_are_compared_only_of_the_same_model(fabric: Fabric, cache: Cache) -> None:
    peers = peers_of(cache, {**MODEL, "dtype": "float16"})
    with pytest.raises(IncompatiblePeer) as error:
        peers.check(engine_of(ReadableRank(fabric, HALF)))
    assert "heads" not in str(error.value)


@pytest.mark.parametrize(
    ("differing", "more"),
    [
        pytest.param(1, "", id="one"),
        pytest.param(SHOWN_MISMATCHES, "", id="all that are shown"),
        pytest.param(SHOWN_MISMATCHES + 3, "; and 3 more", id="more"),
    ],
)
def test_only_so_many_mismatches_are_shown(
    fabric: Fabric, cache: Cache, differing: int, more: str
) -> None:
    peers = peers_of(cache, {f"fact {n}": "1" for n in range(differing)})
    described = engine_of(ReadableRank(fabric, SIZES))
    there = msgspec.structs.replace(described, model={f"fact {n}": "2" for n in range(differing)})
    with pytest.raises(IncompatiblePeer) as error:
        peers.check(there)
    assert str(error.value).count(" here and ") == min(differing, SHOWN_MISMATCHES)
    assert str(error.value).endswith("'2' there" + more)


def test_all_ranks_of_this_engine_are_compared(fabric: Fabric) -> None:
    """A rank with half of the heads does not fit alone, and does with the other half."""
    halves = [Cache(HALF, first_head=head) for head in range(2)]
    peers, described = peers_of(halves[0]), engine_of(ReadableRank(fabric, SIZES))
    with pytest.raises(IncompatiblePeer, match="number of KV heads"):
        peers.check(described)
    peers.engine_layouts = tuple(half.layout() for half in halves)
    peers.check(described)


@pytest.mark.parametrize(
    ("cidr", "is_allowed"), [("10.0.0.0/24", True), ("10.0.1.0/24", False)], ids=["inside", "not"]
)
def test_a_description_leads_only_to_allowed_hosts(
    fabric: Fabric, cache: Cache, cidr: str, *, is_allowed: bool
) -> None:
    """The engine may be on an allowed host, and a rank of it on another one."""
    allowed = Config.parse({"peers": [cidr]}, {}).allowed_hosts
    peers = peers_of(cache, allowed=allowed)
    described = engine_of(ReadableRank(fabric, SIZES))
    if is_allowed:
        peers.check(described)
        return
    with pytest.raises(IncompatiblePeer) as error:
        peers.check(described)
    endpoint = described.ranks[0].endpoint
    assert str(error.value) == (
        f"engine 'prefill' has a rank at {endpoint}; allowed by 'peers': {cidr}"
    )


def test_each_rank_has_an_endpoint_of_its_own(fabric: Fabric, cache: Cache) -> None:
    described = engine_of(*(ReadableRank(fabric, HALF, first_head=head) for head in range(2)))
    first, second = described.ranks
    same = msgspec.structs.replace(second, endpoint=first.endpoint)
    with pytest.raises(IncompatiblePeer, match="has several ranks at one endpoint"):
        peers_of(cache).check(msgspec.structs.replace(described, ranks=(first, same)))


def test_a_host_is_checked_before_anything_is_compared(fabric: Fabric, cache: Cache) -> None:
    peers = peers_of(cache, {"another": "model"}, allowed=AllowedHosts(()))
    with pytest.raises(IncompatiblePeer, match="has a rank at"):
        peers.check(engine_of(ReadableRank(fabric, SIZES)))


def test_each_rank_reads_its_heads_from_those_that_have_them(fabric: Fabric) -> None:
    halves = [Cache(HALF, first_head=head) for head in range(2)]
    described = engine_of(*(ReadableRank(fabric, HALF, first_head=head) for head in range(2)))
    readers = {}
    for number, half in enumerate(halves):
        peers = RemotePeers(half.layout(), Rank(number), MODEL)
        peers.engine_layouts = tuple(each.layout() for each in halves)
        routes = peers.routes(described)
        readers[number] = {route.remote_rank: route.readers for route in routes if route.readers}
    assert readers == {0: {0: (0,)}, 1: {1: (1,)}}


# --- what an agent has prepared of them


class CountingTransport(MemoryTransport):
    """Keeps whom it knows, and fails where a test says so."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self.known: list[PeerName] = []
        self.on_prepare: Callable[[PeerName | None, int], None] = lambda *_: None

    def add_peer(self, metadata: bytes) -> PeerName:
        self.known.append(super().add_peer(metadata))
        return self.known[-1]

    def drop_peer(self, peer: PeerName) -> None:
        self.known.remove(peer)

    def prepare(self, rows: Rows, memory: Memory, peer: PeerName | None) -> ListHandle:
        self.on_prepare(peer, len(self.known))
        return super().prepare(rows, memory, peer)


@pytest.fixture
def transport(fabric: Fabric, cache: Cache) -> CountingTransport:
    transport = CountingTransport(fabric)
    transport.register(Span(cache.memory.ctypes.data, cache.memory.nbytes), "DRAM", 0)
    return transport


def two_halves(fabric: Fabric) -> tuple[Description, list[ReadableRank]]:
    ranks = [ReadableRank(fabric, HALF, seed=head, first_head=head) for head in range(2)]
    return engine_of(*ranks), ranks


def prepare(prepared: PreparedPeers, description: Description) -> None:
    """All of its steps."""
    for _ in prepared.prepare(PEER, description):
        pass


@pytest.mark.parametrize("is_joined", [True, False], ids=["joined", "by another agent"])
def test_all_ranks_that_are_read_are_prepared(
    fabric: Fabric, cache: Cache, transport: CountingTransport, *, is_joined: bool
) -> None:
    """By the agent that joins them, or when another one first reads them."""
    described, ranks = two_halves(fabric)
    peers = peers_of(cache)
    peers.descriptions[PEER] = described
    prepared = PreparedPeers(transport, peers)
    assert repr(prepared) == "<PreparedPeers: none>"
    if is_joined:
        prepare(prepared, described)
    prepared.get(PEER, Rank(1))
    assert transport.known == [rank.transport.name for rank in ranks]
    assert repr(prepared) == "<PreparedPeers: 2 of prefill>"
    for number, rank in enumerate(ranks):
        one = prepared.get(PEER, Rank(number))
        assert one.name == rank.transport.name
        assert one.share == {f"layer.{layer}": (number, number + 1) for layer in range(3)}
    assert len(transport.known) == 2


def test_a_peer_can_be_read_until_it_is_removed(
    fabric: Fabric, cache: Cache, transport: CountingTransport
) -> None:
    """What this agent has prepared of it may outlast it, where a read goes on."""
    peers = peers_of(cache)
    peers.descriptions[PEER] = engine_of(ReadableRank(fabric, SIZES))
    prepared = PreparedPeers(transport, peers)
    prepared.get(PEER, Rank(0))
    del peers.descriptions[PEER]
    for missing in (OTHER, PEER):
        with pytest.raises(TransportError, match=r"^engine 'prefill' is gone$"):
            prepared.get(missing, Rank(0))


def test_a_rank_that_cannot_be_added_leaves_nothing_of_its_engine(
    fabric: Fabric, cache: Cache, transport: CountingTransport
) -> None:
    described, ranks = two_halves(fabric)
    fabric.lost_peers.add(ranks[1].transport.name)
    prepared = PreparedPeers(transport, peers_of(cache))
    with pytest.raises(PeerLost):
        prepare(prepared, described)
    assert transport.known == []
    assert repr(prepared) == "<PreparedPeers: none>"


def test_a_list_that_cannot_be_prepared_leaves_nothing_of_its_engine(
    fabric: Fabric, cache: Cache, transport: CountingTransport
) -> None:
    described, _ = two_halves(fabric)

    def refuse(peer: PeerName | None, num_known: int) -> None:
        if peer is not None and num_known == 2:
            raise TransportError("no such memory")

    transport.on_prepare = refuse
    prepared = PreparedPeers(transport, peers_of(cache))
    with pytest.raises(TransportError, match="no such memory"):
        prepare(prepared, described)
    assert transport.known == []


def test_a_dropped_peer_is_dropped_by_the_transport(
    fabric: Fabric, cache: Cache, transport: CountingTransport
) -> None:
    described, _ = two_halves(fabric)
    prepared = PreparedPeers(transport, peers_of(cache))
    prepare(prepared, described)
    prepared.drop(OTHER)
    assert len(transport.known) == 2
    prepared.drop(PEER)
    assert transport.known == []
    prepared.drop(PEER)


def test_heads_that_no_rank_has_cannot_be_prepared(
    fabric: Fabric, cache: Cache, transport: CountingTransport
) -> None:
    described = engine_of(ReadableRank(fabric, HALF))
    prepared = PreparedPeers(transport, peers_of(cache))
    with pytest.raises(ValueError, match="KV head 1"):
        prepare(prepared, described)
    assert transport.known == []
