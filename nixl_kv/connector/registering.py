"""Transports with a rank's memory registered: to be read by peers, or to read from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.transport.base import Transport
from nixl_kv.transport.slots import SlotPage

CHECKS: Final = 4096
"""Slots that can be read at the same time."""


def register(transport: Transport, layout: CacheLayout, page: SlotPage) -> None:
    """Let it use this rank's cache and a page of slots: its own, or scratch for those it reads.

    Raises:
        TransportError: if the transport does not take the memory.
    """
    for span in layout.spans:
        transport.register(span, layout.memory, layout.device)
    transport.register(page.span, "DRAM", 0)


@dataclass(frozen=True)
class Opened:
    """A transport that may write into this rank's cache, and into scratch for slots it reads."""

    transport: Transport
    scratch: SlotPage


def open_transport(make: Callable[[], Transport], layout: CacheLayout) -> Opened:
    """Make a transport and register what it writes into. Slow; runs on any thread.

    Raises:
        TransportError: if it cannot be created, or does not take the memory.
    """
    transport, scratch = make(), SlotPage(CHECKS)
    register(transport, layout, scratch)
    return Opened(transport, scratch)
