"""The one place where the simulator looks into a ticket."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.cluster.tickets import sealed, values
from nixl_kv.ids import Incarnation
from nixl_kv.protocol.ticket import WIRE_VERSION, SealedTicket
from sim.cache import KnownPrompt


@dataclass(frozen=True)
class IssuedTicket:
    """What the router was given for a prompt, and by which engine."""

    params: dict[str, Any]
    prompt: KnownPrompt
    engine: str


def incarnation_in(params: Mapping[str, Any]) -> Incarnation:
    """Which life of an engine a ticket names."""
    return SealedTicket.parse(params).open().incarnation


def newer(params: dict[str, Any]) -> dict[str, Any]:
    """The same ticket, as the next release of this package makes it."""
    return sealed(params, list(values(params).values()), version=WIRE_VERSION + 1)
