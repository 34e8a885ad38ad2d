"""Decides which peers a rank reads over TCP, by a rule about hosts and devices.

Neither NIXL nor UCX can be asked which transport a read will take. So each engine appends three
facts to its NIXL metadata (which NIXL ignores there): its host, its PID namespace, and whether it
has a usable RDMA device. A reader compares them with its own:

1. Same host and PID namespace, and UCX may use shared memory (CUDA IPC for GPU memory): not TCP.
2. Otherwise, both sides have RDMA: not TCP.
3. Otherwise: TCP.

A peer without these facts counts as another host with the reader's own devices. UCX's own settings
`UCX_TLS` and `UCX_NET_DEVICES` restrict what either side may use.

Delete this file with `paced.py`: no other part of a rank needs the rule.

The rule is wrong where devices are there but cannot be used: two GPUs of one host without peer
access, or RDMA devices of unconnected fabrics. Then take them out of `UCX_TLS` or
`UCX_NET_DEVICES`, which this rule reads as well.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from nixl_kv.geometry.layout import Memory

# Decides whether a rank reads the peer with this metadata over TCP.
IsTcp: TypeAlias = Callable[[bytes], bool]

MARK: Final = b"|nixl_kv|"

ROOT: Final = Path("/")
BOOT_ID: Final = "proc/sys/kernel/random/boot_id"
PID_NAMESPACE: Final = "proc/self/ns/pid"
RDMA_DEVICES: Final = "sys/class/infiniband"
VERBS: Final = "dev/infiniband"

# UCX's transports for an agent that reads over TCP only.
ONLY_TCP: Final[Mapping[Memory, str]] = {"DRAM": "tcp", "VRAM": "tcp,cuda_copy"}
# UCX's transports between processes of one host, between GPUs of one, and of RDMA.
SHARED: Final = frozenset({"posix", "sysv", "xpmem", "cma", "knem"})
GPU_IPC: Final = frozenset({"cuda_ipc", "rocm_ipc"})
RDMA: Final = frozenset({"rc_v", "rc_x", "dc_x", "ud_v", "ud_x", "gga_x", "srd"})
# What UCX_TLS calls several of them, besides the part before `_`.
ALIASES: Final[Mapping[str, frozenset[str]]] = {
    "all": SHARED | GPU_IPC | RDMA,
    "sm": SHARED,
    "shm": SHARED,
    "mm": frozenset({"posix", "sysv", "xpmem"}),
    "ib": RDMA,
}


@dataclass(frozen=True)
class HostFacts:
    """The facts of a process that decide how others can read its memory."""

    host: str  # Linux's boot id: containers of one host share it
    namespace: str  # processes of two PID namespaces cannot read each other's memory
    has_rdma: bool

    def suffix(self) -> bytes:
        """The facts as they stand behind NIXL's metadata."""
        return MARK + f"{self.host} {self.namespace} {int(self.has_rdma)}".encode()

    @classmethod
    def find(cls, settings: Mapping[str, str], root: Path = ROOT) -> "HostFacts":
        try:
            namespace = (root / PID_NAMESPACE).readlink().name
        except OSError:
            namespace = ""
        return cls(_read(root / BOOT_ID).strip(), namespace, has_rdma=_has_rdma(settings, root))

    @classmethod
    def of_peer(cls, metadata: bytes) -> "HostFacts | None":
        """The facts behind a peer's metadata; None without facts, or with other ones."""
        _, mark, facts = metadata.rpartition(MARK)
        words = facts.decode("ascii", "replace").split(" ")
        if not mark or len(words) != 3:  # noqa: PLR2004 - the three facts
            return None
        return cls(words[0], words[1], has_rdma=words[2] == "1")


def ucx_settings(environ: Mapping[str, str], engine_config: str) -> dict[str, str]:
    """UCX's settings without their prefix; those of the agent override the environment."""
    prefix = "UCX_"
    settings = {k.removeprefix(prefix): v for k, v in environ.items() if k.startswith(prefix)}
    pairs = (each.partition("=") for each in engine_config.split(",") if each)
    return settings | {name: value for name, _, value in pairs}


