"""Gather: a kernel on decode's GPU reads the memory of prefill processes on the same host.

Start with `path`, which has decode's half. Prefill only exports its memory: within its PID
namespace (`memory.Exported`), or on a socket in `share_dir` (`memory.Shared`, `share`).
"""

import contextlib
from functools import partial

from nixl_kv.errors import TransportError, get_logger
from nixl_kv.feature import RankSetup
from nixl_kv.reading.gather.path import SLOW, GatherPath, UnmappedPath
from nixl_kv.reading.gather.share import ShareServer, Tokens
from nixl_kv.reading.paths import PathFeature, ReadPath, allocate

logger = get_logger(__name__)


def build(setup: RankSetup) -> PathFeature:
    """Let decode map and gather, and prefill export, if the cache is in GPU memory."""
    if setup.config.share_dir is not None and (why := _why_unshared(setup)):
        logger.warning("share_dir %r has no effect on this rank: %s", setup.config.share_dir, why)
    if setup.layout.memory == "DRAM":
        return PathFeature()
    with contextlib.ExitStack() as undo:
        path = _path(setup) if setup.is_decode else None
        if path is not None:
            undo.callback(path.close)
        feature = _export(setup, path) if setup.is_prefill else PathFeature(path=path)
        undo.pop_all()
    return feature


def _why_unshared(setup: RankSetup) -> str:
    if setup.layout.memory == "DRAM":
        return "its KV cache is in host memory, and only GPU memory is shared"
    path = setup.config.path
    uses = {"auto", "gather", "staged"} if setup.is_prefill else {"auto", "gather"}
    return "" if path in uses else f"path is {path!r}"


def _path(setup: RankSetup) -> ReadPath:
    layout, config = setup.layout, setup.config
    if config.path not in {"auto", "gather"}:
        return UnmappedPath(f"path is {config.path!r}", "set it to 'auto'")
    try:
        # Triton and CUDA's bindings are only installed where there are GPUs.
        from nixl_kv.reading.gather.memory import Exported, Mapping  # noqa: PLC0415
        from nixl_kv.reading.kernel import KernelStream  # noqa: PLC0415

        stream = KernelStream(layout.device)
        # The first export of a process takes long, so do it now. Memory without handles is not
        # an error here; the export of the cache reports it.
        mine = allocate(1, layout.memory, layout.device)
        with contextlib.suppress(TransportError):
            Exported([mine.span], layout.device).close()
    except (ImportError, TransportError) as error:
        logger.warning("this rank does not map GPU memory of other processes: %s", error)
        return UnmappedPath(str(error))
    map_memory = partial(Mapping, device=layout.device, share_dir=config.share_dir, tokens=Tokens())
    return GatherPath(stream, map_memory, setup.watch, config.share_dir)


def _export(setup: RankSetup, path: ReadPath | None) -> PathFeature:
    layout, config = setup.layout, setup.config
    if config.path == "direct":
        return PathFeature(path=path)
    try:
        from nixl_kv.reading.gather.memory import Exported, Shared  # noqa: PLC0415 - as above
    except ImportError as error:
        logger.warning("this rank does not export its GPU memory: %s", error)
        return PathFeature(path=path)
    if config.share_dir is not None:
        config.make_share_dir()
        make_server = partial(ShareServer, config.share_dir, watch=setup.watch, clock=setup.clock)
        try:
            shared = Shared(layout.spans, layout.device, make_server)
        except TransportError as error:
            logger.warning(
                "this rank's GPU memory cannot be shared in share_dir, so other containers do not "
                "map it: %s",
                error,
            )
        else:
            return PathFeature(
                path=path,
                worker=shared.server,
                invite=shared.server.invite,
                begin_life=shared.server.begin_life,
                description={"export": shared.description},
                close=shared.close,
            )
    try:
        exported = Exported(layout.spans, layout.device)
    except TransportError as error:
        logger.warning(
            "this rank does not export its GPU memory, so processes of this host read it with "
            "NIXL: %s; %s",
            *(error, SLOW),
        )
        return PathFeature(path=path)
    return PathFeature(
        path=path, description={"export": exported.description}, close=exported.close
    )
