"""One turn of the transfer thread: the order of its work, and how long it waits."""

from unittest.mock import MagicMock, Mock

import msgspec
import numpy as np
import pytest

from harness.local.machines import by_name
from harness.local.memory import MemoryTransport
from harness.local.memory_control import MemoryControl
from nixl_kv.config import Config
from nixl_kv.engine import loop
from nixl_kv.engine.loop import MAX_DECODING, RECEIVING_S, SERVING_PAUSE_S, STOPPED
from nixl_kv.errors import REQUEST_LINES, TransportError
from nixl_kv.feature import Feature
from nixl_kv.geometry.layout import Table
from nixl_kv.ids import ANY_INCARNATION, Endpoint, EngineId, Incarnation, Rank, RequestId, new_claim
from nixl_kv.protocol import prefill
from nixl_kv.protocol.events import (
    CancelLoad,
    Counts,
    FailureKind,
    LoadEnded,
    OfferEnd,
    OfferEnded,
    OfferGranted,
    PrepareLoad,
    RevokeOffer,
    SetEngine,
    StartLoad,
)
from nixl_kv.protocol.messages import (
    Answer,
    Deny,
    Grant,
    Leave,
    Status,
    StatusRequest,
    VersionRefusal,
    decode_answer,
    decode_to_tool,
    encode,
)
from nixl_kv.protocol.peers import CONNECT_TIMEOUT_S
from nixl_kv.reading.agent import READING_PAUSE_S
from nixl_kv.reading.turnover import TIDY_S, TRY_AGAIN_S
from nixl_kv.transport.base import LINGER_S, LINK_KEPT_S, LONGEST_PAUSE_S, FromEndpoint, Received
from support.records import HOME, ask, description, hex32, reader
from support.stepped import Background, MakeWorld, Stepped, World

TABLE, OTHER_TABLE = [7, 3, 4], [2, 9, 1]
DIED = "the transfer thread died"


def counts_of(rank: Stepped) -> dict[str, float]:
    """The counts among the results, but for those of handshakes; the others are dropped."""
    totals: dict[str, float] = {}
    for result in rank.engine.pop_results():
        if isinstance(result, Counts):
            for name, amount in by_name(result).items():
                totals[name] = totals.get(name, 0) + amount
    return {name: n for name, n in totals.items() if not name.startswith("first_contact")}


def granted(world: World, number: int = 1) -> None:
    """An offer that decode was granted, and has no blocks for yet."""
    world.decode.prepare_load(number, world.prefill.offer(number, TABLE, 11))

    def is_granted() -> bool:
        load = world.decode.load(number)
        return load is not None and load.lacks_only_blocks

    world.until(is_granted)


def granted_slot(world: World) -> tuple[int, bytes]:
    """The fence slot of the only grant, and its token."""
    grant = world.decode.parts.decode.loads[0].reads[Rank(0)].grant
    assert grant is not None
    return grant.slot, grant.fence_token


def reading(world: World) -> None:
    """A load whose read hangs."""
    world.fabric.reads_hang = True
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.decode.turn()


class Stranger:
    """Sends any message to a rank."""

    def __init__(self, world: World, rank: Stepped) -> None:
        self.control = MemoryControl(world.network)
        self.rank = rank

    def send(self, payload: bytes) -> float | None:
        """How long the rank waits in its next turn."""
        self.control.send(self.rank.parts.description.endpoint, payload)
        return self.rank.turn()

    def answer(self) -> bytes:
        (item,) = self.control.poll(0)
        assert isinstance(item, FromEndpoint)
        return item.payload

    def ask(self, **changed: object) -> Answer:
        incarnation = self.rank.parts.description.incarnation
        self.send(encode(ask(incarnation=incarnation, **changed)))
        return decode_answer(self.answer())