def make_rule(own: HostFacts, settings: Mapping[str, str], memory: Memory) -> IsTcp:
    """The rule in the module's docstring, for a reader at `own` whose cache is in such memory."""

    def is_tcp(metadata: bytes) -> bool:
        peer = HostFacts.of_peer(metadata) or HostFacts("", "", own.has_rdma)
        is_near = bool(own.host) and (own.host, own.namespace) == (peer.host, peer.namespace)
        if is_near and _may_share(settings, memory):
            return False
        return not (own.has_rdma and peer.has_rdma)

    return is_tcp


class Link(NamedTuple):
    link: str  # how UCX should read a peer; '' if the peer does not tell where it is
    why_slow: str = ""  # why it is TCP, although the machines have something faster


def link_of(
    own: HostFacts,
    metadata: bytes,
    settings: Mapping[str, str],
    memory: Memory,
    root: Path = ROOT,
) -> Link:
    """How a reader at `own` should read the peer with this metadata, by the same rule."""
    peer = HostFacts.of_peer(metadata)
    if peer is None:
        return Link("")
    shared = "shared memory" if memory == "DRAM" else "GPU IPC"
    if not make_rule(own, settings, memory)(metadata):
        is_near = (own.host, own.namespace) == (peer.host, peer.namespace)
        return Link(shared if is_near and _may_share(settings, memory) else "RDMA")
    reason = ""
    if own.host and own.host == peer.host and own.namespace != peer.namespace:
        reason = f"they share a host but not a PID namespace, which {shared} needs"
    elif own.host and own.host == peer.host:
        reason = f"they share a host, but UCX_TLS={settings.get('TLS', '')} excludes {shared}"
    elif peer.has_rdma:
        reason = "the reader has no RDMA device that UCX may use, and the peer has one"
    elif own.has_rdma:
        reason = "the peer has no RDMA device that UCX may use, and the reader has one"
    elif any((root / RDMA_DEVICES).glob("*")):
        reason = "neither has an RDMA device that UCX may use, but the reader's host has devices"
    return Link("TCP", reason)


def _may_share(settings: Mapping[str, str], memory: Memory) -> bool:
    permitted = _permitted(settings)
    if memory == "DRAM":
        return bool(permitted & SHARED)
    # `^cuda_ipc` leaves rocm_ipc, but only because this machine's GPUs are NVIDIA's.
    is_exclusion = settings.get("TLS", "").startswith("^")
    return permitted >= GPU_IPC if is_exclusion else bool(permitted & GPU_IPC)


def _permitted(settings: Mapping[str, str]) -> frozenset[str]:
    setting, every = settings.get("TLS", "all"), ALIASES["all"]
    named: set[str] = set()
    for entry in setting.removeprefix("^").split(","):
        name = entry.strip().lstrip("\\").replace("_mlx5", "_x").replace("_verbs", "_v")
        of_name = {each for each in every if name in (each, each.partition("_")[0])}
        named |= ALIASES.get(name, of_name)
    return every - named if setting.startswith("^") else frozenset(named)


def _may_use_device(settings: Mapping[str, str], device: str) -> bool:
    """The same for UCX_NET_DEVICES, whose entries are `all`, `DEVICE` or `DEVICE:PORT`."""
    setting = settings.get("NET_DEVICES", "all")
    names = {name.strip().partition(":")[0] for name in setting.removeprefix("^").split(",")}
    return (device in names or "all" in names) is not setting.startswith("^")


def _has_rdma(settings: Mapping[str, str], root: Path) -> bool:
    """Whether this process can open an RDMA device with an active port."""
    if not _permitted(settings) & RDMA:
        return False
    # A container often sees the devices in /sys without those in /dev, and then UCX uses TCP.
    if not any(os.access(verbs, os.R_OK | os.W_OK) for verbs in (root / VERBS).glob("uverbs*")):
        return False
    ports = (root / RDMA_DEVICES).glob("*/ports/*/state")
    return any(
        "ACTIVE" in _read(port) and _may_use_device(settings, port.parts[-4]) for port in ports
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
