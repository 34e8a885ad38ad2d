"""A rank's answer to a tool about itself."""

import os
import resource

import pytest

from harness.local.engine import HAS_STAGED, HAS_VERIFY
from nixl_kv.engine.event_log import RECENT_S
from nixl_kv.engine.status import LOST_LISTENER, MAX_SETTINGS, build_status, process_facts
from nixl_kv.errors import MAX_ID
from nixl_kv.ids import ANY_INCARNATION, Rank, RequestId, new_claim, short
from nixl_kv.protocol.events import PrepareLoad
from nixl_kv.protocol.messages import MAX_LISTED, Status, StatusRequest, decode_to_tool, encode
from support.records import prepare_offer
from support.stepped import MakeWorld, Stepped, World

TABLE, OTHER_TABLE = [7, 3, 4], [2, 9, 1]


def status(rank: Stepped, request: str = "") -> Status:
    """Its answer after ten seconds."""
    spec, now = rank.engine.spec, rank.world.clock()
    question = StatusRequest(incarnation=ANY_INCARNATION, request=request)
    answer = build_status(rank.parts, Rank(0), spec.roles, lambda: now, now - 10, question)
    assert decode_to_tool(encode(answer)) == answer
    return answer


def granted(world: World) -> None:
    """A load that has its grant, and no blocks yet."""
    world.decode.prepare_load(1, world.prefill.offer(1, TABLE, 11))
    world.run()


@pytest.mark.parametrize("roles", ["prefill", "decode", "prefill and decode"])
def test_an_idle_rank_says_its_identity(make_world: MakeWorld, roles: str) -> None:
    rank = make_world(roles=(roles, roles)).prefill
    answer = status(rank)
    assert answer.incarnation == rank.parts.description.incarnation
    facts = {"engine": "prefill", "rank": 0, "roles": roles, "uptime_s": 10}
    facts |= {**process_facts(), "unreadable": None, "blocks_waited_s": None}
    assert answer.facts == {**facts, "events_since": None, "failures_span_s": RECENT_S}
    assert set(answer.totals.values()) == {0}
    names = ("failures", "peers", "unmapped", "links", "offers", "loads", "story")
    assert answer.lists == {name: [] for name in names}


def test_offers_say_what_they_wait_for(world: World) -> None:
    world.prefill.prepare_offer(2, [5], 4)
    world.prefill.offer(3, [6], 4)
    granted(world)
    world.clock.now += 1
    answer = status(world.prefill)
    assert answer.totals["offers"] == 3
    of = {offer["request"]: offer for offer in answer.lists["offers"]}
    assert [of[name]["state"] for name in ("p2", "p3", "p1")] == ["PREPARED", "OFFERED", "GRANTED"]
    assert (of["p2"]["waits_for"], of["p2"]["ends_in_s"]) == ("its ticket", None)
    assert of["p3"]["waits_for"] == "a reader's ask"
    assert of["p3"]["ends_in_s"] == world.config.offer_ttl_s - 1
    assert of["p1"]["waits_for"] == "engine 'decode', ranks 0"
    assert of["p1"]["ends_in_s"] == world.config.lease_s - 1
    assert of["p1"]["nonce"] == short(world.prefill.ticket(1, 11).nonce)
    assert of["p1"]["num_tokens"] == 11


def test_a_load_its_peer_and_its_link_say_what_they_wait_for(world: World) -> None:
    granted(world)
    answer = status(world.decode)
    (load,), (peer,), (link,) = (answer.lists[name] for name in ("loads", "peers", "links"))
    engine = f"engine 'prefill' at tcp://127.0.0.1:{world.prefill.directory.port}"
    assert (load["request"], load["peer"], load["reads"]) == ("d1", engine, [[0, "GRANTED"]])
    assert load["waits_for"] == "local blocks"
    assert load["late_in_s"] is None  # it may queue for as long as it likes
    assert (answer.totals["loads_without_blocks"], answer.facts["blocks_waited_s"]) == (1, 0.0)
    world.clock.now += 3.5
    assert status(world.decode).facts["blocks_waited_s"] == 3.5
    assert (peer["engine"], peer["state"], peer["detail"]) == ("prefill", "READY", "")
    assert peer["incarnation"] == short(world.prefill.description.incarnation)
    assert link["endpoint"] == world.prefill.parts.description.endpoint
    assert (link["sent"], link["received"]) == (1, 1)
    assert link["idle_s"] >= 0
    world.fabric.reads_hang = True
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run(1)
    answer = status(world.decode)
    (load,) = answer.lists["loads"]
    assert load["waits_for"] == "data"
    assert load["late_in_s"] == world.config.request_timeout_s
    ones = dict.fromkeys(("peers", "links", "loads", "reads"), 1)
    works = *["digests"] * HAS_VERIFY, *["packs"] * HAS_STAGED
    zeros = dict.fromkeys(("offers", "loads_without_blocks", *works), 0)
    sums = {"bytes_being_read": world.decode.cache.layout().bytes_per_token * 12}
    sums["events"] = len(world.decode.parts.event_log)
    assert answer.totals == {**ones, **zeros, **sums}
    assert (peer["path"], peer["bytes_per_second"], peer["read_s"]) == (None, None, None)
    world.fabric.reads_hang = False
    world.clock.now += 2.0
    world.run()
    (peer,) = status(world.decode).lists["peers"]
    assert (peer["path"], peer["read_s"]) == ("direct", 2.0)
    assert peer["bytes_per_second"] == round(sums["bytes_being_read"] / 2.0)


