"""Memory that engines of one test read from each other."""

import pytest

from harness.local.memory import Fabric, MemoryTransport
from support.integration import MakeTransport


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def memory(fabric: Fabric) -> MakeTransport:
    return lambda: MemoryTransport(fabric)
