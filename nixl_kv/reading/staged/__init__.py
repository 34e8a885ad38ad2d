"""Staged reads: prefill packs small runs into a ring, and decode reads and scatters them.

Start with `path`, which has decode's half; `packs` has prefill's.
"""

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.geometry.staging import NUM_SLOTS
from nixl_kv.protocol import messages
from nixl_kv.reading.paths import ExtraMemory, Feature, HostMemory, RankSetup
from nixl_kv.reading.staged.copier import (
    NUM_THREADS,
    Copier,
    HostCopier,
    Staging,
    StagingMemory,
    split,
)
from nixl_kv.reading.staged.packs import PackQueue
from nixl_kv.reading.staged.path import StagedPath

logger = get_logger(__name__)


def _make_threads() -> Executor:
    return ThreadPoolExecutor(NUM_THREADS, "nixl-kv-copies")


def build(
    setup: RankSetup,
    *,
    make_copier: Callable[[Executor], Copier] = HostCopier,
    make_threads: Callable[[], Executor] = _make_threads,
    make_memory: Callable[[int], StagingMemory] = HostMemory,
    num_slots: int | None = None,
) -> Feature:
    """Let prefill pack and decode scatter, each with a ring of its own.

    Tests replace the copier, its threads, the allocation of a number of bytes, and the number of
    slots of each ring.
    """
    layout, config = setup.layout, setup.config
    if not config.staging_mib or config.path in {"direct", "gather"}:
        return Feature()
    num_bytes = config.staging_mib << 20
    try:
        if layout.memory == "DRAM":
            owner, copier = make_memory(num_bytes), make_copier(make_threads())
        else:
            owner, copier = _on_gpu(layout, num_bytes)
    except (ImportError, TransportError) as error:
        logger.warning("this rank neither packs KV nor reads packed KV: %s", error)
        return Feature()
    roles = setup.is_prefill, setup.is_decode
    rings = split(owner.span, sum(roles), num_slots or NUM_SLOTS[layout.memory])
    stagings = [Staging(ring, layout.memory, layout.device, copier, owner) for ring in rings]
    packing = stagings[0] if setup.is_prefill else None
    reading = stagings[-1] if setup.is_decode else None
    path = packer = ring = None
    if reading is not None:
        path = StagedPath(layout, reading, is_forced=config.path == "staged")
    if packing is not None:
        packer = PackQueue(layout, packing, setup.counts, setup.clock)
        ring = messages.StagingRing(
            address=packing.ring.span.address,
            length=packing.ring.span.length,
            num_slots=packing.ring.num_slots,
        )
    return Feature(
        path=path,
        packer=packer,
        description={} if ring is None else {"ring": ring},
        read_into=() if reading is None else (_memory(reading),),
        served=() if packing is None else (_memory(packing),),
    )


def _memory(staging: Staging) -> ExtraMemory:
    return ExtraMemory(staging.ring.span, staging.memory, staging.device)


def _on_gpu(layout: CacheLayout, num_bytes: int) -> tuple[StagingMemory, Copier]:
    # Triton is only installed where there are GPUs.
    from nixl_kv.reading.staged.gpu import GpuCopier, GpuMemory  # noqa: PLC0415

    return GpuMemory(num_bytes, layout.device), GpuCopier(layout.device)