def test_lists_are_bounded_and_totals_are_not(world: World) -> None:
    for number in range(MAX_LISTED + 3):
        world.prefill.prepare_offer(number, [5], 4)
    world.prefill.turn()
    answer = status(world.prefill)
    assert (len(answer.lists["offers"]), answer.totals["offers"]) == (MAX_LISTED, MAX_LISTED + 3)


def test_the_story_of_an_offer_names_its_readers(world: World) -> None:
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run()
    assert status(world.prefill).lists["story"] == []
    story = status(world.prefill, "p1").lists["story"]
    assert (story[0]["before"], story[0]["after"]) == ("", "PREPARED")
    assert (story[-1]["before"], story[-1]["after"]) == ("GRANTED", "OVER")
    assert story[-1]["cause"] == "Release: read"
    assert {event["peer"] for event in story} >= {"engine 'decode', rank 0", "engine 'decode'"}


def test_the_failures_of_a_peer_are_listed(world: World) -> None:
    """Loads from an engine whose directory is gone."""
    world.prefill.directory.stop()
    for number in (1, 2):
        world.decode.prepare_load(number, world.prefill.offer(number, TABLE, 11))
        world.decode.start_load(number, OTHER_TABLE, 11)
        world.run()
        world.clock.now += 2.5  # its pause ends
        world.run()
    answer = status(world.decode)
    endpoint = f"tcp://127.0.0.1:{world.prefill.directory.port}"
    (peer,) = answer.lists["peers"]
    assert (peer["engine"], peer["endpoint"]) == ("prefill", endpoint)
    assert (peer["state"], peer["num_failures"]) == ("UNUSABLE", 2)
    assert peer["detail"] == f"{endpoint}: cannot connect"
    assert peer["paused_for_s"] == 0.0
    (failure,) = answer.lists["failures"]
    assert (failure["num_loads"], failure["requests"]) == (2, ["d2", "d1"])


def test_long_ids_of_requests_are_cut(world: World) -> None:
    name = RequestId("x" * 60_000)
    world.prefill.submit(prepare_offer(request=name))
    world.decode.submit(PrepareLoad(name, world.prefill.offer(2, TABLE, 11), new_claim()))
    world.run()
    for rank, kind in ((world.prefill, "offers"), (world.decode, "loads")):
        answer = status(rank)
        assert len(answer.lists[kind][0]["request"]) == MAX_ID
        assert len(encode(answer)) < 5000


def test_a_rank_says_the_usage_of_its_own_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool runs in another shell, perhaps on another host."""
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UCX_TLS", "tcp\n")
    monkeypatch.setenv("UCX_NET_DEVICES", "x" * MAX_SETTINGS)
    facts = status(world.prefill).facts
    assert str(facts["ucx_settings"]).startswith("UCX_NET_DEVICES=xxx")
    assert len(str(facts["ucx_settings"])) == MAX_SETTINGS
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    assert status(world.prefill).facts["ucx_settings"] == r"UCX_NET_DEVICES=lo UCX_TLS=tcp\n"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert facts["max_descriptors"] == soft
    assert 0 < int(facts["num_descriptors"] or 0) < soft
    serving = world.prefill.parts.serving
    assert serving is not None
    monkeypatch.setattr(type(serving), "has_lost_listener", True)
    assert status(world.prefill).facts["unreadable"] == LOST_LISTENER
