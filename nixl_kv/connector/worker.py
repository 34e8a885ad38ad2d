"""The connector in a vLLM worker: hands commands to the rank's transfer engine, and results back.

vLLM's step thread only swaps commands and results with the transfer thread (`engine/loop.py`).
"""

import contextlib
import ipaddress
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from nixl_kv import addresses
from nixl_kv.config import MAX_PORT, Config
from nixl_kv.connector.gather import make_pool
from nixl_kv.connector.kv_layout import cache_layout, choose_interleave
from nixl_kv.connector.stats import RankReports, Stats
from nixl_kv.connector.vllm_config import (
    check_supported,
    draft_facts,
    engine_id,
    holds_state,
    is_copy,
    is_read,
    model_facts,
    parse_config,
    transfer_config,
    worker_rank,
)
from nixl_kv.engine.directory import SHUTDOWN_S
from nixl_kv.engine.engine import RankSpec, TransferEngine, UnwrittenOffers
from nixl_kv.engine.loop import STOPPED
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import ConfigError, LocalProtocolError, TransportError, get_logger
from nixl_kv.geometry.layout import ABSENT, CacheLayout
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import encode

if TYPE_CHECKING:  # it needs CUDA's bindings, which only GPU machines have
    from nixl_kv.reading.gather.gpu import SharePool

logger = get_logger(__name__)

# How long after the latest load a step that computes nothing waits for one to end. Otherwise vLLM
# asks again one or two milliseconds later, which would dominate short loads. A request that arrives
# meanwhile waits as well.
LOAD_WAIT_S: Final = 0.01

# How long the transfer thread may take to wake up and grant a chunk.
GRANTING_S: Final = 0.0001

RESET: Final = events.Failure(
    events.FailureKind.DROPPED, "the cache was reset before the load was used"
)


