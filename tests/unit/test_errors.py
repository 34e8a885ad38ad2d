"""The rate-limited log writes one line per format and interval; `printable` escapes texts."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.errors import ID_END, MAX_ID, LimitedLog, printable, shown_id
from support.stepped import Clock

logger = logging.getLogger("test_errors")
MORE = "  and {} more like it since the last such line"


@pytest.mark.parametrize("seconds", [None, 2.0])
def test_lines_of_one_kind_are_counted_until_the_interval_is_over(
    seconds: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    interval = seconds or 1.0
    log = LimitedLog(logger, clock, interval_s=interval) if seconds else LimitedLog(logger, clock)
    for number in range(4):
        log.warning("dropped %d", number)
        clock.now += interval / 4
    assert caplog.messages == ["dropped 0"]
    log.warning("dropped %d", 4)
    assert caplog.messages[1:] == ["dropped 4", MORE.format(3)]


def test_each_kind_has_an_interval_and_a_count_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    log = LimitedLog(logger, clock, interval_s=2.0)
    log.warning("lost %s", "a")
    log.warning("lost %s", "b")
    clock.now += 1.5
    log.warning("denied %s", "c")
    clock.now += 0.5
    log.warning("denied %s", "d")
    log.warning("lost %s", "e")
    assert caplog.messages == ["lost a", "denied c", "lost e", MORE.format(1)]


def test_a_kind_may_have_several_lines_in_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    log = LimitedLog(logger, clock, lines=3)
    written = [log.info("request %d", number, about=f"{number % 2}") for number in range(10)]
    assert written == [True] * 6 + [False] * 4
    assert caplog.messages == [f"request {number}" for number in range(6)]
    clock.now += 0.9
    assert not log.info("request %d", 10, about="0")
    clock.now += 0.1
    assert log.info("request %d", 11, about="1")
    assert log.warning("request %d", 12, about="0")  # a warning says how many came before
    assert caplog.messages[6:] == ["request 11", MORE.format(2), "request 12", MORE.format(3)]
    clock.now += 60
    assert log.info("request %d", 13, about="1")
    assert caplog.messages[10:] == ["request 13"], "none was left out"


@given(st.text() | st.text("x\n\x1b\ud800", min_size=MAX_ID - 2, max_size=3 * MAX_ID))
def test_an_id_is_shown_on_one_short_line(request: str) -> None:
    shown = shown_id(request)
    assert shown.isprintable()
    assert len(shown) <= MAX_ID
    if request.isprintable():
        assert (shown == request) == (len(request) <= MAX_ID)
        assert shown.endswith(request[-ID_END:])
        assert shown.startswith(request[: MAX_ID - ID_END - 3])


def test_control_characters_are_escaped_and_then_the_text_is_cut() -> None:
    """Escapes are longer than the characters that they replace."""
    assert printable("cmpl-ü→1 \x1b[2J\n\x9b\u202e") == r"cmpl-ü→1 \x1b[2J\n\x9b\u202e"
    assert printable("\n" * 4, 8) == r"\n\n\n\n"
    assert printable("\n" * 5, 8) == r"\n\n\..."
    assert printable("x" * 9, 8) == "xxxxx..."
    assert printable("x" * 9) == "x" * 9
