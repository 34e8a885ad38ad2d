"""The promise of an early answer, and how many answers may be open."""

import pytest

from nixl_kv.early.answers import FULL, LIFE_S, SILENT, OpenAnswers, open_promise, seal_promise
from nixl_kv.errors import TicketRefused
from nixl_kv.ids import Nonce
from support.records import NONCE, hex32
from support.stepped import Clock

KEY = b"k" * 32


@pytest.mark.parametrize("key", [KEY, None])
def test_an_engine_opens_the_promise_of_its_own_front_end(key: bytes | None) -> None:
    assert open_promise(seal_promise(NONCE, key), key) == NONCE


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(f"{NONCE}.", id="without a MAC"),
        pytest.param(seal_promise(NONCE, b"another" * 4), id="of another key"),
        pytest.param(
            seal_promise(Nonce(hex32(77)), KEY).replace(hex32(77), NONCE), id="of another offer"
        ),
        *(None, 7, "", [], {}, "x" * 10**5, NONCE, f"{NONCE}.{NONCE}", f"{NONCE}.{'é' * 32}"),
    ],
)
def test_a_promise_that_no_front_end_has_written_is_refused(value: object) -> None:
    with pytest.raises(TicketRefused, match="clients and routers must not send it"):
        open_promise(value, KEY)


def test_as_many_requests_are_answered_early_as_the_engine_has_seats() -> None:
    answers = OpenAnswers(2, Clock())
    for name in ("a", "b"):
        assert answers.why_late() == ""
        answers.begin(name)
    assert answers.why_late() == FULL
    assert answers.end("a")
    assert not answers.end("a"), "once"
    assert answers.why_late() == ""


def test_a_silent_engine_answers_itself() -> None:
    """A hung engine must look hung to a router."""
    answers = OpenAnswers(8, clock := Clock())
    clock.now += 10 * LIFE_S
    assert answers.why_late() == "", "an idle engine is silent too"
    answers.begin("a")
    clock.now += LIFE_S
    answers.begin("b")
    assert answers.why_late() == ""
    clock.now += 0.1
    assert answers.why_late() == SILENT
    answers.hear()
    assert answers.why_late() == ""
    clock.now += LIFE_S + 0.1
    assert answers.why_late() == SILENT
    answers.end("a")
    answers.end("b")
    assert answers.why_late() == "", "nothing waits for it"
