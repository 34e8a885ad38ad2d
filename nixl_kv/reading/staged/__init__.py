"""Staged reads: prefill packs small runs into a ring, and decode reads and scatters them.

Start with `path`, which has both halves. `ring` has the protocol's part of both.
"""

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.feature import RankSetup
from nixl_kv.protocol import messages
from nixl_kv.reading.paths import Buffer, PathFeature, allocate
from nixl_kv.reading.staged.copier import NUM_THREADS, Copier, HostCopier, Staging, split
from nixl_kv.reading.staged.layout import NUM_SLOTS
from nixl_kv.reading.staged.path import PackQueue, StagedPath
from nixl_kv.reading.staged.ring import ChunkPart, RingPart

logger = get_logger(__name__)


def build(
    setup: RankSetup,
    *,
    wrap_copier: Callable[[Copier], Copier] = lambda copier: copier,
    make_threads: Callable[[], Executor] = lambda: ThreadPoolExecutor(
        NUM_THREADS, "nixl-kv-copies"
    ),
    make_memory: Callable[[int], Buffer] | None = None,
    num_slots: int | None = None,
) -> PathFeature:
    """Let prefill pack and decode scatter, each with a ring of its own.

    Tests replace the copier, its threads, the allocation of a number of bytes,
    and the number of slots of each ring.
    """
    layout, config = setup.layout, setup.config
    if not config.staging_mib or config.path in {"direct", "gather"}:
        return PathFeature()
    make = make_memory or partial(allocate, memory=layout.memory, device=layout.device)
    copier: Copier
    try:
        buffer = make(config.staging_mib << 20)
        if layout.memory == "DRAM":
            copier = wrap_copier(HostCopier(make_threads()))
        else:
            # Triton is only installed where there are GPUs.
            from nixl_kv.reading.kernel import KernelStream  # noqa: PLC0415

            copier = wrap_copier(KernelStream(layout.device))
    except (ImportError, TransportError) as error:
        logger.warning("this rank neither packs KV nor reads packed KV: %s", error)
        return PathFeature()
    rings = split(
        buffer.span, setup.is_prefill + setup.is_decode, num_slots or NUM_SLOTS[layout.memory]
    )
    stagings = [Staging(ring, layout.memory, layout.device, copier, buffer) for ring in rings]
    path = part = packs = ring = chunks = None
    if setup.is_decode:
        path = StagedPath(layout, stagings[-1], is_forced=config.path == "staged")
        chunks = ChunkPart()
    if setup.is_prefill:
        packs = PackQueue(layout, stagings[0], setup.background)
        span, count = rings[0].span, rings[0].num_slots
        ring = messages.StagingRing(address=span.address, length=span.length, num_slots=count)
        part = RingPart(count, packs.writing)
    return PathFeature(
        path=path,
        prefill=part,
        load=chunks,
        worker=packs,
        description={} if ring is None else {"ring": ring},
        read_into=stagings[-1].registered if setup.is_decode else (),
        served=stagings[0].registered if setup.is_prefill else (),
    )