# --- a machine that stands still


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("who", ["both ranks", "decode"])
def test_time_in_which_the_loop_did_not_run_makes_no_load_late(
    make_world: MakeWorld, who: str, turns: int
) -> None:
    """In whatever phase of a load. If decode alone stands still, prefill's lease must hold."""
    seconds = {"both ranks": 100.0, "decode": 12.0}[who]
    config = Config(request_timeout_s=5, lease_s=20)
    world = make_world(config, max_gap_s=1.0)
    world.decode.prepare_load(1, world.prefill.offer(1, TABLE, 11))
    world.decode.start_load(1, OTHER_TABLE, 11)
    for turn in range(40):
        if turn == turns:
            world.clock.now += seconds
            if who == "decode":
                world.prefill.turn()
        (world.prefill if turn % 2 else world.decode).turn()
        world.clock.now += 0.01
    (end,) = (each for each in world.decode.ends() if isinstance(each, LoadEnded))
    assert end.failure is None


# --- a whole transfer


@pytest.mark.parametrize("polls", [0, 3], ids="lands at poll {}".format)
def test_a_load_takes_a_few_turns_and_no_time(
    world: World, polls: int, caplog: pytest.LogCaptureFixture
) -> None:
    world.fabric.polls = polls
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run(20)
    assert caplog.messages == [], "a good load has nothing to say"
    load = world.decode.ended_load()
    assert (load.failure, load.verified, load.num_tokens) == (None, False, 11)
    results = world.prefill.engine.pop_results()
    claimed, end = (one for one in results if not isinstance(one, Counts))
    assert claimed == OfferGranted(RequestId("p1"))
    assert isinstance(end, OfferEnded)
    assert (end.request, end.end) == ("p1", OfferEnd.READ)
    expected = world.prefill.cache.blocks(TABLE)
    assert np.array_equal(world.decode.cache.blocks(OTHER_TABLE), expected)
    (read,) = load.reads
    assert read.num_bytes == expected.nbytes
    assert read.num_runs > 0


# --- why a load failed


def test_a_failed_load_logs_its_story_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    granted(world)
    world.run()  # until prefill was read once
    world.decode.start_load(1, [2], 11)  # too few blocks
    world.run()
    assert world.decode.ended_load().failure is not None
    first, *lines = caplog.messages
    engine = f"engine 'prefill' at tcp://127.0.0.1:{world.prefill.directory.port}"
    reason = "reading prefill rank 0 failed: block table has 1 entries; needed: 3"
    assert first == f"request d1: KV not loaded: {reason} (broken; {engine})"
    assert lines[0].endswith(f" s  d1 {engine}: CONNECTING (PrepareLoad: offer 00000000)")
    assert lines[-1].endswith(f"d1 {engine}: FAILING -> FAILED (Settled: {reason} (broken))")
    assert len(lines) == 13


def test_an_unwanted_load_logs_no_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    reading(world)
    world.decode.submit(CancelLoad(RequestId("d1")))
    world.decode.turn()
    world.fabric.reads_hang = False
    world.run()
    assert world.decode.failed_load().kind is FailureKind.DROPPED
    assert caplog.messages == []


