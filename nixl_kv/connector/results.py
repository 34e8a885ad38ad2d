"""What the transfer thread hands back to vLLM's step thread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from nixl_kv.protocol import events


@dataclass(frozen=True)
class Transferred:
    """One read of data that was proven good; for the counters."""

    num_bytes: int
    num_runs: int
    seconds: float


@dataclass(frozen=True)
class LoadResult:
    """A load is over; `transferred` are the figures of its reads, one per prefill rank."""

    loaded: events.Loaded
    transferred: list[Transferred]


@dataclass(frozen=True)
class Counts:
    """How often things happened that no request of this engine is waiting for, by counter."""

    counts: Mapping[str, float]


Result: TypeAlias = LoadResult | events.Sent | Counts
