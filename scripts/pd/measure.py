"""What one request through the router moved, read from the decode engine's counters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pd.client import Answer, Client, Counters
from pd.engines import Connector


@dataclass(frozen=True)
class MetricNames:
    """Where a connector counts what it moved."""

    tokens: str
    nbytes: str
    descriptors: str
    seconds: str


METRICS: Final[Mapping[Connector, MetricNames]] = {
    "nixl-kv": MetricNames(
        tokens="vllm:nixl_kv_tokens_loaded_total",
        nbytes="vllm:nixl_kv_bytes_read_total",
        descriptors="vllm:nixl_kv_descriptors_total",
        seconds="vllm:nixl_kv_transfer_seconds_sum",
    ),
    "in-tree": MetricNames(
        tokens="vllm:external_prefix_cache_hits_total",
        nbytes="vllm:nixl_bytes_transferred_sum",
        descriptors="vllm:nixl_num_descriptors_sum",
        seconds="vllm:nixl_xfer_time_seconds_sum",
    ),
}


@dataclass(frozen=True)
class Moved:
    """What went from the prefill to the decode engine for one request."""

    tokens: int
    nbytes: int
    descriptors: int
    seconds: float

    @classmethod
    def from_counters(cls, changed: Counters, names: MetricNames) -> "Moved":
        """Pick a connector's counters out of what changed."""
        return cls(
            tokens=round(changed.get(names.tokens, 0)),
            nbytes=round(changed.get(names.nbytes, 0)),
            descriptors=round(changed.get(names.descriptors, 0)),
            seconds=changed.get(names.seconds, 0.0),
        )


@dataclass(frozen=True)
class Measured:
    """An answer and what was moved for it."""

    answer: Answer
    moved: Moved


def ask_and_measure(
    router: Client, decode: Client, prompt: str, *, connector: Connector, max_tokens: int
) -> Measured:
    """Send one prompt through the router while nothing else runs."""
    names = METRICS[connector]
    before = decode.counters()
    answer = router.complete(prompt, max_tokens)
    changed = decode.counters_after(before, names.nbytes)
    return Measured(answer, Moved.from_counters(changed, names))
