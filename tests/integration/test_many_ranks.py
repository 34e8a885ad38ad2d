"""Engines of several ranks, cut differently: real threads, sockets and machines, all ranks."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from harness.local.caches import Cache, Sizes
from harness.local.engine import HOST_PATHS, LocalEngine
from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.geometry.layout import CacheLayout, Stripe
from nixl_kv.protocol.events import OfferEnd, SetEngine
from nixl_kv.transport.base import ControlPlane
from nixl_kv.transport.zmq import ZmqControl
from support.pair import CONFIG, MakeTransport

Bytes = npt.NDArray[np.uint8]

WHOLE = Sizes(layers=2, blocks=24, heads=4, tokens=4)
TOKENS = 30
SLOT_BYTES = 1024  # some blocks fit into a slot
ORDERS = ("LBHNC", "BHLNC", "LHBNC", "BLHNC") * 2


class World:
    """Two engines of one model, whose heads are cut among the ranks."""

    def __init__(
        self,
        transport: MakeTransport,
        make_control: Callable[[], ControlPlane],
        *,
        tp: tuple[int, int],
        tokens: tuple[int, int],
        path: str = "direct",
        num_slots: int = 16,
    ) -> None:
        self.path = path
        self.caches = [_caches(*cut) for cut in zip(tp, tokens, strict=True)]
        self.prefill, self.decode = (
            LocalEngine(
                name,
                [cache.layout() for cache in caches],
                transport,
                config=replace(CONFIG, path=path),
                make_control=make_control,
                staging_bytes=num_slots * 2 * SLOT_BYTES,
                num_ring_slots=num_slots,
            )
            for name, caches in zip(("prefill", "decode"), self.caches, strict=True)
        )


def _caches(tp: int, tokens: int) -> list[Cache]:
    sizes = replace(WHOLE, heads=max(1, WHOLE.heads // tp), tokens=tokens)
    return [Cache(sizes, ORDERS[rank], rank * WHOLE.heads // tp) for rank in range(tp)]


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(memory: MakeTransport) -> Iterator[MakeWorld]:
    with contextlib.ExitStack() as stack:

        def make(
            tp: tuple[int, int],
            tokens: tuple[int, int] = (4, 4),
            make_control: Callable[[], ControlPlane] = ZmqControl,
            path: str = "direct",
            transport: MakeTransport = memory,
            num_slots: int = 16,
        ) -> World:
            cut = {"tp": tp, "tokens": tokens}
            world = World(transport, make_control, **cut, path=path, num_slots=num_slots)
            for engine in (world.prefill, world.decode):
                stack.callback(engine.close)
            return world

        yield make


def kv_of(cache: Cache, table: Sequence[int], num_tokens: int) -> Bytes:
    """A copy of the KV of the first tokens, shape [layer, head, token, content]."""
    blocks = cache.blocks(table).transpose(0, 2, 1, 3, 4)
    layers, heads, _, _, content = blocks.shape
    return blocks.reshape(layers, heads, -1, content)[:, :, :num_tokens]


def write_prompt(caches: Sequence[Cache], table: Sequence[int]) -> Bytes:
    """Put the KV of a prompt into prefill's blocks; its whole, [layer, head, token, content]."""
    rng = np.random.default_rng(7)
    shape = (WHOLE.layers, WHOLE.heads, TOKENS, WHOLE.key + WHOLE.value)
    whole = rng.integers(1, 256, shape, dtype=np.uint8)
    for cache in caches:
        first, count, size = cache.first_head, cache.sizes.heads, cache.sizes.tokens
        for token in range(TOKENS):
            block = cache.view[:, table[token // size]]
            block[:, :, token % size] = whole[:, first : first + count, token]
    return whole


def check_all_ranks(world: World) -> None:
    """Every decode rank gets its heads, and every prefill rank is released."""
    tables = [
        list(range(20, 20 - -(-TOKENS // caches[0].sizes.tokens), -1)) for caches in world.caches
    ]
    whole = write_prompt(world.caches[0], tables[0])
    world.decode.prepare_load("d1", world.prefill.offer("p1", [tables[0]], TOKENS))
    world.decode.start_load("d1", [tables[1]], range(TOKENS), verify=True)
    reports = world.decode.wait_load("d1")
    assert [(report.failure, report.verified) for report in reports] == [(None, True)] * len(
        world.caches[1]
    )
    assert {read.path for report in reports for read in report.reads} == {world.path}
    for cache in world.caches[1]:
        first, count = cache.first_head, cache.sizes.heads
        assert np.array_equal(kv_of(cache, tables[1], TOKENS), whole[:, first : first + count])
    tp = [len(caches) for caches in world.caches]
    num_unread = max(0, tp[0] - max(tp[1], WHOLE.heads))
    expected = [OfferEnd.READ] * (tp[0] - num_unread) + [OfferEnd.NOT_NEEDED] * num_unread
    ends = world.prefill.wait_offer("p1")
    assert sorted(end.value for end in ends) == sorted(end.value for end in expected)


@pytest.mark.parametrize("path", HOST_PATHS)
@pytest.mark.parametrize("tokens", [(4, 4), (4, 8), (8, 4), (6, 4)], ids=str)
@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (4, 2), (2, 8), (8, 1)], ids=str)
def test_all_ranks_get_their_heads_and_prefill_is_released(
    make_world: MakeWorld, tp: tuple[int, int], tokens: tuple[int, int], path: str
) -> None:
    network = MemoryNetwork()
    check_all_ranks(make_world(tp, tokens, lambda: MemoryControl(network), path=path))


@pytest.mark.parametrize("tp", [(8, 2), (8, 8)], ids=str)
def test_all_ranks_get_their_heads_over_zmq(make_world: MakeWorld, tp: tuple[int, int]) -> None:
    check_all_ranks(make_world(tp, (4, 8)))


@pytest.mark.nixl
@pytest.mark.skipif("staged" not in HOST_PATHS, reason="this tree does not pack")
@pytest.mark.parametrize("tokens", [(4, 8), (8, 4)], ids=str)
@pytest.mark.parametrize(("tp", "num_slots"), [((2, 1), 16), ((1, 4), 4)], ids=str)
def test_chunks_arrive_over_nixl(
    make_world: MakeWorld, tp: tuple[int, int], tokens: tuple[int, int], num_slots: int
) -> None:
    """Four readers share a ring of four slots, too, as on GPUs."""
    nixl = pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)
    transport = nixl.NixlTransport
    check_all_ranks(make_world(tp, tokens, path="staged", transport=transport, num_slots=num_slots))


DIVIDED_TOKENS = 61


@pytest.mark.parametrize("path", HOST_PATHS)
@pytest.mark.parametrize(
    "stripes",
    [
        pytest.param(((1, 1), (2, 1)), id="on decode, one by one"),
        pytest.param(((2, 4), (1, 1)), id="on prefill, in blocks"),
        pytest.param(((4, 2), (2, 4)), id="on both, unlike"),
        pytest.param(((2, 1), (2, 1)), id="on both, alike"),
    ],
)
def test_ranks_with_the_same_head_divide_the_tokens(
    memory: MakeTransport, stripes: tuple[tuple[int, int], tuple[int, int]], path: str
) -> None:
    """Pairs are (prefill, decode): how many ranks, and how many tokens each has in turn."""
    sizes, network = replace(WHOLE, heads=1), MemoryNetwork()
    whole = np.random.default_rng(7).integers(1, 256, (2, DIVIDED_TOKENS, 12), dtype=np.uint8)
    places = [[Stripe(n, place, width) for place in range(n)] for n, width in stripes]
    caches = [[Cache(sizes, ORDERS[stripe.place]) for stripe in side] for side in places]
    tables = [list(range(20, 20 - -(-DIVIDED_TOKENS // (4 * n)), -1)) for n, _ in stripes]

    def element(side: int, rank: int, token: int) -> Bytes:
        block, slot = divmod(places[side][rank].position(token), sizes.tokens)
        view: Bytes = caches[side][rank].view[:, tables[side][block], 0, slot]
        return view

    def tokens_of(side: int, rank: int) -> list[int]:
        tokens = np.arange(DIVIDED_TOKENS)
        return tokens[places[side][rank].holds(tokens)].tolist()  # type: ignore[no-any-return]

    for rank in range(len(caches[0])):
        for token in tokens_of(0, rank):
            element(0, rank, token)[...] = whole[:, token]
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            LocalEngine(
                name,
                [_divided(cache.layout(), s) for cache, s in zip(*side, strict=True)],
                memory,
                config=replace(CONFIG, path=path),
                make_control=lambda: MemoryControl(network),
                staging_bytes=16 * 2 * SLOT_BYTES,
            )
            for name, *side in zip(("prefill", "decode"), caches, places, strict=True)
        )
        stack.callback(prefill.close)
        stack.callback(decode.close)
        decode.prepare_load("d1", prefill.offer("p1", [tables[0]], DIVIDED_TOKENS))
        decode.start_load("d1", [tables[1]], range(DIVIDED_TOKENS), verify=True)
        reports = decode.wait_load("d1")
        assert [(report.failure, report.verified) for report in reports] == [
            (None, True) for _ in reports
        ]
        assert set(prefill.wait_offer("p1")) == {OfferEnd.READ}
    for rank in range(len(caches[1])):
        for token in tokens_of(1, rank):
            assert np.array_equal(element(1, rank, token), whole[:, token])


def _divided(layout: CacheLayout, stripe: Stripe) -> CacheLayout:
    """The same, of a rank that has these tokens."""
    return replace(layout, groups=tuple(replace(group, stripe=stripe) for group in layout.groups))


def test_a_cancelled_load_releases_all_ranks(make_world: MakeWorld) -> None:
    world = make_world((8, 2))
    world.decode.prepare_load("d1", world.prefill.offer("p1", [[1, 2]], 8))
    world.decode.cancel_load("d1")
    assert set(world.prefill.wait_offer("p1")) <= {OfferEnd.NOT_NEEDED, OfferEnd.ABORTED}


def test_a_cut_that_is_not_known_yet_is_refused(make_world: MakeWorld) -> None:
    """A rank that was not told of the others takes itself for the whole engine."""
    world = make_world((1, 2))
    layout = world.caches[1][0].layout()
    world.decode.ranks[0].engine.submit([SetEngine(world.decode.name, (layout,))])
    world.decode.prepare_load("d1", world.prefill.offer("p1", [[1]], 4))
    world.decode.start_load("d1", [[1]], range(4))
    failures = [report.failure for report in world.decode.wait_load("d1")]
    assert failures[0] is not None
    assert "number of KV heads" in failures[0].detail
