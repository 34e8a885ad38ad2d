"""An index of this engine's cached blocks, beside vLLM's block pool, for other engines.

The adapter wraps three methods of the pool, of this instance alone, and only with the setting
`conversations`. `conversations/index.py` explains the index. The engine's directory answers `Find`
with it, and the ranks hear of each step's blocks with the step's commands. Decode names its own
directory in its answers, so that a router can send that with the conversation's next prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from nixl_kv.config import ON, Config
from nixl_kv.connector.legs import Leg, leg_of
from nixl_kv.connector.part import SchedulerPart
from nixl_kv.connector.stats import Stats
from nixl_kv.connector.vllm_config import (
    NOR,
    applying,
    content_facts,
    ended_well,
    engine_id,
    has_draft_layers,
    may_copy_blocks,
    specs,
    transfer_config,
    zeroes_blocks,
)
from nixl_kv.conversations import runs
from nixl_kv.conversations.index import ContentIndex
from nixl_kv.engine.probe import probe_ticket
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import ConfigError
from nixl_kv.ids import ANY_INCARNATION, Incarnation, new_nonce
from nixl_kv.protocol import events
from nixl_kv.protocol.messages import ContentFacts, Find, Found
from nixl_kv.protocol.ticket import FIELD

# --- engines that cannot serve the setting

# vLLM's other algorithms are not collision-resistant, so equal hashes prove nothing.
HASHES: Final = ("sha256", "sha256_cbor")

FULL_ATTENTION: Final = ("FullAttentionSpec", "MLAAttentionSpec")

# Each entry is the reason, and the condition. These are checked before the weights load.
REFUSALS: Final[Mapping[str, Callable[[VllmConfig], bool]]] = {
    "kv_role 'kv_producer': such an engine reads no KV; allowed: 'kv_both', and on an engine that "
    "only decodes 'kv_consumer'": lambda vllm: not transfer_config(vllm).is_kv_consumer,
    "prefill context parallelism (prefill_context_parallel_size > 1)": lambda vllm: (
        vllm.parallel_config.prefill_context_parallel_size > 1
    ),
    "no prefix caching: set --enable-prefix-caching": lambda vllm: (
        not vllm.cache_config.enable_prefix_caching
    ),
    f"a --prefix-caching-hash-algo other than {' and '.join(HASHES)}": lambda vllm: (
        vllm.cache_config.prefix_caching_hash_algo not in HASHES
    ),
    "recurrent state (Mamba)": lambda vllm: (
        vllm.model_config.is_hybrid or vllm.model_config.is_attention_free
    ),
    # vLLM's V2 model runner copies and zeroes blocks before it calls the workers' hooks.
    "prompts that reuse a part of a block, which vLLM copies: leave out --prefix-match-unit": (
        lambda vllm: may_copy_blocks(vllm.cache_config)
    ),
}

# The same for the cache, which vLLM describes after it has loaded the weights.
CACHE_REFUSALS: Final[Mapping[str, Callable[[KVCacheConfig], bool]]] = {
    "several cache groups": lambda kv: len(kv.kv_cache_groups) != 1,
    "layers that do not keep all tokens": lambda kv: any(
        type(spec).__name__ not in FULL_ATTENTION for spec in specs(kv)
    ),
    "new blocks that vLLM fills with zeros": zeroes_blocks,
}


def check_start(config: Config, vllm_config: VllmConfig) -> None:
    """Raise a ConfigError that names all that keeps an engine from serving `conversations`."""
    if config.conversations == ON:
        _refuse(applying(REFUSALS, vllm_config))


def check_cache(kv_cache_config: KVCacheConfig) -> None:
    """The same, of an engine that has the setting."""
    _refuse(applying(CACHE_REFUSALS, kv_cache_config))


def _refuse(reasons: Sequence[str]) -> None:
    if reasons:
        raise ConfigError(
            f"conversations is 'on', which does not work with {NOR.join(reasons)}; allowed here: "
            "'off'"
        )


# --- the owner's half


OWNER: Final = "nixl_kv_owner"
"""The field of decode's answer in which it names its own directory, sealed like a ticket."""

WANT_TICKET: Final = {"do_remote_decode": True, "do_remote_prefill": False}


