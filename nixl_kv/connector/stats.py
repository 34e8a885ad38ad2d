"""Counters and gauges, and how they reach vLLM's log and Prometheus.

The scheduler and each worker fill a `Stats` in every step. vLLM merges them with `aggregate`. The
API server logs `reduce()` and passes the data to `PromMetrics`.
"""

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from nixl_kv.errors import get_logger
from nixl_kv.protocol import events
from nixl_kv.transport import descriptors

logger = get_logger(__name__)

COUNTERS: Final = {
    "loads": "Loads completed, per rank: decode read all KV while prefill held it.",
    "loads_verified": "Loads whose bytes matched prefill's digest.",
    "load_failures": "Loads failed, per rank. on_load_failure decides how the request continues.",
    "load_failures_denied": "Load failures because the offer was used, expired or revoked.",
    "load_failures_lease_lost": "Load failures because the lease expired before a read began.",
    "load_failures_recalled": "Load failures because prefill recalled the offer before a read.",
    "load_failures_unreachable": "Load failures because prefill did not answer, or was lost.",
    "load_failures_incompatible": "Load failures because the engines' models or caches differ.",
    "load_failures_late": "Load failures because a deadline passed.",
    "load_failures_broken": "Load failures because a read returned an error.",
    "load_failures_fenced": "Load failures because prefill took its blocks back during the read.",
    "load_failures_corrupt": "Load failures because the bytes did not match prefill's digest.",
    "load_failures_internal": "Load failures because of a bug in nixl_kv, or a failed digest.",
    "loads_dropped": "Loads cancelled because the request had ended or the cache was reset.",
    "tokens_loaded": "Prompt tokens whose KV was loaded, per rank.",
    "bytes_read": "Bytes of KV read, per rank.",
    "descriptors": "Contiguous runs in these bytes, per rank.",
    "reads_direct": "Reads by NIXL with one descriptor per run, per rank.",
    "read_seconds_direct": "Seconds that direct reads took.",
    "reads_gather": "Reads by a kernel from mapped GPU memory, per rank.",
    "read_seconds_gather": "Seconds that gather reads took.",
    "reads_staged": "Reads for which prefill packed all or most bytes into its ring, per rank.",
    "read_seconds_staged": "Seconds that staged reads took, from the first request for a chunk.",
    "staged_bytes_read_directly": "Bytes of staged reads that NIXL read run by run, per rank.",
    "chunks_packed": "Chunks of KV that prefill packed for its readers, per rank.",
    "chunk_bytes": "Bytes of KV in these chunks, per rank.",
    "chunk_seconds": "Seconds from the start to the end of each packing, per rank.",
    "digests": "Digests computed, by prefill and by decode, per rank.",
    "digest_bytes": "Bytes of KV covered by digests, per rank.",
    "digest_seconds": "Seconds that digests took, concurrent with other work, per rank.",
    "offers": "Finished prefills whose ticket left, per rank.",
    "offers_read": "Offers that all their readers released after reading, per rank.",
    "offers_unclaimed": "Offers that no reader claimed in time, per rank.",
    "offers_not_needed": "Offers not read: decode had the KV or read another copy, per rank.",
    "offers_aborted": "Offers whose reader aborted, per rank.",
    "offers_revoked": "Offers taken back unread: their blocks were needed or held long, per rank.",
    "offers_expired": "Offers whose last lease expired, per rank.",
    "offers_lost": "Offers that ended because the transfer thread restarted, per rank.",
    "asks_denied": "Asks for an unknown offer, or by a reader without the claim, per rank.",
    "messages_dropped": "Control messages that violate the protocol, per rank.",
    "peers_lost": "Prefill engines or ranks in use that twice in a row did not answer.",
    "peers_unreadable": "Prefill engines to which two data connections in a row broke, per rank.",
    "joins": "Handshakes that made a prefill engine's memory readable, per rank.",
    "join_seconds": "Seconds that handshakes took, concurrent with other work, per rank.",
    "warm_ups": "First reads from a prefill rank, which only open connections, per rank.",
    "warm_up_seconds": "Seconds that these first reads took, per rank.",
    "agents_recycled": "NIXL agents destroyed to stop a stuck read, per rank.",
    "serving_restarts": "New incarnations because peers could not connect to its memory, per rank.",
    "agents_replaced": "NIXL agents replaced to close connections to departed peers, per rank.",
    "thread_restarts": "Restarts of the transfer thread after an exception, per rank.",
    "tickets_refused": "Requests computed on decode because their kv_transfer_params are invalid.",
    "tickets_missing": "Requests computed on decode because they have no ticket.",
}

# The scheduler measures these, once per engine.
GAUGES: Final = {
    "open_offers": "Offers that hold blocks now.",
    "open_loads": "Requests that load KV now, or will when they have blocks.",
}

# Each rank measures its own. A sum, or the value that arrived last, would be wrong for all ranks,
# so Prometheus shows a series per rank (label `rank`).
RANK_GAUGES: Final = {
    "unreadable": "1 while peers cannot connect to the rank's memory; else 0.",
    "open_descriptors": "Open file descriptors of the rank's process.",
}

