"""Reads the GPU memory of other processes on this host with a kernel. See `path`."""

from nixl_kv.errors import TransportError
from nixl_kv.log_limit import get_logger
from nixl_kv.reading.gather.path import GatherPath
from nixl_kv.reading.paths.base import Feature, RankSetup

logger = get_logger(__name__)


def build(setup: RankSetup) -> Feature:
    """Decode maps and gathers, prefill exports: both only where the cache is in GPU memory."""
    layout, wanted = setup.layout, setup.config.path
    if layout.memory == "DRAM":
        return Feature()
    path, exported = None, None
    try:
        # Triton and CUDA's bindings are only installed where there are GPUs.
        from nixl_kv.reading.gather.gpu import GpuGather  # noqa: PLC0415
        from nixl_kv.reading.gather.memory import Exported  # noqa: PLC0415

        if setup.is_decode and wanted in {"auto", "gather"}:
            path = GatherPath(GpuGather(layout.device, setup.wake))
        if setup.is_prefill and wanted != "direct":
            exported = Exported(layout.spans, layout.device)
    except (ImportError, TransportError) as error:
        logger.warning("GPU memory is not shared between processes of this host: %s", error)
    if exported is None:
        return Feature(path=path)
    return Feature(path=path, description={"export": exported.description}, close=exported.close)
