"""The worker role: swaps commands and results with the transfer engine on vLLM's step thread."""

import ipaddress
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from nixl_kv import addresses
from nixl_kv.config import MAX_PORT, Config
from nixl_kv.connector.kv_layout import cache_layout, choose_interleave
from nixl_kv.connector.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from nixl_kv.connector.stale_tails import StaleTails
from nixl_kv.connector.stats import Stats
from nixl_kv.connector.unwritten import UnwrittenOffers
from nixl_kv.connector.vllm_config import (
    check_supported,
    draft_facts,
    is_awaited,
    is_copy,
    model_facts,
    parse_config,
    spans_machines,
    worker_rank,
)
from nixl_kv.engine.engine import RankSpec, TransferEngine
from nixl_kv.engine.loop import STOPPED
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import ConfigError, LocalProtocolError, TransportError, get_logger
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.ids import Rank, RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import encode
from nixl_kv.transport.base import Transport

logger = get_logger(__name__)

LOAD_WAIT_S: Final = 0.01
"""How long after the latest load steps that compute nothing wait for one to end. vLLM asks again a
millisecond or two later, which counts for loads that are short; and a request that comes meanwhile
waits as well."""
SHUTDOWN_S: Final = 5.0
"""How long the end of the process waits for the transfer engine."""


RESET: Final = events.Failure(
    events.FailureKind.DROPPED, "the cache was reset before the load was used"
)


class Worker:
    """One rank. vLLM calls every method on the step thread.

    Only `register` and `stop` wait, and `pop_results` if vLLM does.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check the configuration; nothing starts before the cache exists."""
        self._clock = clock
        check_supported(vllm_config, kv_cache_config)
        choose_interleave(vllm_config, kv_cache_config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._engine: TransferEngine | None = None
        self._ending: TransferEngine | None = None  # it was told to stop, and has not yet
        self._kv_caches: Mapping[str, torch.Tensor] | None = None
        self._unwritten = UnwrittenOffers()
        self._stale_tails = StaleTails(kv_cache_config, {})
        self.handshake: HandshakeMetadata | None = None
        """What the scheduler publishes of this rank, once it is registered."""
        self._new_life: bytes | None = None  # its description, for the scheduler
        self._left: list[events.Result] = []  # of the former life
        self._loading: set[RequestId] = set()
        self._wait_until = -math.inf  # for them, in monotonic seconds
        self._computes = True  # in this step
        self._is_awaited = is_awaited(vllm_config)
        self.stats = Stats()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the cache and start the transfer engine; again after a wake-up, as a new life.

        Raises:
            NixlKVError: if the cache cannot be served, if NIXL or a socket fails, or if the former
                life may still write into the memory.
        """
        self.stop()
        self._kv_caches = kv_caches
        self._stale_tails = StaleTails(self._kv_cache_config, kv_caches)
        if is_copy(self._vllm_config):
            return
        layout = cache_layout(self._vllm_config, self._kv_cache_config, kv_caches)
        self._engine = TransferEngine(rank_spec(self._vllm_config, layout))
        self.handshake = HandshakeMetadata(encode(self._engine.start()))
        logger.info(
            "registered %.2f GiB of KV cache: %d layers, %d blocks of %d tokens, %s",
            sum(span.length for span in layout.spans) / 2**30,
            len(kv_caches),
            max(group.num_entries for group in layout.groups),
            max(group.entry_size for group in layout.groups),
            ", ".join(sorted({r.element for group in layout.groups for r in group.regions})),
        )

    def restore(self) -> None:
        """Register the same cache, at the same addresses, as a new life.

        Raises:
            LocalProtocolError: if none was registered before.
        """
        if self._kv_caches is None:
            raise LocalProtocolError("a cache is to be restored that was never registered")
        self.register(self._kv_caches)

    def on_step(self, step: StepMetadata) -> None:
        """Hand over the step's commands, before the forward that belongs to them."""
        self._computes = step.computes
        self._left += [events.LoadEnded(request, 0, RESET) for request in step.failed]
        if self._engine is not None:
            starting = [one.request for one in step.commands if isinstance(one, events.StartLoad)]
            if starting:
                self._loading.update(starting)
                self._wait_until = self._clock() + LOAD_WAIT_S
            self._stale_tails.clear(step.commands)
            self._unwritten.on_step_enqueued()  # the last step's, if vLLM did not say so
            self._engine.submit([*self._unwritten.pop_written(), *step.commands])
            self._unwritten.add(step.commands)
            self.stats.count_commands(step.commands)
        else:  # vLLM waits for a report of each worker, also of a copy, and after a failed sleep
            for one in step.commands:
                if isinstance(one, events.PublishOffer):
                    end = events.OfferEnd.NOT_NEEDED
                    self._left.append(events.OfferEnded(one.nonce, one.request, end))
                elif isinstance(one, events.StartLoad):
                    self._left.append(events.LoadEnded(one.request, one.num_tokens, STOPPED))

    def on_step_enqueued(self) -> None:
        """The step's forwards, also of a draft model, are on the GPU's stream."""
        self._unwritten.on_step_enqueued()
        if self._engine is not None:
            self._engine.submit(self._unwritten.pop_written())

    def pop_results(self) -> KVConnectorTransferResults:
        """What has ended since the last step; a draft model may still follow in this step."""
        results, self._left = self._left, []
        if self._engine is not None:
            self._engine.submit(self._unwritten.pop_written())
            if self._loading and not (self._computes or self._is_awaited):
                self._engine.wait_load(max(0.0, self._wait_until - self._clock()))
            living = self._engine.pop_results()
            for one in living:
                if isinstance(one, events.NewLife):
                    self.handshake = HandshakeMetadata(encode(one.description))
                    self._new_life = self.handshake.rank_description
            results += living
        if self._ending is not None:  # loads into which nothing can write any longer, by now
            results += self._ending.pop_results()
        self._loading -= {one.request for one in results if isinstance(one, events.LoadEnded)}
        self.stats.count_results(results)
        return transfer_results(results)

    def pop_metadata(self) -> WorkerMetadata | None:
        """What the scheduler has to publish of this rank, if it began a new life."""
        description, self._new_life = self._new_life, None
        if description is None:
            return None
        return WorkerMetadata({worker_rank(self._vllm_config): description})

    def pop_stats(self) -> Stats | None:
        """What was counted since the last time."""
        self.stats.measure_descriptors(self._clock())
        return self.stats.pop()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the transfer engine; what it owed to vLLM is reported with the next step.

        Raises:
            TransportError: if something may still write into the cache: then vLLM must not free its
                memory, and nothing can be registered. It may be called again.
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
                f"the KV cache may still be written, so its memory must not be freed: {error}. Let "
                "this engine sleep again in some seconds, and restart it if that fails too. Until "
                "then it transfers no KV, and computes all prompts itself"
            ) from error
        self._left += self._ending.pop_results()
        self._ending = None

    def shutdown(self) -> None:
        """End the transfer engine with the process, which frees the memory in any case."""
        try:
            self.stop(SHUTDOWN_S)
        except TransportError as error:
            logger.error("shutdown: %s", error)  # noqa: TRY400 - the error says all


