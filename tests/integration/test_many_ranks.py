"""Engines of several ranks, cut differently: real threads, sockets and machines, all ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from caches import Cache, Sizes
from pairs import Side

from nixl_kv.ids import new_claim
from nixl_kv.protocol import events
from nixl_kv.protocol.events import How
from nixl_kv.transport.base import Transport

MakeTransport = Callable[[], Transport]
WHOLE = Sizes(layers=2, blocks=24, heads=4, tokens=4)
TOKENS = 30


class World:
    """Two engines of one model, whose heads are cut among the ranks."""

    def __init__(
        self, transport: MakeTransport, tp: tuple[int, int], tokens: tuple[int, int]
    ) -> None:
        self.prefill = self._engine("prefill", transport, tp[0], tokens[0])
        self.decode = self._engine("decode", transport, tp[1], tokens[1])
        self.prefill[0].publish(self.prefill)
        for side in self.decode:
            side.meet(self.decode)

    @staticmethod
    def _engine(name: str, transport: MakeTransport, tp: int, tokens: int) -> list[Side]:
        heads = max(1, WHOLE.heads // tp)
        sizes = replace(WHOLE, heads=heads, tokens=tokens)
        return [
            Side(name, Cache(sizes, order, rank * WHOLE.heads // tp), transport, rank=rank)
            for rank, order in zip(
                range(tp), ["LBHNC", "BHLNC", "LHBNC", "BLNHC"] * 2, strict=False
            )
        ]

    def close(self) -> None:
        for side in [*self.prefill, *self.decode]:
            side.close()


def kv_of(side: Side, table: Sequence[int], tokens: int) -> np.ndarray:
    """The KV of the first tokens, shape [layer, head, token, content]; a view on no memory."""
    blocks = side.cache.blocks(table).transpose(0, 2, 1, 3, 4)
    layers, heads, _, _, content = blocks.shape
    return blocks.reshape(layers, heads, -1, content)[:, :, :tokens]


@pytest.fixture
def make_world(memory: MakeTransport) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*args: tuple[int, int]) -> World:
        worlds.append(World(memory, *args))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def write_prompt(world: World, table: Sequence[int]) -> np.ndarray:
    """Put the KV of a prompt into prefill's blocks; its whole, [layer, head, token, content]."""
    rng = np.random.default_rng(7)
    shape = (WHOLE.layers, WHOLE.heads, TOKENS, WHOLE.key + WHOLE.value)
    whole = rng.integers(1, 256, shape, dtype=np.uint8)
    for side in world.prefill:
        first, count = side.cache.first_head, side.cache.sizes.heads
        size = side.cache.sizes.tokens
        for token in range(TOKENS):
            block = side.cache.view[:, table[token // size]]
            block[:, :, token % size] = whole[:, first : first + count, token]
    return whole


@pytest.mark.parametrize("tokens", [(4, 4), (4, 8), (8, 4), (6, 4)], ids=str)
@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (4, 2), (2, 8), (8, 2), (8, 1), (8, 8)], ids=str)
def test_all_ranks_get_their_heads_and_prefill_is_released(
    make_world: Callable[..., World], tp: tuple[int, int], tokens: tuple[int, int]
) -> None:
    world = make_world(tp, tokens)
    tables = [list(range(20, 20 - -(-TOKENS // size), -1)) for size in tokens]
    whole = write_prompt(world, tables[0])
    offered = world.prefill[0].offer("p1", tables[0], TOKENS, siblings=world.prefill)
    claim = new_claim()
    for side in world.decode:
        side.thread.submit([events.Fetch("d1", offered, claim)])
        side.load("d1", tables[1], end=TOKENS, verify=True)
    assert {side.outcome("d1") for side in world.decode} == {None}
    assert all(side.wait_loaded("d1").verified for side in world.decode)
    for side in world.decode:
        first, count = side.cache.first_head, side.cache.sizes.heads
        got = kv_of(side, tables[1], TOKENS)
        assert np.array_equal(got, whole[:, first : first + count])
    hows = [side.wait_sent("p1").how for side in world.prefill]
    unread = max(0, tp[0] - max(tp[1], WHOLE.heads))
    assert sorted(how.value for how in hows) == sorted(
        [How.READ.value] * (tp[0] - unread) + [How.NOT_NEEDED.value] * unread
    )


def test_a_dropped_request_releases_all_ranks(make_world: Callable[..., World]) -> None:
    world = make_world((8, 2), (4, 4))
    offered = world.prefill[0].offer("p1", [1, 2], 8, siblings=world.prefill)
    claim = new_claim()
    for side in world.decode:
        side.thread.submit([events.Fetch("d1", offered, claim), events.Drop("d1")])
    hows = {side.wait_sent("p1").how for side in world.prefill}
    assert hows <= {How.NOT_NEEDED, How.ABORTED}


def test_a_cut_that_is_not_known_yet_is_refused(make_world: Callable[..., World]) -> None:
    """A rank that has not met its siblings takes itself for the whole engine."""
    world = make_world((1, 2), (4, 4))
    alone = world.decode[0]
    alone.meet([alone])
    alone.fetch("d1", world.prefill[0].offer("p1", [1], 4))
    alone.load("d1", [1])
    assert "number of KV heads" in str(alone.outcome("d1"))
