"""The number of cached tokens in `usage`, which decode's clients are told and billed for.

vLLM counts all tokens that decode loads as cached. Prefill knows better: it sends the number that
it would tell its own clients with each grant. vLLM's scheduler keeps the number in a record of the
request, until the request's first output takes the record to the front end.
"""

from typing import Any

from vllm.v1.request import Request

from nixl_kv.ids import RequestId


def count_cached(request: Request) -> int | None:
    """The tokens that vLLM takes from caches; None once the first output has left.

    vLLM sets the number when it schedules the request, before it calls `build_connector_meta`.
    """
    return getattr(getattr(request, "prefill_stats", None), "num_cached_tokens", None)


class CachedTokens:
    """Replaces decode's number of cached tokens by prefill's, for each load that is good.

    The record also has the numbers of local, external and computed tokens, which vLLM's metrics
    `prompt_tokens_by_source` add up. They stay. If a load fails, vLLM fills the record anew.
    """

    def __init__(self) -> None:
        self._loading: dict[RequestId, Request] = {}

    def on_start(self, request: Request) -> None:
        self._loading[RequestId(request.request_id)] = request

    def on_loaded(self, request_id: RequestId, num_cached: int | None) -> None:
        """The load is good, and vLLM has not run the request yet; None changes nothing."""
        prefill_stats: Any = getattr(self._loading.pop(request_id, None), "prefill_stats", None)
        most = getattr(prefill_stats, "num_prompt_tokens", None)
        if num_cached is not None and most is not None:
            prefill_stats.num_cached_tokens = min(num_cached, most)  # a peer sent the number

    def forget(self, request_id: RequestId) -> None:
        self._loading.pop(request_id, None)
