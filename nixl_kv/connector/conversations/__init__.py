"""VLLM's half of `nixl_kv/conversations`, in the scheduler process."""

from collections.abc import Iterator
from functools import partial
from typing import Final

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from nixl_kv.config import ON, Config
from nixl_kv.connector import unpromised
from nixl_kv.connector.conversations.content import CachedContent, check_cache, check_start
from nixl_kv.connector.conversations.finding import Finder, why_unfit
from nixl_kv.connector.decode import DecodeScheduler
from nixl_kv.connector.part import SchedulerPart
from nixl_kv.connector.stats import Stats
from nixl_kv.connector.vllm_config import draft_facts, has_hooks, model_facts, transfer_config
from nixl_kv.engine.trust import Trust
from nixl_kv.errors import get_logger

logger = get_logger(__name__)

NO_HOOKS: Final = (
    "conversations: this engine asks no other engine for cached KV, because nixl_kv's hooks over "
    "vLLM's scheduler, which let a request wait for the answer, are missing or incomplete; load "
    "vLLM's plugins (VLLM_PLUGINS), and use a tested version of vLLM"
)


def build(  # noqa: PLR0913 - the engine and its halves
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: Config,
    trust: Trust,
    stats: Stats,
    decode: DecodeScheduler,
    *,
    is_child: bool,
) -> Iterator[SchedulerPart]:
    """No part, if the setting is off or this vLLM lacks something; `unpromised.warn` tells what."""
    if config.conversations != ON or unpromised.is_off(unpromised.CONVERSATIONS):
        return
    check_start(config, vllm_config)
    check_cache(kv_cache_config)
    content = CachedContent(vllm_config, config, trust)
    yield content
    if not transfer_config(vllm_config).is_kv_producer:
        return
    if not has_hooks(vllm_config) or unpromised.is_off(unpromised.OVERLAP):
        logger.warning(NO_HOOKS)
        return
    why = partial(why_unfit, model_facts(vllm_config), draft_facts(vllm_config))
    yield Finder(decode, content.facts, config, trust, stats, why, owns_source=not is_child)
