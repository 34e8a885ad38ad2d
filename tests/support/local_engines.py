"""Engines of one or two ranks, without vLLM, for tests of the tools that ask them."""

from collections.abc import Callable
from typing import TypeAlias

from harness.local.engine import HOST, LocalEngine

MakeEngine: TypeAlias = Callable[..., LocalEngine]
"""See the fixture `make_engine`."""


def address(engine: LocalEngine) -> str:
    """Where it is described, as an option of a command."""
    return f"{HOST}:{engine.directory.port}"
