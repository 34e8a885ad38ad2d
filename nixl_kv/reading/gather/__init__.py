"""Gather: a kernel on decode's GPU reads the memory of prefill processes on the same host.

Start with `path`, which has decode's half. Prefill only exports its memory (`memory.Exported`).
"""

import contextlib
from functools import partial

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.feature import RankSetup
from nixl_kv.reading.gather.path import GatherPath, OwnerWatch
from nixl_kv.reading.paths import PathFeature, allocate

logger = get_logger(__name__)


def build(setup: RankSetup) -> PathFeature:
    """Let decode map and gather, and prefill export, if the cache is in GPU memory."""
    layout, wanted = setup.layout, setup.config.path
    if layout.memory == "DRAM":
        return PathFeature()
    path, exported = None, None
    try:
        # Triton and CUDA's bindings are only installed where there are GPUs.
        from nixl_kv.reading.gather.memory import Exported, Mapping  # noqa: PLC0415
        from nixl_kv.reading.kernel import KernelStream  # noqa: PLC0415

        if setup.is_decode and wanted in {"auto", "gather"}:
            stream = KernelStream(layout.device)
            # The first export of a process takes long, so do it now. Memory without handles is not
            # an error here; the export of the cache reports it.
            mine = allocate(1, layout.memory, layout.device)
            with contextlib.suppress(TransportError):
                Exported([mine.span], layout.device).close()
            map_memory = partial(Mapping, device=layout.device)
            path = GatherPath(stream, map_memory, OwnerWatch(setup.wake))
        if setup.is_prefill and wanted != "direct":
            exported = Exported(layout.spans, layout.device)
    except (ImportError, TransportError) as error:
        logger.warning(
            "this rank neither maps GPU memory of other processes nor exports its own: %s", error
        )
    if exported is None:
        return PathFeature(path=path)
    return PathFeature(
        path=path, description={"export": exported.description}, close=exported.close
    )
