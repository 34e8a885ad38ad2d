"""The scheduler role: sends each request to the prefill or the decode side, and publishes.

vLLM ends the engine for an exception from any of these hooks, so what a client sent never raises
beyond `arrived`.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from nixl_kv.connector import translate
from nixl_kv.connector.commands import Handshake, StepCommands
from nixl_kv.connector.decode import DecodeScheduler
from nixl_kv.connector.holds import PromptBlocks
from nixl_kv.connector.prefill import Address, PrefillScheduler
from nixl_kv.connector.pressure import Pressure
from nixl_kv.connector.publisher import Publisher
from nixl_kv.connector.shards import shape
from nixl_kv.connector.stats import Stats
from nixl_kv.connector.trust import Trust
from nixl_kv.errors import RemoteProtocolError, TransportError
from nixl_kv.ids import Incarnation, engine_incarnation
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import WIRE_VERSION, Description, decode_rank

logger = logging.getLogger(__name__)


class Scheduler:
    """One engine. Every method is called by vLLM on the scheduler's thread, and none waits."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Check the configuration; nothing listens before the workers have described themselves."""
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = translate.config(vllm_config)
        self._trust = Trust.of(self._config)
        transfer = vllm_config.kv_transfer_config
        self._pagings = translate.pagings(kv_cache_config)
        sizes = [paging.block_size for paging in self._pagings]
        pressure = Pressure(kv_cache_config.num_blocks, self._config.offer_share)
        self._prefill = PrefillScheduler(pressure, self._trust) if transfer.is_kv_producer else None
        verify = self._config.verify
        decode = DecodeScheduler(sizes, self._trust, verify=verify)
        self._decode = decode if transfer.is_kv_consumer else None
        self._publisher: Publisher | None = None
        self._siblings: list[events.Siblings] = []  # until the next step takes them to the workers
        self._stats = Stats()
        if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is %r: a request whose KV cannot be read fails with "
                "HTTP 500; with 'recompute' it is computed here instead",
                transfer.kv_load_failure_policy,
            )

    def bind(self, kv_cache_manager: Any) -> None:
        """Take the cache manager: offers are made from its block tables."""
        if self._prefill is not None:
            self._prefill.blocks = PromptBlocks(kv_cache_manager, self._pagings)

    def sent(self, requests: Iterable[str]) -> None:
        """The workers have reported these offers as ended."""
        if self._prefill is not None:
            self._prefill.release(requests)

    def arrived(self, request: Request) -> None:
        """A request is new. A ticket that does not hold costs a log line and a counter."""
        params = request.kv_transfer_params
        try:
            self._sort(request, params)
        except RemoteProtocolError as error:
            self._stats.count("tickets_refused")
            logger.warning("request %s is computed here: %s", request.request_id, error)

    def matched(self, request: Request, local: int) -> tuple[int, bool]:
        """See `DecodeScheduler.matched`."""
        return (0, False) if self._decode is None else self._decode.matched(request, local)

    def allocated(self, request: Request, tables: Sequence[list[int]], load: int) -> None:
        """See `DecodeScheduler.allocated`; `tables` are those of all groups."""
        if self._decode is not None:
            self._decode.allocated(request, self._select(tables), load)

    def step(self, output: SchedulerOutput) -> StepCommands:
        """The commands of this step, in the order in which things happened."""
        commands = StepCommands(list(self._siblings))
        self._siblings.clear()
        if self._prefill is not None:
            self._prefill.scheduled(output)
            commands.commands += self._prefill.take()
        if self._decode is not None:
            commands.commands += self._decode.take()
        return commands

    def finished(
        self, request: Request, tables: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether to keep the blocks, and the ticket for them; `tables` are those of all groups."""
        if self._decode is not None:
            self._decode.finished(request)
        if self._prefill is None:
            return False, None
        return self._prefill.finished(request, self._select(tables))

    def publish(self, handshakes: Mapping[tuple[int, int], Handshake]) -> None:
        """The workers' parts are here, by (pp, tp) rank: for each other, and for peers."""
        if not handshakes:
            return
        ranks = tuple(decode_rank(handshakes[key].rank_description) for key in sorted(handshakes))
        self._siblings = [events.Siblings(tuple(rank.layout for rank in ranks))]
        engine = self._vllm_config.kv_transfer_config.engine_id
        incarnation = engine_incarnation(Incarnation(rank.incarnation) for rank in ranks)
        publisher = self._publisher = self._publisher or self._listen()
        publisher.publish(
            Description(
                WIRE_VERSION,
                incarnation,
                engine,
                translate.model_facts(self._vllm_config),
                shape(self._vllm_config),
                ranks,
            )
        )
        address = Address(engine, incarnation, publisher.host, publisher.port)
        if self._prefill is not None:
            self._prefill.address = address
        logger.info(
            "engine %s is described at %s:%d; it has %s",
            engine,
            address.host,
            address.port,
            self._trust,
        )

    def stats(self) -> Stats | None:
        """What was counted since the last step."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, Stats()
        return stats

    def stop(self) -> None:
        """Stop listening."""
        if self._publisher is not None:
            self._publisher.stop()

    def _sort(self, request: Request, params: object) -> None:
        """By what it asks for, and by what this engine is.

        Raises:
            RemoteProtocolError: if the parameters do not hold.
        """
        if params is None:
            self._note_plain(request)
        elif isinstance(params, Mapping) and params.get("do_remote_decode") is True:
            if self._prefill is None:
                raise RemoteProtocolError(
                    "kv_transfer_params: do_remote_decode is true; allowed on a kv_consumer: false"
                )
            self._prefill.arrived(request)
        elif self._decode is not None:
            self._decode.arrived(request, params)
        else:
            raise RemoteProtocolError(
                "kv_transfer_params: do_remote_decode is not true; allowed on a kv_producer: true"
            )

    def _note_plain(self, request: Request) -> None:
        """On an engine that only decodes, a request without parameters is worth a line."""
        if self._prefill is None:
            self._stats.count("tickets_missing")
            logger.info(
                "request %s is computed here: it has no kv_transfer_params", request.request_id
            )

    def _listen(self) -> Publisher:
        """Tickets name this port. An engine that only decodes is asked by tools alone."""
        port = self._config.port
        # Data-parallel engines of one host have a port each.
        port = port and port + self._vllm_config.parallel_config.data_parallel_index
        control = self._trust.control()
        try:
            return Publisher(self._config.host, port, control)
        except TransportError:
            if self._prefill is not None:
                raise
            return Publisher(self._config.host, 0, control)

    def _select(self, tables: Sequence[list[int]]) -> tuple[list[int], ...]:
        """The groups that are transferred."""
        return tuple(self._kv_cache_config.select_transfer_block_ids(tables))