# --- the records that vLLM carries between its scheduler process and its workers


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, with each step."""

    commands: list[events.Command] = field(default_factory=list)  # in this order
    computes: bool = True  # False if all requests wait, for loads
    # Each worker reports these loads as failed. All had reported them as good, but the scheduler
    # held that back because its cache was reset.
    failed: list[RequestId] = field(default_factory=list)
    is_cleared: bool = False  # the worker has cleared the slots of preempted requests


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, with a step's output."""

    rank_descriptions: Mapping[int, bytes]  # of new incarnations, by rank
    reports: RankReports = field(default_factory=RankReports)

    def aggregate(self, other: Any) -> "WorkerMetadata":
        self.reports.join(other.reports)
        descriptions = {**self.rank_descriptions, **other.rank_descriptions}
        return WorkerMetadata(descriptions, self.reports)


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once after each registration of the cache."""

    rank_description: bytes  # an encoded RankDescription


class Worker:
    """One rank. vLLM calls every method on the step thread.

    Only `register_kv_caches` and `unregister_kv_caches` wait, and `get_transfer_results` in a step
    that computes nothing.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing starts before the cache exists."""
        check_supported(vllm_config, kv_cache_config)
        choose_interleave(vllm_config, kv_cache_config)
        self._clock = clock
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        parallel = vllm_config.parallel_config
        # Other pipeline stages may compute in a step that computes nothing here. Data-parallel
        # engines step in lockstep, so an idle one takes part in the steps of the others.
        self._is_awaited = parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1
        self._pool: SharePool | None = None  # of the cache, with `share_dir`
        self._kv_caches: dict[str, torch.Tensor] | None = None
        self._engine: TransferEngine | None = None
        self._ending: TransferEngine | None = None  # told to stop; may still write
        self._unwritten = UnwrittenOffers(_record_event)
        self._stale_tails = StaleTails(kv_cache_config, {})
        self._handshake: HandshakeMetadata | None = None  # once registered
        self._new_life: HandshakeMetadata | None = None  # if the scheduler does not know it yet
        self._late_results: list[events.Result] = []  # to report with the next step
        self._reports = RankReports()  # for the scheduler, with the output of this step
        self._loading: set[RequestId] = set()
        self._wait_until = -math.inf  # for these loads, in monotonic seconds
        self._computes = True  # whether the current step does
        self.stats = Stats(rank=parallel.rank)

    # Before vLLM allocates the cache.
    def get_mem_pool_context(self) -> contextlib.AbstractContextManager[None] | None:
        """The pool in which vLLM allocates the cache; None: vLLM's choice."""
        self._pool = make_pool(self._vllm_config)
        return None if self._pool is None else self._pool.use()

    # Once after vLLM has allocated the cache, and again after a wake-up.
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache and start the transfer engine. The rank has a new incarnation."""
        self._stop()
        self._kv_caches = kv_caches
        self._stale_tails = StaleTails(self._kv_cache_config, kv_caches)
        if is_copy(self._vllm_config):
            return
        layout = cache_layout(self._vllm_config, self._kv_cache_config, kv_caches)
        self._engine = TransferEngine(rank_spec(self._vllm_config, layout))
        self._handshake = HandshakeMetadata(encode(self._engine.start()))
        logger.info(
            "registered %.2f GiB of KV cache: %d layers, %d blocks of %d tokens, %s",
            sum(span.length for span in layout.spans) / 2**30,
            len(kv_caches),
            max(group.num_entries for group in layout.groups),
            max(group.entry_size for group in layout.groups),
            ", ".join(sorted({r.element for group in layout.groups for r in group.regions})),
        )

    # After a wake-up (vLLM 0.33). Tickets of the former incarnation are void.
    def restore_kv_caches(self) -> None:
        if self._kv_caches is None:
            raise LocalProtocolError("restore_kv_caches was called before register_kv_caches")
        self.register_kv_caches(self._kv_caches)

    # Before vLLM 0.33 frees the cache's memory. If this raises, vLLM keeps the memory.
    def unregister_kv_caches(self) -> None:
        self._stop()

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        return self._handshake

    def _stop(self, timeout_s: float | None = None) -> None:
        """Stop the transfer engine. The next step reports the loads and offers that it ended.

        Raises:
            TransportError: if something may still write into the cache. vLLM then must not free its
                memory, and nothing can be registered. May be called again.
        """
        if self._engine is not None:
            self._ending, self._engine = self._engine, None
            self._new_life = None  # the next registration describes this rank
        if self._ending is None:
            return
        try:
            self._ending.stop(timeout_s)
        except TransportError as error:
            raise TransportError(
                f"a transfer may still write into the KV cache, so vLLM must not free it: {error}. "
                "Put this engine to sleep again in a few seconds; if that fails too, restart it. "
                "Until then it transfers no KV and computes all prompts itself"
            ) from error
        self._late_results += self._ending.pop_results()
        self._late_results.append(events.Counts({("unreadable", ""): 0}))
        self._ending = None

    def shutdown(self) -> None:
        try:
            self._stop(SHUTDOWN_S)
        except TransportError as error:  # the end of the process frees the memory in any case
            logger.error("shutdown: %s", error)  # noqa: TRY400 - a traceback adds nothing

    # Before each step. The V1 runner calls this before it zeroes new blocks or copies into them,
    # and `bind_connector_metadata` after that. The V2 runner calls both after that.
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Clear the slots of preempted requests: this step may reuse their blocks."""
        if isinstance(kv_connector_metadata, StepMetadata):
            self._clear_slots(kv_connector_metadata)

    def _clear_slots(self, step: StepMetadata) -> None:
        if self._engine is not None and not step.is_cleared:
            self._engine.end_step(_record_event)  # of the step before
            step.is_cleared = True  # a step may withdraw an offer and prepare it again
            step.commands = self._engine.before_step(step.commands)

    # Before the forward of each step. vLLM 0.32 calls `start_load_kv` after it.
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(connector_metadata, StepMetadata):
            self._begin(connector_metadata)

    def _begin(self, step: StepMetadata) -> None:
        self._computes = step.computes
        self._late_results += [events.LoadEnded(request, 0, RESET) for request in step.failed]
        if self._engine is None:
            self._answer_without_engine(step.commands)
            return
        self._engine.note_step()
        # Before anything else writes into the blocks.
        self._clear_slots(step)
        commands = step.commands
        starting = [one for one in step.commands if isinstance(one, events.StartLoad)]
        if starting:
            self._loading.update(load.request for load in starting)
            self._wait_until = self._clock() + LOAD_WAIT_S
            self._stale_tails.clear(starting)
        self._engine.submit([*self._unwritten.pop(), *commands])
        self._unwritten.add(commands)

    # After the forwards of a step. vLLM 0.31 to 0.33 call it after the draft model, in both model
    # runners. The V1 runner calls `get_transfer_results` before it; the V2 runner does so from 0.33
    # on. On a pipeline rank without the draft model the V1 runner does not call it. There the next
    # step's `bind_connector_metadata` comes after the whole step.
    def wait_for_save(self) -> None:
        written = self._unwritten.pop()
        if self._engine is not None:
            self._engine.end_step(_record_event)
            self._engine.submit(written)
            if written and not current_platform.is_cpu():
                # Sampling comes next, and keeps the GIL for 2 ms. Let the transfer thread grant
                # this chunk before: on H200s, 512 tokens are decoded 1 to 1.5 ms earlier.
                time.sleep(GRANTING_S)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The loads and offers that have ended. A draft model may still run after this."""
        results, self._late_results = self._late_results, []
        if self._engine is not None:
            if self._loading and not (self._computes or self._is_awaited):
                self._engine.wait_load(max(0.0, self._wait_until - self._clock()))
            results += self._pop_results(self._engine)
            self._engine.note_step(has_computed=self._computes)
        if self._ending is not None:  # loads into which it can no longer write
            results += self._ending.pop_results()
        self.stats.count_rank(results)
        self._reports.add(results)
        transferred = KVConnectorTransferResults()
        for result in results:
            match result:
                case events.LoadEnded():
                    self._loading.discard(result.request)
                    # vLLM requires failed_recving to be a subset of finished_recving.
                    transferred.finished_recving.add(result.request)
                    if result.failure is not None:
                        transferred.failed_recving.add(result.request)
                case events.OfferEnded():
                    transferred.finished_sending.add(result.request)
        return transferred

    def _pop_results(self, engine: TransferEngine) -> list[events.Result]:
        results = engine.pop_results()
        for one in results:
            if isinstance(one, events.NewLife):
                self._new_life = self._handshake = HandshakeMetadata(encode(one.description))
        return results

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        life, self._new_life = self._new_life, None
        reports, self._reports = self._reports, RankReports()
        if life is None and not reports:
            return None
        rank = worker_rank(self._vllm_config)
        return WorkerMetadata({} if life is None else {rank: life.rank_description}, reports)

    def get_kv_connector_stats(self) -> Stats | None:
        self.stats.measure_descriptors(self._clock())
        return self.stats.pop()

    def _answer_without_engine(self, commands: Iterable[events.Command]) -> None:
        """End offers and loads at once: vLLM waits for a report from every worker.

        A worker has no engine if it is a copy of another one, and after a failed sleep.
        """
        for one in commands:
            if isinstance(one, events.PublishOffer):
                end = events.OfferEnd.NOT_NEEDED
                self._late_results.append(events.OfferEnded(one.nonce, one.request, end))
            elif isinstance(one, events.PrepareLoad) and one.ticket.is_early:
                self._late_results.append(events.LoadReady(one.request))
            elif isinstance(one, events.StartLoad):
                self._late_results.append(events.LoadEnded(one.request, one.num_tokens, STOPPED))


# --- the GPU's stream


def _record_event() -> Callable[[], bool] | None:
    """Whether all work that is on the stream now has ended; None on CPUs, which do it at once."""
    if current_platform.is_cpu():
        return None
    event = torch.Event(current_platform.device_type)
    event.record()
    query: Callable[[], bool] = event.query
    return query


class StaleTails:
    """Zeroes the last block of a load, of models with recurrent state.

    A load fills only a part of its last block. Kernels multiply the rest by zero, but state pages
    and KV pages share memory, so stale bytes may decode as NaN, and NaN * 0 is NaN. vLLM zeroes new
    blocks of such models, except those that a connector fills.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
    ) -> None:
        self._num_entries = kv_cache_config.num_blocks
        # The caches of each transferred group, but of states none: a load fills a whole state.
        groups = kv_cache_config.transfer_groups if kv_cache_config.has_mamba_layers else ()
        self._groups = [
            [kv_caches[name] for name in group.layer_names if name in kv_caches]
            if not holds_state(group.kv_cache_spec)
            else []
            for group in groups
        ]
        self._stream: Any = None
        tensors = [tensor for group in self._groups for tensor in group]
        if tensors and tensors[0].is_cuda:
            stream: Any = torch.cuda.Stream  # untyped
            self._stream = stream(tensors[0].device)

    def clear(self, loads: Iterable[events.StartLoad]) -> None:
        """Zero the last block of each group, for all loads that start now."""
        if not self._groups:
            return
        # On a stream of its own, so that it does not wait for the forward in progress.
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for load in loads:
                for caches, table in zip(self._groups, load.tables, strict=True):
                    last = table.block_ids[-1:].tolist()
                    if last in ([], [ABSENT]):  # outside of the window
                        continue
                    for cache in caches:
                        per_entry = cache.shape[0] // self._num_entries
                        cache[last[0] * per_entry :][:per_entry].zero_()
        if self._stream:
            self._stream.synchronize()


