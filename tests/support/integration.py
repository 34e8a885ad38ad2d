"""Types of fixtures and a configuration for integration tests."""

from collections.abc import Callable
from typing import TypeAlias

from harness.local.engine import HOST, LocalEngine
from nixl_kv.config import Config
from nixl_kv.transport.base import Transport

MakeTransport: TypeAlias = Callable[[], Transport]
MakeEngine: TypeAlias = Callable[..., LocalEngine]  # the fixture of tests/integration/cli

CONFIG = Config(host=HOST, offer_ttl_s=60.0, lease_s=20.0, request_timeout_s=60.0)
"""So long that nothing ends by itself, however busy the machine is."""


def address(engine: LocalEngine) -> str:
    """Where it is described, as an option of a command."""
    return f"{HOST}:{engine.directory.port}"
