"""Counts, and how they reach vLLM's log and Prometheus.

Workers and the scheduler fill a `Stats` each step; vLLM adds them up and shows them.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from nixl_kv.errors import get_logger
from nixl_kv.protocol import events
from nixl_kv.transport import descriptors

logger = get_logger(__name__)

COUNTERS: Final = {
    "loads": "Requests whose KV was read from a prefill engine, every byte while it was held.",
    "loads_verified": "Of these: with bytes that are prefill's, by a digest.",
    "load_failures": "Requests whose KV could not be read; recomputed or failed by policy.",
    "load_failures_denied": "Of these: prefill had no such offer (used, expired, revoked).",
    "load_failures_lease_lost": "Of these: the lease ran out before decode had blocks.",
    "load_failures_recalled": "Of these: prefill wanted its blocks back before decode had blocks.",
    "load_failures_unreachable": "Of these: prefill could not be reached, or was lost.",
    "load_failures_incompatible": "Of these: prefill's model or cache does not fit.",
    "load_failures_late": "Of these: not read in time.",
    "load_failures_broken": "Of these: the read itself failed.",
    "load_failures_fenced": "Of these: prefill took its blocks back while they were read.",
    "load_failures_corrupt": "Of these: what was read is not what prefill has, by its digest.",
    "load_failures_internal": "Of these: a fault of nixl_kv, or a digest that failed.",
    "loads_dropped": (
        "Loads that were cancelled: the request had ended, or the cache was reset. No failure."
    ),
    "tokens_loaded": "Prompt tokens whose KV was read.",
    "bytes_read": "Bytes of KV read, per rank.",
    "descriptors": "Runs of these bytes that are contiguous on both sides, per rank.",
    "reads_direct": "Parts of loads that NIXL has read, a descriptor for each run, per rank.",
    "read_seconds_direct": "Seconds that these took.",
    "reads_gather": "Parts of loads that a kernel has read from memory that is mapped, per rank.",
    "read_seconds_gather": "Seconds that these took.",
    "reads_staged": "Parts of loads that were read where prefill had packed all or most, per rank.",
    "read_seconds_staged": "Seconds that these took, from the first chunk that was asked for.",
    "staged_bytes_read_directly": "Of bytes_read: bytes of staged reads that NIXL read run by run.",
    "chunks_packed": "Chunks of KV that prefill has packed for its readers, per rank.",
    "chunk_bytes": "Bytes of KV in these chunks, per rank.",
    "chunk_seconds": "Seconds that packing took, several chunks at a time, per rank.",
    "digests": "Digests made, on prefill for its readers and on decode of what it read, per rank.",
    "digest_bytes": "Bytes of KV that these cover, per rank.",
    "digest_seconds": "Seconds that these took, beside other work, per rank.",
    "offers": "Finished prefills put on offer.",
    "offers_read": "Offers that were read to the end, per rank.",
    "offers_unclaimed": "Offers that nobody claimed in time, per rank.",
    "offers_not_needed": (
        "Offers that were not read: decode had all of it, or reads another rank's copy, per rank."
    ),
    "offers_aborted": "Offers whose reader gave up, per rank.",
    "offers_revoked": ("Offers taken back unread: blocks were scarce, or they were held for long."),
    "offers_expired": "Offers whose last lease ran out, per rank.",
    "offers_lost": "Offers that ended with a death of the transfer thread, per rank.",
    "asks_denied": "Asks for offers that are not there, or not for who asks, per rank.",
    "messages_dropped": "Control messages that are not of this protocol, per rank.",
    "peers_lost": "Prefill engines and ranks that could not be reached, twice in a row, in use.",
    "peers_unreadable": (
        "Prefill engines that answered, but to which two connections in a row broke, per rank."
    ),
    "joins": "Prefill engines whose memory was made readable, per rank.",
    "join_seconds": "Seconds that this took, beside other work, per rank.",
    "warm_ups": "First reads of a prefill rank, of bytes that nobody wants, per rank.",
    "warm_up_seconds": "Seconds that these took: connecting, and mapping memory, per rank.",
    "agents_recycled": "NIXL agents that were destroyed to stop a read, per rank.",
    "serving_restarts": (
        "New lives of a rank that begin since nobody could connect to its memory, per rank."
    ),
    "agents_replaced": (
        "NIXL agents that were replaced to close connections to peers that had left, per rank."
    ),
    "thread_restarts": "Deaths of the transfer thread that it survived, per rank.",
    "tickets_refused": "Requests whose kv_transfer_params do not hold; computed locally.",
    "tickets_missing": "Requests on decode without a ticket; computed locally.",
}

GAUGES: Final = {
    "open_offers": "Offers that hold blocks, now.",
    "unreadable": "1 while peers cannot connect to a rank's memory, by its own check, else 0.",
    "open_descriptors": "File descriptors of a worker's process, of the one that has most.",
    "open_loads": "Requests whose KV is being read, or will be when they have blocks, now.",
}

OF_WORST: Final = frozenset({"unreadable", "open_descriptors"})
"""Gauges of which the greatest of all ranks is shown."""
DESCRIPTORS_S: Final = 10.0
"""Between two looks at how many descriptors are open."""
DESCRIPTORS_SHARE: Final = 0.8
"""Of `ulimit -n`, above which the log warns: without any, UCX closes its ports for good."""
WARN_S: Final = 600.0

TRANSFER_SECONDS: Final = "transfer_seconds"
NOT_LOGGED: Final = "read_seconds_"
"""Of use only as sums over many loads."""
_BUCKETS: Final = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]


@dataclass
class Stats(KVConnectorStats):
    """`data` holds a number per counter and gauge, and the list of transfer times in seconds."""

    data: dict[str, Any] = field(default_factory=dict)
    _descriptors_at: float = -math.inf
    _warn_at: float = -math.inf
    _measured: dict[str, int] = field(default_factory=dict)  # gauges, as they were shown last

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        self.data[name] = self.data.get(name, 0) + amount

    def measure(self, name: str, value: int) -> None:
        """Show a gauge, if it has changed."""
        if self._measured.get(name, 0) != value:
            self._measured[name] = self.data[name] = value

    def measure_descriptors(self, now: float) -> None:
        """Show how many this process has open, every few seconds; warn before there are none."""
        if now < self._descriptors_at:
            return
        self._descriptors_at = now + DESCRIPTORS_S
        count, limit = descriptors.num_open(), descriptors.limit()
        self.measure("open_descriptors", count)
        if limit is not None and count > limit * DESCRIPTORS_SHARE and now >= self._warn_at:
            self._warn_at = now + WARN_S
            logger.warning(
                "%d of %d file descriptors are open (`ulimit -n`); raise the limit: at 0 left, "
                "peers can no longer connect",
                *(count, limit),
            )

    def count_commands(self, commands: Iterable[events.Command]) -> None:
        """Count what a step hands to the transfer engine."""
        for command in commands:
            if isinstance(command, events.PublishOffer):
                self.count("offers")

    def count_results(self, results: Iterable[events.Result]) -> None:
        """Count what the transfer engine has reported."""
        for result in results:
            match result:
                case events.LoadEnded():
                    self._count_load(result)
                case events.OfferEnded():
                    self.count(f"offers_{result.end.value}")
                case events.Counts():
                    for name, amount in result.counts.items():
                        if name in GAUGES:
                            self.measure(name, int(amount))
                        else:
                            self.count(name, amount)

    def _count_load(self, load: events.LoadEnded) -> None:
        if load.failure is not None and load.failure.kind is events.FailureKind.DROPPED:
            self.count("loads_dropped")
            return
        if load.failure is not None:
            self.count("load_failures")
            self.count(f"load_failures_{load.failure.kind.value}")
            return
        self.count("loads")
        if load.verified:
            self.count("loads_verified")
        self.count("tokens_loaded", load.num_tokens)
        for read in load.reads:
            self.count("bytes_read", read.num_bytes)
            self.count("descriptors", read.num_runs)
            if read.num_bytes:
                self.count(f"reads_{read.path}")
                if read.direct_bytes:
                    self.count("staged_bytes_read_directly", read.direct_bytes)
                self.count(f"read_seconds_{read.path}", read.seconds)
        seconds = max((read.seconds for read in load.reads), default=0.0)
        self.data.setdefault(TRANSFER_SECONDS, []).append(seconds)

    def pop(self) -> "Stats | None":
        """What was counted since the last time; None if nothing was."""
        data, self.data = self.data, {}
        return Stats(data=data) if data else None

    def reset(self) -> None:
        """Start an interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        """Add another worker's or step's."""
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data[name] = [*self.data.get(name, []), *value]
            elif name in OF_WORST:
                self.data[name] = max(self.data.get(name, 0), value)
            elif name in GAUGES:
                self.data[name] = value
            else:
                self.count(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers of vLLM's log line."""
        numbers: dict[str, int | float] = {
            name: value
            for name, value in self.data.items()
            if name != TRANSFER_SECONDS and not name.startswith(NOT_LOGGED)
        }
        seconds = self.data.get(TRANSFER_SECONDS, [])
        if seconds:
            numbers["median transfer ms"] = round(statistics.median(seconds) * 1000, 2)
            numbers["GB/s"] = round(self.data.get("bytes_read", 0) / sum(seconds) / 1e9, 2)
        return numbers

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """`vllm:nixl_kv_<counter>_total`, `vllm:nixl_kv_<gauge>`, and a histogram of seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Register each metric once, with a child per engine. Arguments are the base class's."""
        super().__init__(*args, **kwargs)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:nixl_kv_{name}", documentation=text, labelnames=self._labelnames
                ),
                self.per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: create_metric_per_engine(
                self._gauge_cls(
                    name=f"vllm:nixl_kv_{name}",
                    documentation=text,
                    labelnames=self._labelnames,
                    multiprocess_mode="mostrecent",
                ),
                self.per_engine_labelvalues,
            )
            for name, text in GAUGES.items()
        }
        self._seconds = create_metric_per_engine(
            self._histogram_cls(
                name="vllm:nixl_kv_transfer_seconds",
                documentation="Seconds of a load's longest read, until all of it has landed.",
                buckets=_BUCKETS,
                labelnames=self._labelnames,
            ),
            self.per_engine_labelvalues,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take over what one step counted."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)
        for seconds in transfer_stats_data.get(TRANSFER_SECONDS, []):
            self._seconds[engine_idx].observe(seconds)