# --- the transfer engine's specification


def rank_spec(vllm_config: VllmConfig, layout: CacheLayout) -> RankSpec:
    """Describe this worker's transfer engine. Call it in a worker only."""
    # Imported here because only a worker with a cache needs NIXL.
    from nixl_kv.transport.nixl import nixl_transports  # noqa: PLC0415

    config = parse_config(vllm_config)
    transfer, parallel = transfer_config(vllm_config), vllm_config.parallel_config
    rank, is_decode = worker_rank(vllm_config), transfer.is_kv_consumer
    trust = Trust.of(config)
    make_transport, ports = nixl_transports(config, layout.memory, is_decode=is_decode)
    if rank % max(1, parallel.world_size // parallel.nnodes_within_dp) == 0:
        ports.warn_of_other_users()  # once for each machine of the engine
    return RankSpec(
        engine=engine_id(vllm_config),
        rank=rank,
        layout=layout,
        model=model_facts(vllm_config),
        extras=draft_facts(vllm_config),
        config=config,
        host=rank_host(config.host, parallel),
        port=rank_port(config, parallel, rank),
        is_prefill=is_read(vllm_config),
        is_decode=is_decode,
        make_transport=make_transport,
        ports=ports,
        make_control=trust.control,
        check_ticket=trust.check,
    )


def rank_host(host: str, parallel: ParallelConfig) -> str:
    is_one_machine = parallel.master_addr in ("127.0.0.1", "localhost", "::1")
    spans_machines = parallel.nnodes_within_dp > 1 and not is_one_machine
    if spans_machines and ipaddress.ip_address(host).is_loopback:
        raise ConfigError(
            f"host is {host!r}; allowed for an engine on several machines: 'auto', or an address "
            "or a network interface that the other engines reach"
        )
    if addresses.is_local(host):
        return host
    # All ranks may have been given the `host` of one of the engine's machines. On the others they
    # use their own address on the route to it.
    try:
        return addresses.towards(host)
    except OSError as error:
        raise ConfigError(
            f"host is {host!r}, which is not an address of this machine: {error}; allowed: 'auto', "
            "or an address of a machine that this one reaches"
        ) from error


def rank_port(config: Config, parallel: ParallelConfig, rank: Rank) -> int:
    """The port of a rank's control plane, different for all ranks of a data-parallel group."""
    if not config.rank_port:
        return 0
    port: int = config.rank_port + parallel.data_parallel_index * parallel.world_size + rank
    engines = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
    first, last = config.port, config.port + engines - 1
    if port > MAX_PORT or (first and first <= port <= last):
        raise ConfigError(
            f"rank_port is {config.rank_port}, which makes {port} the port of rank {rank} of "
            f"data-parallel rank {parallel.data_parallel_index}; allowed: a number that gives "
            f"each rank a port up to {MAX_PORT}, outside {first} to {last}, where the engines' "
            "descriptions are served (port)"
        )
    return port
