"""Medians and ratios of what is measured in turn."""

from lab.bench import timing


def test_steps_are_timed_in_turn() -> None:
    calls: list[str] = []
    medians = timing.medians([lambda: calls.append("one"), lambda: calls.append("other")], 0)
    assert calls == ["one", "other"] * timing.FEWEST
    assert all(median > 0 for median in medians)


def test_ratio_compares_each_round_with_itself() -> None:
    """The machine became ten times slower between the rounds, for both sides."""
    assert timing.ratio([1.0, 2.0, 10.0, 22.0], [1.0, 2.0, 10.0, 20.0]) == "1.00 (1.00 to 1.02)"


def test_ratio_is_above_one_where_ours_is_slower() -> None:
    assert timing.ratio([3.0, 6.0], [2.0, 4.0]) == "1.50 (1.50 to 1.50)"
