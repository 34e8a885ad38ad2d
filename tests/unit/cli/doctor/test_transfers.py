"""Doctor's conclusions from the engines' own reports of their transfers."""

from collections.abc import Sequence
from typing import Any

import pytest

from nixl_kv.cli.client import EngineAnswer
from nixl_kv.cli.doctor import transfers
from nixl_kv.cli.doctor.report import Check
from nixl_kv.cli.doctor.transfers import SLOW_SPEED, check_transfers, judge_probe
from nixl_kv.errors import NixlKVError, TransportError
from nixl_kv.protocol.messages import Status
from support.records import ENGINE_LIFE, description

HEALTHY: dict[str, Any] = {
    "num_descriptors": 200,
    "max_descriptors": 65_536,
    "ucx_settings": "",
    "unreadable": None,
    "blocks_waited_s": None,
}
PEER: dict[str, Any] = {
    "engine": "P",
    "incarnation": "aa",
    "state": "READY",
    "link": "RDMA",
    "why_slow": "",
    "path": "direct",
    "bytes_per_second": 20e9,
    "read_s": 0.01,
}


def status(
    facts: dict[str, Any] | None = None,
    *peers: dict[str, Any],
    unmapped: Sequence[dict[str, Any]] = (),
    **totals: int,
) -> Status:
    lists = {"peers": list(peers), "unmapped": list(unmapped)}
    return Status(
        incarnation=ENGINE_LIFE, facts=HEALTHY | (facts or {}), totals=totals, lists=lists
    )


def engine(*ranks: Status | NixlKVError, scheduler: dict[str, Any] | None = None) -> EngineAnswer:
    described = description(max(1, len(ranks)))
    answers = list(zip(described.ranks, ranks, strict=True)) if ranks else []
    return EngineAnswer("10.0.0.1:5600", described, status(scheduler), answers)


def checks(*ranks: Status | NixlKVError, **options: Any) -> dict[str, Check]:
    return {check.name: check for check in check_transfers(engine(*ranks, **options))}


def test_an_engine_without_trouble() -> None:
    found = checks(status(None, PEER))
    assert {check.verdict for check in found.values()} == {"ok"}
    assert {name: check.detail for name, check in found.items()} == {
        "its file descriptors": "rank 0 has 200 of 65,536 open",
        "UCX's settings": "none in its environment",
        "reads from P (aa)": "direct by RDMA, at 20,000.0 MB/s and 0.01 s each",
    }


def test_an_engine_of_another_release_tells_less() -> None:
    old = Status(incarnation=ENGINE_LIFE, facts={"roles": "decode"}, totals={}, lists={})
    assert checks(old) == checks(TransportError("silent")) == checks() == {}


WAITS = {"blocks_waited_s": 5.2}
CLOSED = "UCX has closed a listening socket"
UNMAPPED = {"endpoint": "tcp://10.0.0.2:5700", "detail": "in another PID namespace"}


@pytest.mark.parametrize(
    ("rank", "name", "verdict", "detail", "fix"),
    [
        (status({"unreadable": CLOSED}), "listening sockets", "error", CLOSED, "RankUnreadable"),
        (
            *(status(WAITS, loads_without_blocks=1), "local blocks", "warning"),
            *("1 load waits for blocks of its KV cache, the first for 5.2 s", "WaitingForBlocks"),
        ),
        (
            *(status(WAITS, loads_without_blocks=7), "local blocks", "warning"),
            *("7 loads wait for blocks of its KV cache, the first for 5.2 s", "WaitingForBlocks"),
        ),
        (
            *(status(unmapped=[UNMAPPED]), "GPU memory of tcp://10.0.0.2:5700", "warning"),
            *("in another PID namespace", "Wrong path"),
        ),
    ],
)
def test_a_rank_in_trouble(rank: Status, name: str, verdict: str, detail: str, fix: str) -> None:
    check = checks(rank)[name]
    assert (check.verdict, detail in check.detail) == (verdict, True), check
    assert fix in str(check.fix)


def test_a_load_that_waits_shortly_for_blocks_is_no_trouble() -> None:
    assert "local blocks" not in checks(status({"blocks_waited_s": 0.5}, loads_without_blocks=1))


DESCRIPTORS = "its file descriptors"


@pytest.mark.parametrize(
    ("ranks", "scheduler", "verdict", "words"),
    [
        ([{"num_descriptors": 176, "max_descriptors": 178}], {}, "error", "rank 0 has 176 of 178"),
        ([{"num_descriptors": 3277, "max_descriptors": 4096}], {}, "error", "UCX closes ports"),
        ([{"num_descriptors": 3276, "max_descriptors": 4096}], {}, "ok", "3,276 of 4,096"),
        ([{"max_descriptors": 1024}], {}, "warning", "over TCP it may need more"),
        ([{"max_descriptors": None}], {"max_descriptors": None}, "ok", "200, without a limit"),
        ([{}, {"num_descriptors": 60_000}], {}, "error", "rank 1 has 60,000 of 65,536"),
        ([{}], {"num_descriptors": 60_000}, "error", "its scheduler has 60,000 of 65,536"),
    ],
)
def test_the_fullest_process_counts(
    ranks: list[dict[str, Any]], scheduler: dict[str, Any], verdict: str, words: str
) -> None:
    check = checks(*map(status, ranks), scheduler=scheduler)[DESCRIPTORS]
    assert (check.verdict, words in check.detail) == (verdict, True), check
    assert bool(check.fix) is (verdict != "ok")
    assert verdict == "ok" or "ulimit -n" in str(check.fix)


