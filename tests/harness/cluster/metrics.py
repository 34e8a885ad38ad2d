"""The names of engines' metrics, and how much they have grown since a moment."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from harness.cluster.client import Client, Counters
from harness.cluster.engines import Connector
from harness.cluster.waiting import look_until

PREFIX: Final = "vllm:nixl_kv_"
LOADS: Final = f"{PREFIX}loads_total{{outcome=loaded}}"
EARLY_ENDS: Final = f"{PREFIX}early_ends_total"
VERIFIED: Final = f"{PREFIX}verified_loads_total"
FAILURES: Final = f"{PREFIX}load_failures_total"
CORRUPT: Final = f"{FAILURES}{{reason=corrupt}}"
UNREACHABLE: Final = f"{FAILURES}{{reason=unreachable}}"
TOKENS: Final = f"{PREFIX}loaded_tokens_total"
NBYTES: Final = f"{PREFIX}read_bytes_total"
READS: Final[Mapping[str, str]] = {
    path: f"{PREFIX}read_seconds_count{{path={path}}}" for path in ("direct", "gather", "staged")
}
SECONDS: Final = f"{PREFIX}wait_seconds_sum{{phase=read}}"
TICKETS_REFUSED: Final = f"{PREFIX}refused_tickets_total"
TICKETS_MISSING: Final = f"{PREFIX}recomputed_requests_total{{reason=no_ticket}}"
OFFERS: Final = f"{PREFIX}offers_total"
OFFERS_READ: Final = f"{PREFIX}ended_offers_total{{outcome=read}}"
OFFERS_ABORTED: Final = f"{PREFIX}ended_offers_total{{outcome=aborted}}"
OFFERS_UNCLAIMED: Final = f"{PREFIX}ended_offers_total{{outcome=unclaimed}}"
OFFERS_NOT_NEEDED: Final = f"{PREFIX}ended_offers_total{{outcome=not_needed}}"
PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
CACHED_TOKENS: Final = "vllm:prompt_tokens_cached_total"
COMPUTED_TOKENS: Final = "vllm:prompt_tokens_by_source_total{source=local_compute}"
PREEMPTIONS: Final = "vllm:num_preemptions_total"
DRAFTED: Final = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens_total"
QUEUED: Final = "vllm:num_requests_waiting"
RUNNING: Final = "vllm:num_requests_running"
USAGE: Final = "vllm:kv_cache_usage_perc"

POLL_S: Final = 0.05
PROBE: Final = "ba"  # a prompt of one token


# Where each connector counts a field of Loaded.
LOADED_METRICS: Final[Mapping[Connector, Mapping[str, str]]] = {
    "nixl-kv": {"loads": LOADS, "tokens": TOKENS, "nbytes": NBYTES, "seconds": SECONDS},
    "in-tree": {
        "loads": "vllm:nixl_bytes_transferred_count",
        "tokens": "vllm:external_prefix_cache_hits_total",
        "nbytes": "vllm:nixl_bytes_transferred_sum",
        "seconds": "vllm:nixl_xfer_time_seconds_sum",
    },
}


class Loaded(NamedTuple):
    """The loads of some requests; bytes and descriptors over all ranks of decode."""

    loads: int
    tokens: int
    nbytes: int
    seconds: float

    @classmethod
    def from_counters(cls, changed: Counters, connector: Connector = "nixl-kv") -> "Loaded":
        counted = {
            name: changed.get(metric, 0.0) for name, metric in LOADED_METRICS[connector].items()
        }
        seconds = counted.pop("seconds")
        return cls(**{name: round(value) for name, value in counted.items()}, seconds=seconds)


class CountersSince:
    """The growth of an engine's counters since this was built.

    Counters may lag an answer: an engine publishes its workers' counts with a later step.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before = client.counters()

    def changed(self) -> Counters:
        now = self._client.counters()
        return {name: value - self._before.get(name, 0.0) for name, value in now.items()}

    def wait(
        self, condition: Callable[[Counters], bool], timeout_s: float, *, step: bool = False
    ) -> Counters:
        """The changes once the condition holds, or after the timeout; missing names count as 0.

        With `step` the engine is given a token to compute before each look.
        """

        def look() -> Counters:
            if step:
                self._client.complete(PROBE, 1)
            return defaultdict(float, self.changed())

        return look_until(look, condition, timeout_s, interval_s=POLL_S)

    def wait_for(self, name: str, amount: float = 1, timeout_s: float = 60.0) -> Counters:
        """The changes once one counter has grown by `amount`, or after the timeout."""
        return self.wait(lambda changed: changed[name] >= amount, timeout_s)


def accepted_share(changed: Counters) -> float | None:
    """How many of the tokens that were drafted were right; None if none was drafted."""
    drafted = changed.get(DRAFTED, 0.0)
    return changed.get(ACCEPTED, 0.0) / drafted if drafted else None
