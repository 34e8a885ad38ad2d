"""vLLM's half of gather: where vLLM allocates the cache, so that other containers can map it."""

from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from nixl_kv.connector.vllm_config import is_read, parse_config
from nixl_kv.errors import TransportError, get_logger

if TYPE_CHECKING:  # it needs CUDA's bindings, which only GPU machines have
    from nixl_kv.reading.gather.gpu import SharePool

logger = get_logger(__name__)


def make_pool(vllm_config: VllmConfig) -> "SharePool | None":
    """A pool for the cache of a rank that others read, with `share_dir`.

    vLLM's sleep mode has a pool of its own, which it must be able to free.
    """
    config, model = parse_config(vllm_config), vllm_config.model_config
    if config.share_dir is None or not is_read(vllm_config) or not current_platform.is_cuda():
        return None
    if config.path == "direct":  # it exports nothing, and NIXL reads other memory faster
        return None
    if getattr(model, "enable_cumem_allocator", True):  # sleep mode turns it on
        return None
    try:
        from nixl_kv.reading.gather.gpu import SharePool  # noqa: PLC0415 - as above

        return SharePool(torch.cuda.current_device())
    except (ImportError, TransportError) as error:
        # Memory of expandable segments can be shared too, in pieces of 20 MiB.
        logger.info("the KV cache is not allocated in a pool to share: %s", error)
        return None
