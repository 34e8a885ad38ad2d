"""The worker role: swaps commands and results with the transfer thread on vLLM's step thread.

Exactly once: vLLM ends the engine for an id that it does not expect. So a load is reported only if
it was commanded and not reported yet, and a sent offer only once vLLM has said that it is pinned.
"""

import logging
from collections.abc import Mapping
from functools import partial

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from nixl_kv.connector import translate
from nixl_kv.connector.caches import cache_layout
from nixl_kv.connector.commands import Handshake, StepCommands
from nixl_kv.connector.engine import LoadResult, Result, TransferThread
from nixl_kv.connector.setup import build
from nixl_kv.connector.stats import Stats
from nixl_kv.ids import RequestId, shown
from nixl_kv.protocol import events

logger = logging.getLogger(__name__)


class Worker:
    """One rank. Every method is called by vLLM on the step thread, and none waits."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Check the configuration; nothing starts before the cache exists."""
        translate.check_supported(vllm_config, kv_cache_config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._thread: TransferThread | None = None
        self._handshake: Handshake | None = None
        self._loading: set[RequestId] = set()
        self._pinned: set[RequestId] = set()
        self._sent_early: set[RequestId] = set()
        self._stats = Stats()
        self._results = KVConnectorTransferResults()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the cache and start the transfer thread; again after a wake-up, as a new life.

        Raises:
            NixlKVError: if the cache cannot be served, or NIXL or a socket fails.
        """
        self.stop()
        layout = cache_layout(self._vllm_config, self._kv_cache_config, kv_caches)
        self._thread = TransferThread(partial(build, self._vllm_config, layout))
        self._handshake = Handshake(self._thread.start().description)
        logger.info(
            "registered %.2f GiB of KV cache: %d layers, %d blocks of %d tokens, %s",
            sum(span.length for span in layout.spans) / 2**30,
            sum(len(group.regions) for group in layout.groups),
            layout.groups[0].num_blocks,
            layout.groups[0].block_size,
            layout.element,
        )

    def handshake(self) -> Handshake | None:
        """What the scheduler publishes of this rank."""
        return self._handshake

    def swap(self, step: StepCommands) -> None:
        """Hand over the step's commands, before the forward that belongs to them."""
        for command in step.commands:
            if isinstance(command, events.Load):
                self._loading.add(command.request)
            elif isinstance(command, events.Offer):
                self._pin(command.request)
        if self._thread is not None:
            self._thread.submit(step.commands)

    def results(self) -> KVConnectorTransferResults:
        """What has ended since the last step."""
        for result in self._thread.take() if self._thread is not None else ():
            self._note(result)
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def stats(self) -> Stats | None:
        """What was counted since the last step."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, Stats()
        return stats

    def stop(self) -> None:
        """End the transfer thread."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def _pin(self, request: RequestId) -> None:
        """The blocks are held until they are reported; readers may have been quicker."""
        self._stats.count("offers")
        if request in self._sent_early:
            self._sent_early.remove(request)
            self._results.finished_sending.add(request)
        else:
            self._pinned.add(request)

    def _note(self, result: Result) -> None:
        match result:
            case LoadResult():
                self._note_load(result)
            case events.Sent():
                self._note_sent(result)
            case events.Denied():
                self._stats.count("asks_denied")
                logger.info("denied an ask for offer %s: %s", shown(result.nonce), result.reason)

    def _note_load(self, result: LoadResult) -> None:
        loaded = result.loaded
        if loaded.request not in self._loading:
            return
        self._loading.remove(loaded.request)
        self._results.finished_recving.add(loaded.request)
        if loaded.reason is not None:
            self._results.failed_recving.add(loaded.request)
            self._stats.count("load_failures")
            logger.warning("request %s: KV not loaded: %s", loaded.request, loaded.reason)
            return
        self._stats.count("loads")
        self._stats.count("tokens_loaded", loaded.num_tokens)
        self._count_transfers(result)

    def _count_transfers(self, result: LoadResult) -> None:
        for transferred in result.transferred:
            self._stats.count("bytes_read", transferred.num_bytes)
            self._stats.count("descriptors", transferred.num_runs)
        self._stats.transferred(max((t.seconds for t in result.transferred), default=0.0))

    def _note_sent(self, sent: events.Sent) -> None:
        self._stats.count(f"offers_{sent.how.value}")
        if sent.request in self._pinned:
            self._pinned.remove(sent.request)
            self._results.finished_sending.add(sent.request)
        else:
            self._sent_early.add(sent.request)
