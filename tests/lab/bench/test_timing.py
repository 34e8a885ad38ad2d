"""Medians and ratios of what is measured in turn."""

from lab.bench import timing


def test_step_is_repeated_until_there_is_a_median() -> None:
    calls: list[int] = []
    assert timing.median_time(lambda: calls.append(1), 0) > 0
    assert len(calls) == timing.FEWEST


def test_ratio_compares_each_round_with_itself() -> None:
    """The machine became ten times slower between the rounds, for both sides."""
    assert timing.ratio([1.0, 2.0, 10.0, 22.0], [1.0, 2.0, 10.0, 20.0]) == "1.00 (1.00 to 1.02)"


def test_ratio_is_above_one_where_ours_is_slower() -> None:
    assert timing.ratio([3.0, 6.0], [2.0, 4.0]) == "1.50 (1.50 to 1.50)"
