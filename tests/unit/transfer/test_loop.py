"""One turn of the transfer thread: what comes first, what follows, how long it waits."""

import logging

import numpy as np
import pytest

from nixl_kv.config import Config
from nixl_kv.errors import TransportError
from nixl_kv.ids import ANY_INCARNATION, Endpoint, RequestId
from nixl_kv.protocol.events import (
    Action,
    CancelLoad,
    Counts,
    DecodeEvent,
    FailureKind,
    LoadEnded,
    OfferEnd,
    OfferEnded,
    ReadFailed,
    RevokeOffer,
    SetEngineLayouts,
)
from nixl_kv.protocol.messages import (
    Ask,
    Deny,
    Grant,
    StatusRequest,
    decode_answer,
    decode_status,
    decode_to_rank,
    encode,
)
from nixl_kv.transfer.loop import LINGER_S, READING_PAUSE_S, SERVING_PAUSE_S, TICK_S
from nixl_kv.transport.base import FromEndpoint
from nixl_kv.transport.memory_control import MemoryControl
from support.digesters import SlowDigester
from support.records import ask
from support.stepped import MakeWorld, Stepped, World

TABLE, OTHER_TABLE = [7, 3, 4], [2, 9, 1]


def counts_of(rank: Stepped) -> dict[str, float]:
    """The counts among the results; the others are dropped."""
    totals: dict[str, float] = {}
    for result in rank.engine.pop_results():
        if isinstance(result, Counts):
            for name, amount in result.counts.items():
                totals[name] = totals.get(name, 0) + amount
    return totals


def granted(world: World, number: int = 1) -> None:
    """An offer that decode was granted, and has no blocks for yet."""
    world.prefill.prepare_offer(number, TABLE, 11)
    world.prefill.publish_offer(number)
    world.decode.prepare_load(number, world.prefill.ticket(number, 11))

    def is_granted() -> bool:
        load = world.decode.load(number)
        return load is not None and load.lacks_only_blocks

    world.until(is_granted)


# --- a whole transfer


@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
@pytest.mark.parametrize("polls", [0, 3], ids="lands at poll {}".format)
def test_a_load_takes_a_few_turns_and_no_time(world: World, polls: int, *, verify: bool) -> None:
    world.fabric.polls = polls
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11, verify=verify)
    world.run(20)
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    assert (load.failure, load.verified, load.num_tokens) == (None, verify, 11)
    (offer,) = world.prefill.ends()
    assert isinstance(offer, OfferEnded)
    assert (offer.request, offer.end) == ("p1", OfferEnd.READ)
    read, expected = world.decode.cache.blocks(OTHER_TABLE), world.prefill.cache.blocks(TABLE)
    assert np.array_equal(read, expected)


def test_what_was_read_is_in_the_report(world: World) -> None:
    world.fabric.polls = 1
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.until(lambda: world.decode.parts.agents.is_busy)
    world.clock.now += 0.5
    world.run()
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    (read,) = load.reads
    assert read.num_bytes == world.prefill.cache.blocks(TABLE).nbytes
    assert read.num_runs > 0
    assert read.seconds == 0.5


# --- the order inside a turn


def test_commands_come_before_messages(world: World) -> None:
    """Who asks for an offer has its ticket, which left after the command."""
    reader = MemoryControl(world.network)
    endpoint = world.prefill.parts.description.endpoint
    incarnation = world.prefill.parts.description.incarnation
    nonce = world.prefill.prepare_offer(1, TABLE, 11)
    reader.send(endpoint, encode(ask(nonce=nonce, incarnation=incarnation)))
    world.prefill.turn()
    (answer,) = reader.poll(0)
    assert isinstance(answer, FromEndpoint)
    assert isinstance(decode_answer(answer.payload), Grant)


def test_what_follows_from_an_action_happens_in_the_same_turn(world: World) -> None:
    """A description leads to a join, that to the peer's routes, and those to an ask."""
    world.network.held = True
    world.prefill.prepare_offer(1, TABLE, 11)
    world.prefill.turn()
    world.decode.prepare_load(1, world.prefill.ticket(1, 11))
    world.decode.turn()
    for _ in range(2):  # to the directory, and back
        (packet,) = world.network.packets
        world.network.deliver(packet)
        world.prefill.turn()
    world.decode.turn()
    (packet,) = world.network.packets
    assert isinstance(decode_to_rank(packet.payload), Ask)


