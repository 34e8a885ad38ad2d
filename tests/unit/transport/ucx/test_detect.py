"""Which peers are read over TCP: a rule about hosts, PID namespaces, devices and UCX's settings."""

from pathlib import Path

import pytest

from nixl_kv.geometry.layout import Memory
from nixl_kv.transport.ucx.detect import HostFacts, Link, link_of, make_rule, ucx_settings

HERE = HostFacts("this-boot", "pid:[1]", has_rdma=False)
RDMA = HostFacts("this-boot", "pid:[1]", has_rdma=True)
OTHER_NAMESPACE = HostFacts("this-boot", "pid:[2]", has_rdma=False)
ELSEWHERE = HostFacts("other-boot", "pid:[1]", has_rdma=False)
RDMA_ELSEWHERE = HostFacts("other-boot", "pid:[1]", has_rdma=True)
SILENT = None


@pytest.mark.parametrize(
    ("own", "peer", "memory", "tls", "expected"),
    [
        pytest.param(HERE, HERE, "DRAM", "all", False, id="one host"),
        pytest.param(HERE, HERE, "VRAM", "all", False, id="GPUs of one host"),
        pytest.param(HERE, OTHER_NAMESPACE, "DRAM", "all", True, id="two containers"),
        pytest.param(HERE, OTHER_NAMESPACE, "VRAM", "all", True, id="GPUs of two containers"),
        pytest.param(HERE, ELSEWHERE, "DRAM", "all", True, id="two hosts"),
        pytest.param(RDMA, RDMA_ELSEWHERE, "VRAM", "all", False, id="RDMA on both"),
        pytest.param(RDMA, ELSEWHERE, "VRAM", "all", True, id="RDMA on the reader only"),
        pytest.param(HERE, RDMA_ELSEWHERE, "VRAM", "all", True, id="RDMA on the owner only"),
        pytest.param(RDMA, SILENT, "VRAM", "all", False, id="a silent peer has our RDMA"),
        pytest.param(HERE, SILENT, "DRAM", "all", True, id="a silent peer is another host"),
        pytest.param(
            HostFacts("", "", has_rdma=False),
            HostFacts("", "", has_rdma=False),
            "DRAM",
            "all",
            True,
            id="hosts that cannot tell who they are",
        ),
        pytest.param(HERE, HERE, "DRAM", "tcp", True, id="TCP only"),
        pytest.param(HERE, HERE, "DRAM", "tcp,cma", False, id="with CMA"),
        pytest.param(HERE, HERE, "DRAM", "sm,tcp", False, id="with an alias of shared memory"),
        pytest.param(HERE, HERE, "DRAM", "^cma", False, id="shared memory but CMA"),
        pytest.param(HERE, HERE, "DRAM", "^sm", True, id="no shared memory"),
        pytest.param(HERE, HERE, "DRAM", "^mm,cma,knem", True, id="no transport of shared memory"),
        pytest.param(HERE, HERE, "VRAM", "sm,tcp,cuda_copy", True, id="no CUDA IPC"),
        pytest.param(HERE, HERE, "VRAM", "^cuda_ipc", True, id="no CUDA IPC on NVIDIA"),
        pytest.param(HERE, HERE, "VRAM", "^tcp", False, id="another excluded"),
        pytest.param(HERE, HERE, "VRAM", "cuda", False, id="with an alias of CUDA IPC"),
    ],
)
def test_the_rule(
    own: HostFacts, peer: HostFacts | None, memory: Memory, tls: str, *, expected: bool
) -> None:
    metadata = b"nixlSerDes|...|" + (peer.suffix() if peer else b"")
    assert make_rule(own, {"TLS": tls}, memory)(metadata) is expected


SHARED = "they share a host but not a PID namespace, which"
EXCLUDED = "they share a host, but UCX_TLS=tcp excludes"


@pytest.mark.parametrize(
    ("own", "peer", "memory", "tls", "expected"),
    [
        (HERE, HERE, "DRAM", "all", Link("shared memory")),
        (HERE, HERE, "VRAM", "all", Link("GPU IPC")),
        (RDMA, RDMA, "DRAM", "rc,tcp", Link("RDMA")),
        (RDMA, RDMA_ELSEWHERE, "VRAM", "all", Link("RDMA")),
        (HERE, ELSEWHERE, "DRAM", "all", Link("TCP")),
        (HERE, OTHER_NAMESPACE, "DRAM", "all", Link("TCP", f"{SHARED} shared memory needs")),
        (HERE, OTHER_NAMESPACE, "VRAM", "all", Link("TCP", f"{SHARED} GPU IPC needs")),
        (HERE, HERE, "DRAM", "tcp", Link("TCP", f"{EXCLUDED} shared memory")),
        (HERE, HERE, "VRAM", "tcp", Link("TCP", f"{EXCLUDED} GPU IPC")),
        (
            RDMA,
            ELSEWHERE,
            "VRAM",
            "all",
            Link("TCP", "the peer has no RDMA device that UCX may use, and the reader has one"),
        ),
        (
            HERE,
            RDMA_ELSEWHERE,
            "VRAM",
            "all",
            Link("TCP", "the reader has no RDMA device that UCX may use, and the peer has one"),
        ),
        (HERE, SILENT, "DRAM", "all", Link("")),
    ],
)
def test_a_link_has_a_name_and_a_reason_why_it_is_slow(
    tmp_path: Path,
    own: HostFacts,
    peer: HostFacts | None,
    memory: Memory,
    tls: str,
    expected: Link,
) -> None:
    metadata = b"nixlSerDes|...|" + (peer.suffix() if peer else b"")
    link = link_of(own, metadata, {"TLS": tls}, memory, tmp_path)
    assert link == expected
    assert peer is None or (link.link == "TCP") is make_rule(own, {"TLS": tls}, memory)(metadata)