class CachedContent(SchedulerPart):
    """The blocks of one engine. vLLM's scheduler thread calls all methods but `find`."""

    facts: ContentFacts

    def __init__(self, vllm_config: VllmConfig, config: Config, trust: Trust) -> None:
        """Has no blocks before `bind_kv_cache_manager`, and no questions before `begin_life`."""
        self.facts = content_facts(vllm_config, config)
        self._engine = engine_id(vllm_config)
        self._trust = trust
        # vLLM drops the last block of its own hits likewise. With a connector, vLLM 0.33 hashes no
        # tokens after a block either.
        self._drops_last = has_draft_layers(vllm_config)
        self._weights = config.weights
        self._index: ContentIndex
        self._key = b""
        self._incarnation: Incarnation = ANY_INCARNATION
        self._ticket_epoch = 0
        # The directory's thread counts, and the scheduler's reports.
        self._answers = {"found": 0, "none": 0}
        self._counted = dict.fromkeys(self._answers, 0)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Follow vLLM's block pool from now on."""
        pool: Any = kv_cache_manager.block_pool
        index = self._index = ContentIndex(
            pool.num_gpu_blocks,
            lookup_in(pool),
            weights=self._weights,
            drops_last=self._drops_last,
        )
        take, cache, reset = pool.get_new_blocks, pool.cache_full_blocks, pool.reset_prefix_cache

        @wraps(take)
        def get_new_blocks(num_blocks: int) -> Any:
            taken = take(num_blocks)
            index.on_taken([block.block_id for block in taken])
            return taken

        @wraps(cache)
        def cache_full_blocks(
            request: Any,
            blocks: Any,
            num_cached_blocks: int,
            num_full_blocks: int,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            # A session is left out, with all that follows its blocks. If its part ends within
            # accepted drafts, vLLM takes tokens of the next part for computed.
            if num_cached_blocks < num_full_blocks and not request.resumable:
                full = blocks[num_cached_blocks:num_full_blocks]
                parent = blocks[num_cached_blocks - 1].block_id if num_cached_blocks else None
                ids = [block.block_id for block in full]
                index.on_hashed(request.request_id, ids, parent)
            cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)

        @wraps(reset)
        def reset_prefix_cache() -> bool:
            is_reset: bool = reset()
            if is_reset:
                index.on_reset()
            return is_reset

        pool.get_new_blocks = get_new_blocks
        pool.cache_full_blocks = cache_full_blocks
        pool.reset_prefix_cache = reset_prefix_cache

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> list[events.Command]:
        preempted = scheduler_output.preempted_req_ids or ()
        # After a reset that preempts all requests, they may run in the next step.
        scheduled = scheduler_output.num_scheduled_tokens
        taken = self._index.end_step(
            [each for each in preempted if each not in scheduled],
            is_doubtful=bool(scheduler_output.has_sync_kv_loads),
        )
        return [taken]

    def begin_life(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation

    def on_registered(self) -> list[events.Command]:
        """The cache's memory is new too: its ranks believe nothing that was found before."""
        # In this order: `find` takes a key before it looks for blocks.
        self._index.on_reset()
        self._key = runs.new_key()
        return [events.SetContentKey(self._key)]

    def reset_cache(self, epoch: int, weights: str) -> None:
        """Find nothing any longer that was computed before, even if vLLM keeps its own cache."""
        # In this order: `find` takes the epoch before it looks for blocks.
        self._index.on_reset(weights)
        self._ticket_epoch = epoch

    def request_finished(self, request: Request, *, is_offered: bool) -> dict[str, Any] | None:
        """The fields that a router may send with the next prompt: they name this engine."""
        del is_offered
        directory = self.directory
        if directory is None or not ended_well(request):
            return None
        if leg_of(request.kv_transfer_params) is not Leg.DECODE:
            return None
        ticket = probe_ticket(self._engine, self._incarnation, directory.host, directory.port)
        # The flags are those of a prompt that another engine decodes, as the next one will be.
        return {**WANT_TICKET, OWNER: self._trust.seal(ticket)[FIELD]}

    @property
    def find(self) -> Callable[[Find], Found]:
        return self._find

    # On the directory's thread, which has the latest label of the engine's weights. The scheduler
    # follows it later. Until then the cache has KV of the former weights.
    def _find(self, question: Find) -> Found:
        label = self._weights if self.directory is None else self.directory.weights
        key, epoch = self._key, self._ticket_epoch
        run = None
        if question.weights == label:
            run = self._index.find(question.hashes, question.first_block, label)
        offer = new_nonce()
        self._answers["none" if run is None else "found"] += 1
        return Found(
            incarnation=self._incarnation,
            nonce=question.nonce,
            num_blocks=0 if run is None else run.end_block - run.first_block,
            offer=offer,
            run=b"" if run is None else runs.seal(run, offer, key),
            epoch=epoch,
            weights=label,
        )

    def count(self, stats: Stats) -> None:
        for outcome, number in self._answers.items():
            if number != self._counted[outcome]:
                stats.count("finds", number - self._counted[outcome], outcome)
                self._counted[outcome] = number


def lookup_in(pool: Any) -> Callable[[bytes], int | None]:
    """Find the block with a hash in vLLM's prefix-cache map, on any thread."""
    # Imported for this feature alone.
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id  # noqa: PLC0415

    empty: Any = b""
    group = bytes(make_block_hash_with_group_id(empty, 0))  # follows the hash in a key of the map

    def lookup(block_hash: bytes) -> int | None:
        # A reset of the pool replaces the map.
        try:
            block = pool.cached_block_hash_to_block.get_one_block(block_hash + group)
        except (RuntimeError, StopIteration):
            return None  # of several blocks with this hash, the scheduler's thread took some away
        return None if block is None else block.block_id

    return lookup
