"""How much is under way follows from the link: as much as it holds, within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.transport.tcp.paced import (
    MAX_STREAMS,
    MIN_STREAMS,
    PIECE_BYTES,
    Window,
)


class Link:
    """One after the other, pieces take their time on it; each has gone round before that."""

    def __init__(self, rate: float, round_trip_s: float) -> None:
        self.rate, self.round_trip_s = rate, round_trip_s
        self.window = Window()
        self.now = 0.0
        self.free_at = 0.0
        self.under_way: list[tuple[float, int, float, int]] = []

    def move(self, num_bytes: int, run: int | None = None) -> float:
        """Move so many bytes; in what time."""
        begin, left = self.now, num_bytes
        while left or self.under_way:
            while left and len(self.under_way) < self.window.streams:
                piece = min(left, PIECE_BYTES, run or left)
                left -= piece
                self.free_at = max(self.free_at, self.now + self.round_trip_s) + piece / self.rate
                self.under_way.append((self.free_at, piece, self.now, self.window.arrived))
            self.under_way.sort(key=lambda one: one[0])
            self.now, piece, at, before = self.under_way.pop(0)
            self.window.end(piece, self.now - at, before=before)
        return self.now - begin


def test_while_nothing_is_known_little_is_under_way() -> None:
    assert Window().streams == MIN_STREAMS


@pytest.mark.parametrize("round_trip_s", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("rate", [1.25e7, 1.25e8, 1.25e9])
def test_a_link_is_filled_whatever_its_round_trip(rate: float, round_trip_s: float) -> None:
    link = Link(rate, round_trip_s)
    link.move(int(rate / 2))
    seconds = link.move(int(rate))
    assert seconds == pytest.approx(1.0, rel=0.1)
    assert link.window.rate == pytest.approx(rate, rel=0.1)


def test_a_short_link_has_few_streams_and_a_long_one_many() -> None:
    streams = {}
    for round_trip_s in (1e-4, 1e-2):
        link = Link(1.25e9, round_trip_s)
        link.move(1 << 30)
        streams[round_trip_s] = link.window.streams
    assert streams[1e-4] < 6
    assert streams[1e-2] == MAX_STREAMS


def test_small_runs_are_read_in_as_many_streams_as_there_may_be() -> None:
    link = Link(1.25e9, 1e-3)
    link.move(1 << 28, run=16 << 10)
    assert link.window.streams > MIN_STREAMS


@given(
    st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(0, 100)), min_size=1),
)
def test_whatever_was_measured_it_stays_within_bounds(ends: list[tuple[int, float]]) -> None:
    window = Window()
    for num_bytes, seconds in ends:
        window.end(num_bytes, seconds, before=window.arrived)
        assert MIN_STREAMS <= window.streams <= MAX_STREAMS