def test_devices_that_neither_can_use_are_named(tmp_path: Path) -> None:
    root = machine(tmp_path, has_verbs=False)
    link = link_of(HERE, ELSEWHERE.suffix(), {}, "VRAM", root)
    assert link.why_slow.endswith("but the reader's host has devices")


@pytest.mark.parametrize("metadata", [b"", b"|nixl_kv|", b"|nixl_kv|a b", b"|nixl_kv|\xff b c d"])
def test_metadata_without_whole_facts_says_nothing(metadata: bytes) -> None:
    assert HostFacts.of_peer(metadata) is None


def machine(
    root: Path, *, state: str = "4: ACTIVE", has_verbs: bool = True, device: str = "mlx5_0"
) -> Path:
    """A machine's file system, with one RDMA device."""
    files = {
        "proc/sys/kernel/random/boot_id": "1-2-3\n",
        f"sys/class/infiniband/{device}/ports/1/state": f"{state}\n",
    }
    if has_verbs:
        files["dev/infiniband/uverbs0"] = ""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to("pid:[7]")
    return root


def test_facts_of_a_machine_are_told_to_peers(tmp_path: Path) -> None:
    place = HostFacts.find({}, machine(tmp_path))
    assert place == HostFacts("1-2-3", "pid:[7]", has_rdma=True)
    assert HostFacts.of_peer(b"NIXL's own" + place.suffix()) == place


def test_a_machine_without_any_of_it_has_a_place(tmp_path: Path) -> None:
    assert HostFacts.find({}, tmp_path) == HostFacts("", "", has_rdma=False)


@pytest.mark.parametrize(
    ("state", "has_verbs", "settings", "expected"),
    [
        pytest.param("4: ACTIVE", True, {}, True, id="usable"),
        pytest.param("1: DOWN", True, {}, False, id="a port that is down"),
        pytest.param("4: ACTIVE", False, {}, False, id="a container without /dev/infiniband"),
        pytest.param("4: ACTIVE", True, {"TLS": "tcp,sm"}, False, id="TLS without it"),
        pytest.param("4: ACTIVE", True, {"TLS": "rc,ud"}, True, id="TLS with it"),
        pytest.param("4: ACTIVE", True, {"TLS": "rc_x"}, True, id="TLS with an alias"),
        pytest.param("4: ACTIVE", True, {"TLS": "^ib"}, False, id="TLS excludes it"),
        pytest.param(
            *("4: ACTIVE", True, {"TLS": "^rc,dc,ud,gga_mlx5,srd"}, False), id="TLS excludes each"
        ),
        pytest.param("4: ACTIVE", True, {"TLS": "^rc_x"}, True, id="TLS excludes one of them"),
        pytest.param("4: ACTIVE", True, {"NET_DEVICES": "lo"}, False, id="only loopback"),
        pytest.param("4: ACTIVE", True, {"NET_DEVICES": "eth0,mlx5_0:1"}, True, id="named"),
        pytest.param("4: ACTIVE", True, {"NET_DEVICES": "mlx5_1:1"}, False, id="another named"),
        pytest.param("4: ACTIVE", True, {"NET_DEVICES": "^mlx5_0:1"}, False, id="excluded"),
        pytest.param("4: ACTIVE", True, {"NET_DEVICES": "^eth0"}, True, id="another excluded"),
    ],
)
def test_which_rdma_device_counts(
    tmp_path: Path, state: str, settings: dict[str, str], *, has_verbs: bool, expected: bool
) -> None:
    root = machine(tmp_path, state=state, has_verbs=has_verbs)
    assert HostFacts.find(settings, root).has_rdma is expected


def test_settings_of_the_agent_override_the_environment() -> None:
    environ = {"UCX_TLS": "all", "UCX_NET_DEVICES": "eth0", "TLS": "tcp"}
    assert ucx_settings(environ, "TLS=tcp,TCP_CONN_NB=y") == {
        "TLS": "tcp",
        "NET_DEVICES": "eth0",
        "TCP_CONN_NB": "y",
    }
