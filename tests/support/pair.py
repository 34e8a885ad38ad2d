"""Engines of one rank with their caches, and one load from the one into the other."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from harness.local.caches import Cache, Sizes
from harness.local.engine import HOST, LocalEngine
from nixl_kv.config import Config
from nixl_kv.engine.loop import Parts
from nixl_kv.protocol.events import OfferEnd
from nixl_kv.transport.base import Transport

MakeTransport: TypeAlias = Callable[[], Transport]
MakeEngine: TypeAlias = Callable[..., LocalEngine]  # the fixture of tests/integration/cli

CONFIG = Config(host=HOST, offer_ttl_s=60.0, lease_s=20.0, request_timeout_s=60.0)
"""So long that nothing ends by itself, however busy the machine is."""


def address(engine: LocalEngine) -> str:
    """Where it is described, as an option of a command."""
    return f"{HOST}:{engine.directory.port}"


class SmallEngine(LocalEngine):
    def __init__(
        self,
        name: str,
        cache: Cache,
        make_transport: MakeTransport,
        *,
        config: Config = CONFIG,
        **options: Any,
    ) -> None:
        super().__init__(name, [cache.layout()], make_transport, config=config, **options)
        self.cache = cache

    @property
    def parts(self) -> Parts:
        return self.ranks[0].parts

    def load(
        self, request: str, table: Sequence[int], *, begin: int = 0, end: int | None = None
    ) -> None:
        """Start a load into these blocks, of which the first holds token `begin`."""
        size = self.cache.sizes.tokens
        tokens = range(begin, begin // size * size + len(table) * size if end is None else end)
        self.start_load(request, [table], tokens)

    def is_reported(self, request: str) -> bool:
        self.ranks[0].poll()
        return request in self.ranks[0].loads

    def wait_count(self, name: str, amount: float) -> None:
        """Wait for a counter. An idle rank is woken to publish it."""
        (rank,) = self.ranks

        def is_counted() -> bool:
            if rank.engine.loop is not None:
                rank.engine.loop.wake()
            return rank.counts.get(name, 0) >= amount

        self.wait(is_counted)
        assert rank.counts[name] == amount


Pair: TypeAlias = tuple[SmallEngine, SmallEngine]  # prefill and decode

MakePair: TypeAlias = Callable[..., Pair]

PREFILL_TABLE, DECODE_TABLE, NUM_TOKENS = [7, 3, 4], [2, 9, 1], 11


def exchange(pair: Pair, name: str = "1", *, verify: bool = True) -> None:
    """One load, all the way: the bytes are prefill's, and nothing else has changed."""
    prefill, decode = pair
    before = decode.cache.view.copy()
    ticket = prefill.offer(f"p{name}", [PREFILL_TABLE], NUM_TOKENS)
    decode.prepare_load(f"d{name}", ticket)
    decode.start_load(f"d{name}", [DECODE_TABLE], range(NUM_TOKENS), verify=verify)
    (report,) = decode.wait_load(f"d{name}")
    assert report.failure is None
    assert report.verified is verify
    assert prefill.wait_offer(f"p{name}") == [OfferEnd.READ]
    read, expected = decode.cache.blocks(DECODE_TABLE), prefill.cache.blocks(PREFILL_TABLE)
    assert np.array_equal(read, expected)
    others = [block for block in range(decode.cache.sizes.blocks) if block not in DECODE_TABLE]
    assert np.array_equal(decode.cache.blocks(others), before[:, others])


def new_pair(
    make_transport: MakeTransport,
    *,
    sizes: tuple[Sizes, Sizes] = (Sizes(), Sizes()),
    orders: tuple[str, str] = ("LBHNC", "LBHNC"),
    **options: Any,
) -> Pair:
    """A prefill and a decode engine; `options` are those of both."""
    engines = []
    for number, name in enumerate(("prefill", "decode")):
        cache = Cache(sizes[number], orders[number]).fill(number)
        engines.append(SmallEngine(name, cache, make_transport, **options))
    return engines[0], engines[1]
