"""Gather: a kernel on decode's GPU reads the memory of prefill processes on the same host.

Start with `path`, which has decode's half. Prefill only exports its memory (`memory.Exported`).
"""

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.reading.gather.path import GatherPath
from nixl_kv.reading.paths import Feature, RankSetup

logger = get_logger(__name__)


def build(setup: RankSetup) -> Feature:
    """Let decode map and gather, and prefill export, if the cache is in GPU memory."""
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
        logger.warning(
            "this rank neither maps GPU memory of other processes nor exports its own: %s", error
        )
    if exported is None:
        return Feature(path=path)
    return Feature(path=path, description={"export": exported.description}, close=exported.close)