def test_only_so_many_failures_are_logged_in_a_second(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(REQUEST_LINES + 2):
        world.decode.start_load(number, OTHER_TABLE, 11)
        world.decode.turn()
    assert sum("KV not loaded" in message for message in caplog.messages) == REQUEST_LINES


def test_long_ids_cost_short_lines(world: World, caplog: pytest.LogCaptureFixture) -> None:
    name = RequestId("x\n" * 30_000)
    world.decode.submit(PrepareLoad(name, world.prefill.offer(1, TABLE, 11), new_claim()))
    world.decode.submit(StartLoad(name, 0, 11, (Table.of([2]),)))  # too few blocks
    world.run()
    assert world.decode.failed_load().kind is FailureKind.BROKEN
    assert len(caplog.messages) > 5, "the story of the load"
    assert max(map(len, caplog.messages)) < 600
    assert all(message.isprintable() for message in caplog.messages)


def test_a_report_is_not_lost_with_its_story(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is settled, so it would not come again."""
    fail = Mock(side_effect=KeyError("a bug"))
    monkeypatch.setattr(world.decode.parts.event_log, "story_lines", fail)
    world.decode.start_load(1, OTHER_TABLE, 11)
    with pytest.raises(KeyError):
        world.decode.turn()
    assert world.decode.failed_load().kind is FailureKind.INTERNAL


# --- the order inside a turn


def test_commands_come_before_messages(world: World) -> None:
    """A peer that asks for an offer has its ticket, which left after the command."""
    nonce = world.prefill.prepare_offer(1, TABLE, 11)
    assert isinstance(Stranger(world, world.prefill).ask(nonce=nonce), Grant)


def test_a_message_that_cannot_be_sent_is_a_loss(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = Mock(side_effect=TransportError("no socket\nforged line"))
    monkeypatch.setattr(world.decode.control, "send", refuse)
    world.decode.prepare_load(1, world.prefill.ticket(1, 11))
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.decode.turn()
    failure = world.decode.failed_load()
    assert failure.kind is FailureKind.UNREACHABLE
    assert "no socket" in failure.detail
    assert r"\nforged line" in caplog.messages[-1].splitlines()[0], "not a line of its own"


def test_a_rank_asks_in_the_name_that_all_ranks_of_its_engine_have(world: World) -> None:
    """On a node of its own it may have been started with another one."""
    layouts = (world.decode.cache.layout(),)
    world.decode.submit(SetEngine(EngineId("other"), layouts))
    granted(world)
    assert world.decode.parts.agents.peers.engine_layouts == layouts
    (offer,) = list(world.prefill.parts.prefill.offers.values())
    assert offer.waits_for == "engine 'other', ranks 0"
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run()
    assert world.decode.ended_load().failure is None


def test_a_revoked_offer_ends_and_is_reported(world: World) -> None:
    world.prefill.submit(RevokeOffer(world.prefill.offer(1, TABLE, 11).nonce))
    world.prefill.turn()
    assert world.prefill.ended_offer() == ("p1", OfferEnd.REVOKED)


def test_a_reader_that_reads_for_ever_loses_the_blocks_and_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefill, "READING_S", 2.0)
    reading(world)
    for _ in range(4):
        world.clock.now += 0.8
        world.decode.turn()
        world.prefill.turn()
    assert world.prefill.ended_offer() == ("p1", OfferEnd.OVERDUE)
    (line,) = [each for each in caplog.messages if "taken back" in each]
    assert line.startswith("engine 'decode' has read the KV of request p1 for so long")


# --- strangers


def test_a_farewell_to_a_former_life_is_ignored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(world.prefill.parts.admission, "drop", dropped.append)
    stranger, leaving = Stranger(world, world.prefill), reader()
    for life in (hex32(99), world.prefill.parts.description.incarnation):
        assert dropped == []
        stranger.send(encode(Leave(incarnation=Incarnation(life), reader=leaving)))
    assert dropped == [leaving.incarnation]


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"x" * 999], ids=["empty", "no msgpack", "text"])
def test_a_message_that_is_not_of_this_protocol_is_counted_and_logged(
    world: World, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts come one record at a time, when all results were popped: strangers send at will."""
    stranger = Stranger(world, world.prefill)
    for _ in range(3):
        stranger.send(payload)
    assert caplog.messages[0].startswith("control message dropped: ")
    assert list(world.prefill.results) == [Counts({("dropped_messages", ""): 1})]
    assert counts_of(world.prefill) == {"dropped_messages": 1}
    world.prefill.turn()
    assert counts_of(world.prefill) == {"dropped_messages": 2}
    world.prefill.turn()
    assert world.prefill.engine.pop_results() == []


def test_a_long_description_is_decoded_beside_the_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank goes on meanwhile, and the load succeeds."""
    monkeypatch.setattr(loop, "BACKGROUND_BYTES", 0)
    background = world.decode.background
    background.is_held = True
    world.decode.prepare_load(1, world.prefill.offer(1, TABLE, 11))
    world.run(5)
    (peer,) = list(world.decode.parts.decode.peers.known.values())
    assert (peer.state.name, len(background)) == ("CONNECTING", 1)
    background.is_held = False
    background.work()
    granted(world, 2)
    world.until(lambda: peer.state.name == "READY")


def test_an_invalid_description_is_counted_and_logged(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "BACKGROUND_BYTES", 0)
    monkeypatch.setattr(world.prefill.directory, "_answer", lambda _: b"\x92\xabDescription\x09")
    world.decode.prepare_load(1, world.prefill.offer(1, TABLE, 11))
    world.run(5)
    counts_of(world.decode)  # of the peer's state
    world.run(1)
    assert counts_of(world.decode)["dropped_messages"] == 1
    (line,) = caplog.messages
    assert line.startswith("control message dropped: ")


def test_only_so_many_descriptions_wait_to_be_decoded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "BACKGROUND_BYTES", 0)
    world.decode.background.is_held = True
    item = FromEndpoint(HOME, encode(description()))
    for _ in range(2 * MAX_DECODING):
        world.decode.loop._on_received(item)
    assert len(world.decode.background) == MAX_DECODING


@pytest.mark.parametrize("version", [11, 13])
def test_a_peer_of_another_version_gets_this_version_as_the_answer(
    world: World, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Stranger(world, world.prefill)
    stranger.send(msgspec.msgpack.encode(["Ask", version, "0" * 32, {}]))
    assert decode_answer(stranger.answer()) == VersionRefusal()
    assert counts_of(world.prefill) == {"dropped_messages": 1}
    words = f"control message dropped: wire version {version}; this side speaks 12"
    assert caplog.messages == [words]


def test_a_denied_ask_is_counted_and_logged_without_the_whole_nonce(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(Stranger(world, world.prefill).ask(), Deny)
    assert counts_of(world.prefill) == {"denied_asks": 1}
    assert caplog.messages == [
        "denied an ask for offer 00000000: no such offer: used, expired, or never made"
    ]


def cut(world: World) -> Endpoint:
    """Break decode's one link, which it hears of."""
    (link,) = world.network.working()
    world.network.cut(link)
    world.decode.turn()
    return link.endpoint


def test_a_link_that_breaks_is_lost_if_no_word_comes_before_it_breaks_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    granted(world)
    for _ in range(3):
        cut(world)
        world.run(2)
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run()
    assert world.decode.ended_load().failure is None
    assert (counts_of(world.decode), caplog.messages) == ({}, [])
    granted(world, 2)
    cut(world)
    assert counts_of(world.decode) == {}
    endpoint = cut(world)
    assert counts_of(world.decode) == {"lost_peers": 1}
    assert f"lost {endpoint}" in caplog.text


def test_the_end_of_an_unused_link_does_not_count_as_a_loss(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    granted(world)
    world.decode.submit(CancelLoad(RequestId("d1")))
    world.run(2)
    cut(world)
    assert (counts_of(world.decode), caplog.messages) == ({}, [])
    assert not list(world.decode.parts.decode.peers.known.values()), "described anew when needed"


QUESTION = encode(StatusRequest(incarnation=ANY_INCARNATION))


def test_a_tool_is_answered_and_changes_nothing(world: World) -> None:
    tool = Stranger(world, world.prefill)
    assert tool.send(QUESTION) is None
    assert world.prefill.turn() is None  # it does not wait for the tool to read
    status = decode_to_tool(tool.answer())
    assert isinstance(status, Status)
    assert status.facts["engine"] == "prefill"
    assert not world.prefill.results


def test_a_question_that_cannot_be_answered_costs_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    granted(world)
    fail = Mock(side_effect=KeyError("a bug"))
    monkeypatch.setattr(world.prefill.loop, "_report_status", fail)
    Stranger(world, world.prefill).send(QUESTION)
    (line,) = caplog.messages
    assert "KeyError('a bug')" in line
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run()
    assert world.decode.ended_load().failure is None


# --- how long a turn waits


def test_a_rank_waits_until_a_command_is_there_or_a_timer_is_due(world: World) -> None:
    """Prepared offers have none; those that are out end by themselves."""
    assert world.prefill.turn() is None
    assert world.decode.turn() is None
    world.decode.submit(CancelLoad(RequestId("d1")))
    assert world.decode.turn() == 0
    assert world.decode.turn() is None
    world.prefill.prepare_offer(1, TABLE, 11)
    world.prefill.turn()
    assert world.prefill.turn() is None
    world.prefill.publish_offer(1)
    world.prefill.turn()
    assert world.prefill.turn() == world.config.offer_ttl_s
    world.decode.prepare_load(1, world.prefill.ticket(1, 11))
    world.decode.turn()
    assert world.decode.turn() == CONNECT_TIMEOUT_S


def test_a_read_is_polled(world: World) -> None:
    reading(world)
    assert world.decode.turn() == READING_PAUSE_S
    world.clock.now += 0.008
    assert world.decode.turn() == pytest.approx(0.0002), "a fortieth of its time so far"
    world.clock.now += 0.1
    assert world.decode.turn() == LONGEST_PAUSE_S
    world.fabric.reads_hang = False
    world.run()
    world.clock.now += LINGER_S
    world.run(2)
    assert world.decode.turn() == pytest.approx(LINK_KEPT_S - LINGER_S - 0.108)


def test_a_rank_that_closes_makes_its_grants_void_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted(world)
    parts, slot_page = world.prefill.parts, world.prefill.parts.slots
    slot, fence_token = granted_slot(world)
    assert slot_page.read(slot) == fence_token
    left: list[bytes] = []
    with monkeypatch.context() as closing:
        closing.setattr(parts.control, "close", lambda _: left.append(slot_page.read(slot)))
        world.prefill.loop.close()
    assert left == [bytes(16)]


def test_a_rank_that_closes_sends_its_outstanding_reports(world: World) -> None:
    """Commands that it has not looked at are owed as well."""
    reading(world)
    world.decode.prepare_load(2, world.prefill.offer(2, TABLE, 11))
    world.decode.start_load(2, [5, 6, 8], 11)
    world.decode.loop.close()
    ends = world.decode.ends()
    assert {end.request for end in ends} == {"d1", "d2"}
    failures = {str(end.failure) for end in ends if isinstance(end, LoadEnded)}
    assert failures == {"this rank has stopped (dropped)"}
    world.prefill.prepare_offer(3, TABLE, 11)
    world.prefill.publish_offer(3)
    world.prefill.loop.close()
    assert sorted(end.request for end in world.prefill.ends()) == ["p1", "p2", "p3"]


def test_an_unreported_load_fails_when_its_rank_stops(world: World) -> None:
    """The cache is discarded when the engine sleeps."""
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run(20)
    world.decode.engine.stop()
    assert world.decode.failed_load() == STOPPED


def test_a_rank_has_not_stopped_before_the_end_of_each_agent_is_proven(world: World) -> None:
    """Its read may still land, whatever the memory is used for by then."""
    reading(world)
    transport, closing = world.decode.parts.agents.current.transport, Background(is_held=True)
    assert isinstance(transport, MemoryTransport)
    world.decode.parts.agents.turnover._close_on = closing
    for _ in range(2):  # the read is late, and is abandoned
        world.clock.now += world.config.request_timeout_s
        world.run()
    world.decode.prepare_load(2, world.prefill.offer(2, TABLE, 11))
    world.decode.start_load(2, [5, 6, 8], 11)
    assert world.decode.ends() == []
    world.fabric.closes_fail = True
    closing.work()
    for _ in range(2):
        with pytest.raises(TransportError, match="this transport does not end"):
            world.decode.engine.stop()
    assert [end.request for end in world.decode.ends()] == ["d2"], "nothing writes into its blocks"
    world.fabric.closes_fail = False
    world.clock.now += TRY_AGAIN_S
    for _ in range(2):
        with pytest.raises(TransportError, match="being destroyed; 1 of its reads may go on"):
            world.decode.engine.stop()
        assert transport.name in world.fabric.transports
    closing.work()
    for _ in range(2):
        world.decode.engine.stop()
        assert transport.name not in world.fabric.transports
    assert world.decode.failed_load() == STOPPED


def busy_worker(wait_s: float) -> MagicMock:
    """The worker of a feature, with one piece of work that never ends."""
    worker = MagicMock(actions=frozenset(), wait_s=wait_s)
    worker.name = "busy"
    worker.__len__.return_value = 1
    worker.poll.return_value = ()
    return worker


def test_a_part_that_is_closed_stays_closed(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error keeps nothing else from being closed, and is raised."""
    worker = busy_worker(1.0)
    world = make_world(features=(lambda _: Feature(worker=worker),))
    parts = world.decode.parts
    closed = Mock(wraps=parts.control.close)
    monkeypatch.setattr(parts.control, "close", closed)
    worker.close.side_effect = KeyError("a bug")
    with pytest.raises(KeyError, match="a bug"):
        world.decode.engine.stop()
    worker.close.side_effect = None
    assert not parts.agents.polled
    world.decode.engine.stop()
    closed.assert_called_once()


def test_a_link_is_closed_when_nothing_is_held_over_it(world: World) -> None:
    granted(world)
    world.decode.control.clock = world.clock
    for _ in range(4):
        world.clock.now += LINK_KEPT_S / 2
        world.run(2)
        assert len(world.decode.control.links()) == 1, "it is renewed"
    world.decode.submit(CancelLoad(RequestId("d1")))
    world.run(2)
    for _ in range(2):
        assert len(world.decode.control.links()) == 1
        world.clock.now += LINK_KEPT_S / 2
        world.run(2)
    assert world.decode.control.links() == []
    assert world.decode.turn() is not None, "its peer is kept for longer"
    (peer,) = list(world.decode.parts.decode.peers.known.values())
    assert peer.state.name == "READY"
    world.prefill.offer(2, OTHER_TABLE, 11)
    world.decode.prepare_load(2, world.prefill.ticket(2, 11))
    world.decode.turn()
    (link,) = world.decode.control.links()
    assert link.endpoint == world.prefill.parts.description.endpoint, "and was not described anew"


@pytest.mark.parametrize("pause_s", [0.0, 0.5], ids=["each step is work", "a step looks at a GPU"])
def test_the_work_of_a_feature_is_stepped_as_often_as_it_needs(
    make_world: MakeWorld, pause_s: float
) -> None:
    world = make_world(features=(lambda _: Feature(worker=busy_worker(pause_s)),))
    assert world.prefill.turn() == pause_s


def test_prefill_serves_while_it_may_be_read_and_a_while_longer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Mock()
    monkeypatch.setattr(world.prefill.parts.serving, "progress", progress)
    world.prefill.turn()
    progress.assert_not_called()
    granted(world)
    progress.reset_mock()
    assert world.prefill.turn() == SERVING_PAUSE_S
    progress.assert_called_once()
    world.decode.submit(CancelLoad(RequestId("d1")))
    world.run(3)
    world.clock.now += LINGER_S - 0.01
    assert world.prefill.turn() == SERVING_PAUSE_S
    world.clock.now += 0.01
    world.prefill.turn()
    assert world.prefill.turn() is None


def test_an_error_of_serving_ends_no_grant(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers over other connections go on, and the log is not filled."""
    granted(world)
    fail = Mock(side_effect=TransportError("a connection is broken"))
    monkeypatch.setattr(world.prefill.parts.serving, "progress", fail)
    caplog.clear()
    for _ in range(5):
        world.prefill.turn()
    assert caplog.messages == ["serving readers of this rank failed: a connection is broken"]
    world.decode.start_load(1, OTHER_TABLE, 11)
    world.run(20)
    assert world.decode.ended_load().failure is None


def test_a_rank_that_cannot_be_read_answers_no_ask(make_world: MakeWorld) -> None:
    world = make_world(roles=("prefill", "decode"))
    assert isinstance(Stranger(world, world.decode).ask(), Deny)
    assert world.decode.turn() is None


# --- a restart


def test_after_a_restart_no_grant_is_valid_and_offers_are_lost_at_once(world: World) -> None:
    granted(world)
    world.prefill.prepare_offer(2, [5], 4)
    world.prefill.offer(3, [6], 4)
    world.prefill.turn()
    slot, fence_token = granted_slot(world)
    assert world.prefill.parts.slots.read(slot) == fence_token
    world.prefill.loop.restart()
    assert world.prefill.parts.slots.read(slot) == bytes(16)
    ends = [(end.request, end.end) for end in world.prefill.ends() if isinstance(end, OfferEnded)]
    assert ends == [("p1", OfferEnd.LOST), ("p3", OfferEnd.LOST)]
    world.prefill.publish_offer(2)  # prepared for a machine that is gone
    world.prefill.turn()
    assert world.prefill.ended_offer() == ("p2", OfferEnd.LOST)
    assert len(list(world.prefill.parts.prefill.offers.values())) == 0
    world.prefill.turn()
    assert counts_of(world.prefill) == {"thread_restarts": 1}


def test_after_a_restart_a_load_is_reported_once_nothing_writes(world: World) -> None:
    reading(world)
    counts_of(world.decode)
    world.decode.background.is_held = True
    world.decode.loop.restart()
    assert world.decode.ends() == []
    world.decode.turn()
    assert counts_of(world.decode) == {"thread_restarts": 1}
    for _ in range(3):
        world.decode.turn()
    assert world.decode.ends() == []
    world.decode.background.work()  # another agent
    world.decode.turn()
    world.decode.background.work()  # the end of the first one
    world.decode.turn()
    counts, load = world.decode.engine.pop_results()
    assert isinstance(counts, Counts)
    assert by_name(counts) == {"replaced_agents stuck_read": 1}, "a load's counts come with its end"
    assert isinstance(load, LoadEnded)
    assert load.failure is not None
    assert (load.request, load.num_tokens, load.failure.detail) == ("d1", 11, DIED)
    assert len(world.decode.loop.outstanding) == 0


def test_after_a_restart_a_load_that_is_not_read_is_reported_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted(world)
    world.decode.start_load(1, OTHER_TABLE, 11)
    with monkeypatch.context() as buggy:
        buggy.setattr(world.decode.parts.decode, "handle", Mock(side_effect=KeyError("a bug")))
        with pytest.raises(KeyError):
            world.decode.turn()
    world.decode.loop.restart()
    world.decode.turn()
    assert world.decode.failed_load().detail == DIED
    world.decode.turn()
    assert world.decode.turn() == TIDY_S, "then the agent is looked at"


# --- more messages than a turn has time for


def test_messages_beyond_a_turns_time_wait_and_more_wait_at_their_senders(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, strangers = world.prefill.loop, [Stranger(world, world.prefill) for _ in range(4)]
    handled: list[Received] = []

    def take_long(item: Received) -> None:
        handled.append(item)
        world.clock.now += RECEIVING_S

    monkeypatch.setattr(loop, "_on_received", take_long)
    for stranger in strangers[:3]:
        stranger.control.send(world.prefill.parts.description.endpoint, b"")
    world.prefill.turn()
    strangers[3].control.send(world.prefill.parts.description.endpoint, b"")
    for number in (2, 3):
        world.prefill.turn()
        assert len(handled) == number
    assert len(world.prefill.control.waits) == 1, "it looked for more while some were left"
    world.prefill.turn()
    assert len(handled) == 4
