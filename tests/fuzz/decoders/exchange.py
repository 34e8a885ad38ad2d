"""A transfer between two ranks, in which a test may change each message on its way.

Both ranks are real transfer engines, stepped by hand. Whatever a peer says, the thread of a rank
goes on, each request ends once, and bytes that differ are not called verified.
"""

from collections.abc import Callable, Sequence
from typing import Final
from unittest.mock import patch

import msgspec
import numpy as np

from harness.local.caches import Bytes, Cache, Sizes
from harness.local.engine import HAS_VERIFY
from nixl_kv import ids
from nixl_kv.config import Config
from nixl_kv.protocol.events import LoadEnded, OfferEnded
from sim.repeatable import SeededSecrets
from support.stepped import World

TABLE, OTHER_TABLE, NUM_TOKENS = [7, 3, 4], [2, 9, 1], 11
BOTH: Final = ("prefill and decode", "prefill and decode")
ROUNDS: Final = 25  # an exchange whose messages arrive ends in fewer
ROUND_S: Final = 0.2
MORE_ROUNDS: Final = 60
SLOW_ROUND_S: Final = 1.0

Change = Callable[[bytes], Sequence[bytes]]
"""Returns the messages that arrive instead of one; that one alone, if nothing is changed."""


class BrokenPromiseError(Exception):
    """No exception came, but what must hold does not."""


def unchanged(message: bytes) -> Sequence[bytes]:
    return [message]


class Exchange:
    """Prefill offers a prompt; decode loads it, and verifies it if this tree can.

    `run` does all of it once.
    """

    def __init__(self, path: str, change: Change = unchanged) -> None:
        self.load: LoadEnded | None = None
        self.kinds: list[str] = []
        """The kinds of the messages, before they are changed."""
        self._change = change
        self._config = Config(path=path, lease_s=2.0, offer_ttl_s=4.0, request_timeout_s=4.0)

    def run(self) -> "Exchange":
        """To the end of both requests, after which no fault is left."""
        with patch.object(ids, "secrets", SeededSecrets(0)):
            world = World(Sizes(), self._config, BOTH, hold_s=2.0)
            world.network.held = True
            theirs, mine = world.prefill.cache.view.copy(), world.decode.cache.view.copy()
            ends = self._transfer(world)
            world.close()
        self._check(world, ends)
        if not np.array_equal(theirs, world.prefill.cache.view):
            raise BrokenPromiseError("prefill's cache was written")
        if not np.array_equal(_other_blocks(mine), _other_blocks(world.decode.cache.view)):
            raise BrokenPromiseError("blocks of another request were written")
        return self

    def _transfer(self, world: World) -> list[LoadEnded | OfferEnded]:
        world.decode.prepare_load(1, world.prefill.offer(1, TABLE, NUM_TOKENS))
        world.decode.start_load(1, OTHER_TABLE, NUM_TOKENS, verify=HAS_VERIFY)
        ends: list[LoadEnded | OfferEnded] = []
        for number in range(ROUNDS + MORE_ROUNDS):
            is_calm = number >= ROUNDS
            if is_calm and len(ends) > 1:
                break
            for rank in (world.prefill, world.decode):
                rank.turn()
                self._deliver(world, unchanged if is_calm else self._change)
                ends += rank.ends()
            world.clock.now += SLOW_ROUND_S if is_calm else ROUND_S
        return ends

    def _deliver(self, world: World, change: Change) -> None:
        for packet in list(world.network.packets):
            message = packet.payload
            self.kinds.append(msgspec.msgpack.decode(message)[0])
            for packet.payload in change(message):
                world.network.deliver(packet, again=True)
            world.network.packets.remove(packet)

    def _check(self, world: World, ends: list[LoadEnded | OfferEnded]) -> None:
        if sorted(end.request for end in ends) != ["d1", "p1"]:
            raise BrokenPromiseError(f"not one end of each request: {ends}")
        (self.load,) = (end for end in ends if isinstance(end, LoadEnded))
        read, sent = _tokens(world.decode.cache, OTHER_TABLE), _tokens(world.prefill.cache, TABLE)
        if self.load.verified and not np.array_equal(read, sent):
            raise BrokenPromiseError("bytes that are called verified differ from prefill's")


def _other_blocks(view: Bytes) -> Bytes:
    return np.delete(view, OTHER_TABLE, axis=1)


def _tokens(cache: Cache, table: list[int]) -> Bytes:
    """The bytes of the prompt, shape [layers, tokens, heads, content]."""
    blocks = cache.blocks(table).swapaxes(2, 3)
    layers, _, _, heads, content = blocks.shape
    return blocks.reshape(layers, -1, heads, content)[:, :NUM_TOKENS]
