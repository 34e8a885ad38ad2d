"""The rate-limited log writes one line per format and interval; `printable` escapes texts."""

import logging

import pytest

from nixl_kv.errors import LimitedLog, printable
from support.stepped import Clock

logger = logging.getLogger("test_errors")
MORE = "  and {} more like it since the last such line"


@pytest.mark.parametrize("seconds", [None, 2.0])
def test_lines_of_one_kind_are_counted_until_the_interval_is_over(
    seconds: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    interval = seconds or 1.0
    log = LimitedLog(logger, clock, **({} if seconds is None else {"interval_s": seconds}))
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


def test_control_characters_are_escaped_and_then_the_text_is_cut() -> None:
    """Escapes are longer than the characters that they replace."""
    assert printable("cmpl-ü→1 \x1b[2J\n\x9b\u202e") == r"cmpl-ü→1 \x1b[2J\n\x9b\u202e"
    assert printable("\n" * 4, 8) == r"\n\n\n\n"
    assert printable("\n" * 5, 8) == r"\n\n\..."
    assert printable("x" * 9, 8) == "xxxxx..."
    assert printable("x" * 9) == "x" * 9
