"""Counters, gauges and histograms, and how they reach vLLM's log and Prometheus.

The scheduler and each worker fill a `Stats` in every step. vLLM merges them with `aggregate`. The
API server logs `reduce()` and passes the data to `PromMetrics`.

A load or an offer counts once, whatever the TP size: each worker sends its part with the step's
output, and the scheduler joins the parts (`RequestCounts`). Workers count only the events of a
rank, such as reads.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

import nixl_kv
from nixl_kv.config import Config
from nixl_kv.connector.media import FAIL_REASONS
from nixl_kv.connector.own import own_config
from nixl_kv.errors import TICKET_REASONS, get_logger
from nixl_kv.ids import Endpoint, Nonce, RequestId
from nixl_kv.protocol import events, peers
from nixl_kv.protocol.ticket import WIRE_VERSION
from nixl_kv.transport import ports

logger = get_logger(__name__)

PREFIX: Final = "vllm:nixl_kv_"

# A process counts its open file descriptors again.
DESCRIPTORS_S: Final = 10.0
# The share of `ulimit -n` above which the log warns. At 0 left, UCX closes its ports for good.
DESCRIPTORS_SHARE: Final = 0.8
DESCRIPTORS_LOG_S: Final = 600.0

# --- the metrics

Role: TypeAlias = Literal["prefill", "decode"]
BOTH: Final[tuple[Role, ...]] = ("prefill", "decode")

SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

FAILURES: Final = [kind.value for kind in events.FailureKind if kind.value != "dropped"]
NO_TICKET: Final = "no_ticket"
PATHS: Final = ("direct", "gather", "staged")


@dataclass(frozen=True)
class Metric:
    """One name under `PREFIX`. A counter's name in Prometheus ends in `_total`."""

    help: str
    roles: tuple[Role, ...]
    # Its labels, and their values that Prometheus shows as 0 from the start.
    labels: Mapping[str, Iterable[str]] = field(default_factory=dict)
    buckets: tuple[float, ...] = SECONDS  # of a histogram


def _decode(text: str, **labels: Iterable[str]) -> Metric:
    return Metric(text, ("decode",), labels)


def _prefill(text: str, **labels: Iterable[str]) -> Metric:
    return Metric(text, ("prefill",), labels)


def _both(text: str, **labels: Iterable[str]) -> Metric:
    return Metric(text, BOTH, labels)


PEER: Final[Iterable[str]] = ()  # the entries of the setting `peers`
RANK: Final[Iterable[str]] = ()  # each rank of the engine

COUNTERS: Final[Mapping[str, Metric]] = {
    "loads": _decode(
        "Requests whose load of KV from prefill ended, by outcome and by prefill's entry in peers.",
        outcome=("loaded", "failed", "cancelled"),
        peer=PEER,
    ),
    "load_failures": _decode(
        "Requests whose KV load failed, by reason and by prefill's entry in peers.",
        reason=FAILURES,
        peer=PEER,
    ),
    "early_ends": _decode("Loads whose end vLLM's scheduler learned between two steps (overlap)."),
    "verified_loads": _decode("Requests whose loaded bytes matched prefill's digest."),
    "loaded_tokens": _decode("Prompt tokens whose KV was loaded from prefill."),
    # On prefill, those that a router sent to the wrong pool (role).
    "refused_tickets": _both(
        "Requests with a ticket that an engine refused before it asked prefill, by reason.",
        reason=TICKET_REASONS,
    ),
    "failed_requests": _decode(
        "Requests that decode ended with an error because it may not compute them itself (media), "
        "by reason.",
        reason=(*TICKET_REASONS, *FAIL_REASONS),
    ),
    "recomputed_requests": _decode(
        "Requests whose prompt decode computed because it did not get its KV, by reason.",
        reason=(*FAILURES, *TICKET_REASONS, NO_TICKET),
    ),
    "read_bytes": _decode(
        "Bytes of KV read, by the path that they took, summed over ranks.", path=PATHS
    ),
    "lost_peers": _decode("Connections to prefill ranks in use that broke twice, per rank."),
    "unusable_peers": _decode(
        "Prefill engines that could not be reached or read twice in a row, per rank."
    ),
    "finds": _both(
        "Questions of other engines for cached blocks of a prompt (conversations), by outcome.",
        outcome=("found", "none"),
    ),
    "sought_requests": _both(
        "Requests for whose prompt an engine asked another one for cached KV (conversations), by "
        "outcome. none: the other one had nothing of use; late: it did not answer in time; lost: "
        "it reused the blocks, or the load failed.",
        outcome=("read", "none", "late", "refused", "lost"),
    ),
    "found_tokens": _both(
        "Prompt tokens that an engine read from another one's prefix cache (conversations)."
    ),
    "offers": _prefill("Requests whose finished prefill was offered to decode with a ticket."),
    "ended_offers": _prefill(
        "Offers that ended, by outcome. unclaimed: no decode engine asked for it in time.",
        outcome=[end.value for end in events.OfferEnd],
    ),
    "denied_asks": _prefill(
        "Asks for an unknown offer, or by a reader without the claim, per rank."
    ),
    "replaced_agents": _both(
        "NIXL agents that were replaced, by reason, per rank.",
        reason=("stuck_read", "departed_peers", "closed_listener"),
    ),
    "dropped_messages": _both("Control messages that violate the protocol, per rank."),
    "thread_restarts": _both("Restarts of the transfer thread after an exception, per rank."),
}

