"""Checks of limits and RDMA devices, on hosts made of folders."""

import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from nixl_kv.cli.doctor import host
from nixl_kv.cli.doctor.report import Check

MakeHost: TypeAlias = Callable[..., Path]


def verdicts(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: check.verdict for check in checks}


def only(checks: Iterable[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


@pytest.fixture
def make_host(tmp_path: Path) -> MakeHost:
    """A root folder with devices. RDMA devices have the given states, by name."""

    def make(rdma: dict[str, str], *, verbs: bool = True) -> Path:
        files = {
            "proc/sys/kernel/random/boot_id": "host\n",
            "dev/shm/x": "",
        }
        for name, state in rdma.items():
            files[f"sys/class/infiniband/{name}/ports/1/state"] = f"{state}\n"
        if rdma and verbs:
            files["dev/infiniband/uverbs0"] = ""
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


DESCRIPTORS, LOCKED, SHARED = (
    "file descriptors (ulimit -n)",
    "locked memory (ulimit -l)",
    "shared memory (/dev/shm)",
)


@pytest.mark.parametrize(
    ("limit", "free", "rdma", "expected"),
    [
        (512, 64 << 20, {}, ("error", None, "warning")),
        (1024, 8 << 30, {"mlx5_0": "4: ACTIVE"}, ("warning", "error", "ok")),
        (65536, 8 << 30, {}, ("ok", None, "ok")),
        (-1, 8 << 30, {"m": "1: DOWN"}, ("ok", "ok", "ok")),
    ],
)
def test_limits_are_judged(
    make_host: MakeHost,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    free: int,
    rdma: dict[str, str],
    expected: tuple[str | None, ...],
) -> None:
    """Locked memory matters with RDMA alone."""
    blocks = SimpleNamespace(f_blocks=free >> 12, f_bavail=free >> 12, f_frsize=4096)
    monkeypatch.setattr(host.os, "statvfs", lambda _: blocks)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, -1))
    found = list(host.check_limits({}, make_host(rdma)))
    judged = [verdicts(found).get(name) for name in (DESCRIPTORS, LOCKED, SHARED)]
    assert judged == list(expected)
    shown = "unlimited" if limit < 0 else f"{limit:,}"
    assert only(found, DESCRIPTORS).detail == f"{shown}, at most unlimited"


def test_a_missing_shm_is_an_error(tmp_path: Path) -> None:
    check = only(host.check_limits({}, tmp_path), SHARED)
    assert (check.verdict, check.detail) == ("error", "No such file or directory")


@pytest.mark.parametrize(
    ("state", "verbs", "environ", "verdict"),
    [
        ("4: ACTIVE", True, {}, "ok"),
        ("4: ACTIVE", False, {}, "warning"),
        ("1: DOWN", True, {}, "warning"),
        ("4: ACTIVE", True, {"UCX_TLS": "sm,tcp"}, "warning"),
    ],
    ids=["active", "container", "down", "forbidden"],
)
def test_rdma_must_be_usable(
    make_host: MakeHost, state: str, *, verbs: bool, environ: dict[str, str], verdict: str
) -> None:
    root = make_host({"mlx5_0": state}, verbs=verbs)
    check = only(host.check_limits(environ, root), "RDMA")
    assert (check.verdict, "mlx5_0" in check.detail) == (verdict, True)
    assert ("so it uses TCP" in check.detail) is (verdict == "warning")