def rank_spec(vllm_config: VllmConfig, layout: CacheLayout) -> RankSpec:
    """What this worker's transfer engine is made of; to be called in a worker only.

    Raises:
        ConfigError: if the key file is not one, or peers could not reach this rank.
    """
    config = parse_config(vllm_config)
    transfer = vllm_config.kv_transfer_config

    def make_transport() -> Transport:
        from nixl_kv.transport.nixl import nixl_transport  # noqa: PLC0415 - only where it is used

        return nixl_transport(config, layout.memory, is_decode=transfer.is_kv_consumer)

    def make_checker() -> Transport:
        from nixl_kv.transport.nixl import nixl_checker  # noqa: PLC0415 - only where it is used

        return nixl_checker(config, is_decode=transfer.is_kv_consumer)

    return RankSpec(
        engine=transfer.engine_id,
        rank=worker_rank(vllm_config),
        layout=layout,
        model=model_facts(vllm_config),
        extras=draft_facts(vllm_config),
        config=config,
        host=rank_host(config.host, spans_machines=spans_machines(vllm_config)),
        port=rank_port(config, vllm_config.parallel_config, worker_rank(vllm_config)),
        is_prefill=transfer.is_kv_producer,
        is_decode=transfer.is_kv_consumer,
        make_transport=make_transport,
        make_checker=make_checker,
        make_control=Trust.of(config).control,
    )


def rank_host(host: str, *, spans_machines: bool) -> str:
    """The address on which a rank listens, as an IP literal.

    The ranks of one engine may run on several machines, which may all have been given the `host` of
    one. The others take the address that they have for that one: it is in the same network.

    Raises:
        ConfigError: if there is no way to that one, or `host` is reached by its own machine alone.
    """
    if spans_machines and ipaddress.ip_address(host).is_loopback:
        raise ConfigError(
            f"host is {host!r}; allowed for an engine on several machines: 'auto', or an address "
            "or a network interface that the other engines reach"
        )
    if addresses.is_local(host):
        return host
    try:
        return addresses.towards(host)
    except OSError as error:
        raise ConfigError(f"host is {host!r}, which is not this machine's: {error}") from error


def rank_port(config: Config, parallel: ParallelConfig, rank: Rank) -> int:
    """The port of a rank's control plane, different for all ranks of a data-parallel group.

    Raises:
        ConfigError: if there is no such port, or the engine's description has it.
    """
    if not config.rank_port:
        return 0
    port: int = config.rank_port + parallel.data_parallel_index * parallel.world_size + rank
    engines = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
    first, last = config.port, config.port + engines - 1
    if port > MAX_PORT or (first and first <= port <= last):
        raise ConfigError(
            f"rank_port is {config.rank_port}, which makes {port} the port of rank {rank} of "
            f"data-parallel rank {parallel.data_parallel_index}; allowed: a number that gives "
            f"each rank a port up to {MAX_PORT}, outside {first} to {last}, where the engine is "
            "described (port)"
        )
    return port


def transfer_results(results: Iterable[events.Result]) -> KVConnectorTransferResults:
    """As vLLM wants them: what failed is a part of what was received."""
    transferred = KVConnectorTransferResults()
    for result in results:
        match result:
            case events.LoadEnded():
                transferred.finished_recving.add(result.request)
                if result.failure is not None:
                    transferred.failed_recving.add(result.request)
            case events.OfferEnded():
                transferred.finished_sending.add(result.request)
    return transferred
