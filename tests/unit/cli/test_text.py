"""Byte counts and escapes, as `nixl-kv` prints them."""

import pytest

from nixl_kv.cli.text import num_bytes_text
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


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("cmpl-ü→1 \x1b[2J\n\x9b\u202e") == r"cmpl-ü→1 \x1b[2J\n\x9b\u202e"
