"""The connector on a CPU worker that sleeps as a GPU worker does: its cache loses its contents.

vLLM's CPU worker ignores sleep and wake-up. Start the engine with VLLM_SERVER_DEV_MODE=1, for
/sleep and /wake_up, and without --enable-sleep-mode, which vLLM refuses on CPU.
"""

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from nixl_kv.connector.connector import NixlKVConnector as OurConnector


class NixlKVConnector(OurConnector):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register them, and let the worker call the hooks that vLLM 0.33 calls on GPUs."""
        super().register_kv_caches(kv_caches)

        def sleep(_: Any, level: int = 1) -> None:  # noqa: ARG001 - vLLM's
            self.unregister_kv_caches()
            for cache in kv_caches.values():
                for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                    tensor.zero_()

        def wake_up(_: Any, tags: Any = None) -> None:  # noqa: ARG001 - vLLM's
            self.restore_kv_caches()

        CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up
