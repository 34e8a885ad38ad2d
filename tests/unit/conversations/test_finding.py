"""Which engine a reader asks, and how long a request waits for the answer."""

import math
from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.conversations.finding import (
    FIND_S,
    MAX_FINDS,
    MAX_HASHES,
    MIN_TOKENS,
    Finds,
    OwnerTable,
    SoughtEvent,
    SoughtState,
    Source,
    marks,
)
from nixl_kv.conversations.owners import Answer, Question
from nixl_kv.ids import Endpoint, Nonce, RequestId, new_nonce

HERE: Final = Endpoint("tcp://10.0.0.1:5600")
THERE: Final = Endpoint("tcp://10.0.0.2:5600")
BLOCK: Final = 16
A, B = RequestId("a"), RequestId("b")
LONG: Final = 4 * MIN_TOKENS


def hashes(*parts: tuple[int, str]) -> list[bytes]:
    """A chain: each hash commits to all before it. Each part is a number of blocks and a text."""
    chain: list[bytes] = []
    before = ""
    for count, text in parts:
        for number in range(count):
            before += f"{text}{number}."
            chain.append(before.encode())
    return chain


# --- the table


@given(given_blocks=st.integers(1, 200), kept=st.integers(1, 200), more=st.integers(0, 50))
def test_a_changed_history_is_found_by_half_of_its_unchanged_part(
    given_blocks: int, kept: int, more: int
) -> None:
    kept = min(kept, given_blocks)
    table = OwnerTable()
    table.learn(marks(hashes((kept, "same"), (given_blocks - kept, "old"))), HERE)
    found = table.find(hashes((kept, "same"), (more, "new")), BLOCK)
    assert found is not None
    assert found.owner == HERE
    assert kept * BLOCK / 2 <= found.num_given <= kept * BLOCK
    if kept == given_blocks:
        assert found.num_given == kept * BLOCK


def test_another_conversation_is_not_found() -> None:
    table = OwnerTable()
    table.learn(marks(hashes((9, "a"))), HERE)
    assert table.find(hashes((9, "b")), BLOCK) is None
    assert table.find([], BLOCK) is None


class Counted(list[bytes]):
    """The hashes of a prompt, and how many of them were looked up."""

    lookups = 0

    def __getitem__(self, place: Any) -> Any:
        self.lookups += 1
        return super().__getitem__(place)


@pytest.mark.parametrize(("given_blocks", "most"), [(0, 14), (3, 16), (8000, 200), (5000, 3200)])
def test_few_hashes_of_a_long_prompt_are_looked_up(given_blocks: int, most: int) -> None:
    """The scheduler's thread does it for each new prompt."""
    table = OwnerTable()
    chain = [b"%d" % number for number in range(8192)]
    table.learn(marks([b"other %d" % number for number in range(8192)]), THERE)
    table.learn(marks(chain[:given_blocks]), HERE)
    prompt = Counted(chain)
    found = table.find(prompt, BLOCK)
    assert found == (Source(HERE, given_blocks * BLOCK) if given_blocks else None)
    assert prompt.lookups <= most


def test_of_two_owners_the_one_with_more_is_asked_and_of_two_alike_the_latest() -> None:
    table = OwnerTable()
    table.learn(marks(hashes((4, "a"), (6, "first"))), HERE)
    table.learn(marks(hashes((4, "a"), (6, "other"))), THERE)
    assert table.find(hashes((4, "a"), (7, "first")), BLOCK) == Source(HERE, 10 * BLOCK)
    assert table.find(hashes((4, "a"), (7, "new")), BLOCK) == Source(THERE, 4 * BLOCK)


@given(st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=20), st.integers(1, 8))
def test_the_table_is_bounded_and_forgets_the_least_recent(
    learnt: list[list[int]], most: int
) -> None:
    table = OwnerTable(most)
    latest: list[bytes] = []
    for each in learnt:
        chain = [b"%d" % number for number in each]
        table.learn(chain, HERE)
        latest = [one for one in latest if one not in chain] + list(dict.fromkeys(reversed(chain)))[
            ::-1
        ]
    assert len(table) <= most <= MAX_HASHES
    known = [one for one in latest if table.find([one], 1) is not None]
    assert known == latest[len(latest) - len(known) :]


# --- questions


