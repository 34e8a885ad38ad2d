"""The fate of each question to another engine's directory, and of an engine without answers."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nixl_kv.conversations.finding import FIND_S
from nixl_kv.conversations.owners import (
    MAX_OWNERS,
    NO_CONTENT,
    Answer,
    Owners,
    OwnerState,
    Question,
)
from nixl_kv.errors import LimitedLog
from nixl_kv.ids import ANY_INCARNATION, Endpoint, EngineId, Nonce, RequestId, new_nonce
from nixl_kv.protocol import messages
from nixl_kv.protocol.messages import (
    ContentFacts,
    Describe,
    Description,
    Find,
    Found,
    KeyRefusal,
    Refusal,
    VersionRefusal,
)
from nixl_kv.protocol.peers import CONNECT_TIMEOUT_S, INCOMPATIBLE_S, MAX_PAUSE_S, PAUSE_S
from nixl_kv.transport.base import FromEndpoint, Lost
from support.records import ENGINE_LIFE, OTHER_LIFE, description, hex32

HERE: Final = Endpoint("tcp://10.0.0.2:5600")
THERE: Final = Endpoint("tcp://[fd00::3]:5601")
FACTS: Final = ContentFacts(algorithm="sha256", seed="seed", block_size=16, vllm="0.32.0")
NUM_BLOCKS: Final = 100
HASHES: Final = tuple(b"%032d" % number for number in range(NUM_BLOCKS))
OFFER: Final = Nonce(hex32(0x0FFE))
RUN: Final = b"sealed"


def described(**changes: object) -> Description:
    return replace(description(), **{"content": FACTS, **changes})


@dataclass
class Asker:
    """Owners with a clock; their thread is the test."""

    now: float = 100.0
    unfit: str = ""
    hashes: Sequence[bytes] | str = HASHES
    hash_s: float = 0.0  # what making them takes
    num_hashed: int = 0  # questions
    sent: list[tuple[Endpoint, messages.Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        log = LimitedLog(logging.getLogger(__name__), lambda: self.now)
        self.owners = Owners(lambda _: self.unfit, log, lambda: self.now)
        self._numbers = itertools.count()

    def make_hashes(self, _: ContentFacts) -> Sequence[bytes] | str:
        self.now += self.hash_s
        self.num_hashed += 1
        return self.hashes

    def add(self, owner: Endpoint = HERE, begin: int = 0) -> Question:
        question = Question(
            RequestId(f"request {next(self._numbers)}"),
            owner,
            new_nonce(),
            begin,
            "label",
            self.make_hashes,
            self.now + FIND_S,
        )
        self.owners.questions.append(question)
        return question

    def ask(self, owner: Endpoint = HERE, begin: int = 0) -> Question:
        question = self.add(owner, begin)
        self.turn()
        return question

    def turn(self) -> None:
        decoders = messages.decode_to_engine
        self.sent += [(at, decoders(payload)) for at, payload in self.owners.turn(self.now)]
        self.owners.check()

    def receive(self, message: messages.Message, owner: Endpoint = HERE) -> None:
        self.owners.receive(FromEndpoint(owner, messages.encode(message)), self.now)
        self.turn()

    def lose(self, owner: Endpoint = HERE) -> None:
        self.owners.receive(Lost(owner, "connection closed"), self.now)
        self.turn()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.turn()

    def take(self) -> list[messages.Message]:
        sent, self.sent = self.sent, []
        return [message for _, message in sent]

    def outcomes(self) -> list[Answer]:
        answers = list(self.owners.answers)
        self.owners.answers.clear()
        return answers

    def meet(self, owner: Endpoint = HERE) -> None:
        """Ask it once, so that it is KNOWN."""
        question = self.ask(owner)
        self.receive(described(), owner)
        self.receive(found(question, 0), owner)
        assert self.owners.state_of(owner) is OwnerState.KNOWN
        self.take()
        self.outcomes()


def found(question: Question, num_blocks: int, **changes: object) -> Found:
    message = Found(
        incarnation=ENGINE_LIFE,
        nonce=question.nonce,
        num_blocks=num_blocks,
        offer=OFFER,
        run=RUN if num_blocks else b"",
        epoch=3,
        weights="label",
    )
    return replace(message, **changes)


@pytest.fixture
def asker() -> Asker:
    return Asker()


def test_the_first_question_asks_for_the_description_then_for_the_blocks(asker: Asker) -> None:
    question = asker.ask()
    (describe,) = asker.take()
    assert isinstance(describe, Describe)
    assert describe.incarnation == ANY_INCARNATION
    asker.receive(described())
    (find,) = asker.take()
    assert find == Find(
        incarnation=ENGINE_LIFE,
        engine=description().engine,
        nonce=question.nonce,
        weights="label",
        first_block=0,
        hashes=HASHES,
    )
    asker.receive(found(question, 7))
    (answer,) = asker.outcomes()
    ticket = answer.ticket
    assert (answer.request, answer.nonce, answer.outcome) == (
        question.request,
        question.nonce,
        "found",
    )
    assert answer.run == RUN
    assert ticket is not None
    assert ticket.endpoint == HERE
    assert (ticket.engine, ticket.incarnation) == (description().engine, ENGINE_LIFE)
    assert (ticket.nonce, ticket.num_tokens) == (OFFER, 7 * 16)
    assert (ticket.epoch, ticket.weights, ticket.is_early) == (3, "label", False)


@pytest.mark.parametrize(
    ("begin", "first", "num_tokens"), [(0, 0, 32), (15, 0, 32), (16, 1, 48), (175, 10, 192)]
)
def test_only_blocks_beyond_the_own_hit_are_asked_for(
    asker: Asker, begin: int, first: int, num_tokens: int
) -> None:
    asker.meet()
    question = asker.ask(begin=begin)
    (find,) = asker.take()
    assert isinstance(find, Find)
    assert (find.first_block, find.hashes) == (first, HASHES[first:])
    asker.receive(found(question, 2))
    (answer,) = asker.outcomes()
    assert answer.ticket is not None
    assert (answer.begin, answer.ticket.num_tokens) == (first * 16, num_tokens)


def test_a_question_without_hashes_is_not_sent(asker: Asker) -> None:
    asker.meet()
    asker.ask(begin=NUM_BLOCKS * 16)
    asker.hashes = ()
    asker.ask()
    asker.hashes = "another algorithm"
    asker.ask()
    assert asker.take() == []
    assert [answer.outcome for answer in asker.outcomes()] == ["none", "none", "refused"]


def test_a_long_prompt_is_asked_for_in_part(asker: Asker) -> None:
    asker.meet()
    asker.hashes = HASHES * 100
    asker.ask()
    (find,) = asker.take()
    assert isinstance(find, Find)
    assert len(find.hashes) == messages.MAX_HASHES


@pytest.mark.parametrize(
    ("num_blocks", "run", "outcome"),
    [
        (NUM_BLOCKS - 90, RUN, "found"),
        (NUM_BLOCKS - 89, RUN, "refused"),
        (messages.MAX_HASHES, RUN, "refused"),
        (1, b"", "refused"),
        (0, RUN, "refused"),
        (0, b"", "none"),
    ],
)
def test_an_answer_has_a_run_of_at_most_the_blocks_that_were_asked_for(
    asker: Asker, caplog: pytest.LogCaptureFixture, num_blocks: int, run: bytes, outcome: str
) -> None:
    asker.meet()
    question = asker.ask(begin=90 * 16)
    asker.receive(found(question, num_blocks, run=run))
    assert [answer.outcome for answer in asker.outcomes()] == [outcome]
    assert ("for a question of 10 blocks" in caplog.text) == (outcome == "refused")


@pytest.mark.parametrize("engine", ["line\nend", "x"])
def test_a_peer_may_have_any_name(asker: Asker, engine: str) -> None:
    question = asker.ask()
    asker.receive(described(engine=EngineId(engine)))
    asker.receive(found(question, 1))
    expected = "found" if engine.isprintable() else "refused"
    assert [answer.outcome for answer in asker.outcomes()] == [expected]


def test_each_description_and_each_answer_names_the_engines_met(asker: Asker) -> None:
    """Also an answer of nothing, and one that comes too late."""
    first = asker.ask()
    asker.receive(described())
    asker.receive(found(first, 0, epoch=4))
    second = asker.ask()
    asker.wait(FIND_S)
    asker.receive(found(second, 1, epoch=5))
    assert list(asker.owners.met) == [(ENGINE_LIFE, None), (ENGINE_LIFE, 4), (ENGINE_LIFE, 5)]


def test_answers_of_another_life_or_engine_are_not_used(asker: Asker) -> None:
    asker.meet()
    asker.meet(THERE)
    first, second = asker.ask(), asker.ask()
    asker.receive(found(first, 1, incarnation=OTHER_LIFE))
    asker.receive(found(second, 1), THERE)
    assert [(a.request, a.outcome) for a in asker.outcomes()] == [(first.request, "none")]
    asker.receive(found(second, 1))
    assert [(a.request, a.outcome) for a in asker.outcomes()] == [(second.request, "found")]


def test_a_restarted_owner_is_described_anew(asker: Asker) -> None:
    asker.meet()
    questions = [asker.ask() for _ in range(3)]
    assert [type(each) for each in asker.take()] == [Find] * 3
    refusal = Refusal(incarnation=ENGINE_LIFE, engine=EngineId("x"), reason="another life")
    for _ in questions:
        asker.receive(refusal)
    assert [type(each) for each in asker.take()] == [Describe]
    waiting = [question.request for question in questions[1:]]
    assert [(a.request, a.outcome) for a in asker.outcomes()] == [(n, "refused") for n in waiting]
    asker.receive(described(incarnation=OTHER_LIFE))
    (find,) = asker.take()
    assert isinstance(find, Find)
    assert (find.incarnation, find.nonce) == (OTHER_LIFE, questions[0].nonce)


def test_a_late_answer_is_not_used_and_makes_a_pause_that_it_ends(asker: Asker) -> None:
    asker.meet()
    question = asker.ask()
    asker.wait(FIND_S)
    assert [answer.outcome for answer in asker.outcomes()] == ["late"]
    assert asker.owners.state_of(HERE) is OwnerState.UNUSABLE
    asker.ask()
    assert [answer.outcome for answer in asker.outcomes()] == ["refused"]
    asker.receive(found(question, 5))
    assert asker.outcomes() == []
    assert asker.owners.state_of(HERE) is OwnerState.KNOWN
    asker.take()
    asker.ask()
    assert [type(each) for each in asker.take()] == [Find]


def test_a_question_is_not_hashed_after_its_time(asker: Asker) -> None:
    """Each one that is sent leaves before the next one is hashed."""
    asker.meet()
    asker.hash_s = 0.6 * FIND_S
    asker.num_hashed = 0
    questions = [asker.add() for _ in range(5)]
    asker.turn()
    assert len(asker.take()) == 1
    while asker.owners.next_due <= asker.now:
        asker.receive(found(questions[0], 1))
    assert asker.take() == []
    assert asker.num_hashed == 2
    outcomes = {answer.request: answer.outcome for answer in asker.outcomes()}
    assert [outcomes.pop(each.request) for each in questions] == ["found"] + 4 * ["late"]
    assert asker.owners.state_of(HERE) is OwnerState.KNOWN, "it is not to blame"


def test_a_question_that_waits_for_a_description_is_not_hashed_after_its_time(
    asker: Asker,
) -> None:
    asker.ask()
    asker.now += FIND_S
    asker.receive(described())
    assert asker.num_hashed == 0
    assert [answer.outcome for answer in asker.outcomes()] == ["late"]
    assert asker.owners.state_of(HERE) is OwnerState.KNOWN


def test_while_an_owner_is_described_other_requests_do_not_wait(asker: Asker) -> None:
    first = asker.ask()
    second = asker.ask()
    assert [(a.request, a.outcome) for a in asker.outcomes()] == [(second.request, "refused")]
    asker.wait(FIND_S)
    assert [(a.request, a.outcome) for a in asker.outcomes()] == [(first.request, "late")]
    asker.take()
    asker.receive(described())
    assert asker.take() == [], "no request waits any longer"
    assert asker.owners.state_of(HERE) is OwnerState.KNOWN


def test_an_owner_that_never_answers_is_asked_after_a_pause_that_doubles(asker: Asker) -> None:
    pauses = []
    asker.ask()
    for _ in range(9):
        assert [type(each) for each in asker.take()] == [Describe]
        asker.wait(CONNECT_TIMEOUT_S)
        since = asker.now
        while not asker.sent:
            asker.wait(0.25)
            asker.ask()
        pauses.append(asker.now - since)
    assert pauses == [min(PAUSE_S * 2**number, MAX_PAUSE_S) for number in range(9)]


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(incarnation=ANY_INCARNATION, engine=EngineId("any"), reason="still starting"),
        KeyRefusal(incarnation=ENGINE_LIFE, reason="the engines' key"),
        VersionRefusal(speaks=99),
    ],
)
def test_an_owner_that_refuses_is_not_asked_for_a_pause(
    asker: Asker, refusal: messages.Message
) -> None:
    question = asker.ask()
    asker.receive(refusal)
    assert [(a.request, a.outcome) for a in asker.outcomes()] == [(question.request, "refused")]
    asker.take()
    asker.wait(PAUSE_S / 2)
    asker.ask()
    assert asker.take() == []
    asker.wait(PAUSE_S / 2)
    asker.ask()
    assert [type(each) for each in asker.take()] == [Describe]


def test_bytes_other_than_an_answer_count_as_a_lost_connection(asker: Asker) -> None:
    asker.meet()
    question = asker.ask()
    asker.owners.receive(FromEndpoint(HERE, b"\xff garbage"), asker.now)
    asker.turn()
    assert [(a.request, a.outcome) for a in asker.outcomes()] == [(question.request, "refused")]


@pytest.mark.parametrize(
    ("unfit", "changes", "reason"),
    [("its model differs", {}, "its model differs"), ("", {"content": None}, NO_CONTENT)],
)
def test_an_owner_whose_cache_is_of_no_use_is_asked_seldom(
    asker: Asker,
    caplog: pytest.LogCaptureFixture,
    unfit: str,
    changes: dict[str, object],
    reason: str,
) -> None:
    asker.unfit = unfit
    asker.ask()
    asker.receive(described(**changes))
    assert [answer.outcome for answer in asker.outcomes()] == ["refused"]
    assert reason in caplog.text
    asker.take()
    asker.wait(INCOMPATIBLE_S - 0.1)
    asker.ask()
    assert asker.take() == []


def test_an_idle_connection_may_break(asker: Asker) -> None:
    asker.meet()
    asker.lose()
    asker.ask()
    assert [type(each) for each in asker.take()] == [Find]


def test_owners_are_bounded(asker: Asker) -> None:
    for number in range(MAX_OWNERS + 1):
        asker.ask(Endpoint(f"tcp://10.0.0.1:{number + 1}"))
    assert asker.owners.state_of(Endpoint("tcp://10.0.0.1:1")) is None
    assert [answer.outcome for answer in asker.outcomes()] == ["refused"]


ACTS: Final = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([HERE, THERE]), st.just(0)),
    st.tuples(st.just("describe"), st.sampled_from([HERE, THERE]), st.integers(0, 1)),
    st.tuples(st.just("found"), st.sampled_from([HERE, THERE]), st.integers(0, 9)),
    st.tuples(st.just("refuse"), st.sampled_from([HERE, THERE]), st.integers(0, 2)),
    st.tuples(st.just("lose"), st.sampled_from([HERE, THERE]), st.just(0)),
    st.tuples(st.just("wait"), st.just(HERE), st.sampled_from([1, 10, 25, 1000, 6000])),
)


@given(st.lists(ACTS, max_size=30))
def test_whatever_happens_each_question_is_answered_once_and_in_time(
    acts: list[tuple[str, Endpoint, int]],
) -> None:
    asker = Asker()
    asked: list[Question] = []
    ended: dict[Nonce, str] = {}
    for kind, at, number in acts:
        match kind:
            case "ask":
                asked.append(asker.ask(at))
            case "describe":
                asker.unfit = "unfit" if number else ""
                asker.receive(described(), at)
            case "found" if number < len(asked):
                asker.receive(found(asked[number], 1), at)
            case "refuse":
                life = (ENGINE_LIFE, OTHER_LIFE, ANY_INCARNATION)[number]
                asker.receive(Refusal(incarnation=life, engine=EngineId("x"), reason="no"), at)
            case "lose":
                asker.lose(at)
            case "wait":
                asker.wait(number / 1000)
        for answer in asker.outcomes():
            assert answer.nonce not in ended
            ended[answer.nonce] = answer.outcome
            assert (answer.ticket is not None) == (answer.outcome == "found")
        is_open = [question for question in asked if question.nonce not in ended]
        assert all(asker.now < question.ends_at for question in is_open)
        assert asker.owners.next_due > asker.now