def test_settings_are_those_of_the_engine() -> None:
    found = checks(status({"ucx_settings": "UCX_TLS=tcp"}), status({"ucx_settings": "UCX_TLS=tcp"}))
    assert found["UCX's settings"].detail == "UCX_TLS=tcp"


SHARE = "they share a host but not a PID namespace, which GPU IPC needs"


@pytest.mark.parametrize(
    ("changed", "verdict", "words"),
    [
        ({"bytes_per_second": 0.5e6, "read_s": 22.0}, "warning", "at 0.5 MB/s and 22 s each"),
        ({"bytes_per_second": SLOW_SPEED}, "ok", "at 100.0 MB/s"),
        ({"bytes_per_second": 0.5e6, "read_s": 0.02}, "ok", "at 0.5 MB/s"),  # a few bytes
        ({"link": "TCP"}, "ok", "direct by TCP"),
        ({"link": "TCP", "why_slow": SHARE}, "warning", SHARE),
        ({"link": "TCP", "why_slow": SHARE, "path": "gather"}, "ok", "gather by TCP"),
        ({"path": None, "bytes_per_second": None, "read_s": None}, "ok", "RDMA"),
    ],
)
def test_how_an_engine_reads_a_peer(changed: dict[str, Any], verdict: str, words: str) -> None:
    check = checks(status(None, PEER | changed))["reads from P (aa)"]
    assert (check.verdict, words in check.detail) == (verdict, True), check
    assert bool(check.fix) is (verdict == "warning")


def test_the_slowest_rank_of_a_peer_counts_and_one_that_was_not_read_does_not() -> None:
    unread = {"link": "", "path": None, "bytes_per_second": None, "read_s": None}
    slow = PEER | {"bytes_per_second": 1e6, "read_s": 3.0}
    other = PEER | unread | {"incarnation": "bb"}
    found = checks(status(None, PEER, other), status(None, slow), status(None, PEER | unread))
    assert found["reads from P (aa)"].verdict == "warning"
    assert "reads from P (bb)" not in found


READ: dict[str, Any] = {
    "probe": "read",
    "error": "",
    "step": "READY",
    "num_bytes": 65536,
    "seconds": 0.0004,
    "rank": 0,
    "num_ranks": 1,
    "link": "TCP",
    "why_slow": "",
}
FAILED = {"probe": "failed", "error": "NIXL_ERR_REMOTE_DISCONNECT", "seconds": None}
FIRST_READ = "prefill's own ports answer, but a first read from UCX's ports fails"
BUSY = "another probe is in progress"


def at(step: str) -> dict[str, Any]:
    return FAILED | {"step": step, "num_bytes": None}


@pytest.mark.parametrize(
    ("facts", "verdict", "detail", "fix"),
    [
        (READ, "ok", "64 KiB in 0.4 ms (163.8 MB/s) over TCP", None),
        (READ | {"link": ""}, "ok", "64 KiB in 0.4 ms (163.8 MB/s)", None),
        (READ | {"seconds": 0.13}, "warning", "64 KiB in 130.0 ms (0.5 MB/s)", "ReadsSlow"),
        (READ | {"why_slow": SHARE}, "warning", SHARE, "Wrong path"),
        (READ | {"num_ranks": 0, "seconds": None}, "skipped", "needs no bytes", None),
        (READ | FAILED, "error", "16 bytes arrive, but 64 KiB do not: NIXL_ERR", "MTU"),
        (READ | FAILED | {"num_bytes": 16}, "error", FIRST_READ, "UCX_TCP_PORT_RANGE"),
        (READ | at("HANDSHAKING"), "error", FIRST_READ, "UCX_TCP_PORT_RANGE"),
        (READ | at("ADMITTING"), "error", "is not admitted to UCX's ports", "'peers'"),
        (READ | at("CONNECTING"), "error", "cannot meet prefill", "Firewall"),
        ({"probe": "failed", "error": BUSY}, "skipped", f"not tested: {BUSY}", None),
        ({"roles": "decode"}, "skipped", "not tested: the release of decode rank 3", None),
    ],
)
def test_what_the_answer_to_a_probe_means(
    facts: dict[str, Any], verdict: str, detail: str, fix: str | None
) -> None:
    answer = Status(incarnation=ENGINE_LIFE, facts=facts, totals={}, lists={})
    check = judge_probe("a read", 3, answer)
    assert (check.verdict, detail in check.detail) == (verdict, True), check
    assert (check.fix is None) if fix is None else (fix in str(check.fix))


def test_a_decode_rank_that_does_not_answer_is_an_error() -> None:
    check = judge_probe("a read", 3, TransportError("no answer within 30 s"))
    assert (check.verdict, check.detail) == (
        "error",
        "decode rank 3 does not answer: no answer within 30 s",
    )


def test_the_worst_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        Status(incarnation=ENGINE_LIFE, facts=f, totals={}, lists={}) for f in (READ, READ | FAILED)
    ]
    ranks = list(zip(description(2).ranks, answers, strict=True))
    monkeypatch.setattr(transfers.client, "probe", lambda *_: ranks)
    prefill = engine(status(), scheduler={"probe_ticket": "11.x.y"})
    check = transfers.check_read(engine(status()), prefill, None)
    assert check.verdict == "error"
    assert check.detail.startswith("decode rank 1 over TCP: 16 bytes arrive")
    check = transfers.check_read(engine(status()), engine(status()), None)
    assert (check.verdict, "gives no ticket" in check.detail) == ("skipped", True)