DESCRIPTORS_S: Final = 10.0  # between two counts of the open file descriptors
# The share of `ulimit -n` above which the log warns. At 0 left, UCX closes its ports for good.
DESCRIPTORS_SHARE: Final = 0.8
WARN_S: Final = 600.0

# These mean something only as sums over many loads, so the log omits them.
NOT_LOGGED: Final = "read_seconds_"

TRANSFER_SECONDS: Final = "transfer_seconds"
HISTOGRAMS: Final = {TRANSFER_SECONDS: "Seconds that the longest read of a load took, per rank."}
_BUCKETS: Final = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]


@dataclass
class Stats(KVConnectorStats):
    """The counts of one step. A gauge is sent only when it changes."""

    # vLLM sends it between processes: a number per counter and per engine's gauge, `{rank: value}`
    # per rank's gauge, and a list of seconds.
    data: dict[str, Any] = field(default_factory=dict)
    rank: int = 0  # the worker's
    _descriptors_at: float = -math.inf
    _warn_at: float = -math.inf
    _measured: dict[str, float] = field(default_factory=dict)  # the gauges as last sent

    def count(self, name: str, amount: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def measure(self, name: str, value: float) -> None:
        if self._measured.get(name, 0) != value:
            self._measured[name] = value
            self.data[name] = value if name in GAUGES else {str(self.rank): value}

    def measure_descriptors(self, now: float) -> None:
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

    def count_results(self, results: Iterable[events.Result]) -> None:
        for result in results:
            match result:
                case events.LoadEnded():
                    self._count_load(result)
                case events.OfferEnded():
                    self.count(f"offers_{result.end.value}")
                case events.Counts():
                    for name, amount in result.counts.items():
                        record = self.measure if name in RANK_GAUGES else self.count
                        record(name, amount)

    def _count_load(self, load: events.LoadEnded) -> None:
        if load.failure is not None:
            if load.failure.kind is events.FailureKind.DROPPED:
                self.count("loads_dropped")  # not a failure
            else:
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
                self.count(f"read_seconds_{read.path}", read.seconds)
                if read.direct_bytes:
                    self.count("staged_bytes_read_directly", read.direct_bytes)
        seconds = max((read.seconds for read in load.reads), default=0.0)
        self.data.setdefault(TRANSFER_SECONDS, []).append(seconds)

    def pop(self) -> "Stats | None":
        data, self.data = self.data, {}
        return Stats(data=data) if data else None

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data[name] = [*self.data.get(name, []), *value]
            elif name in RANK_GAUGES:
                self.data[name] = {**self.data.get(name, {}), **value}
            elif name in GAUGES:
                self.data[name] = value
            else:
                self.count(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        numbers: dict[str, int | float] = {}
        for name, value in self.data.items():
            if name in RANK_GAUGES:
                numbers |= {f"{name} of rank {rank}": each for rank, each in value.items()}
            elif name != TRANSFER_SECONDS and not name.startswith(NOT_LOGGED):
                numbers[name] = value
        seconds = self.data.get(TRANSFER_SECONDS, [])
        if any(seconds):  # a rank that has nothing to read needs no time
            numbers["median transfer ms"] = round(statistics.median(seconds) * 1000, 2)
            numbers["GB/s"] = round(self.data.get("bytes_read", 0) / sum(seconds) / 1e9, 2)
        return numbers

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """`vllm:nixl_kv_<counter>_total`, `vllm:nixl_kv_<gauge>`, and a histogram of seconds."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        # With several API servers, each gets the stats of some steps.
        latest = partial(self._gauge_cls, multiprocess_mode="mostrecent")
        histogram = partial(self._histogram_cls, buckets=_BUCKETS)
        kinds = (
            (self._counter_cls, COUNTERS, ()),
            (latest, GAUGES, ()),
            (latest, RANK_GAUGES, ("rank",)),
            (histogram, HISTOGRAMS, ()),
        )
        self._metrics = {
            name: kind(
                name=f"vllm:nixl_kv_{name}",
                documentation=text,
                labelnames=[*self._labelnames, *further],
            )
            for kind, texts, further in kinds
            for name, text in texts.items()
        }
        ranks = map(str, range(vllm_config.parallel_config.world_size))
        for place in itertools.product(self._metrics, self.per_engine_labelvalues, ranks):
            self._series(*place)  # show 0 from the start

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in COUNTERS:
                self._series(name, engine_idx).inc(value)
            elif name in GAUGES:
                self._series(name, engine_idx).set(value)
            elif name in RANK_GAUGES:
                for rank, each in value.items():
                    self._series(name, engine_idx, rank).set(each)
            elif name in HISTOGRAMS:
                for each in value:
                    self._series(name, engine_idx).observe(each)

    def _series(self, name: str, engine: int, rank: str = "") -> Any:
        labels = self.per_engine_labelvalues[engine]
        return self._metrics[name].labels(*labels, *([rank] if name in RANK_GAUGES else []))
