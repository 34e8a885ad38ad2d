"""The rate-limited log writes one line per format and interval; `printable` escapes texts."""

import logging

import pytest

from nixl_kv.errors import LimitedLog, printable

logger = logging.getLogger("test_errors")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> LimitedLog:
    caplog.set_level(logging.DEBUG)
    return LimitedLog(logger, clock, interval_s=2.0)


def test_lines_of_one_kind_are_counted_until_the_interval_is_over(
    log: LimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        log.warning("dropped %d", number)
        clock.now += 0.5
    assert caplog.messages == ["dropped 0"]
    log.warning("dropped %d", 4)
    assert caplog.messages[1:] == ["dropped 4", "  and 3 more like it since the last such line"]


def test_each_kind_has_an_interval_and_a_count_of_its_own(
    log: LimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log.warning("lost %s", "a")
    log.warning("lost %s", "b")
    clock.now += 1.5
    log.warning("denied %s", "c")
    clock.now += 0.5
    log.warning("denied %s", "d")
    log.warning("lost %s", "e")
    assert caplog.messages == [
        "lost a",
        "denied c",
        "lost e",
        "  and 1 more like it since the last such line",
    ]


def test_the_interval_is_a_second_where_none_is_given(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = LimitedLog(logger, clock)
    for _ in range(3):
        log.warning("dropped")
        clock.now += 0.5
    assert caplog.messages == [
        "dropped",
        "dropped",
        "  and 1 more like it since the last such line",
    ]


def test_a_text_is_cut_after_it_was_escaped() -> None:
    """Escapes are longer than the characters that they replace."""
    assert printable("\n" * 4, 8) == r"\n\n\n\n"
    assert printable("\n" * 5, 8) == r"\n\n\..."
    assert printable("x" * 9, 8) == "xxxxx..."
    assert printable("x" * 9) == "x" * 9


def test_control_characters_are_escaped() -> None:
    assert printable("cmpl-ü→1 \x1b[2J\n\x9b\u202e") == r"cmpl-ü→1 \x1b[2J\n\x9b\u202e"
