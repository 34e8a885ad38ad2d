"""Checks of this host's limits and RDMA devices, as this process sees them.

The limits are those of this shell, user or container. A running engine tells its own (`transfers`).
"""

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from nixl_kv.cli.doctor.report import Check, error, ok, warning
from nixl_kv.cli.tables import num_bytes_text
from nixl_kv.transport.ucx.detect import ROOT, HostFacts, ucx_settings

DESCRIPTORS: Final = 4096  # 40 per decode rank and more (docs/operations.md): 100 ranks
FEWEST_DESCRIPTORS: Final = 1024  # an agent of UCX needs up to 128, vLLM some hundreds
RAISE_LIMIT: Final = (
    "start the engine after `ulimit -n 65536`, or set LimitNOFILE (systemd) or --ulimit nofile "
    "(Docker); over TCP a prefill rank needs 40 for each decode rank"
)
SHARED_MEMORY: Final = 1 << 30  # bytes; a container of Docker has 64 MiB unless it says more


def check_limits(environ: Mapping[str, str], root: Path = ROOT) -> Iterator[Check]:
    yield _descriptors()
    settings = {name: environ[name] for name in sorted(environ) if name.startswith("UCX_")}
    if settings:
        shown = " ".join(f"{name}={value}" for name, value in settings.items())
        yield ok("UCX's settings", f"{shown}; engines started elsewhere may have others")
    yield _shared_memory(root)
    devices = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if devices:
        has_rdma = HostFacts.find(ucx_settings(environ, ""), root).has_rdma
        yield _locked_memory()
        yield _rdma(", ".join(devices), has_rdma=has_rdma)


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    name, limits = "file descriptors (ulimit -n)", f"{_limit(soft)}, at most {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS:
        return ok(name, limits)
    return (error if soft < FEWEST_DESCRIPTORS else warning)(name, limits, RAISE_LIMIT)


def _limit(count: int) -> str:
    return "unlimited" if count == resource.RLIM_INFINITY else f"{count:,}"


def _shared_memory(root: Path) -> Check:
    name = "shared memory (/dev/shm)"
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as reason:
        fix = "mount a tmpfs at /dev/shm; UCX and vLLM need it between processes of one host"
        return error(name, f"{reason.strerror}", fix)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    sizes = f"{num_bytes_text(total)}, {num_bytes_text(free)} free"
    if free >= SHARED_MEMORY:
        return ok(name, sizes)
    fix = "docker run --shm-size=8g, or an emptyDir with medium: Memory at /dev/shm in a pod"
    return warning(name, sizes, fix)


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    name = "locked memory (ulimit -l)"
    if soft == resource.RLIM_INFINITY:
        return ok(name, "unlimited")
    about = f"{num_bytes_text(soft)}; registering a KV cache with an RDMA device locks all of it"
    fix = "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
    return error(name, about, fix)


def _rdma(devices: str, *, has_rdma: bool) -> Check:
    if has_rdma:
        return ok("RDMA", devices)
    fix = (
        "give the container /dev/infiniband (docker run --device, or an RDMA resource of the "
        "device plugin), and check cables, `ibstat`, UCX_TLS and UCX_NET_DEVICES"
    )
    return warning("RDMA", f"{devices}; UCX can use none of them here, so it uses TCP", fix)
