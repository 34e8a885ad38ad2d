"""Makes the loads of a cell."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from harness.local.memory import Fabric, MemoryTransport
from nixl_kv.ids import RequestId
from suites.detect.cells import Cell
from suites.detect.tally import Tally
from suites.detect.world import MakeTransport, Order, World

WAVE: Final = 64


def orders_of(faults: Sequence[str], seeds: int, clean: int) -> list[Order]:
    """The loads of one cell."""
    planted = [
        Order(RequestId(f"{fault}-{seed}"), fault) for seed in range(seeds) for fault in faults
    ]
    return planted + [Order(RequestId(f"clean-{number}")) for number in range(clean)]


def run_cell(
    cell: Cell,
    make: MakeTransport,
    orders: Sequence[Order],
    *,
    seed: int = 0,
    verify: bool = True,
    path: str = "direct",
) -> Tally:
    """Make all loads between the two engines of a cell."""
    tally = Tally()
    world = World(cell, make, wave=min(WAVE, len(orders)), seed=seed, verify=verify, path=path)
    try:
        for outcome in world.run(orders):
            tally.add(outcome)
    finally:
        world.close()
    return tally


def _in_memory() -> MakeTransport:
    """All transports of a cell have a fabric of their own."""
    fabric = Fabric()
    return lambda: MemoryTransport(fabric)


def _over_nixl() -> MakeTransport:
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - only where it is used

    return NixlTransport


TRANSPORTS: Final[Mapping[str, Callable[[], MakeTransport]]] = {
    "nixl": _over_nixl,
    "memory": _in_memory,
}
"""For each kind, a function that is called once for a cell, and returns what makes transports."""
