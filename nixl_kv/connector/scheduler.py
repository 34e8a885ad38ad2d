"""The scheduler role: sends each request to prefill or decode, and describes the engine.

vLLM ends the engine for an exception from any of these hooks, so what a client sent never raises
beyond `on_arrival`.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from nixl_kv.config import needless
from nixl_kv.connector.admission import Admission
from nixl_kv.connector.block_pinning import PinnedBlocks
from nixl_kv.connector.block_shortage import BlockShortage
from nixl_kv.connector.decode import DecodeScheduler
from nixl_kv.connector.listening import may_move, port_of, unusable
from nixl_kv.connector.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from nixl_kv.connector.offer_quota import OfferQuota
from nixl_kv.connector.prefill import Address, PrefillScheduler
from nixl_kv.connector.stats import Stats
from nixl_kv.connector.vllm_config import (
    choose_load_failure_policy,
    computed_on_decode,
    draft_facts,
    has_failed,
    model_facts,
    pagings,
    parallel_shape,
    parse_config,
    progress,
    prompt_of,
    request_ids,
    shorten,
    why_not_offered,
    why_not_shortened,
    writes_late,
)
from nixl_kv.engine.directory import DirectoryServer, describe_engine
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import (
    ConfigError,
    LimitedLog,
    RemoteProtocolError,
    TransportError,
    get_logger,
    printable,
)
from nixl_kv.ids import RequestId
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import RankDescription, decode_rank
from nixl_kv.protocol.ticket import FIELD

logger = get_logger(__name__)

OTHERS_HANDSHAKE: Final = (
    "the workers' handshake is another connector's: of the connectors of a MultiConnector, "
    "NixlKVConnector has to be the first, and the only one with a handshake of its own"
)
OUTER_POLICY: Final = (
    "request %s has failed with its load, although on_load_failure is 'recompute': of a "
    "MultiConnector, vLLM looks at kv_load_failure_policy of the whole, which has to say the same"
)
IN_TREE_BLOCKS: Final = "remote_block_ids"
"""vLLM's own NixlConnector on prefill fills in this field."""
OUR_PREFIXES: Final = ("nixl_kv_", "do_remote_", "remote_")
"""Of the fields of `kv_transfer_params` that a prefill engine or a router writes for decode."""

OTHERS_FIELDS: Final = frozenset({"remote_decoder", "remote_prefiller", "remote_kv_source"})
"""Fields of vLLM's OffloadingConnector (its peer-to-peer tier) that begin like ours."""

IN_TREE_PREFILL: Final = (
    "request %s is computed here: prefill runs vLLM's own NixlConnector (engine %s at %s); load "
    'the same connector on both engines: add "kv_connector_module_path": "nixl_kv.connector" to '
    "prefill's --kv-transfer-config"
)
SHOWN: Final = 64
"""The log cuts a client's value after this many characters."""
IN_TREE_LOG_S: Final = 60.0
"""A fleet in migration sends such requests for hours: log one line a minute, with a count."""

OUTCOMES: Final = {"recompute": "is computed here", "fail": "fails with HTTP 500"}