def test_a_read_that_fails_at_once_is_reported_in_the_same_turn(world: World) -> None:
    granted(world)
    world.decode.start_load(1, [2], 11)  # too few blocks
    world.decode.turn()
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    assert load.failure is not None
    assert load.failure.kind is FailureKind.BROKEN


def test_a_message_that_cannot_be_sent_is_a_loss(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(endpoint: Endpoint, payload: bytes) -> None:
        del payload
        raise TransportError(f"no socket for {endpoint}")

    monkeypatch.setattr(world.decode.control, "send", refuse)
    world.decode.prepare_load(1, world.prefill.ticket(1, 11))
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.decode.turn()
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    assert load.failure is not None
    assert load.failure.kind is FailureKind.UNREACHABLE
    assert "no socket for tcp://" in load.failure.detail


def test_the_engines_layouts_are_for_the_agents(world: World) -> None:
    layouts = (world.decode.cache.layout(), world.prefill.cache.layout())
    world.decode.submit(SetEngineLayouts(layouts))
    world.decode.turn()
    assert world.decode.parts.agents.peers.engine_layouts == layouts


def test_a_revoked_offer_ends_and_is_reported(world: World) -> None:
    nonce = world.prefill.prepare_offer(1, TABLE, 11)
    world.prefill.publish_offer(1)
    world.prefill.submit(RevokeOffer(nonce))
    world.prefill.turn()
    assert world.prefill.ends() == [OfferEnded(nonce, RequestId("p1"), OfferEnd.REVOKED)]


# --- strangers


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"x" * 999], ids=["empty", "no msgpack", "text"])
def test_a_message_that_is_not_of_this_protocol_is_counted_and_logged(
    world: World, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = MemoryControl(world.network)
    stranger.send(world.prefill.parts.description.endpoint, payload)
    with caplog.at_level(logging.WARNING):
        world.prefill.turn()
    assert counts_of(world.prefill) == {"messages_dropped": 1}
    (record,) = caplog.records
    assert record.getMessage().startswith("control message dropped: ")


def test_a_denied_ask_is_counted_and_logged_without_the_whole_nonce(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = MemoryControl(world.network)
    message = ask(incarnation=world.prefill.parts.description.incarnation)
    stranger.send(world.prefill.parts.description.endpoint, encode(message))
    with caplog.at_level(logging.WARNING):
        world.prefill.turn()
    (answer,) = stranger.poll(0)
    assert isinstance(answer, FromEndpoint)
    assert isinstance(decode_answer(answer.payload), Deny)
    assert counts_of(world.prefill) == {"asks_denied": 1}
    (record,) = caplog.records
    assert record.getMessage() == (
        "denied an ask for offer 00000000: no such offer: used, expired, or never made"
    )
    assert message.nonce not in caplog.text


def test_a_lost_connection_is_counted_and_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    granted(world)
    with caplog.at_level(logging.WARNING):
        (link,) = world.network.working()
        world.network.cut(link)
        world.decode.turn()
    assert counts_of(world.decode) == {"peers_lost": 1}
    assert f"lost {link.endpoint}: connection closed" in caplog.text


def test_a_tool_is_answered_and_changes_nothing(world: World) -> None:
    tool = MemoryControl(world.network)
    request = StatusRequest(incarnation=ANY_INCARNATION)
    tool.send(world.prefill.parts.description.endpoint, encode(request))
    assert world.prefill.turn() is None
    assert world.prefill.turn() is None  # it does not wait for the tool to read
    (answer,) = tool.poll(0)
    assert isinstance(answer, FromEndpoint)
    status = decode_status(answer.payload)
    assert (status.engine, status.uptime_s) == ("prefill", 0.0)
    assert world.prefill.results == type(world.prefill.results)()


# --- counts


def test_counts_are_published_only_when_all_results_were_popped(world: World) -> None:
    """One record at a time: nobody may pop them for long, and strangers send as they like."""
    stranger = MemoryControl(world.network)
    endpoint = world.prefill.parts.description.endpoint
    for _ in range(3):
        stranger.send(endpoint, b"garbage")
        world.prefill.turn()
    assert list(world.prefill.results) == [Counts({"messages_dropped": 1})]
    assert counts_of(world.prefill) == {"messages_dropped": 1}
    world.prefill.turn()
    assert counts_of(world.prefill) == {"messages_dropped": 2}
    world.prefill.turn()
    assert world.prefill.engine.pop_results() == []


# --- how long a turn waits


def test_an_idle_rank_waits_for_ever(world: World) -> None:
    assert world.prefill.turn() is None
    assert world.decode.turn() is None


def test_a_command_is_not_waited_for(world: World) -> None:
    world.decode.submit(CancelLoad(RequestId("d1")))
    assert world.decode.turn() == 0
    assert world.decode.turn() is None


def test_a_rank_with_a_timer_looks_at_it_now_and_then(world: World) -> None:
    """Prepared offers have none; those that are out end by themselves."""
    world.prefill.prepare_offer(1, TABLE, 11)
    world.prefill.turn()
    assert world.prefill.turn() is None
    world.prefill.publish_offer(1)
    world.prefill.turn()
    assert world.prefill.turn() == TICK_S
    world.decode.prepare_load(1, world.prefill.ticket(1, 11))
    world.decode.turn()
    assert world.decode.turn() == TICK_S


def test_a_read_is_polled(world: World) -> None:
    world.fabric.stuck = True
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.decode.turn()
    assert world.decode.turn() == READING_PAUSE_S
    world.fabric.stuck = False
    world.run()
    world.clock.now += LINGER_S
    world.run(2)
    assert world.decode.turn() is None


@pytest.mark.parametrize(
    ("pause_s", "wait_s"),
    [
        pytest.param(0.0, 0, id="each step is work"),
        pytest.param(0.5, READING_PAUSE_S, id="a step looks whether a GPU is done"),
    ],
)
def test_a_digest_is_stepped_as_often_as_its_maker_needs(
    world: World, pause_s: float, wait_s: float
) -> None:
    world.prefill.parts.digests._digester = SlowDigester(3, pause_s)
    world.fabric.stuck = True
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11, verify=True)
    world.decode.turn()
    world.prefill.turn()
    assert len(world.prefill.parts.digests) == 1
    assert world.prefill.turn() == wait_s
    world.fabric.stuck = False
    world.run()
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    assert load.verified


def test_prefill_serves_while_it_may_be_read_and_a_while_longer(world: World) -> None:
    granted(world)
    assert world.prefill.turn() == SERVING_PAUSE_S
    world.decode.submit(CancelLoad(RequestId("d1")))
    world.run(3)
    (offer,) = world.prefill.ends()
    assert isinstance(offer, OfferEnded)
    assert offer.end is OfferEnd.ABORTED
    world.clock.now += LINGER_S - 0.01
    assert world.prefill.turn() == SERVING_PAUSE_S
    world.clock.now += 0.01
    world.prefill.turn()
    assert world.prefill.turn() is None


def test_a_rank_that_cannot_be_read_does_not_serve_whoever_asks(make_world: MakeWorld) -> None:
    world = make_world(roles=("prefill", "decode"))
    stranger = MemoryControl(world.network)
    stranger.send(world.decode.parts.description.endpoint, encode(ask()))
    world.decode.turn()
    (answer,) = stranger.poll(0)
    assert isinstance(answer, FromEndpoint)
    assert isinstance(decode_answer(answer.payload), Deny)
    assert world.decode.turn() is None


def test_serving_lets_the_transport_progress(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    serving = world.prefill.parts.serving
    assert serving is not None
    monkeypatch.setattr(serving, "progress", lambda: calls.append(world.clock()))
    world.prefill.turn()
    assert calls == []
    granted(world)
    num_calls = len(calls)
    assert num_calls > 0
    world.prefill.turn()
    assert len(calls) == num_calls + 1


def test_a_queued_load_keeps_its_grant_for_many_leases(world: World) -> None:
    granted(world)
    for _ in range(200):
        world.clock.now += 0.25
        world.run(1)
    assert world.clock.now > 1000 + 8 * world.config.lease_s
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run()
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    assert load.failure is None


def test_without_a_renewal_the_lease_runs_out(world: World) -> None:
    granted(world)
    world.clock.now += world.config.lease_s + 0.1
    world.prefill.turn()
    (offer,) = world.prefill.ends()
    assert isinstance(offer, OfferEnded)
    assert offer.end is OfferEnd.EXPIRED


def test_offers_that_nobody_claims_end_with_their_time(make_world: MakeWorld) -> None:
    world = make_world(Config(offer_ttl_s=7.0))
    world.prefill.prepare_offer(1, TABLE, 11)
    world.prefill.publish_offer(1)
    world.prefill.turn()
    world.clock.now += 6.9
    world.prefill.turn()
    assert world.prefill.ends() == []
    world.clock.now += 0.2
    world.prefill.turn()
    (offer,) = world.prefill.ends()
    assert isinstance(offer, OfferEnded)
    assert offer.end is OfferEnd.UNCLAIMED


# --- a restart


def test_after_a_restart_no_grant_is_valid_and_offers_are_lost_at_once(world: World) -> None:
    granted(world)
    world.prefill.prepare_offer(2, [5], 4)
    world.prefill.prepare_offer(3, [6], 4)
    world.prefill.publish_offer(3)
    world.prefill.turn()
    slot_page = world.prefill.parts.slots
    load = world.decode.parts.decode.loads.all()[0]
    grant = load.rank_reads[0].grant
    assert grant is not None
    assert slot_page.read(grant.slot) == grant.generation
    world.prefill.loop.restart()
    assert slot_page.read(grant.slot) == bytes(16)
    ends = world.prefill.ends()
    assert [(end.request, end.end) for end in ends if isinstance(end, OfferEnded)] == [
        ("p1", OfferEnd.LOST),
        ("p3", OfferEnd.LOST),
    ]
    world.prefill.publish_offer(2)  # prepared for a machine that is gone
    world.prefill.turn()
    (late,) = world.prefill.ends()
    assert isinstance(late, OfferEnded)
    assert (late.request, late.end) == ("p2", OfferEnd.LOST)
    assert len(world.prefill.parts.prefill.offers) == 0
    world.prefill.turn()
    assert counts_of(world.prefill) == {"thread_restarts": 1}


def test_after_a_restart_a_load_is_reported_when_nothing_writes_any_more(world: World) -> None:
    world.fabric.stuck = True
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.decode.turn()
    world.decode.background.is_held = True
    world.decode.loop.restart()
    world.decode.turn()
    assert counts_of(world.decode) == {"thread_restarts": 1}
    for _ in range(3):
        world.decode.turn()
    assert world.decode.ends() == []
    world.decode.background.work()  # another agent
    world.decode.turn()
    world.decode.background.work()  # the end of the first one
    world.decode.turn()
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    assert load.failure is not None
    assert (load.request, load.num_tokens) == ("d1", 11)
    assert load.failure.detail == "the transfer thread died"
    assert len(world.decode.loop.outstanding) == 0
    world.decode.turn()
    assert counts_of(world.decode) == {"agents_recycled": 1}


def test_after_a_restart_a_load_that_is_not_read_is_reported_at_once(world: World) -> None:
    granted(world)
    world.decode.parts.decode.handle = fail  # type: ignore[method-assign]
    world.decode.start_load(1, OTHER_TABLE, 11)
    with pytest.raises(KeyError):
        world.decode.turn()
    del world.decode.parts.decode.handle
    world.decode.loop.restart()
    assert world.decode.turn() == 0
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    world.decode.turn()
    assert world.decode.turn() is None


def fail(*_: object) -> list[Action]:
    raise KeyError("a bug")


def test_after_a_restart_loads_go_on(world: World) -> None:
    for rank in (world.prefill, world.decode):
        rank.turn()
        rank.loop.restart()
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run()
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    assert load.failure is None


def test_what_was_to_follow_is_forgotten_with_the_machines(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that fails at once is an event to come when the machine's next one raises."""
    granted(world)
    machine = world.decode.parts.decode
    handle = machine.handle
    handled: list[object] = []

    def break_at_the_second(event: DecodeEvent, now: float) -> list[Action]:
        handled.append(event)
        if len(handled) == 2:
            raise KeyError("a bug")
        return handle(event, now)

    monkeypatch.setattr(machine, "handle", break_at_the_second)
    world.decode.start_load(1, [2], 11)
    with pytest.raises(KeyError):
        world.decode.turn()
    assert isinstance(handled[1], ReadFailed)
    world.decode.loop.restart()
    world.decode.turn()
    (load,) = world.decode.ends()
    assert isinstance(load, LoadEnded)
    assert load.failure is not None
    assert load.failure.detail == "the transfer thread died"
