"""Numbers and names in words."""

import time
from collections.abc import Iterator

import pytest

from nixl_kv.cli.text import duration_text, num_bytes_text, ranges_text, time_text
from nixl_kv.errors import printable


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1179648, "1.12 MiB"),
        (2**30, "1 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (2**50, "1,024.00 TiB"),
        (0.5, "0.5 B"),
    ],
)
def test_num_bytes_text(count: float, words: str) -> None:
    assert num_bytes_text(count) == words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([3], "3"),
        (range(4), "0-3"),
        ([5, 0, 1, 2], "0-2, 5"),
        ([0, 2, 4], "0, 2, 4"),
        ([0, 2, 4, 6], "4 of 0-6"),
    ],
)
def test_ranges_text(numbers: list[int], words: str) -> None:
    assert ranges_text(numbers) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.00001, "0 s"),
        (0.0125, "0.013 s"),
        (12.345, "12.3 s"),
        (59.4, "59.4 s"),
        (59.6, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3600, "1 h 0 min"),
        (4_000_000, "1,111 h 6 min"),
    ],
)
def test_duration_text(seconds: float, words: str) -> None:
    assert duration_text(seconds) == words


@pytest.fixture
def _central_europe() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "CET-1")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_central_europe")
def test_time_is_local_and_has_milliseconds() -> None:
    assert time_text(1_700_000_000.1234) == "2023-11-14 23:13:20.123+01:00"


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("cmpl-ü→1 \x1b[2J\n\x9b\u202e") == r"cmpl-ü→1 \x1b[2J\n\x9b\u202e"