GAUGES: Final[Mapping[str, Metric]] = {
    # The scheduler measures these, once per engine.
    "open_loads": _decode("Requests that load KV now, or will when they have blocks."),
    "open_offers": _prefill("Offers that hold blocks now."),
    "offered_blocks": _prefill("Blocks of the KV cache that open offers hold."),
    "oldest_offer_timestamp_seconds": _prefill(
        "Unix time at which the ticket of the oldest open offer left; 0 without open offers."
    ),
    "draining": _prefill("1 while the engine offers no new requests (nixl-kv drain); else 0."),
    # Each rank measures its own. A sum, or the value that arrived last, would be wrong.
    "peers": _decode(
        "Prefill engines that a decode rank knows, by state.",
        state=[state.name.lower() for state in peers.PeerState],
        rank=RANK,
    ),
    "unreadable": _prefill("1 while peers cannot connect to the rank's memory; else 0.", rank=RANK),
    "open_descriptors": _both("Open file descriptors of the rank's process.", rank=RANK),
}

HISTOGRAMS: Final[Mapping[str, Metric]] = {
    "wait_seconds": _decode(
        "Seconds that a request waited for its KV, by phase: for prefill's grant (ask), for local "
        "blocks, in the read queue, for the bytes (read) and for the digests (verify).",
        phase=events.PHASES,
    ),
    "read_seconds": _decode(
        "Seconds that the read of one prefill rank by one decode rank took, by path.", path=PATHS
    ),
    "first_contact_seconds": _decode(
        "Seconds until a prefill engine's memory was readable (handshake), and that the first read "
        "from a prefill rank took, which opens connections (warm_up), per rank.",
        step=("handshake", "warm_up"),
    ),
    "digest_seconds": _both("Seconds that computing a digest (verify) took, per rank."),
}

METRICS: Final[Mapping[str, Metric]] = {**COUNTERS, **GAUGES, **HISTOGRAMS}

# Reads of a step: `{path: [[seconds, seconds to post, bytes, runs, of these bytes directly], ...]}`
READS: Final = "reads"

