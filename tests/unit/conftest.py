"""Two ranks that are stepped by hand, and fence tokens that are known beforehand."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from harness.local.caches import Sizes
from nixl_kv.config import Config
from support.offers import count_fence_tokens
from support.stepped import MakeWorld, World


@pytest.fixture
def counted_fence_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    count_fence_tokens(monkeypatch)


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Makes worlds, each closed and checked at the end."""
    with contextlib.ExitStack() as stack:

        def make(
            config: Config | None = None,
            roles: tuple[str, str] = ("prefill and decode", "prefill and decode"),
            **options: Any,
        ) -> World:
            world = World(Sizes(), config or Config(), roles, **options)
            stack.callback(world.close)
            return world

        yield make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()
