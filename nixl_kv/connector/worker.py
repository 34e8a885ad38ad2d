"""The worker role: swaps commands and results with the transfer thread on vLLM's step thread."""

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
from nixl_kv.connector.reports import Reports
from nixl_kv.connector.setup import build
from nixl_kv.connector.stats import Stats
from nixl_kv.connector.thread import TransferThread

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
        self._reports = Reports()

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
        self._reports.expect(step.commands)
        if self._thread is not None:
            self._thread.submit(step.commands)

    def results(self) -> KVConnectorTransferResults:
        """What has ended since the last step."""
        if self._thread is not None:
            self._reports.note(self._thread.take())
        return self._reports.take()

    def stats(self) -> Stats | None:
        """What was counted since the last step."""
        return self._reports.take_stats()

    def stop(self) -> None:
        """End the transfer thread."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