# The metrics of vLLM's own NixlConnector, whose names dashboards and autoscalers know. They are
# always there: they are 8 names without further labels.
_BYTES: Final = tuple(float(2 << exponent) for exponent in range(10, 34, 2))
_RUNS: Final = (10.0, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
_TIMES: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
IN_TREE_PREFIX: Final = "vllm:nixl_"
IN_TREE_HISTOGRAMS: Final[Mapping[str, Metric]] = {  # in the order of the values of `READS`
    "xfer_time_seconds": Metric("Seconds that a read took, per rank.", BOTH, {}, _TIMES),
    "post_time_seconds": Metric("Seconds to start a read, per rank.", BOTH, {}, (0.001, *_TIMES)),
    "bytes_transferred": Metric("Bytes of one read, per rank.", BOTH, {}, _BYTES),
    "num_descriptors": Metric("Contiguous runs of one read, per rank.", BOTH, {}, _RUNS),
}
IN_TREE_COUNTERS: Final[Mapping[str, Metric]] = {
    "num_failed_transfers": _both("Requests whose KV load failed."),
    "num_failed_notifications": _both("Always 0: decode sends no NIXL notifications."),
    "num_kv_expired_reqs": _both("Offers that no decode engine claimed or finished in time."),
    "num_notifications_after_expiry": _both("Always 0: a fence proves that blocks were held."),
}
_EXPIRED: Final = (events.OfferEnd.UNCLAIMED.value, events.OfferEnd.EXPIRED.value)


# --- the counts of a step


@dataclass
class Stats(KVConnectorStats):
    """The counts of one step. A gauge is sent only when it changes."""

    # vLLM sends it between processes: `{name: {label values, joined by '|': value}}`. The value is
    # a number, or a list for a histogram and for READS.
    data: dict[str, Any] = field(default_factory=dict)
    rank: int = 0  # the worker's
    _descriptors_at: float = -math.inf
    _warn_at: float = -math.inf
    _measured: dict[tuple[str, str], float] = field(default_factory=dict)  # gauges as last sent

    def count(self, name: str, amount: float = 1, *labels: str) -> None:
        values, key = self.data.setdefault(name, {}), "|".join(labels)
        values[key] = values.get(key, 0) + amount

    def measure(self, name: str, value: float, *labels: str) -> None:
        key = "|".join((*labels, str(self.rank)) if "rank" in GAUGES[name].labels else labels)
        if self._measured.get((name, key), 0) != value:
            self._measured[name, key] = value
            self.data.setdefault(name, {})[key] = value

    def observe(self, name: str, values: Iterable[Any], *labels: str) -> None:
        self.data.setdefault(name, {}).setdefault("|".join(labels), []).extend(values)

    def measure_descriptors(self, now: float) -> None:
        if now < self._descriptors_at:
            return
        self._descriptors_at = now + DESCRIPTORS_S
        count, limit = ports.num_descriptors(), ports.max_descriptors()
        self.measure("open_descriptors", count)
        if limit is not None and count > limit * DESCRIPTORS_SHARE and now >= self._warn_at:
            self._warn_at = now + DESCRIPTORS_LOG_S
            logger.warning(
                "%d of %d file descriptors are open (`ulimit -n`); raise the limit: at 0 left, "
                "peers can no longer connect",
                *(count, limit),
            )

    def count_rank(self, results: Iterable[events.Result]) -> None:
        """Count the events of one rank; `RequestCounts` counts its loads and offers."""
        for result in results:
            match result:
                case events.LoadEnded():
                    for read in result.reads:
                        if read.num_bytes:
                            times = read.seconds, read.post_seconds
                            sizes = read.num_bytes, read.num_runs, read.direct_bytes
                            self.observe(READS, [[*times, *sizes]], read.path)
                case events.Counts():
                    for (name, label), amount in result.amounts.items():
                        record = self.measure if name in GAUGES else self.count
                        record(name, amount, *filter(None, (label,)))
                    for (name, label), seconds in result.seconds.items():
                        self.observe(name, seconds, *filter(None, (label,)))

    def pop(self) -> "Stats | None":
        data, self.data = self.data, {}
        return Stats(data=data) if data else None

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, values in other.data.items():
            mine = self.data.setdefault(name, {})
            for key, value in values.items():
                if isinstance(value, list):
                    mine[key] = [*mine.get(key, []), *value]
                else:
                    mine[key] = value if name in GAUGES else mine.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers of vLLM's log line. The first ones have the names of vLLM's NixlConnector."""
        numbers: dict[str, int | float] = {}
        reads = [read for each in self.data.get(READS, {}).values() for read in each]
        if reads:
            times, posts, sizes, runs, _ = zip(*reads, strict=True)
            mib = sum(sizes) / 2**20
            numbers = {
                "Num successful transfers": len(reads),
                "Avg xfer time (ms)": _milliseconds(statistics.mean(times)),
                "P90 xfer time (ms)": _milliseconds(_p90(times)),
                "Avg post time (ms)": _milliseconds(statistics.mean(posts)),
                "P90 post time (ms)": _milliseconds(_p90(posts)),
                "Avg MB per transfer": round(mib / len(reads), 3),
                "Throughput (MB/s)": round(mib / sum(times), 3) if any(times) else 0,
                "Avg number of descriptors": round(statistics.mean(runs), 1),
            }
        ended = self.data.get("ended_offers", {})
        failed = sum(self.data.get("load_failures", {}).values())
        expired = sum(ended.get(outcome, 0) for outcome in _EXPIRED)
        numbers |= {"Num failed transfers": failed} if failed else {}
        numbers |= {"Num KV expired reqs": expired} if expired else {}
        for name, values in sorted(self.data.items()):
            if name in COUNTERS or name in GAUGES:
                numbers |= {
                    f"{name}{{{key}}}" if key.strip("|") else name: value
                    for key, value in values.items()
                }
        return numbers

    def is_empty(self) -> bool:
        return not self.data


def _p90(values: tuple[float, ...]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


# --- loads and offers, which all ranks of an engine share


@dataclass
class LoadReport:
    """How a load ended on one rank, or on several."""

    num_tokens: int
    reason: str = ""  # why it failed
    verified: bool = False
    waits: tuple[float, ...] = ()  # see `events.PHASES`
    began_at: float = 0.0  # in Unix seconds, if `waits` is known
    source: events.PeerKey | None = None  # the prefill engine; None: none was asked
    num_bytes: int = 0
    paths: frozenset[str] = frozenset()
    num_cached: int | None = None  # see `messages.Landed`

    @classmethod
    def of(cls, ended: events.LoadEnded) -> "LoadReport":
        return cls(
            ended.num_tokens,
            "" if ended.failure is None else ended.failure.kind.value,
            ended.verified,
            ended.waits,
            _unix(ended.ended_at) - sum(ended.waits),
            ended.peer,
            sum(read.num_bytes for read in ended.reads),
            frozenset(read.path for read in ended.reads if read.num_bytes),
            ended.num_cached,
        )

    @property
    def outcome(self) -> str:
        if self.reason == events.FailureKind.DROPPED.value:
            return "cancelled"
        return "failed" if self.reason else "loaded"

    def join(self, other: "LoadReport") -> "LoadReport":
        """The slowest rank decides how long the request waited, and one failure fails the load."""
        slowest = max(self, other, key=lambda report: sum(report.waits))
        return LoadReport(
            max(self.num_tokens, other.num_tokens),
            self.reason or other.reason,
            self.verified and other.verified,
            slowest.waits,
            slowest.began_at,
            self.source or other.source,
            self.num_bytes + other.num_bytes,
            self.paths | other.paths,
            other.num_cached if self.num_cached is None else self.num_cached,
        )


@dataclass
class OfferReport:
    """How an offer ended on one rank, or on several."""

    end: events.OfferEnd
    reader: str = ""  # the decode engine that asked; empty if none did
    asked_at: float = 0.0  # when it did, in Unix seconds
    read_by: Endpoint | None = None  # the directory of that engine, if it has read all

    @classmethod
    def of(cls, ended: events.OfferEnded) -> "OfferReport":
        if ended.reader is None:
            return cls(ended.end)
        read_by = ended.directory if ended.end is events.OfferEnd.READ else None
        return cls(ended.end, ended.reader, _unix(ended.asked_at), read_by)

    def join(self, other: "OfferReport") -> "OfferReport":
        """A rank that no reader needs does not hide what happened to the others."""
        asked = min(filter(None, (self.asked_at, other.asked_at)), default=0.0)
        end = max(self.end, other.end, key=_ORDER.index)
        read_by = self.read_by or other.read_by
        return OfferReport(end, self.reader or other.reader, asked, read_by)


def _unix(monotonic_s: float) -> float:
    return time.time() - time.monotonic() + monotonic_s


@dataclass
class RankReports:
    """The loads and offers that ended on some ranks in one step."""

    loads: dict[RequestId, LoadReport] = field(default_factory=dict)
    offers: dict[RequestId, OfferReport] = field(default_factory=dict)
    ready: set[RequestId] = field(default_factory=set)  # early loads; see `events.LoadReady`
    released: set[Nonce] = field(default_factory=set)  # see `events.EarlyReleased`
    granted: set[RequestId] = field(default_factory=set)  # see `events.OfferGranted`

    def __bool__(self) -> bool:
        return any((self.loads, self.offers, self.ready, self.released, self.granted))

    def add(self, results: Iterable[events.Result]) -> None:
        for result in results:
            match result:
                case events.LoadEnded():
                    self.loads[result.request] = LoadReport.of(result)
                case events.OfferEnded():
                    self.offers[result.request] = OfferReport.of(result)
                case events.LoadReady():
                    self.ready.add(result.request)
                case events.EarlyReleased():
                    self.released.add(result.nonce)
                case events.OfferGranted():
                    self.granted.add(result.request)

    def join(self, other: "RankReports") -> None:
        for request, load in other.loads.items():
            mine = self.loads.get(request)
            self.loads[request] = load if mine is None else mine.join(load)
        for request, offer in other.offers.items():
            known = self.offers.get(request)
            self.offers[request] = offer if known is None else known.join(offer)
        self.ready |= other.ready
        self.released |= other.released
        self.granted |= other.granted


_ORDER: Final = list(events.OfferEnd)


class RequestCounts:
    """Counts each load and each offer once, when vLLM has heard of its end from all ranks."""

    def __init__(self, stats: Stats, entry_of: Callable[[str], str], *, recomputes: bool) -> None:
        """`entry_of` finds the entry of `peers` that allows an endpoint; see `Config`."""
        self._stats = stats
        self._entry_of = entry_of
        self._recomputes = recomputes
        self._reports = RankReports()
        self._refused: set[RequestId] = set()  # requests that fail without a load

    def add(self, reports: RankReports) -> None:
        self._reports.join(RankReports(reports.loads, reports.offers))

    def count_loads(
        self,
        ended: Iterable[RequestId],
        held_back: Iterable[RequestId],
        must_load: Container[RequestId] = (),
        found: Container[RequestId] = (),
    ) -> dict[RequestId, LoadReport]:
        """Returns the loads that have ended. `held_back` will be reported once more, as failed.

        A request in `must_load` is not recomputed if its load fails. Those in `found` load what
        another engine has cached; `sought_requests` counts them.
        """
        counted = {}
        for request in ended:
            load = self._reports.loads.pop(request, None)
            is_load = request not in self._refused and request not in held_back
            if load is not None and is_load:
                if request not in found:
                    self._count_load(load, is_recomputed=request not in must_load)
                counted[request] = load
        return counted

    def _count_load(self, load: LoadReport, *, is_recomputed: bool) -> None:
        stats, reason = self._stats, load.reason
        peer = "" if load.source is None else self._entry_of(load.source.endpoint)
        stats.count("loads", 1, load.outcome, peer)
        if load.outcome == "cancelled":
            return
        for phase, seconds in zip(events.PHASES, load.waits, strict=False):
            stats.observe("wait_seconds", [seconds], phase)
        if reason:
            stats.count("load_failures", 1, reason, peer)
            if is_recomputed:
                self.count_recomputed(reason)
            return
        stats.count("loaded_tokens", load.num_tokens)
        if load.verified:
            stats.count("verified_loads")

    def count_offers(self, ended: Iterable[RequestId]) -> dict[RequestId, OfferReport]:
        counted = {}
        for request in ended:
            offer = self._reports.offers.pop(request, None)
            if offer is not None:
                self._stats.count("ended_offers", 1, offer.end.value)
                counted[request] = offer
        return counted

    def count_refused(self, request: RequestId, reason: str) -> None:
        self._stats.count("refused_tickets", 1, reason)
        self.count_recomputed(reason)
        if not self._recomputes:
            self._refused.add(request)

    def forget(self, request: RequestId) -> None:
        self._refused.discard(request)

    def count_recomputed(self, reason: str) -> None:
        if self._recomputes or reason == NO_TICKET:
            self._stats.count("recomputed_requests", 1, reason)


# --- Prometheus


class PromMetrics(KVConnectorPromMetrics):
    """The series of this engine's role under `PREFIX`, and those of vLLM's NixlConnector."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        config, self._roles = own_config(vllm_config)
        self._values: dict[str, Iterable[str]] = {
            "peer": ("", *map(str, config.peers or ())),
            "rank": [str(rank) for rank in range(vllm_config.parallel_config.world_size)],
        }
        # With several API servers, each gets the stats of some steps.
        gauge = partial(self._gauge_cls, multiprocess_mode="mostrecent")
        self._metrics = {
            **self._make(PREFIX, self._counter_cls, COUNTERS),
            **self._make(PREFIX, gauge, GAUGES),
            **self._make(PREFIX, self._histogram_cls, HISTOGRAMS),
            **self._make(IN_TREE_PREFIX, self._histogram_cls, IN_TREE_HISTOGRAMS),
            **self._make(IN_TREE_PREFIX, self._counter_cls, IN_TREE_COUNTERS),
        }
        self._show_build(gauge, config)

    def _make(self, prefix: str, make: Any, metrics: Mapping[str, Metric]) -> dict[str, Any]:
        series = {}
        for name, metric in metrics.items():
            if not set(self._roles) & set(metric.roles):
                continue
            options = {"buckets": metric.buckets} if make is self._histogram_cls else {}
            made = make(
                name=f"{prefix}{name}",
                documentation=metric.help,
                labelnames=[*self._labelnames, *metric.labels],
                **options,
            )
            values = [known or self._values[label] for label, known in metric.labels.items()]
            for engine, labels in itertools.product(
                self.per_engine_labelvalues.values(), itertools.product(*values)
            ):
                made.labels(*engine, *labels)  # 0 from the start
            series[name] = made
        return series

    def _show_build(self, gauge: Any, config: Config) -> None:
        facts = {
            "version": nixl_kv.__version__,
            "wire": str(WIRE_VERSION),
            "role": "+".join(self._roles),
            "verify": f"{config.verify:g}",
            "path": config.path,
        }
        info = gauge(
            name=f"{PREFIX}build_info",
            documentation="Always 1. Its labels are facts about nixl_kv in this engine.",
            labelnames=[*self._labelnames, *facts],
        )
        for labels in self.per_engine_labelvalues.values():
            info.labels(*labels, *facts.values()).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, values in self._flatten(transfer_stats_data):
            if name not in self._metrics:  # of another role
                continue
            made = self._metrics[name]
            for key, value in values.items():
                series = made.labels(*labels, *(key.split("|") if METRICS[name].labels else ()))
                if name in COUNTERS:
                    series.inc(value)
                elif name in GAUGES:
                    series.set(value)
                else:
                    for each in value:
                        series.observe(each)
        self._observe_in_tree(transfer_stats_data, labels)

    def _flatten(self, data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from ((name, values) for name, values in data.items() if name in METRICS)
        for path, reads in data.get(READS, {}).items():
            times, _, sizes, _, directly = zip(*reads, strict=True)
            yield "read_seconds", {path: times}
            yield "read_bytes", {path: sum(sizes) - sum(directly)}
            yield "read_bytes", {"direct": sum(directly)}

    def _observe_in_tree(self, data: dict[str, Any], labels: Any) -> None:
        for reads in data.get(READS, {}).values():
            for read in reads:
                for name, value in zip(IN_TREE_HISTOGRAMS, read, strict=False):
                    self._metrics[name].labels(*labels).observe(value)
        ended, failures = data.get("ended_offers", {}), data.get("load_failures", {})
        expired = sum(ended.get(outcome, 0) for outcome in _EXPIRED)
        self._metrics["num_failed_transfers"].labels(*labels).inc(sum(failures.values()))
        self._metrics["num_kv_expired_reqs"].labels(*labels).inc(expired)
