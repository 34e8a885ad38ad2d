"""Questions for an engine's description, and the answers."""

from itertools import chain, repeat
from typing import Any
from unittest.mock import DEFAULT, Mock, call

import msgspec
import pytest

from harness.local.memory_control import MemoryControl, MemoryNetwork
from nixl_kv.engine.directory import (
    BOUNDS,
    DRAIN_HERE,
    FINDS,
    NO_KEY,
    DirectoryServer,
    describe_engine,
)
from nixl_kv.errors import ERROR_PAUSE_S, TransportError
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import (
    ANY_INCARNATION,
    EngineId,
    Incarnation,
    Nonce,
    endpoint_at,
    engine_incarnation,
    new_incarnation,
)
from nixl_kv.protocol.messages import (
    MAX_HASHES,
    PAUSED_S,
    Answer,
    Describe,
    Description,
    Drain,
    Draining,
    Find,
    Found,
    Hint,
    KeyRefusal,
    Paused,
    Refusal,
    SetWeights,
    Status,
    StatusRequest,
    ToTool,
    VersionRefusal,
    WeightsSet,
    decode_answer,
    decode_to_finder,
    decode_to_rank,
    decode_to_tool,
    encode,
)
from nixl_kv.transport.base import FromEndpoint, FromPeer, Proved
from support.records import (
    ENGINE_LIFE,
    OTHER_LIFE,
    PREFILL,
    ask,
    describe,
    description,
    hex32,
    landed,
    ready,
    teller,
)

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
NONCES = [Nonce(hex32(number)) for number in range(4)]


class Directory:
    """A directory whose turns a test makes, and a peer that asks it."""

    def __init__(self, described: Description | None = None, **options: Any) -> None:
        self.network = MemoryNetwork()
        self.control = MemoryControl(self.network)
        self.server = DirectoryServer(self.control, HOST, 0, **options)
        self.asker = MemoryControl(self.network)
        if described is not None:
            self.server.publish(described)

    def ask(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.asker.send(endpoint_at(HOST, self.server.port), payload)

    def replies(self, *payloads: bytes, wait_s: float = 0.0) -> list[bytes]:
        """Its answers, in its next turn or from its thread."""
        self.ask(*payloads)
        if not wait_s:
            self.server.turn(0)
        received = self.asker.poll(wait_s)
        return [item.payload for item in received if isinstance(item, FromEndpoint)]

    def answers(self, *payloads: bytes) -> list[Answer]:
        return list(map(decode_answer, self.replies(*payloads)))

    def tell(self, *payloads: bytes) -> list[ToTool]:
        """Its answer to a tool."""
        return list(map(decode_to_tool, self.replies(*payloads)))


@pytest.fixture
def starting() -> Directory:
    """The engine is not described yet."""
    return Directory()


@pytest.fixture
def directory() -> Directory:
    """The engine is described."""
    return Directory(description())


@pytest.mark.parametrize(
    "question",
    [
        describe(),
        describe(ANY_INCARNATION),
        Describe(incarnation=ANY_INCARNATION, engine=EngineId("whatever")),
    ],
    ids=["the engine", "any life of it", "whatever it is"],
)
def test_an_engine_that_was_asked_for_is_described(
    directory: Directory, question: Describe
) -> None:
    assert directory.answers(encode(question)) == [description()]


OTHER_ENGINE = (
    "engine 'prefill' answers here instead of 'other': prefill restarted, or another engine took "
    "its port"
)
FORMER_LIFE = (
    "engine 'prefill' has restarted, slept or reset its cache since: incarnation "
    f"{ENGINE_LIFE[:8]} instead of {OTHER_LIFE[:8]}"
)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (Describe(incarnation=ENGINE_LIFE, engine=EngineId("other")), OTHER_ENGINE),
        (describe(OTHER_LIFE), FORMER_LIFE),
    ],
    ids=["another engine", "a former life"],
)
def test_another_engine_or_life_is_refused_in_words(
    directory: Directory, question: Describe, reason: str
) -> None:
    expected = Refusal(incarnation=question.incarnation, engine=question.engine, reason=reason)
    assert directory.answers(encode(question)) == [expected]


@pytest.mark.parametrize("incarnation", [ENGINE_LIFE, ANY_INCARNATION])
def test_an_engine_that_is_not_described_yet_says_so(
    starting: Directory, incarnation: Incarnation
) -> None:
    (answer,) = starting.answers(encode(describe(incarnation)))
    assert isinstance(answer, Refusal)
    assert answer.reason == "this engine is still starting"