class Reader:
    """Finds with a clock, and their questions."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[Question] = []
        self.finds = Finds(self.asked.append, lambda: self.now)

    def begin(
        self,
        request: RequestId = A,
        *,
        source: Source | None = Source(HERE, math.inf),  # noqa: B008 - a constant
        local: int = 0,
        num_tokens: int = LONG,
        wanted: bytes | None = None,
    ) -> bool:
        if source is not None:
            self.finds.add(request, source)

        def make(owner: Endpoint, nonce: Nonce, ends_at: float) -> Question:
            return Question(request, owner, nonce, local, "", lambda _: (), ends_at)

        return self.finds.begin(request, local, num_tokens, make, wanted)

    def answer(self, question: Question) -> bool:
        """Let an owner answer that it has nothing; whether a request waited for that."""
        is_awaited = self.finds.awaits(Answer(question.request, question.nonce, "none"))
        if is_awaited:
            self.finds.move(question.request, SoughtEvent.DROPPED)
        self.finds.check()
        return is_awaited


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.mark.parametrize(
    ("local", "num_tokens", "given_tokens", "asks"),
    [
        (0, MIN_TOKENS, math.inf, True),
        (0, MIN_TOKENS - 1, math.inf, False),
        (LONG - MIN_TOKENS, LONG, math.inf, True),
        (LONG - MIN_TOKENS + 1, LONG, math.inf, False),
        (512, LONG, 512, True),  # this engine still has the blocks that it gave
        (496, LONG, 512, True),
        (0, LONG, 16, True),  # it has lost all
        (528, LONG, 512, False),  # it has more: another conversation's beginning
    ],
)
def test_it_asks_where_that_may_pay(
    reader: Reader, local: int, num_tokens: int, given_tokens: float, *, asks: bool
) -> None:
    source = Source(HERE, given_tokens)
    assert reader.begin(source=source, local=local, num_tokens=num_tokens) is asks
    assert len(reader.asked) == len(reader.finds) == asks


def test_a_request_without_a_source_is_not_asked_for(reader: Reader) -> None:
    assert not reader.begin(source=None)


def test_each_request_is_asked_for_once(reader: Reader) -> None:
    assert reader.begin()
    reader.now += FIND_S
    assert reader.finds.pop_late() == [A]
    assert not reader.begin(source=None), "vLLM asks again, after a preemption for example"


def test_an_answer_of_another_question_changes_nothing(reader: Reader) -> None:
    reader.begin()
    assert not reader.finds.awaits(Answer(A, new_nonce(), "none"))
    assert len(reader.finds) == 1


def test_only_so_many_questions_are_open(reader: Reader) -> None:
    begun = [reader.begin(RequestId(str(number))) for number in range(MAX_FINDS + 1)]
    assert begun == [True] * MAX_FINDS + [False]


def test_a_request_waits_once_for_another_one_that_wants_the_same_block(reader: Reader) -> None:
    names = [RequestId(each) for each in "abcde"]
    for name, wanted in zip(names, [b"1", b"1", b"1", b"2", None], strict=True):
        assert reader.begin(name, wanted=wanted)
    assert [one.request for one in reader.asked] == ["a", "d", "e"]
    assert reader.finds.pop_behind({A}.__contains__) == []
    assert reader.finds.pop_behind(lambda _: False) == ["b", "c"]
    assert reader.finds.pop_behind(lambda _: False) == []
    for name in names[1:3]:
        assert reader.begin(name, source=None, wanted=b"1"), "neither waits again"
    assert [one.request for one in reader.asked[3:]] == ["b", "c"]


LIFE: Final = [
    SoughtEvent.ASKED,
    SoughtEvent.FOUND,
    SoughtEvent.STARTED,
    SoughtEvent.LANDED,
    SoughtEvent.REPORTED,
]


@pytest.mark.parametrize("until", range(1, len(LIFE)))
def test_a_request_that_ends_leaves_nothing_once_the_workers_have_reported(
    reader: Reader, until: int
) -> None:
    assert reader.begin()
    for event in LIFE[1:until]:
        reader.finds.move(A, event)
    is_load = LIFE[until - 1] in (SoughtEvent.STARTED, SoughtEvent.LANDED)
    reader.finds.clear()
    assert reader.finds.is_load(A) is is_load
    reader.finds.finish(A)
    assert reader.finds.is_load(A) is is_load
    is_lost = reader.finds.state_of(A) is SoughtState.ABANDONED
    assert is_lost == (LIFE[until - 1] is SoughtEvent.STARTED)
    if is_load:
        reader.finds.move(A, SoughtEvent.REPORTED)
    assert reader.finds.state_of(A) is None
    reader.finds.check()
    reader.finds.finish(A)


def test_an_ended_request_is_not_resumed_under_its_name(reader: Reader) -> None:
    """A client may use the name again while another request still loads."""
    reader.begin(A, wanted=b"1")
    reader.begin(B, wanted=b"1")
    reader.finds.finish(B)
    reader.finds.add(B, Source(HERE, math.inf))
    assert reader.finds.pop_behind(lambda _: False) == []
    assert reader.finds.state_of(B) is SoughtState.NAMED


def test_nothing_is_asked_if_few_tokens_are_left(reader: Reader) -> None:
    reader.begin(A, wanted=b"1")
    reader.begin(B, wanted=b"1")
    assert not reader.begin(B, source=None, local=LONG - MIN_TOKENS + 1, wanted=b"2")
    assert len(reader.asked) == 1


Act = tuple[str, int]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), st.integers(0, 5)),
            st.tuples(st.just("wait"), st.integers(1, 25)),  # milliseconds
            st.tuples(st.just("answer"), st.integers(0, 30)),
            st.tuples(st.just("forget"), st.integers(0, 5)),
        ),
        max_size=40,
    )
)
def test_each_question_ends_once_and_in_time(acts: Sequence[Act]) -> None:
    reader = Reader()
    waiting: dict[RequestId, Question] = {}
    for kind, number in acts:
        name = RequestId(str(number))
        match kind:
            case "begin" if name not in waiting:
                assert reader.begin(name)
                waiting[name] = reader.asked[-1]
            case "wait":
                reader.now += number / 1000
            case "forget":
                reader.finds.finish(name)
                waiting.pop(name, None)
            case "answer" if number < len(reader.asked):
                question = reader.asked[number]
                is_open = waiting.get(question.request) is question
                assert reader.answer(question) == is_open
                if is_open:
                    del waiting[question.request]
        late = reader.finds.pop_late()
        assert late == [one for one in waiting if waiting[one].ends_at <= reader.now]
        for one in late:
            del waiting[one]
        assert len(reader.finds) == len(waiting)
        reader.finds.check()
