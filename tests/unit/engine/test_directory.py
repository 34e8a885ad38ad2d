"""Who asks for an engine's description, and what is answered."""

import logging
import queue
import threading
from collections.abc import Iterator

import msgspec
import pytest

from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.engine.directory import BOUNDS, NO_KEY, DirectoryServer, describe_engine
from nixl_kv.errors import PAUSE_S
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import ANY_INCARNATION, EngineId, endpoint_at, engine_incarnation, new_incarnation
from nixl_kv.protocol.messages import (
    Answer,
    Describe,
    Drain,
    Draining,
    Refusal,
    SetWeights,
    Status,
    StatusRequest,
    ToTool,
    VersionRefusal,
    WeightsSet,
    decode_answer,
    decode_to_tool,
    encode,
)
from nixl_kv.transport.base import Bounds, FromEndpoint, FromPeer, Received
from support.records import ENGINE_LIFE, OTHER_LIFE, PREFILL, ask, describe, description

HOST = "127.0.0.1"
TIMEOUT_S = 30.0


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def server(network: MemoryNetwork) -> Iterator[DirectoryServer]:
    """Not started: a test makes its turns."""
    server = DirectoryServer(MemoryControl(network), HOST, 0)
    yield server
    server.stop()


def answers(network: MemoryNetwork, server: DirectoryServer, *payloads: bytes) -> list[Answer]:
    """What it answers in its next turn."""
    return list(map(decode_answer, replies(network, server, *payloads)))


def told(network: MemoryNetwork, server: DirectoryServer, *payloads: bytes) -> list[ToTool]:
    """The same, to a tool."""
    return list(map(decode_to_tool, replies(network, server, *payloads)))


def replies(network: MemoryNetwork, server: DirectoryServer, *payloads: bytes) -> list[bytes]:
    asker = MemoryControl(network)
    for payload in payloads:
        asker.send(endpoint_at(server.host, server.port), payload)
    server.turn(0)
    received = asker.poll(0)
    return [item.payload for item in received if isinstance(item, FromEndpoint)]


def test_an_engine_that_was_asked_for_is_described(
    network: MemoryNetwork, server: DirectoryServer
) -> None:
    server.publish(description())
    assert answers(network, server, encode(describe())) == [description()]


@pytest.mark.parametrize("engine", [PREFILL, EngineId("whatever")])
def test_a_tool_is_described_the_engine_whatever_it_is(
    network: MemoryNetwork, server: DirectoryServer, engine: EngineId
) -> None:
    server.publish(description())
    question = Describe(incarnation=ANY_INCARNATION, engine=engine)
    assert answers(network, server, encode(question)) == [description()]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        pytest.param(
            Describe(incarnation=ENGINE_LIFE, engine=EngineId("other")),
            "engine is 'other', but here is 'prefill'",
            id="another engine",
        ),
        pytest.param(
            describe(OTHER_LIFE),
            f"incarnation is {OTHER_LIFE[:8]}, but 'prefill' has begun the life "
            f"{ENGINE_LIFE[:8]} since",
            id="a former life",
        ),
    ],
)
def test_another_engine_or_life_is_refused_in_words(
    network: MemoryNetwork, server: DirectoryServer, question: Describe, reason: str
) -> None:
    server.publish(description())
    expected = Refusal(incarnation=question.incarnation, engine=question.engine, reason=reason)
    assert answers(network, server, encode(question)) == [expected]


@pytest.mark.parametrize("incarnation", [ENGINE_LIFE, ANY_INCARNATION])
def test_an_engine_that_is_not_described_yet_says_so(
    network: MemoryNetwork, server: DirectoryServer, incarnation: object
) -> None:
    question = Describe(incarnation=incarnation, engine=PREFILL)  # type: ignore[arg-type]
    (answer,) = answers(network, server, encode(question))
    assert isinstance(answer, Refusal)
    assert answer.reason == "this engine is still starting"


