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
NOWHERE = HostFacts("", "", has_rdma=False)
MEMORY, IPC, NO_NIC = Link("shared memory"), Link("GPU IPC"), Link("TCP")
NO_PEER_NIC = Link("TCP", "the peer has no RDMA device that UCX may use, and the reader has one")
NO_OWN_NIC = Link("TCP", "the reader has no RDMA device that UCX may use, and the peer has one")
METADATA = b"nixlSerDes|...|"


def apart(shared: Link) -> Link:
    return Link("TCP", f"they share a host but not a PID namespace, which {shared.link} needs")


def excluded(tls: str, shared: Link) -> Link:
    return Link("TCP", f"they share a host, but UCX_TLS={tls} excludes {shared.link}")


@pytest.mark.parametrize(
    ("own", "peer", "memory", "tls", "expected"),
    [
        (HERE, HERE, "DRAM", "all", MEMORY),
        (HERE, HERE, "VRAM", "all", IPC),
        (HERE, OTHER_NAMESPACE, "DRAM", "all", apart(MEMORY)),
        (HERE, OTHER_NAMESPACE, "VRAM", "all", apart(IPC)),
        (HERE, ELSEWHERE, "DRAM", "all", NO_NIC),
        (RDMA, RDMA_ELSEWHERE, "VRAM", "all", Link("RDMA")),
        (RDMA, RDMA, "DRAM", "rc,tcp", Link("RDMA")),
        (RDMA, ELSEWHERE, "VRAM", "all", NO_PEER_NIC),
        (HERE, RDMA_ELSEWHERE, "VRAM", "all", NO_OWN_NIC),
        (NOWHERE, NOWHERE, "DRAM", "all", NO_NIC),
        (HERE, HERE, "DRAM", "tcp", excluded("tcp", MEMORY)),
        (HERE, HERE, "DRAM", "tcp,cma", MEMORY),
        (HERE, HERE, "DRAM", "sm,tcp", MEMORY),
        (HERE, HERE, "DRAM", "^cma", MEMORY),
        (HERE, HERE, "DRAM", "^sm", excluded("^sm", MEMORY)),
        (HERE, HERE, "DRAM", "^mm,cma,knem", excluded("^mm,cma,knem", MEMORY)),
        (HERE, HERE, "VRAM", "sm,tcp,cuda_copy", excluded("sm,tcp,cuda_copy", IPC)),
        (HERE, HERE, "VRAM", "^cuda_ipc", excluded("^cuda_ipc", IPC)),  # NVIDIA's GPUs
        (HERE, HERE, "VRAM", "^tcp", IPC),
        (HERE, HERE, "VRAM", "cuda", IPC),
    ],
)
def test_the_rule_names_a_link_and_why_it_is_slow(
    tmp_path: Path, own: HostFacts, peer: HostFacts, memory: Memory, tls: str, expected: Link
) -> None:
    metadata, settings = METADATA + peer.suffix(), {"TLS": tls}
    assert link_of(own, metadata, settings, memory, tmp_path) == expected
    assert make_rule(own, settings, memory)(metadata) is (expected.link == "TCP")


@pytest.mark.parametrize(("own", "is_tcp"), [(RDMA, False), (HERE, True)])
def test_a_silent_peer_is_another_host_with_the_readers_devices(
    own: HostFacts, *, is_tcp: bool
) -> None:
    assert link_of(own, METADATA, {}, "VRAM") == Link("")
    assert make_rule(own, {}, "VRAM")(METADATA) is is_tcp


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
    assert HostFacts.find({}, tmp_path) == NOWHERE


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
