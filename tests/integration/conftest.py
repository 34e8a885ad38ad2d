"""Two engines that exchange real bytes, over memory and over real NIXL."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from harness.local.memory import Fabric, MemoryTransport
from support.pair import MakePair, MakeTransport, Pair, new_pair


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def memory(fabric: Fabric) -> MakeTransport:
    return lambda: MemoryTransport(fabric)


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    """Makes pairs of engines; all are closed, and their machines checked, at the end."""
    with contextlib.ExitStack() as stack:

        def make(transport: MakeTransport, **options: Any) -> Pair:
            pair = new_pair(transport, **options)
            for engine in pair:
                stack.callback(engine.close)
            return pair

        yield make
