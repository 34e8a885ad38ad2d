"""`nixl-kv status` asks engines that run: their directories, and then each rank."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.local.engine import LocalEngine
from harness.local.memory import Fabric
from nixl_kv.keys import read_key_file
from nixl_kv.protocol.load import LoadState
from nixl_kv.transport.zmq import ZmqControl
from support.integration import MakeEngine, address
from support.nixl_kv_command import nixl_kv

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


def test_loads_and_offers_say_what_they_wait_for(
    make_engine: MakeEngine, fabric: Fabric, key_file: Path
) -> None:
    keys, options = read_key_file(key_file), [f"--key-file {key_file}"]
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

    fabric.reads_hang = False
    decode.cancel_load("no-blocks")
    assert decode.wait_failure("hanging") is None


def test_story_of_a_request_is_told_by_all_ranks(make_engine: MakeEngine) -> None:
    prefill = make_engine("P", 1)
    decode = make_engine("D", 2)
    before = time.time()
    tickets = [prefill.offer(name, [TABLE], TOKENS) for name in ("p-0", "p-1")]
    tickets.append(tickets[1])  # which is used by then
    for request, ticket in zip(("cmpl-0", "cmpl-1", "cmpl-2"), tickets, strict=True):
        decode.prepare_load(request, ticket)
        decode.start_load(request, [TABLE], range(TOKENS))
        decode.wait_load(request)

    for rank in status(decode, "--request l-1")["ranks"]:
        states = [event["after"] for event in rank["story"] if event["before"] != event["after"]]
        own = [state for state in states if state in LoadState.__members__]
        assert own == ["CONNECTING", "ASKED", "READY", "LOADED"]
        of_the_read = [state for state in states if state not in own]
        assert of_the_read == ["ASKING", "GRANTED", "READING", "DONE"]
        assert before <= rank["events_since"] <= rank["story"][0]["time"]
    for rank in status(decode, "--request l-2")["ranks"]:
        failed = rank["story"][-1]
        moves = [(event["before"], event["after"], event["cause"]) for event in rank["story"]]
        assert ("ASKING", "FAILED", "Deny") in moves
        assert failed["after"] == "FAILED"
        assert failed["cause"].startswith(f"Settled: {DENIED}")
    prefill.wait_offer("p-1")
    story = status(prefill, "--request p-1")["ranks"][0]["story"]
    # The third ask may be denied before or after the end.
    states = [event["after"] for event in story if event["after"] != event["before"]]
    assert states == ["PREPARED", "OFFERED", "GRANTED", "OVER"]

    shown = nixl_kv("status --at", address(decode), "--request cmpl")
    assert shown.exit_code == 0
    assert shown.stdout.count("READING -> DONE") == 4
    assert "HANDSHAKING -> READY" in shown.stdout  # of the peer, which is part of it


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
