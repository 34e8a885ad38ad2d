"""The connector in vLLM's scheduler process: passes each request to the prefill or decode half.

This file turns vLLM's objects into ours; `prefill.py` and `decode.py` decide. It also serves the
engine description, to which every ticket points. vLLM ends the engine if any hook raises, so no
client's input may cause an exception beyond `on_new_request`.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, TypeVar

from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from nixl_kv.config import EXTRA, LEASE_KEY, ON, POLICY, foreign_lines
from nixl_kv.connector import unpromised
from nixl_kv.connector.conversations import build as build_conversations
from nixl_kv.connector.decode import DecodeScheduler
from nixl_kv.connector.legs import Leg, leg_of
from nixl_kv.connector.paging import RequestBlocks
from nixl_kv.connector.part import SchedulerPart
from nixl_kv.connector.plugin import check_wire_values, may_move, port_of
from nixl_kv.connector.prefill import Address, PrefillScheduler
from nixl_kv.connector.stats import NO_TICKET, RequestCounts, Stats
from nixl_kv.connector.traces import Traces
from nixl_kv.connector.usage import CachedTokens, count_cached
from nixl_kv.connector.vllm_config import (
    MediaReader,
    check_hooks,
    check_params,
    computed_on_decode,
    draft_facts,
    engine_id,
    for_workers,
    has_draft_layers,
    keep_private,
    may_copy_blocks,
    media_rules,
    model_facts,
    pagings,
    parallel_shape,
    parse_config,
    progress,
    prompt_of,
    shorten,
    transfer_config,
    why_not_offered,
    why_not_shortened,
    zeroes_blocks,
)
from nixl_kv.connector.worker import HandshakeMetadata, StepMetadata, WorkerMetadata
from nixl_kv.early.answers import PROMISE, open_promise, seal_promise
from nixl_kv.engine.directory import DirectoryServer, describe_engine
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import (
    MAX_ID,
    REPEATED_LOG_S,
    REQUEST_LINES,
    ConfigError,
    LimitedLog,
    TicketRefused,
    TransportError,
    get_logger,
    printable,
    shown_id,
)
from nixl_kv.ids import Nonce, RequestId, new_nonce, short
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import RankDescription, decode_rank
from nixl_kv.protocol.ticket import MAX_WHY, Ticket

logger = get_logger(__name__)

_Fact = TypeVar("_Fact")

FOREIGN_HANDSHAKE: Final = (
    "another connector made the workers' handshake; in a MultiConnector, list NixlKVConnector "
    "first, and list no other connector that makes a handshake"
)
OUTER_POLICY: Final = (
    "request %s failed because its KV load failed, although on_load_failure is 'recompute'; with a "
    "MultiConnector, also set kv_load_failure_policy of --kv-transfer-config to 'recompute'"
)
LOOPBACK: Final = (
    "%s is %s, which tickets name: decode engines on other machines cannot connect to it; set it "
    "to 'auto', or to an address that they reach"
)
OTHER_LOAD: Final = (
    "another connector failed to load blocks that it shares, so vLLM would compute it from there on"
)
STILL_LOADING: Final = "it ended before its load"
IN_TREE_PREFILL: Final = (
    "request %s %s: %s; load the same connector on both engines: add "
    '"kv_connector_module_path": "nixl_kv.connector" to '
    "prefill's --kv-transfer-config"
)
DROPPED: Final = (
    "request %s: the workers do not get %s of its sampling parameters' extra_args, because it has "
    "more than 100 levels, and vLLM would end the engine"
)
WITHOUT_TICKET: Final = (
    "its kv_transfer_params have no ticket: prefill drains, or the router did not ask it or "
    "dropped its answer's"
)

# Its other connectors may load synchronously. If such a load fails, vLLM discards the whole step,
# also for requests that share blocks with the failed one. Decode may have read them by then.
NO_CHUNKS: Final = (
    "in a MultiConnector, decode reads no prompt in chunks while prefill computes it; use "
    "NixlKVConnector alone for that"
)

NOT_PREFILL: Final = (
    "kv_transfer_params: do_remote_decode is true, but this engine is a kv_consumer, which "
    "decodes; send such requests to a prefill engine (kv_producer or kv_both), and check the "
    "router's lists of engines"
)
NOT_DECODE: Final = (
    "kv_transfer_params: do_remote_decode is not true, but this engine is a kv_producer, which "
    "prefills; send such requests to a decode engine (kv_consumer or kv_both), and check the "
    "router's lists of engines"
)
BOTH_LEGS: Final = (
    "kv_transfer_params name prefill's address, or that it is not ready, but neither blocks nor a "
    "ticket: the router starts decode before prefill answers; let it pass on prefill's answer "
    "(unset VLLM_PD_CONCURRENT_DISPATCH; use a proxy for NixlConnector, not for NixlPushConnector) "
    "and set overlap on prefill (docs/early-answer.md)"
)

RELEASED: Final = (
    "request %s (offer %s) was answered early and is aborted: decode has released its offer"
)
NO_HINTS: Final = (
    "loads end with a step's output, as with overlap 'off': nixl_kv has no hooks that end them "
    "sooner inside a MultiConnector, for a class of another module, or in a process that loads no "
    "plugins (VLLM_PLUGINS)"
)

FOREIGN_SETTINGS: Final = (
    "some settings of vLLM's NixlConnector do less here (docs/migrate.md, What changes):"
)
# The requests whose prompt this engine computes, as far as it does not find its KV.
COMPUTED_HERE: Final = (Leg.NONE, Leg.FOREIGN, Leg.PREFILL)

OUTCOMES: Final = {"recompute": "is computed here", "fail": "fails with HTTP 500"}


class Scheduler:
    """One engine. vLLM calls every method on the scheduler's thread; none of them waits."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_child: bool = False
    ) -> None:
        """The engine listens once its workers have registered.

        `is_child` tells that another connector, such as vLLM's MultiConnector, created this one.
        """
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = parse_config(vllm_config)
        transfer = transfer_config(vllm_config)
        self._engine_id = engine_id(vllm_config)
        check_wire_values(self._config, vllm_config)
        self._is_prefill, self._is_decode = transfer.is_kv_producer, transfer.is_kv_consumer
        self._log_settings(transfer)
        if transfer.kv_connector == "NixlPushConnector":
            logger.info("nixl_kv's NixlPushConnector pulls: decode reads KV from prefill")
        unpromised.warn(*unpromised.FEATURES)
        self._overlaps = self._config.overlap == ON and not unpromised.is_off(unpromised.OVERLAP)
        self._trust = Trust.of(self._config)
        if self._trust.warning():
            logger.warning(self._trust.warning())
        groups = pagings(vllm_config, kv_cache_config)
        recomputes = self._config.on_load_failure == "recompute"
        self._decode = DecodeScheduler(
            groups,
            self._trust.check,
            computed=computed_on_decode(vllm_config),
            verify=self._config.verify,
            media=media_rules(self._config.media),
        )
        self._media = MediaReader.of(vllm_config)
        self._decode.weights = self._config.weights
        self._blocks = RequestBlocks(groups, kv_cache_config.num_blocks)
        self._prefill = PrefillScheduler(
            self._blocks,
            self._config.offer_share,
            partial(self._trust.seal, for_in_tree=self._config.in_tree_decode),
            # The model runner returns a step's output before the draft model writes its KV.
            writes_late=vllm_config.speculative_config is not None,
            in_parts=self._may_offer_chunks(is_child=is_child),
            is_decoding=lambda: self._decode.is_in_use,
        )
        if self._media and self._config.media != "own":
            check_hooks(vllm_config)
        self._is_paused = False
        self._released: set[Nonce] = set()  # early tickets that no decode engine needs any longer
        self._not_offered: dict[RequestId, str] = {}  # why, of open requests with media
        self._epoch = 0
        self._has_state = kv_cache_config.has_mamba_layers
        self._has_drafts = has_draft_layers(vllm_config)
        self._directory: DirectoryServer | None = None
        # Whether `SchedulerHooks` calls `end_landed`; set before the engine is described.
        self.takes_hints = False
        self._early: KVConnectorOutput | None = None  # what `end_landed` tells vLLM
        self._ranks: list[RankDescription] = []
        self._next_step: list[events.Command] = []
        self._log = LimitedLog(logger, time.monotonic, lines=REQUEST_LINES)
        # During a migration such requests come for hours.
        self._in_tree_log = LimitedLog(logger, time.monotonic, interval_s=REPEATED_LOG_S)
        self.stats = Stats()
        parts = build_conversations(
            vllm_config,
            kv_cache_config,
            self._config,
            self._trust,
            self.stats,
            self._decode,
            is_child=is_child,
        )
        self._parts: Sequence[SchedulerPart] = list(parts)
        # vLLM has one policy: it computes a request whose load by a part fails. The hooks end the
        # others.
        reads = any(part.reads for part in self._parts)
        self._decode.ends_failed = reads and not recomputes and not is_child
        # vLLM's scheduler reads this after it has created the connector. In a MultiConnector it has
        # no effect, because a child sees only its own part of the configuration.
        self._recomputes = recomputes
        transfer.kv_load_failure_policy = "recompute" if recomputes or reads else "fail"
        self._counts = RequestCounts(self.stats, self._config.entry_of, recomputes=self._recomputes)
        self._traces = Traces(vllm_config)
        self._cached = CachedTokens()

    def _log_settings(self, transfer: KVTransferConfig) -> None:
        """Tell, once per engine, which settings of the operator's count for something else here."""
        if LEASE_KEY in transfer.kv_connector_extra_config:
            about = f"{EXTRA}[{LEASE_KEY!r}] counts as 'offer_ttl_s', unless that is set"
            logger.info("%s: %g s", about, self._config.offer_ttl_s)
        lines = foreign_lines(vars(transfer), os.environ)
        given, policy = transfer.kv_load_failure_policy, self._config.on_load_failure
        outcome = f"a request whose KV load fails {OUTCOMES[policy]}"
        if self._is_decode and given != policy:
            outcome += f": on_load_failure replaces {POLICY} {given!r}"
            # The connector cannot tell an explicit 'fail' from vLLM's default.
            if lines or given != "fail":
                lines.append(f"{outcome}, which has no effect")
        if self._is_decode:
            logger.info("%s (on_load_failure is %r)", outcome, policy)
        if lines:
            logger.warning("%s %s", FOREIGN_SETTINGS, "; ".join(lines))

    def _may_offer_chunks(self, *, is_child: bool) -> bool:
        """Whether decode may read a prompt while this engine computes it."""
        if is_child and self._is_prefill:
            logger.info(NO_CHUNKS)
        is_off = is_child or unpromised.is_off(unpromised.CHUNKS)
        has_one_group = len(self._kv_cache_config.transfer_groups) == 1
        # vLLM's V2 model runner copies and zeroes new blocks before it calls the workers' hooks.
        # It copies a block if a prompt may end within a cached one.
        copies = may_copy_blocks(self._vllm_config.cache_config)
        writes_early = copies or zeroes_blocks(self._kv_cache_config)
        return has_one_group and not is_off and not writes_early

    @property
    def may_take_hints(self) -> bool:
        """Whether this engine wants `end_landed` before each step."""
        return self._overlaps and self._is_decode

    # --- requests

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._blocks.bind(kv_cache_manager, self._prefill.on_free)
        for part in self._parts:
            part.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self._follow_label()
        try:
            check_params(request)
            self._dispatch(request)
        except TicketRefused as error:
            if outcome := self._refuse(request, error.reason, str(error)):
                shown = shown_id(request.request_id)
                self._log.warning("request %s %s: %s", shown, outcome, error, about=error.reason)

    # For each waiting request, in each step until it is allocated.
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._follow_label()
        request_id = RequestId(request.request_id)
        if not self._prefill.may_begin(request_id, request.num_tokens, num_computed_tokens):
            return None, False  # this request waits, while later ones may run
        for part in self._parts:
            part.on_match(request, num_computed_tokens)
        return self._decode.get_num_new_matched_tokens(request_id, num_computed_tokens)

    # When a running request finds no blocks, before vLLM preempts another one for it.
    def has_pending_block_frees(self) -> bool:
        return self._prefill.has_pending_block_frees()

    # After each allocation of a waiting request, so a second time after its load.
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        request_id = RequestId(request.request_id)
        self._prefill.update_state_after_alloc(request_id)
        tables = self._transferred(blocks.get_block_ids())
        self._decode.update_state_after_alloc(request_id, tables, num_external_tokens)
        if num_external_tokens and self._decode.has_begun(request_id):
            self._prefill.on_load(request_id, num_external_tokens)
            # vLLM's number is right for a part's load: this engine computes the rest.
            if not any(part.on_load(request_id) for part in self._parts):
                self._cached.on_start(request)

    # Once per step, even an empty one.
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        self._follow_label()
        self._strip(scheduler_output)
        commands, self._next_step = self._next_step, []
        for part in self._parts:
            commands += part.build_connector_meta(scheduler_output)
        scheduled = progress(scheduler_output, self._prefill.awaited)
        preempted = scheduler_output.preempted_req_ids or ()
        commands += self._prefill.build_connector_meta(scheduled, map(RequestId, preempted))
        commands += self._decode.build_connector_meta()
        return StepMetadata(
            commands,
            computes=scheduler_output.total_num_scheduled_tokens > 0,
            failed=self._decode.pop_held_back(),
        )

    def _strip(self, scheduler_output: SchedulerOutput) -> None:
        """Leave out of a step what no worker reads, before vLLM pickles it for them.

        Here, because vLLM's `add_request` also changes the parameters of a request that runs
        (streaming input), for which it calls no hook.
        """
        for each in scheduler_output.scheduled_new_reqs:
            each.sampling_params, dropped = for_workers(each.sampling_params)
            if dropped:
                self._log.warning(DROPPED, shown_id(each.req_id), ", ".join(dropped))

    # For models with one cache group, inside another connector.
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._follow_label()
        request_id = RequestId(request.request_id)
        has_failed = request.status is RequestStatus.FINISHED_ERROR
        is_loading = self._decode.has_begun(request_id)
        if not is_loading:
            if not self._decode.is_told(request_id):
                self._traces.drop_load(request_id)
        elif self._recomputes and has_failed:
            self._log.warning(OUTER_POLICY, shown_id(request_id))
        self._decode.request_finished(request_id)
        self._cached.forget(request_id)
        self._counts.forget(request_id)
        # vLLM frees the blocks at the load's end, whatever it hears of an offer then.
        reason = STILL_LOADING if is_loading else why_not_offered(request)
        keeps_blocks, params = self._prefill.request_finished(
            request_id, self._transferred(block_ids), reason=reason
        )
        fields = [p.request_finished(request, is_offered=keeps_blocks) for p in self._parts]
        if params is not None:
            self.stats.count("offers")
            self._traces.begin_offer(request)
        elif request.mm_features:
            try:
                params = self._ticket_without_offer(request)
            except Exception as error:  # noqa: BLE001 - vLLM ends the engine if a hook raises
                shown = shown_id(request_id)
                self._log.warning("request %s gets no ticket: %s", shown, repr(error))
        self._not_offered.pop(request_id, None)
        return keeps_blocks, params or next(filter(None, fields), None)

    # Called by `SchedulerHooks` before each step.
    def pop_failed(self, requests: Mapping[str, Request]) -> list[str]:
        """The requests that vLLM must end with an error now: decode may not compute them."""
        must_load = self._decode.must_load
        for request_id, num_tokens in must_load.loaded.items():
            request = requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.PREEMPTED:
                must_load.fail(request_id, "preempted", "vLLM preempted it, which frees its KV")
            elif request.num_computed_tokens < num_tokens:
                must_load.fail(request_id, "other_load", OTHER_LOAD)
        failed = must_load.pop_failed()
        for request_id, (reason, words) in failed.items():
            self.stats.count("failed_requests", 1, reason)
            shown = shown_id(request_id)
            self._log.error("request %s fails with HTTP 500: %s", shown, words, about=reason)
        return [each for each in failed if each in requests]

    @property
    def aside(self) -> set[RequestId]:
        """The requests that wait for prefill, and about which vLLM need not ask meanwhile."""
        return self._decode.aside

    # Called by `SchedulerHooks` before each step.
    def pop_released(self, requests: Mapping[str, Request]) -> list[str]:
        """The requests that vLLM must abort now: no decode engine needs their KV any longer."""
        if not self._released:
            return []
        released, self._released = self._released, set()
        found = self._prefill.awaited_of(released)
        ended = {nonce: name for nonce, name in found.items() if name in requests}
        for nonce, name in ended.items():
            self._log.info(RELEASED, shown_id(name), short(nonce))
        return list(ended.values())

    def early_address(self) -> dict[str, Any] | None:
        """The fields of each early ticket, and a promise; None: answer nothing early now."""
        is_draining = self._directory is not None and self._directory.is_draining
        is_off = is_draining or self._is_paused or not self._is_prefill
        if is_off or self._prefill.address is None:
            return None
        # Shows that the API server has the same key.
        proof = seal_promise(new_nonce(), self._trust.ticket_key)
        return {**asdict(self._prefill.address), PROMISE: proof}

    # Called by `SchedulerHooks`.
    def may_seek(self, may: bool) -> None:  # noqa: FBT001 - one fact
        """Whether vLLM computes a request whose load fails."""
        for part in self._parts:
            part.may_seek(may)

    # Called by `SchedulerHooks` before each step.
    def take_answers(self) -> None:
        for part in self._parts:
            part.take_answers()

    # Called by `SchedulerHooks`.
    def on_pause(self, *, is_paused: bool) -> None:
        """VLLM begins no request, or goes on: a paused engine does not look hung."""
        self._decode.ignore_hints()
        self._is_paused = is_paused
        if self._directory is not None and self._is_prefill:
            self._directory.tell_ranks(is_paused=is_paused)

    def may_compute(self, request: Request) -> bool:
        """Whether this engine may compute a request that loaded its KV, after a preemption."""
        return self._is_decode and request.request_id not in self._decode.must_load

    def end_landed(self, end_loads: Callable[[KVConnectorOutput], None]) -> None:
        """Tell vLLM's scheduler which loads have landed since its last step.

        The workers report them too, with a step's output; `update_connector_output` drops that.
        """
        self._follow_label()
        hints = [] if self._directory is None else self._directory.pop_hints()
        num_ranks = self._vllm_config.parallel_config.world_size
        landed = self._decode.take_landed(hints, self._engine_id, num_ranks)
        for request_id, num_cached in landed.items():
            self._cached.on_loaded(request_id, num_cached)
        for part in self._parts:
            part.on_landed(landed)
        if landed:
            self.stats.count("early_ends", len(landed))
            self._early = KVConnectorOutput(finished_recving=set(landed))
            end_loads(self._early)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output is self._early:
            return
        output, metadata = connector_output, connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            self._follow_ranks(metadata)
            self._counts.add(metadata.reports)
            self._decode.on_ready(metadata.reports.ready)
            self._prefill.on_granted(metadata.reports.granted)
            self._released.update(metadata.reports.released)
        self._follow_label()
        sent, received = _own(output.finished_sending), _own(output.finished_recving)
        self._prefill.update_connector_output(sent)
        ended_offers = self._counts.count_offers(sent)
        self._traces.end_offers(ended_offers)
        for part in self._parts:
            part.on_offers_ended(sent, ended_offers)
        told, failed = self._decode.pop_told(received), _own(output.failed_recving)
        held_back = self._decode.update_connector_output(received - told, failed)
        of_parts = {each for each in received if any(p.is_load(each) for p in self._parts)}
        ended = self._counts.count_loads(received, held_back, self._decode.must_load, of_parts)
        self._traces.end_loads(ended)
        for request_id, load in ended.items():
            self._cached.on_loaded(request_id, load.num_cached if not load.reason else None)
        for part in self._parts:
            part.on_loads_ended(ended)
        # vLLM has read `failed_recving` already. The workers report these loads as failed later.
        if output.finished_recving:
            output.finished_recving -= held_back | told

    # When a pause clears caches, and for `/reset_prefix_cache?reset_external=true`.
    def reset_cache(self) -> bool:
        """Neither offer KV from before this call, nor count it as loaded.

        This holds at once, even while the engine is paused. The workers follow in the next step.
        """
        self._epoch += 1
        for part in self._parts:
            part.reset_cache(self._epoch, self._decode.weights)
        if self._prefill.address is not None:
            self._prefill.address = replace(
                self._prefill.address, epoch=self._epoch, weights=self._decode.weights
            )
        logger.info(
            "cache reset: revoking %d offers, also those that are being read; cancelling %d loads",
            self._prefill.num_offers,
            self._decode.num_open,
        )
        self._prefill.reset_cache()
        self._decode.reset_cache()
        return True  # vLLM's own part of the reset fails while offers and loads hold blocks

    def get_kv_connector_stats(self) -> Stats | None:
        for part in self._parts:
            part.count(self.stats)
        self.stats.measure("open_offers", self._prefill.num_offers)
        self.stats.measure("open_loads", self._decode.num_open)
        self.stats.measure("offered_blocks", self._prefill.num_held_blocks)
        self.stats.measure("oldest_offer_timestamp_seconds", self._prefill.oldest_offer_at)
        self.stats.measure("draining", self._directory is not None and self._directory.is_draining)
        return self.stats.pop()

    # --- the engine's description

    # After all workers have registered; vLLM 0.33 calls it again after a wake-up.
    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Describe the engine from the `metadata` of its workers, by (pp, tp) rank."""
        if not metadata:
            return
        if not all(isinstance(each, HandshakeMetadata) for each in metadata.values()):
            # MultiConnector passes on the metadata of its first child that has any.
            raise ConfigError(FOREIGN_HANDSHAKE)
        self._ranks = [decode_rank(metadata[key].rank_description) for key in sorted(metadata)]
        layouts = tuple(rank.layout for rank in self._ranks)
        if self._directory is not None:  # after a wake-up
            self._decode.accept_outdated()
        own = self._publish()
        if self._overlaps and self._is_decode and not self.takes_hints:
            logger.info(NO_HINTS)
        here = own.endpoint
        hints_at = here if self.takes_hints else None
        finds_at = None if self._first(lambda part: part.find) is None else here
        self._next_step = [events.SetEngine(self._engine_id, layouts, hints_at, finds_at)]
        for part in self._parts:
            self._next_step += part.on_registered()

    def _follow_ranks(self, metadata: WorkerMetadata) -> None:
        """Describe the engine anew if some ranks have a new incarnation: it has one too then."""
        if self._ranks and metadata.rank_descriptions:
            for rank, description in metadata.rank_descriptions.items():
                self._ranks[rank] = decode_rank(description)
            self._publish()

    def shutdown(self) -> None:
        if self._directory is not None:
            self._directory.stop()

    def _publish(self) -> DirectoryServer:
        description = describe_engine(
            self._engine_id,
            model_facts(self._vllm_config),
            parallel_shape(self._vllm_config),
            self._ranks,
            draft_facts(self._vllm_config),
            self._first(lambda part: part.facts),
        )
        if self._directory is None:
            self._directory = self._listen()
            self._directory.start()
        for part in self._parts:
            part.directory = self._directory
            part.begin_life(description.incarnation)
        self._directory.publish(description)
        engine, host, port = description.engine, self._directory.host, self._directory.port
        self._prefill.address = Address(
            engine, description.incarnation, host, port, self._epoch, self._decode.weights
        )
        log = "serving the description of engine %s on %s:%d; it has %s"
        logger.info(log, engine, host, port, self._trust)
        if self._is_prefill and self._config.has_key and self._config.is_this_machine_only:
            logger.warning(LOOPBACK, self._config.host_name, host)
        return self._directory

    def _listen(self) -> DirectoryServer:
        """Bind the port that tickets name. On a pure decode engine, only tools need it."""
        port = port_of(self._config, self._vllm_config)
        # Its own ranks and API servers may connect, whatever `peers` says.
        control = self._trust.control(self._config.host)
        listen = partial(
            DirectoryServer,
            control,
            self._config.host,
            count_awaited=lambda: len(self._prefill.awaited),
            weights=self._decode.weights,
            has_key=self._trust.keys is not None,
            seal=self._trust.seal,
            find=self._first(lambda part: part.find),
            asks=self._first(lambda part: part.asks),
        )
        try:
            return listen(port)
        except TransportError:
            if not may_move(self._config, is_prefill=self._is_prefill):
                control.close()
                raise
        directory = listen(0)
        logger.warning(
            "port %d (the default) is in use: serving this engine's description on port %d",
            port,
            directory.port,
        )
        return directory

    def _first(self, fact: Callable[[SchedulerPart], _Fact | None]) -> _Fact | None:
        return next((each for each in map(fact, self._parts) if each is not None), None)

    def _follow_label(self) -> None:
        """Reset if a tool has set another label of the weights (`nixl-kv set-weights`).

        Never between a request's `get_num_new_matched_tokens` and its `update_state_after_alloc`:
        vLLM waits for the load that the first has promised.
        """
        if self._directory is not None and self._directory.weights != self._decode.weights:
            self._decode.weights = self._directory.weights
            self.reset_cache()

    # --- kv_transfer_params

    def _dispatch(self, request: Request) -> None:
        leg = leg_of(request.kv_transfer_params)
        if leg is Leg.NONE and not self._is_prefill:
            # Such an engine should get no request without a ticket.
            self._counts.count_recomputed(NO_TICKET)
            message = "request %s is computed here: %s"
            self._log.info(message, shown_id(request.request_id), WITHOUT_TICKET)
        if leg in COMPUTED_HERE:
            for part in self._parts:
                part.on_new_request(request, leg)
        if leg in (Leg.NONE, Leg.FOREIGN):
            return
        has_role = self._is_prefill if leg is Leg.PREFILL else self._is_decode
        if not has_role:
            raise TicketRefused(NOT_PREFILL if leg is Leg.PREFILL else NOT_DECODE, "role")
        match leg:
            case Leg.PREFILL:
                self._begin_offer(request)
            case Leg.IN_TREE:
                self._refuse_in_tree(request)
            case Leg.UNANSWERED:
                raise TicketRefused(BOTH_LEGS)
            case _:
                self._begin_load(request)

    def _begin_load(self, request: Request) -> None:
        params, is_rejected = request.kv_transfer_params, request.abort_immediately
        prompt = prompt_of(request, self._media)
        self._decode.on_new_request(prompt, params, is_rejected=is_rejected)
        is_restricted = self._decode.must_load.outlasts_load(prompt.request)
        if is_restricted and self._decode.media.ids_may_mislead:
            keep_private(request)
        self._traces.begin_load(request)

    def _refuse_in_tree(self, request: Request) -> None:
        fields = request.kv_transfer_params or {}
        named = (fields.get(name) for name in ("remote_engine_id", "remote_host"))
        engine, host = (printable(str(each), MAX_ID) for each in named)
        prefill = f"prefill runs vLLM's own NixlConnector (engine {engine} at {host})"
        if outcome := self._refuse(request, "other_connector", prefill):
            shown = shown_id(request.request_id)
            self._in_tree_log.warning(IN_TREE_PREFILL, shown, outcome, prefill)

    def _refuse(self, request: Request, reason: str, detail: str) -> str:
        """Follow on_load_failure; returns the outcome for the log.

        '' if `pop_failed` ends the request and logs that, because its media may be stand-ins.
        """
        request_id, params = RequestId(request.request_id), request.kv_transfer_params
        self._traces.refuse(request, reason)
        if not request.abort_immediately and leg_of(params) is not Leg.PREFILL:
            why = self._decode.why_not_computed(prompt_of(request, self._media), params)
            if why:
                self.stats.count("refused_tickets", 1, reason)
                self._decode.must_load.add(request_id, why)
                self._decode.must_load.fail(request_id, reason, detail)
                return ""
        self._counts.count_refused(request_id, reason)
        if self._recomputes or not self._is_decode:
            return OUTCOMES["recompute"]
        self._decode.refuse(request_id, request.num_prompt_tokens)
        return OUTCOMES["fail"]

    def _begin_offer(self, request: Request) -> None:
        prompt, promised = prompt_of(request, self._media), self._promised(request)
        if reason := self._why_not_begun(request):
            shown = shown_id(request.request_id)
            self._log.info("request %s is not offered: %s", shown, reason, about=reason)
            if prompt.media.items:
                self._not_offered[prompt.request] = reason
            if promised is not None:
                self._prefill.decline(promised)
            return
        if self._has_state:
            # Decode computes the last token itself. It needs the recurrent state before that
            # token, but prefill keeps only the state after the last token that it computes.
            shorten(request, has_drafts=self._has_drafts)
        # An early ticket is for the whole prompt.
        is_early = promised is not None and self._prefill.is_new(promised)
        num_tokens = prompt.num_tokens if is_early else request.num_prompt_tokens
        self._prefill.on_new_request(
            prompt.request,
            request.num_prompt_tokens,
            partial(prompt.hashes, num_tokens=num_tokens),
            promised,
            num_hashed=num_tokens,
            count_cached=partial(count_cached, request),
        )

    def _why_not_begun(self, request: Request) -> str:
        """Why this request cannot be offered; empty if it can."""
        if self._directory is not None and self._directory.is_draining:
            return "this engine is draining"
        if request.abort_immediately:  # `EarlyAnswers` tells of a request that it has answered
            return "vLLM refused it, or it failed"
        if request.resumable:
            return "it is resumable: more input may follow"
        return why_not_shortened(request) if self._has_state else ""

    def _ticket_without_offer(self, request: Request) -> dict[str, Any] | None:
        """A ticket for a prompt with media: decode may have stand-ins, so it needs the hashes."""
        is_leg = leg_of(request.kv_transfer_params) is Leg.PREFILL
        if not is_leg or self._prefill.address is None:
            return None
        prompt = prompt_of(request, self._media)
        nonce = new_nonce()
        context, media = prompt.hashes(nonce)
        reason = self._not_offered.get(prompt.request) or why_not_offered(request)
        ticket = Ticket(
            **asdict(self._prefill.address),
            nonce=nonce,
            num_tokens=prompt.num_tokens,
            context=context,
            media=media,
            not_offered=printable(
                reason or "its KV is incomplete; prefill's log has the reason", MAX_WHY
            ),
        )
        return self._trust.seal(ticket, for_in_tree=self._config.in_tree_decode)

    def _promised(self, request: Request) -> Nonce | None:
        """The nonce of the early ticket that this engine's API server may have given away."""
        fields = request.kv_transfer_params or {}
        if PROMISE not in fields:
            return None
        try:
            return open_promise(fields[PROMISE], self._trust.ticket_key)
        except TicketRefused as error:
            shown = shown_id(request.request_id)
            self._log.info("request %s: no promise: %s", shown, error, about=error.reason)
            return None

    def _transferred(self, tables: Sequence[list[int]]) -> tuple[list[int], ...]:
        return tuple(self._kv_cache_config.select_transfer_block_ids(tables))


def _own(ids: set[str] | None) -> set[RequestId]:
    return {RequestId(each) for each in ids or ()}
