"""The one place where the simulator looks into a ticket."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.sim.cache import KnownPrompt
from nixl_kv.ids import Incarnation


@dataclass(frozen=True)
class IssuedTicket:
    """What the router was given for a prompt, and by which engine."""

    params: dict[str, Any]
    prompt: KnownPrompt
    engine: str


def incarnation_in(params: Mapping[str, Any]) -> Incarnation:
    """Which life of an engine a ticket names."""
    return Incarnation(params["incarnation"])


def newer(params: Mapping[str, Any]) -> dict[str, Any]:
    """The same ticket, as the next release of this package makes it."""
    return {**params, "wire_version": params["wire_version"] + 1}
