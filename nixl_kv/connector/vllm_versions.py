"""All that differs between the versions of vLLM that are supported: nothing else asks for one.

A version is told by what it has, not by its number, so that builds from source are told apart too.
What is here is on its way out: with the oldest minor goes what only that one lacks.
"""

from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.31 counts all external hits as one
    CacheHitSource = None

HIT_SOURCE: Final = None if CacheHitSource is None else CacheHitSource.P2P
"""As what vLLM counts the tokens that this connector loads; since 0.32."""

LATER_HOOKS: Final = {
    "get_loaded_kv_cache_group_ids": "0.32",
    "supports_sleep_mode": "0.33",
    "unregister_kv_caches": "0.33",
    "restore_kv_caches": "0.33",
}
"""Hooks that the oldest vLLM does not call, by the minor that calls them first."""


def is_told_of_sleep() -> bool:
    """Whether vLLM says when the memory behind the cache goes, and when it is back."""
    return all(
        hasattr(KVConnectorBase_V1, hook) for hook in ("unregister_kv_caches", "restore_kv_caches")
    )
