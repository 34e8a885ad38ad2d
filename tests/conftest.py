"""Two engines that exchange real bytes, over memory and over real NIXL."""

from collections.abc import Callable, Iterator

import pytest
from caches import Cache, Sizes
from pairs import Pair, Side, Times, filled

from nixl_kv.transport.base import Transport
from nixl_kv.transport.memory import Fabric, MemoryTransport


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def memory(fabric: Fabric) -> Callable[[], Transport]:
    return lambda: MemoryTransport(fabric)


@pytest.fixture
def make_pair() -> Iterator[Pair]:
    """Makes a (prefill, decode) pair; both are closed, and their books checked, at the end."""
    sides: list[Side] = []

    def make(
        transport: Callable[[], Transport],
        *,
        sizes: tuple[Sizes, Sizes] = (Sizes(), Sizes()),
        orders: tuple[str, str] = ("LBHNC", "LBHNC"),
        times: Times | None = None,
        models: tuple[dict[str, str] | None, dict[str, str] | None] = (None, None),
    ) -> tuple[Side, Side]:
        caches = [Cache(size, order) for size, order in zip(sizes, orders, strict=True)]
        made = [
            Side(name, filled(cache, seed), transport, times=times, model=model)
            for seed, (name, cache, model) in enumerate(
                zip(("prefill", "decode"), caches, models, strict=True)
            )
        ]
        sides.extend(made)
        made[0].publish()
        return made[0], made[1]

    yield make
    for side in sides:
        side.close()