class Scheduler:
    """One engine. Every method is called by vLLM on the scheduler's thread, and none waits."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Check the configuration; nothing listens before the workers have described themselves."""
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = parse_config(vllm_config)
        for line in needless(vllm_config.kv_transfer_config.kv_connector_extra_config):
            logger.info(line)
        if vllm_config.kv_transfer_config.kv_connector == "NixlPushConnector":
            logger.info("NixlPushConnector of nixl_kv pulls: decode reads KV, prefill pushes none")
        self._trust = Trust.of(self._config)
        groups = pagings(vllm_config, kv_cache_config)
        self._blocks = PinnedBlocks(groups)
        quota = OfferQuota(kv_cache_config.num_blocks, self._config.offer_share)
        seal = partial(self._trust.seal, for_in_tree=self._config.in_tree_decode)
        self._prefill = PrefillScheduler(
            self._blocks, quota, seal, writes_late=writes_late(vllm_config)
        )
        self._decode = DecodeScheduler(
            groups,
            self._trust.check,
            computed=computed_on_decode(vllm_config),
            verify=self._config.verify,
        )
        self._decode.weights = self._config.weights
        self._epoch = 0
        self._admission = Admission(self._blocks, self._prefill, self._decode, BlockShortage())
        self._has_state = kv_cache_config.has_mamba_layers
        self._directory: DirectoryServer | None = None
        self._next_step: list[events.Command] = []
        self._ranks: list[RankDescription] = []
        self.stats = Stats()
        self._in_tree_log = LimitedLog(logger, time.monotonic, interval_s=IN_TREE_LOG_S)
        transfer = vllm_config.kv_transfer_config
        self._is_prefill, self._is_decode = transfer.is_kv_producer, transfer.is_kv_consumer
        policy = choose_load_failure_policy(vllm_config)
        self._recomputes = policy == "recompute"
        if self._is_decode:
            logger.info("a request whose KV cannot be read %s (on_load_failure)", OUTCOMES[policy])

    def bind(self, kv_cache_manager: Any) -> None:
        """Keep the cache manager: offers are made from its block tables."""
        self._blocks.bind(kv_cache_manager, self._prefill.on_free)

    def on_ended(
        self,
        offers: Iterable[str] | None,
        loads: Iterable[str] | None,
        failed: Iterable[str] | None = None,
    ) -> Collection[str]:
        """All workers have reported these offers and loads as ended.

        Returns:
            The loads whose end vLLM must not see yet, see `DecodeScheduler.on_end`.
        """
        self._follow_label()
        self._admission.on_offers_ended(request_ids(offers))
        return self._decode.on_end(request_ids(loads), request_ids(failed))

    def reset_cache(self) -> bool:
        """Let no KV from before this call be offered, or counted as loaded, after it.

        That holds at once, also while the engine is paused: this side decides what may be loaded,
        and which loads are good. The workers take offers back, and stop reads, with the next step.

        Returns:
            True: vLLM's own part fails as long as offers and loads hold blocks.
        """
        self._epoch += 1
        if self._prefill.address is not None:
            self._prefill.address = replace(
                self._prefill.address, epoch=self._epoch, weights=self._decode.weights
            )
        logger.info(
            "the cache was reset: of %d offers those are taken back that nobody reads, and %d "
            "loads are cancelled",
            self._prefill.num_offers,
            self._decode.num_open,
        )
        self._prefill.reset()
        self._decode.reset()
        return True

    def pop_stats(self) -> Stats | None:
        """What is new since the last time."""
        self.stats.measure("open_offers", self._prefill.num_offers)
        self.stats.measure("open_loads", self._decode.num_open)
        return self.stats.pop()

    def on_arrival(self, request: Request) -> None:
        """A request is new. A ticket that is not valid costs a log line and a counter."""
        self._follow_label()
        try:
            self._dispatch(request)
        except RemoteProtocolError as error:
            self.stats.count("tickets_refused")
            logger.warning("request %s is computed here: %s", request.request_id, error)

    def count_matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """See `DecodeScheduler.count_matched`. None: the request has to wait, others need not."""
        self._follow_label()
        request_id = RequestId(request.request_id)
        if not self._admission.may_begin(request_id, request.num_tokens):
            return None, False
        return self._decode.count_matched(request_id, local)

    def on_allocation(self, request: Request, tables: Sequence[list[int]], num_tokens: int) -> None:
        """See `DecodeScheduler.on_allocation`; `tables` are those of all groups."""
        request_id = RequestId(request.request_id)
        self._admission.on_begin(request_id)
        self._decode.on_allocation(request_id, self._select(tables), num_tokens)

    def on_step(self, output: SchedulerOutput) -> StepMetadata:
        """The commands of this step: layouts, then those of prefill, then those of decode."""
        self._follow_label()
        self._prefill.on_step(progress(output, self._prefill.requests))
        self._admission.on_step()
        commands, self._next_step = self._next_step, []
        return StepMetadata(
            [*commands, *self._prefill.pop_commands(), *self._decode.pop_commands()],
            computes=output.total_num_scheduled_tokens > 0,
            failed=self._decode.pop_held_back(),
        )

    def on_finish(
        self, request: Request, tables: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether to keep the blocks, and the ticket for them; `tables` are those of all groups."""
        self._follow_label()
        request_id = RequestId(request.request_id)
        if self._recomputes and self._decode.has_begun(request_id) and has_failed(request):
            logger.warning(OUTER_POLICY, request_id)
        self._decode.on_finish(request_id)
        return self._prefill.on_finish(
            request_id, self._select(tables), reason=why_not_offered(request)
        )

    def publish(self, handshakes: Mapping[tuple[int, int], HandshakeMetadata]) -> None:
        """The workers' parts are here, by (pp, tp) rank: for each other, and for peers.

        Raises:
            ConfigError: if they are another connector's.
        """
        if not handshakes:
            return
        if not all(isinstance(each, HandshakeMetadata) for each in handshakes.values()):
            # MultiConnector passes on what the first of its children has.
            raise ConfigError(OTHERS_HANDSHAKE)
        ranks = [decode_rank(handshakes[key].rank_description) for key in sorted(handshakes)]
        engine = self._vllm_config.kv_transfer_config.engine_id
        self._next_step = [events.SetEngine(engine, tuple(rank.layout for rank in ranks))]
        self._ranks = ranks
        if self._directory is not None:  # after a wake-up
            self._decode.accept_again()
        self._publish()

    def on_worker_metadata(self, metadata: object) -> None:
        """Some ranks have begun a new life, so the engine has, if it is of this connector."""
        if isinstance(metadata, WorkerMetadata) and self._ranks:
            for rank, description in metadata.rank_descriptions.items():
                self._ranks[rank] = decode_rank(description)
            self._publish()

    def _publish(self) -> None:
        """Describe the engine, to peers and in its tickets."""
        ranks, engine = self._ranks, self._vllm_config.kv_transfer_config.engine_id
        description = describe_engine(
            engine,
            model_facts(self._vllm_config),
            parallel_shape(self._vllm_config),
            ranks,
            draft_facts(self._vllm_config),
        )
        if self._directory is None:
            self._directory = self._listen()
            self._directory.start()
        self._directory.publish(description)
        self._prefill.address = Address(
            description.engine,
            description.incarnation,
            self._directory.host,
            self._directory.port,
            self._epoch,
            self._decode.weights,
        )
        logger.info(
            "engine %s is described at %s:%d; it has %s",
            description.engine,
            self._directory.host,
            self._directory.port,
            self._trust,
        )

    def stop(self) -> None:
        """Stop listening."""
        if self._directory is not None:
            self._directory.stop()

    def _follow_label(self) -> None:
        """If a tool has set another label, all that was decided by the former one is void.

        Not between a request's `count_matched` and its `on_allocation`: vLLM waits for the end of
        the load that the first has promised.
        """
        if self._directory is not None and self._directory.weights != self._decode.weights:
            self._decode.weights = self._directory.weights
            self.reset_cache()

    def _dispatch(self, request: Request) -> None:
        """By what a request asks for, if this engine does that."""
        params = request.kv_transfer_params
        if params is None:
            self._note_plain(request)
        elif _are_anothers(params):
            logger.debug(
                "request %s: its kv_transfer_params are for another connector", request.request_id
            )
        elif isinstance(params, Mapping) and params.get("do_remote_decode") is True:
            if not self._is_prefill:
                raise RemoteProtocolError(
                    "kv_transfer_params: do_remote_decode is true; allowed on a kv_consumer: false"
                )
            self._begin_offer(request)
        elif not self._is_decode:
            raise RemoteProtocolError(
                "kv_transfer_params: do_remote_decode is not true; allowed on a kv_producer: true"
            )
        elif _are_in_tree(params):
            self._note_in_tree(request.request_id, params)
        else:
            self._decode.on_arrival(
                prompt_of(request), params, is_rejected=request.abort_immediately
            )

    def _begin_offer(self, request: Request) -> None:
        """With state, decode needs that before the token which it computes itself."""
        arrived, reason = copy(request), ""  # it may be shortened
        if self._directory is not None and self._directory.is_draining:
            reason = "this engine drains"
        elif request.resumable:
            reason = "it goes on with more input"
        elif self._has_state:
            reason = why_not_shortened(request)
        if reason:
            logger.info("request %s is not offered: %s", request.request_id, reason)
            return
        if self._has_state:
            shorten(request)
        self._prefill.on_arrival(
            RequestId(request.request_id), request.num_prompt_tokens, partial(prompt_of, arrived)
        )

    def _note_plain(self, request: Request) -> None:
        """On an engine that only decodes, a request without a ticket is worth a line."""
        if not self._is_prefill:
            self.stats.count("tickets_missing")
            logger.info(
                "request %s is computed here: its kv_transfer_params have no ticket",
                request.request_id,
            )

    def _note_in_tree(self, request_id: str, params: Mapping[str, Any]) -> None:
        """Log that prefill runs the other connector: its blocks cannot be read from here."""
        self.stats.count("tickets_refused")
        engine, host = (_shown(params.get(name)) for name in ("remote_engine_id", "remote_host"))
        self._in_tree_log.warning(IN_TREE_PREFILL, request_id, engine, host)

    def _listen(self) -> DirectoryServer:
        """Tickets name this port. An engine that only decodes is asked by tools alone."""
        port = port_of(self._config, self._vllm_config)
        control = self._trust.control()
        listen = partial(
            DirectoryServer,
            control,
            self._config.host,
            count_awaited=lambda: len(self._prefill.requests),
            weights=self._decode.weights,
            has_key=self._trust.keys is not None,
        )
        try:
            return listen(port)
        except TransportError as error:
            if may_move(self._config, is_prefill=self._is_prefill):
                directory = listen(0)
                logger.warning(
                    "port %d (the default) is in use: this engine is described at port %d",
                    port,
                    directory.port,
                )
                return directory
            control.close()
            if isinstance(error.__cause__, OSError):
                raise unusable(self._config, port, error.__cause__) from error
            raise

    def _select(self, tables: Sequence[list[int]]) -> tuple[list[int], ...]:
        """The groups that are transferred."""
        return tuple(self._kv_cache_config.select_transfer_block_ids(tables))


def _are_anothers(params: object) -> bool:
    """Whether `kv_transfer_params` say nothing to us, but to another connector of a MultiConnector.

    Of ours, and of vLLM's, one field at least is left by every router that has lost others.
    """
    return (
        isinstance(params, Mapping)
        and bool(params)
        and not any(str(name).startswith(OUR_PREFIXES) for name in params.keys() - OTHERS_FIELDS)
    )


def _are_in_tree(params: object) -> bool:
    """Whether vLLM's own NixlConnector on prefill wrote `kv_transfer_params`.

    A ticket of ours has the same fields, but names no block. A router may have lost its string.
    """
    if not isinstance(params, Mapping) or FIELD in params:
        return False
    blocks = params.get(IN_TREE_BLOCKS)
    return isinstance(blocks, list) and any(blocks)


def _shown(value: object) -> str:
    """A value that a client may have written, for the log."""
    return printable(value, SHOWN) if isinstance(value, str) else f"of type {type(value).__name__}"