def test_a_message_other_than_a_question_is_dropped_and_the_next_is_answered(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    payloads = (b"", b"\xc1garbage", encode(ask()), encode(describe()))
    assert directory.answers(*payloads) == [description()]
    assert "request for a description dropped" in caplog.text
    assert len(caplog.records) == 1, "strangers cannot flood the log"


# What its own ranks tell


def test_ranks_are_heard_in_order_and_not_answered(directory: Directory) -> None:
    hints: list[Hint] = [ready(), landed(), landed(reader=teller(1))]
    assert directory.answers(*map(encode, hints), encode(describe())) == [description()]
    assert directory.server.pop_hints() == hints
    assert directory.server.pop_hints() == []


# Offers and loads to stop


def drain(*, undo: bool = False) -> bytes:
    return encode(Drain(incarnation=ANY_INCARNATION, undo=undo))


def test_a_draining_engine_says_how_many_offers_and_loads_it_awaits(starting: Directory) -> None:
    """Also before it is described, and as often as it is asked."""
    server = starting.server
    assert not server.is_draining
    assert starting.tell(drain()) == [Draining(incarnation=ANY_INCARNATION, num_awaited=0)]
    assert server.is_draining
    server.publish(description())
    server.count_awaited = lambda: 3
    assert starting.tell(drain()) == [Draining(incarnation=ENGINE_LIFE, num_awaited=3)]
    assert starting.answers(encode(describe())) == [description()]


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize(
    ("address", "is_obeyed"),
    [
        pytest.param("", True, id="with the key"),
        pytest.param("127.0.0.1", True, id="without a key, from this machine"),
        pytest.param("::1", True, id="without a key, from this machine by IPv6"),
        pytest.param("192.0.2.1", False, id="without a key, from another machine"),
    ],
)
def test_a_stranger_on_another_machine_drains_no_engine(
    directory: Directory,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    *,
    is_obeyed: bool,
    undo: bool,
) -> None:
    reply = Mock()
    monkeypatch.setattr(directory.control, "reply", reply)
    directory.server.is_draining = undo
    proved = Proved.NO_KEY if address else Proved.ENGINE_KEY
    directory.control.inbox.append(FromPeer(b"r", drain(undo=undo), proved, address))
    directory.server.turn(0)
    answer = decode_to_tool(reply.call_args.args[1])
    assert isinstance(answer, Draining)
    assert answer.refusal == ("" if is_obeyed else DRAIN_HERE)
    assert directory.server.is_draining is (is_obeyed is not undo)


# The label of the weights


def set_weights(label: str) -> bytes:
    return encode(SetWeights(incarnation=ANY_INCARNATION, weights=label))


def test_a_tool_sets_the_label_of_the_weights() -> None:
    """At once, so that the scheduler never acts by the former label after the answer."""
    labelled = Directory(weights="step 7", has_key=True)
    assert labelled.tell(set_weights("step 8")) == [
        WeightsSet(incarnation=ANY_INCARNATION, former="step 7")
    ]
    assert labelled.server.weights == "step 8"
    labelled.server.publish(description())
    assert labelled.tell(set_weights("")) == [WeightsSet(incarnation=ENGINE_LIFE, former="step 8")]
    assert labelled.server.weights == ""


def test_the_label_cannot_be_set_without_a_key(directory: Directory) -> None:
    refused = WeightsSet(incarnation=ENGINE_LIFE, former="", refusal=NO_KEY)
    assert directory.tell(set_weights("mine")) == [refused]
    assert "key_file" in NO_KEY
    assert directory.server.weights == ""


# What its prefix cache has


FIND = Find(
    incarnation=ENGINE_LIFE,
    engine=PREFILL,
    nonce=NONCES[0],
    weights="",
    first_block=0,
    hashes=(bytes(32),) * MAX_HASHES,
)
FOUND = Found(
    incarnation=ENGINE_LIFE,
    nonce=NONCES[0],
    num_blocks=1,
    offer=NONCES[1],
    run=b"run",
    epoch=0,
    weights="",
)


@pytest.fixture
def find() -> Mock:
    return Mock(return_value=FOUND)


@pytest.fixture
def finding(find: Mock) -> Directory:
    return Directory(description(), find=find)


@pytest.mark.parametrize("incarnation", [ENGINE_LIFE, ANY_INCARNATION])
def test_an_engine_tells_which_blocks_it_has(
    finding: Directory, find: Mock, incarnation: Incarnation
) -> None:
    question = msgspec.structs.replace(FIND, incarnation=incarnation)
    (payload,) = finding.replies(encode(question))
    assert decode_to_finder(payload) == FOUND
    find.assert_called_once_with(question)


@pytest.mark.parametrize(
    "other", [{"engine": EngineId("other")}, {"incarnation": OTHER_LIFE}], ids=["engine", "life"]
)
def test_a_question_for_another_engine_or_life_finds_nothing(
    finding: Directory, find: Mock, other: dict[str, Any]
) -> None:
    question = msgspec.structs.replace(FIND, **other)
    (payload,) = finding.replies(encode(question))
    answer = decode_to_finder(payload)
    assert isinstance(answer, Refusal)
    assert (answer.engine, answer.incarnation) == (question.engine, question.incarnation)
    assert answer.reason.startswith("engine 'prefill' of incarnation")
    find.assert_not_called()


def test_a_failed_search_costs_one_answer(finding: Directory, find: Mock) -> None:
    find.side_effect = [RuntimeError("a bug"), FOUND]
    (payload,) = finding.replies(encode(FIND), encode(FIND))
    assert decode_to_finder(payload) == FOUND


def test_without_conversations_or_a_description_no_question_is_answered(
    directory: Directory,
) -> None:
    assert directory.replies(encode(FIND)) == []
    assert Directory(find=Mock()).replies(encode(FIND)) == []


def test_a_tool_finds_nothing(
    finding: Directory, find: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = Mock()
    monkeypatch.setattr(finding.control, "reply", reply)
    finding.control.inbox.append(FromPeer(b"r", encode(FIND), Proved.TOOLS_KEY))
    finding.server.turn(0)
    assert isinstance(decode_to_tool(reply.call_args.args[1]), KeyRefusal)
    find.assert_not_called()


@pytest.mark.parametrize("find", [None, Mock()], ids=["no", "finds"])
def test_only_an_engine_that_finds_takes_long_questions(find: Mock | None) -> None:
    control, bounds = Mock(), FINDS if find else BOUNDS
    DirectoryServer(control, HOST, 0, find=find)
    control.listen.assert_called_once_with(HOST, 0, bounds)
    assert (len(encode(FIND)) <= bounds.message_bytes) is bool(find)


# Messages of another version


@pytest.mark.parametrize("version", [11, 13])
def test_a_peer_of_another_version_gets_this_version_as_the_answer(
    directory: Directory, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, whatever the question, so that no peer waits for an answer."""
    foreign = [["Describe", version, ENGINE_LIFE, "prefill", {}], ["Shout", version], [8, version]]
    payloads = [*map(msgspec.msgpack.encode, foreign), encode(describe())]
    assert directory.answers(*payloads) == [VersionRefusal()] * 3 + [description()]
    assert f"wire version {version}; this side speaks 12" in caplog.text
    assert len(caplog.records) == 1, "strangers cannot flood the log"


def test_a_refusal_is_not_refused(directory: Directory) -> None:
    """Else two sides could go on for ever."""
    for message in (["VersionRefusal", 0, 8], ["Shout", 0]):
        assert directory.answers(msgspec.msgpack.encode(message)) == []


def test_a_description_is_encoded_once_for_all_askers(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, encoded = encode(describe()), Mock()
    monkeypatch.setattr("nixl_kv.protocol.messages.encode", encoded)
    for _ in range(3):
        assert directory.answers(question) == [description()]
    encoded.assert_not_called()


# Unexpected messages


def let_fail(control: MemoryControl, method: str, *errors: Exception) -> None:
    """Its next calls raise these."""
    effects = chain(errors, repeat(DEFAULT))
    setattr(control, method, Mock(wraps=getattr(control, method), side_effect=effects))


def test_no_error_ends_the_thread(
    directory: Directory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error costs one answer of those that are asked for together, and a pause."""
    pause = Mock()
    monkeypatch.setattr("nixl_kv.errors.time.sleep", pause)
    let_fail(directory.control, "poll", RuntimeError("a bug at the poll"), KeyError("another"))
    let_fail(directory.control, "reply", ValueError("a bug at the reply"))
    directory.ask(encode(describe()))
    directory.server.start()
    (payload,) = directory.replies(encode(describe()), wait_s=TIMEOUT_S)
    assert decode_answer(payload) == description()
    for words in ("a bug at the poll", "another", "a bug at the reply"):
        assert words in caplog.text
    assert {record.levelname for record in caplog.records} == {"CRITICAL"}
    assert pause.call_args_list == [call(ERROR_PAUSE_S)] * 3
    directory.server.stop()


def test_an_engines_life_is_derived_from_those_of_its_ranks() -> None:
    ranks, model = list(description(2).ranks), {"dtype": "bfloat16"}
    one = describe_engine(PREFILL, model, ParallelShape(2, 1), ranks)
    assert (one.engine, one.model, one.shape) == (PREFILL, model, ParallelShape(2, 1))
    assert one.ranks == tuple(ranks)
    for changed in (ranks[1], msgspec.structs.replace(ranks[1], incarnation=new_incarnation())):
        made = describe_engine(PREFILL, model, ParallelShape(2, 1), [ranks[0], changed])
        lives = (ranks[0].incarnation, changed.incarnation)
        assert made.incarnation == engine_incarnation(lives)
        assert (made.incarnation == one.incarnation) is (changed is ranks[1])


def status(directory: Directory) -> Status:
    (answer,) = directory.tell(encode(StatusRequest(incarnation=ANY_INCARNATION)))
    assert isinstance(answer, Status)
    return answer


def test_its_status_tells_whether_it_is_described_and_drains(starting: Directory) -> None:
    server = starting.server
    first = status(starting)
    assert (first.facts["engine"], first.totals) == (None, {"ranks": 0})
    server.publish(description())
    server.weights, server.count_awaited = "step 8", lambda: 3
    ready = status(starting)
    assert ready.incarnation == description().incarnation
    assert ready.totals == {"ranks": len(description().ranks)}
    facts = {"engine": PREFILL, "draining_s": None, "num_awaited": 3, "weights": "step 8"}
    assert ready.facts.items() >= facts.items()
    starting.tell(drain())
    assert isinstance(status(starting).facts["draining_s"], float)
    starting.tell(drain(undo=True))
    assert status(starting).facts["draining_s"] is None


# A pause


def listening_rank(directory: Directory) -> MemoryControl:
    """The second of two ranks; the first one cannot be told anything."""
    let_fail(directory.control, "send", TransportError("no socket"))
    rank = MemoryControl(directory.network)
    endpoint = endpoint_at(HOST, rank.listen(HOST, 0))
    absent, known = description(2).ranks
    ranks = absent, msgspec.structs.replace(known, endpoint=endpoint)
    directory.server.publish(msgspec.structs.replace(description(2), ranks=ranks))
    return rank


def heard(directory: Directory, rank: MemoryControl) -> list[tuple[int, bool]]:
    """Take a turn. Each message to the rank: its number, and whether it says "paused"."""
    directory.server.turn(0)
    told = [decode_to_rank(each.payload) for each in rank.poll(0) if isinstance(each, FromPeer)]
    incarnation = description(2).ranks[1].incarnation
    assert all(isinstance(one, Paused) and one.incarnation == incarnation for one in told)
    return [(one.number, one.is_paused) for one in told if isinstance(one, Paused)]


def test_ranks_hear_of_a_pause_in_order(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the links to them close, as an idle directory has none."""
    rank = listening_rank(directory)
    for is_paused in (True, False):
        directory.server.tell_ranks(is_paused=is_paused)
    assert heard(directory, rank) == [(1, True), (2, False)]
    assert len(directory.control.links()) == 1
    monkeypatch.setattr("nixl_kv.engine.directory.LINK_KEPT_S", 0.0)
    directory.server.turn(0)
    assert not directory.control.links()


def test_a_pause_is_repeated_while_it_lasts() -> None:
    """A connection may break, and a rank believes a pause for a while only."""
    now = 0.0
    directory = Directory(clock=lambda: now)
    rank = listening_rank(directory)
    directory.server.tell_ranks(is_paused=True)
    assert heard(directory, rank) == [(1, True)]
    assert heard(directory, rank) == []
    now += PAUSED_S / 4
    assert heard(directory, rank) == [(2, True)]
    directory.server.tell_ranks(is_paused=False)
    assert heard(directory, rank) == [(3, False)]
    now += PAUSED_S
    assert heard(directory, rank) == []