def test_what_is_no_question_is_dropped_and_what_follows_is_answered(
    network: MemoryNetwork, server: DirectoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.publish(description())
    payloads = (b"", b"\xc1garbage", encode(ask()), encode(describe()))
    with caplog.at_level(logging.WARNING):
        assert answers(network, server, *payloads) == [description()]
    assert "request for a description dropped" in caplog.text
    assert len(caplog.records) == 1, "strangers cannot flood the log"


# What is to stop


def test_an_engine_that_is_to_drain_says_what_it_still_awaits(
    network: MemoryNetwork, server: DirectoryServer
) -> None:
    """Also before it is described, and as often as it is asked."""
    drain = encode(Drain(incarnation=ANY_INCARNATION))
    assert not server.is_draining
    assert told(network, server, drain) == [Draining(incarnation=ANY_INCARNATION, num_awaited=0)]
    assert server.is_draining
    server.publish(description())
    server.count_awaited = lambda: 3
    assert told(network, server, drain) == [Draining(incarnation=ENGINE_LIFE, num_awaited=3)]
    assert answers(network, server, encode(describe())) == [description()]


def test_draining_can_be_undone(network: MemoryNetwork, server: DirectoryServer) -> None:
    server.publish(description())
    drain, undo = (encode(Drain(incarnation=ANY_INCARNATION, undo=undo)) for undo in (False, True))
    answer = Draining(incarnation=ENGINE_LIFE, num_awaited=0)
    assert told(network, server, undo) == [answer]
    assert not server.is_draining
    assert told(network, server, drain, undo) == [answer, answer]
    assert not server.is_draining


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize(
    ("stranger", "is_obeyed"),
    [
        pytest.param("", True, id="with the key"),
        pytest.param("127.0.0.1", True, id="without a key, from this machine"),
        pytest.param("::1", True, id="without a key, from this machine by IPv6"),
        pytest.param("192.0.2.1", False, id="without a key, from another machine"),
    ],
)
def test_a_stranger_on_another_machine_drains_no_engine(
    server: DirectoryServer, stranger: str, *, is_obeyed: bool, undo: bool
) -> None:
    replies: list[ToTool] = []
    control = server._control
    assert isinstance(control, MemoryControl)
    control.reply = lambda _, payload: replies.append(decode_to_tool(payload))  # type: ignore[method-assign, assignment, misc]
    server.publish(description())
    server.is_draining = undo
    control.inbox.append(
        FromPeer(b"r", encode(Drain(incarnation=ANY_INCARNATION, undo=undo)), stranger)
    )
    server.turn(0)
    (answer,) = replies
    assert isinstance(answer, Draining)
    assert answer.is_refused is not is_obeyed
    assert server.is_draining is (is_obeyed is not undo)


# The label of the weights


def set_weights(label: str) -> bytes:
    return encode(SetWeights(incarnation=ANY_INCARNATION, weights=label))


def test_a_tool_sets_the_label_of_the_weights(network: MemoryNetwork) -> None:
    """At once, so that the scheduler never acts by the former label after the answer."""
    server = DirectoryServer(MemoryControl(network), HOST, 0, weights="step 7", has_key=True)
    assert told(network, server, set_weights("step 8")) == [
        WeightsSet(incarnation=ANY_INCARNATION, former="step 7")
    ]
    assert server.weights == "step 8"
    server.publish(description())
    assert told(network, server, set_weights("")) == [
        WeightsSet(incarnation=ENGINE_LIFE, former="step 8")
    ]
    assert server.weights == ""
    server.stop()


def test_without_a_key_nobody_sets_the_label(
    network: MemoryNetwork, server: DirectoryServer
) -> None:
    server.publish(description())
    (answer,) = told(network, server, set_weights("mine"))
    assert isinstance(answer, WeightsSet)
    assert answer.former == ""
    assert answer.refusal == NO_KEY
    assert "key_file" in NO_KEY
    assert server.weights == ""


def test_a_label_that_is_none_changes_nothing(
    network: MemoryNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    server = DirectoryServer(MemoryControl(network), HOST, 0, weights="step 7", has_key=True)
    for label in ("two\nlines", "x" * 257, 7, None):
        wire = msgspec.msgpack.encode(["SetWeights", 9, ANY_INCARNATION, label])
        assert told(network, server, wire) == []
    assert server.weights == "step 7"
    assert "request for a description dropped: " in caplog.text
    server.stop()


# What is of another version


@pytest.mark.parametrize("version", [8, 10])
def test_who_speaks_another_version_is_told_which_one_is_spoken_here(
    network: MemoryNetwork, server: DirectoryServer, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, whatever the question, so that nobody waits for an answer."""
    server.publish(description())
    foreign = [["Describe", version, ENGINE_LIFE, "prefill", {}], ["Shout", version], [8, version]]
    payloads = [*map(msgspec.msgpack.encode, foreign), encode(describe())]
    with caplog.at_level(logging.WARNING):
        assert answers(network, server, *payloads) == [VersionRefusal()] * 3 + [description()]
    assert f"wire version {version}; this side speaks 9" in caplog.text
    assert len(caplog.records) == 1, "strangers cannot flood the log"


def test_a_description_is_encoded_once_for_all_who_ask(
    network: MemoryNetwork, server: DirectoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(description())
    encoded: list[object] = []
    monkeypatch.setattr("nixl_kv.protocol.messages.encode", encoded.append)
    question = encode(describe())
    for _ in range(3):
        assert answers(network, server, question) == [description()]
    assert encoded == []


def test_a_refusal_is_not_refused(network: MemoryNetwork, server: DirectoryServer) -> None:
    """Else two sides could go on for ever."""
    for message in (["VersionRefusal", 0, 8], ["Shout", 0]):
        assert answers(network, server, msgspec.msgpack.encode(message)) == []


# What nobody expects


class FaultyControl(MemoryControl):
    """Raises what it is given to raise: the next polls and replies fail."""

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network)
        self.poll_errors: list[Exception] = []
        self.reply_errors: list[Exception] = []

    def poll(self, timeout_s: float | None) -> list[Received]:
        received = super().poll(timeout_s)
        if received and self.poll_errors:
            self.inbox = received  # they wait for the next one
            raise self.poll_errors.pop()
        return received

    def reply(self, route: bytes, payload: bytes) -> None:
        if self.reply_errors:
            raise self.reply_errors.pop()
        super().reply(route, payload)


@pytest.fixture
def faulty(network: MemoryNetwork) -> Iterator[tuple[FaultyControl, DirectoryServer]]:
    """One whose thread runs."""
    control = FaultyControl(network)
    server = DirectoryServer(control, HOST, 0)
    server.publish(description())
    server.start()
    yield control, server
    server.stop()


def test_no_error_ends_the_thread(
    network: MemoryNetwork,
    faulty: tuple[FaultyControl, DirectoryServer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    control, server = faulty
    asker = MemoryControl(network)
    control.poll_errors = [RuntimeError("a bug at the poll"), KeyError("another")]
    control.reply_errors = [ValueError("a bug at the reply")]
    with caplog.at_level(logging.CRITICAL):
        for _ in range(2):  # the first has no answer
            asker.send(endpoint_at(server.host, server.port), encode(describe()))
        (item,) = asker.poll(TIMEOUT_S)
    assert isinstance(item, FromEndpoint)
    assert decode_answer(item.payload) == description()
    assert (control.poll_errors, control.reply_errors) == ([], [])
    for words in ("a bug at the poll", "another", "a bug at the reply"):
        assert words in caplog.text
    assert {record.levelname for record in caplog.records} == {"CRITICAL"}


def test_an_error_costs_one_question_of_those_that_came_together(network: MemoryNetwork) -> None:
    control, asker = FaultyControl(network), MemoryControl(network)
    server = DirectoryServer(control, HOST, 0)
    server.publish(description())
    for _ in range(3):
        asker.send(endpoint_at(server.host, server.port), encode(describe()))
    control.reply_errors = [ValueError("a bug")]
    server.turn(0)
    assert len(asker.poll(0)) == 2
    server.stop()


def test_an_error_that_recurs_leaves_the_processor_alone(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a pause after each; this test has one that it ends itself."""
    pauses: queue.Queue[float] = queue.Queue()
    go_on = threading.Semaphore(0)

    def pause(seconds: float) -> None:
        pauses.put(seconds)
        go_on.acquire()

    class Broken(MemoryControl):
        def poll(self, timeout_s: float | None) -> list[Received]:
            raise RuntimeError(f"a bug of every poll, {timeout_s}")

    monkeypatch.setattr("nixl_kv.engine.directory.time.sleep", pause)
    server = DirectoryServer(Broken(network), HOST, 0)
    server.start()
    try:
        for _ in range(3):
            assert pauses.get(timeout=TIMEOUT_S) == PAUSE_S
            go_on.release()
    finally:
        go_on.release(10)
        server.stop()
    assert not server._thread.is_alive()


def test_a_stranger_costs_little(network: MemoryNetwork) -> None:
    """Questions are short, and few answers wait for who does not take them."""
    bounds: list[Bounds | None] = []

    class Control(MemoryControl):
        def listen(self, host: str, port: int, bounds_: Bounds | None = None) -> int:
            bounds.append(bounds_)
            return super().listen(host, port, bounds_)

    DirectoryServer(Control(network), HOST, 0)
    assert bounds == [BOUNDS]
    assert BOUNDS.message_bytes <= 4096
    assert BOUNDS.answers <= 8
    assert len(encode(describe())) < BOUNDS.message_bytes


def test_an_engines_life_is_derived_from_those_of_its_ranks() -> None:
    ranks = list(description(2).ranks)
    model = {"dtype": "bfloat16"}
    one = describe_engine(PREFILL, model, ParallelShape(2, 1), ranks)
    assert one.incarnation == engine_incarnation(rank.incarnation for rank in ranks)
    assert (one.engine, one.model, one.shape) == (PREFILL, model, ParallelShape(2, 1))
    assert one.ranks == tuple(ranks)
    ranks[1] = msgspec.structs.replace(ranks[1], incarnation=new_incarnation())
    other = describe_engine(PREFILL, model, ParallelShape(2, 1), ranks)
    assert other.incarnation != one.incarnation


def status(network: MemoryNetwork, server: DirectoryServer) -> Status:
    (answer,) = told(network, server, encode(StatusRequest(incarnation=ANY_INCARNATION)))
    assert isinstance(answer, Status)
    return answer


def test_its_status_tells_whether_it_is_described_and_drains(
    network: MemoryNetwork, server: DirectoryServer
) -> None:
    starting = status(network, server)
    assert (starting.facts["engine"], starting.totals) == (None, {"ranks": 0})
    server.publish(description())
    server.weights, server.count_awaited = "step 8", lambda: 3
    ready = status(network, server)
    assert ready.incarnation == description().incarnation
    assert ready.totals == {"ranks": len(description().ranks)}
    facts = {"engine": PREFILL, "draining_s": None, "num_awaited": 3, "weights": "step 8"}
    assert ready.facts.items() >= facts.items()
    told(network, server, encode(Drain(incarnation=ANY_INCARNATION)))
    assert isinstance(status(network, server).facts["draining_s"], float)
    told(network, server, encode(Drain(incarnation=ANY_INCARNATION, undo=True)))
    assert status(network, server).facts["draining_s"] is None


def test_its_status_has_the_schedulers_failures(
    network: MemoryNetwork, server: DirectoryServer
) -> None:
    server.history.count("ticket_key", detail="another key")
    (failure,) = status(network, server).lists["failures"]
    assert (failure["reason"], failure["num_last_hour"]) == ("ticket_key", 1)
