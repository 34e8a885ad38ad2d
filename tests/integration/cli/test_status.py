"""`nixl-kv status` asks engines that run: their directories, and then each rank."""

import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.local.engine import LocalEngine
from harness.local.memory import Fabric
from nixl_kv.keys import read_key_file, write_key_file
from nixl_kv.transport.zmq import ZmqControl
from support.nixl_kv_command import nixl_kv
from support.pair import MakeEngine, address

TIMEOUT_S = 60.0
TOKENS = 8
TABLE = [1, 2]
DENIED = "prefill rank 0 denied the ask: the offer was used, expired or revoked"


def status(engine: LocalEngine, *options: str) -> dict[str, Any]:
    result = nixl_kv("status --json --at", address(engine), *options)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def wait_status(
    engine: LocalEngine, condition: Callable[[dict[str, Any]], bool], *options: str
) -> list[dict[str, Any]]:
    """The ranks' status, once the condition holds for each."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        ranks = list(status(engine, *options)["ranks"])
        if all(map(condition, ranks)):
            return ranks
        assert time.monotonic() < deadline, ranks


def table_rows(output: str, start: str) -> list[list[str]]:
    """The cells of each row of the tables that follow a line that begins with this text."""
    lines = output.splitlines()
    rows = []
    for number, line in enumerate(lines):
        if line.strip().startswith(start):
            after = itertools.dropwhile(lambda line: "─" not in line, lines[number:])
            body = itertools.takewhile(str.strip, itertools.islice(after, 1, None))
            rows += [re.split(r" {2,}", row.strip()) for row in body]
    return rows


def test_loads_and_offers_say_what_they_wait_for(
    make_engine: MakeEngine, fabric: Fabric, tmp_path: Path
) -> None:
    write_key_file(tmp_path / "key")
    keys, options = read_key_file(tmp_path / "key"), [f"--key-file {tmp_path / 'key'}"]
    prefill = make_engine("P", 1, roles="prefill", make_control=lambda: ZmqControl(keys))
    decode = make_engine("D", 2, roles="decode", make_control=lambda: ZmqControl(keys))
    fabric.reads_hang = True
    for request in ("no-blocks", "hanging"):
        decode.prepare_load(request, prefill.offer(f"p-{request}", [TABLE], TOKENS))
    decode.start_load("hanging", [TABLE], range(TOKENS))
    prefill.offer("p-unclaimed", [TABLE], TOKENS)

    expected = {
        "no-blocks": ([[0, "GRANTED"]], "local blocks"),
        "hanging": ([[0, "READING"]], "data"),
    }
    ranks = wait_status(
        decode,
        lambda rank: (
            {load["request"]: (load["reads"], load["waits_for"]) for load in rank["loads"]}
            == expected
            and rank["totals"]["reads"] == 1  # posted a little later, while peers are added
        ),
        *options,
    )
    assert [(rank["rank"], rank["roles"]) for rank in ranks] == [(0, "decode"), (1, "decode")]
    (rank,) = wait_status(prefill, lambda rank: len(rank["offers"]) == 3, *options)
    waits_for = {offer["request"]: offer["waits_for"] for offer in rank["offers"]}
    readers = "engine 'D', ranks 0, 1"
    assert waits_for == {
        "p-no-blocks": readers,
        "p-hanging": readers,
        "p-unclaimed": "a reader's ask",
    }

    shown = nixl_kv("status --at", address(decode), *options)
    assert shown.exit_code == 0
    assert [(row[0], *row[3:5]) for row in table_rows(shown.stdout, "loads:")] == [
        ("no-blocks", "0 GRANTED", "local blocks"),
        ("hanging", "0 READING", "data"),
    ] * 2
    fabric.reads_hang = False
    decode.cancel_load("no-blocks")
    assert decode.wait_failure("hanging") is None


def test_story_of_a_request_is_in_time_order_over_all_ranks(make_engine: MakeEngine) -> None:
    prefill = make_engine("P", 1)
    decode = make_engine("D", 2)
    before = time.time()
    for request in ("cmpl-1", "cmpl-2"):
        decode.prepare_load(f"{request}-d", prefill.offer(f"{request}-p", [TABLE], TOKENS))
        decode.start_load(f"{request}-d", [TABLE], range(TOKENS))
        assert decode.wait_failure(f"{request}-d") is None
        prefill.wait_offer(f"{request}-p")

    for rank in status(decode, "--request 2-d")["ranks"]:
        states = [event["after"] for event in rank["story"]]
        states.remove("STARTED")  # before or after the grant
        assert states == ["PREPARED", "ASKING", "GRANTED", "READING", "DONE", "LOADED"]
        assert before <= rank["events_since"] <= rank["story"][0]["time"]

    shown = nixl_kv("status --at", address(decode), "--request cmpl")
    assert shown.exit_code == 0
    rows = table_rows(shown.stdout, "time")
    times = [row[0] for row in rows]
    assert times == sorted(times)
    assert {row[2] for row in rows} == {"0", "1"}
    done = [row for row in rows if "READING -> DONE" in row]
    assert [row[5].startswith("ReadDone, ") for row in done] == [True] * 4
    assert "HANDSHAKING -> READY" in shown.stdout  # of the peer, which is part of it

    states = [event["after"] for event in status(prefill, "--request 2-p")["ranks"][0]["story"]]
    assert states == ["PREPARED", "OFFERED", "GRANTED", "OVER"]


def test_failed_load_has_its_reason_in_its_story(make_engine: MakeEngine) -> None:
    prefill = make_engine("P", 1)
    decode = make_engine("D", 1, roles="decode")
    ticket = prefill.offer("p1", [TABLE], TOKENS)
    decode.prepare_load("d1", ticket)
    decode.start_load("d1", [TABLE], range(TOKENS))
    assert decode.wait_failure("d1") is None
    decode.prepare_load("d2", ticket)  # used
    decode.start_load("d2", [TABLE], range(TOKENS))
    assert str(decode.wait_failure("d2")).startswith(DENIED)
    (*_, denied, failed) = status(decode, "--request d2")["ranks"][0]["story"]
    assert (denied["before"], denied["after"], denied["cause"]) == ("ASKING", "FAILED", "Deny")
    assert failed["after"] == "FAILED"
    assert failed["cause"].startswith(DENIED)


def test_peer_that_cannot_be_reached_says_why(make_engine: MakeEngine) -> None:
    prefill = make_engine("P", 1)
    ticket = prefill.offer("p1", [TABLE], TOKENS)
    prefill.directory.stop()
    decode = make_engine("D", 1, roles="decode")
    decode.prepare_load("d1", ticket)
    (rank,) = wait_status(decode, lambda rank: rank["peers"][0]["state"] == "BACKOFF")
    endpoint = f"tcp://{address(prefill)}"
    assert rank["peers"][0]["detail"] == f"{endpoint}: cannot connect"
    assert rank["loads"][0]["waits_for"] == "the scheduler, to start or cancel it"
    decode.cancel_load("d1")


def test_rank_that_is_gone_is_named_and_the_others_are_shown(make_engine: MakeEngine) -> None:
    engine = make_engine("E", 2)
    engine.ranks[0].engine.stop()
    result = nixl_kv("status --at", address(engine))
    assert result.exit_code == 1
    gone, alive = (rank.description.endpoint for rank in engine.ranks)
    assert f"rank 0 at {gone} gives no status: cannot connect\n" in result.stdout
    assert f"rank 1 at {alive}: prefill and decode; up for " in result.stdout
    as_json = nixl_kv("status --json --at", address(engine))
    assert as_json.exit_code == 1
    ranks = json.loads(as_json.stdout)["ranks"]
    assert ranks[0] == {"rank": 0, "endpoint": gone, "error": "cannot connect"}
    assert (ranks[1]["rank"], ranks[1]["endpoint"]) == (1, alive)
