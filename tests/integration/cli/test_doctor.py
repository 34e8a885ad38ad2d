"""`nixl-kv doctor` asks engines that run."""

import itertools
import json
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from harness.local.engine import LocalEngine
from nixl_kv.cli.doctor import engines
from nixl_kv.config import Config
from nixl_kv.keys import read_key_file, write_key_file
from nixl_kv.protocol.peers import MAX_FAILURES
from nixl_kv.transport.zmq import ZmqControl
from support.integration import MakeEngine, address
from support.nixl_kv_command import nixl_kv

TOKENS = 8
TABLE = [1, 2]


def examined(*options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The checks, by group and name. The exit status is that of the worst."""
    result = nixl_kv("doctor --json", *options)
    report = json.loads(result.stdout)
    assert result.exit_code == (2 if report["error"] else 1 if report["warning"] else 0)
    bad = [each for each in report["checks"] if each["verdict"] in ("warning", "error")]
    assert all(each["fix"] for each in bad)
    return {(each["group"], each["name"]): each for each in report["checks"]}


def pair(make_engine: MakeEngine) -> tuple[LocalEngine, LocalEngine]:
    return make_engine("P", 2, roles="prefill"), make_engine("D", 1, roles="decode")


def load(prefill: LocalEngine, decode: LocalEngine, number: int = 1) -> str | None:
    decode.prepare_load(f"d{number}", prefill.offer(f"p{number}", [TABLE], TOKENS))
    decode.start_load(f"d{number}", [TABLE], range(TOKENS))
    return decode.wait_failure(f"d{number}")


def test_engines_that_fit_are_fine(make_engine: MakeEngine) -> None:
    prefill, decode = pair(make_engine)
    assert load(prefill, decode) is None
    at, peer = address(prefill), address(decode)
    checks = examined(f"--at {at} --peer {peer}")
    of_engines = {k: v for k, v in checks.items() if at in k[0] or peer in k[0]}
    assert {each["verdict"] for each in of_engines.values()} == {"ok"}, of_engines
    assert "all 2 answer" in checks[f"engine {at}", "ranks"]["detail"]
    assert checks[f"peer {peer}", "failed loads"]["detail"] == "none in the last 5 min 0 s"
    together = {k[1]: v for k, v in checks.items() if k[0] == "engines together"}
    read = together["engine 'D' reads 64 KiB from engine 'P'"]
    assert read["detail"].startswith("1.41 KiB in ")  # its caches are that small
    assert together["engine 'D' reads engine 'P'"]["detail"] == "they fit; 2 pairs of ranks"
    assert checks[f"peer {peer}", f"TCP to {peer}"]["detail"].startswith("connected in ")
    result = nixl_kv("doctor --peer", at)  # as people see it
    assert f"\npeer {at}\n" in result.stdout
    assert "all 2 answer" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("0 errors, ")


def test_before_an_engine_starts_the_host_and_the_key_are_checked() -> None:
    assert {group for group, _ in examined()} == {"this shell", "key"}


def test_bad_input_is_one_line() -> None:
    result = nixl_kv("doctor --at nowhere")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --at is 'nowhere'; allowed: ")


def test_a_key_is_known_by_its_fingerprint(key_file: Path) -> None:
    check = examined(f"--key-file {key_file}")["key", "key"]
    assert check["verdict"] == "ok"
    assert read_key_file(key_file).fingerprint in check["detail"]
    assert key_file.read_text().strip() not in check["detail"]
    key_file.chmod(0o644)
    check = examined(f"--key-file {key_file}")["key", "key"]
    assert check["verdict"] == "error"
    assert "its mode is 0644" in check["detail"]
    assert examined("--insecure")["key", "key"]["verdict"] == "warning"


def test_another_key_is_named_with_both_fingerprints_to_compare(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    for name in ("mine", "theirs"):
        write_key_file(tmp_path / name)
    theirs = read_key_file(tmp_path / "theirs")
    engine = make_engine("P", 1, make_control=lambda: ZmqControl(theirs))
    where = address(engine)
    checks = examined(f"--peer {where} --key-file {tmp_path / 'mine'}")
    answer = checks[f"peer {where}", "answer"]
    assert (answer["verdict"], "handshake failed" in answer["detail"]) == ("error", True)
    assert read_key_file(tmp_path / "mine").fingerprint in answer["fix"]
    accepted = examined(f"--peer {where} --key-file {tmp_path / 'theirs'}")
    assert accepted[f"peer {where}", "answer"]["verdict"] == "ok"
    assert theirs.fingerprint in accepted[f"peer {where}", "key"]["detail"]


def test_an_engine_that_excludes_this_host_is_told_from_one_that_hangs(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    write_key_file(tmp_path / "key")
    keys = read_key_file(tmp_path / "key")
    allowed = Config.parse({"peers": ["10.0.0.0/24"]}, {}).allowed_hosts
    engine = make_engine("P", 1, make_control=lambda: ZmqControl(keys, allowed=allowed))
    where = address(engine)
    answer = examined(f"--peer {where} --key-file {tmp_path / 'key'}")[f"peer {where}", "answer"]
    assert answer["verdict"] == "error"
    assert answer["detail"].endswith("refused: this host is not among its peers")
    assert "network to its 'peers'" in answer["fix"]


def test_a_port_where_nothing_listens_is_told_from_a_firewall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
    refused = examined(f"--peer {where}")[f"peer {where}", f"TCP to {where}"]
    assert (refused["verdict"], refused["detail"][:8]) == ("error", "refused:")

    def drop(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(engines.socket, "create_connection", drop)
    dropped = examined(f"--peer {where}")[f"peer {where}", f"TCP to {where}"]
    assert "a firewall drops packets" in dropped["detail"]
    assert "Firewall" in dropped["fix"]


def test_a_stopped_process_is_told_from_one_with_another_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel accepts connections to a stopped process, but nothing greets them."""
    monkeypatch.setattr(engines, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        checks = examined(f"--peer {where}")
    silent = checks[f"peer {where}", f"TCP to {where}"]
    assert silent["verdict"] == "error"
    assert "stopped or hangs" in silent["detail"]
    assert "kill -CONT" in silent["fix"]
    assert (f"peer {where}", "answer") not in checks


def test_an_engine_of_another_version_is_to_be_upgraded(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, words = address(make_engine("P", 1)), "it speaks wire version 9; this side speaks 12"
    monkeypatch.setattr(engines.client, "engine_at", Mock(side_effect=ValueError(words)))
    answer = examined(f"--peer {where}")[f"peer {where}", "answer"]
    assert (answer["verdict"], answer["detail"]) == ("error", words)
    assert answer["fix"].startswith("finish the upgrade")


def test_a_drained_engine_and_a_silent_rank_are_named(make_engine: MakeEngine) -> None:
    """So is a name that does not resolve."""
    engine = make_engine("P", 2)
    assert nixl_kv("drain --at", address(engine)).exit_code == 0
    engine.ranks[1].engine.stop()
    group, nowhere = f"peer {address(engine)}", "no.such.host.invalid:5600"
    checks = examined(f"--peer {address(engine)} --peer {nowhere}")
    assert checks[f"peer {nowhere}", "address"]["verdict"] == "error"
    assert checks[group, "draining"]["verdict"] == "warning"
    ranks = checks[group, "ranks"]
    assert ranks["verdict"] == "error"
    assert "1 of 2 ranks do not answer: rank 1 at " in ranks["detail"]


def test_failures_of_the_last_minutes_are_seen_from_the_other_side(make_engine: MakeEngine) -> None:
    """Decode tells that it cannot reach the engine that doctor runs beside, and why."""
    prefill, decode = pair(make_engine)
    described_at, port = address(prefill), prefill.directory.port
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    deadline = time.monotonic() + 60.0
    for number in itertools.count():  # a peer that failed is forgotten after a second
        ticket = msgspec.structs.replace(prefill.offer(f"p{number}", [TABLE], TOKENS), port=closed)
        decode.prepare_load(f"d{number}", ticket)
        decode.start_load(f"d{number}", [TABLE], range(TOKENS))
        assert "cannot connect" in str(decode.wait_failure(f"d{number}"))
        peers = decode.ranks[0].parts.decode.peers.known
        if any(peer.failures >= MAX_FAILURES for peer in peers.values()):
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert port != closed
    checks = examined(f"--at {described_at} --peer {address(decode)}")
    read = checks["engines together", "engine 'D' reads 64 KiB from engine 'P'"]
    assert read["verdict"] == "ok", "its tickets have a wrong address, and doctor's has not"
    peer = f"peer {address(decode)}"
    failed = checks[peer, "failed loads"]
    assert failed["verdict"] == "warning"
    assert failed["detail"].startswith("in the last 5 min 0 s: ")
    assert "unreachable (engine 'P' at " in failed["detail"]
    assert f"such as d{number}" in failed["detail"]
    assert checks[peer, "its peers"]["verdict"] == "warning"


@pytest.mark.parametrize("trouble", ["model", "weights"])
def test_engines_that_do_not_fit_are_an_error(make_engine: MakeEngine, trouble: str) -> None:
    prefill, decode = pair(make_engine)
    if trouble == "model":
        facts = {**prefill.description.model, "num_hidden_layers": "4"}
        prefill.directory.publish(msgspec.structs.replace(prefill.description, model=facts))
    else:
        prefill.directory.weights = "step 8"
    checks = examined(f"--peer {address(prefill)} --peer {address(decode)}")
    check = checks["engines together", "engine 'D' reads engine 'P'"]
    assert check["verdict"] == "error"
    words = "num_hidden_layers is '3' here and '4' there" if trouble == "model" else "'step 8'"
    assert words in check["detail"]
