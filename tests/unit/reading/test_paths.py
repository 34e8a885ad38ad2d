"""How long a read takes by each path is estimated, and corrected by what reads take."""

import numpy as np
import pytest

from nixl_kv.reading.paths import FIRST, Estimate, Link, Path

MIB = 1 << 20
BOTH: tuple[Path, ...] = ("gather", "direct")


def test_many_small_runs_are_gathered_and_long_ones_are_not() -> None:
    link = Link("VRAM")
    assert link.choose(BOTH, 36864, 1152 * MIB) == "gather"
    assert link.choose(BOTH, 1024, 1152 * MIB) == "gather"
    assert link.choose(BOTH, 36, 1152 * MIB) == "direct"
    assert link.choose(BOTH[1:], 36864, 1152 * MIB) == "direct"


@pytest.mark.parametrize("wanted", ["gather", "direct"])
def test_what_is_wanted_is_taken_where_it_can_be(wanted: Path) -> None:
    for num_runs in (1, 36864):
        assert Link("VRAM", wanted).choose(BOTH, num_runs, MIB) == wanted
        assert Link("VRAM", wanted).choose(BOTH[1:], num_runs, MIB) == "direct"


def test_an_estimate_follows_what_reads_take() -> None:
    """Whatever the first numbers were: from reads of all kinds the true ones are found."""
    rng = np.random.default_rng(4)
    true = np.array([300e-6, 20e-6, 1 / 5e9])
    estimate = Estimate(FIRST["direct", "VRAM"])
    for _ in range(100):
        terms = np.array([1, rng.integers(1, 5000), rng.integers(1, 1 << 30)])
        estimate.correct(int(terms[1]), int(terms[2]), float(terms @ true))
    for num_runs, num_bytes in ((1, 1 << 30), (5000, 1 << 20), (500, 1 << 28)):
        seconds = float(np.array([1, num_runs, num_bytes]) @ true)
        assert estimate.seconds(num_runs, num_bytes) == pytest.approx(seconds, rel=0.1)


def test_one_slow_read_is_forgotten() -> None:
    estimate = Estimate(FIRST["gather", "VRAM"])
    usual = estimate.seconds(100, 64 * MIB)
    estimate.correct(100, 64 * MIB, 100 * usual)
    for _ in range(100):
        estimate.correct(100, 64 * MIB, usual)
    assert estimate.seconds(100, 64 * MIB) == pytest.approx(usual, rel=0.05)


def test_an_estimate_is_never_nothing() -> None:
    estimate = Estimate(FIRST["direct", "DRAM"])
    for _ in range(50):
        estimate.correct(1000, 64 * MIB, 0.0)
    assert estimate.seconds(1, 1) > 0


def test_the_path_changes_when_another_one_is_faster() -> None:
    """A GPU whose kernels read slowly, as over PCIe: NIXL reads long runs faster there."""
    link = Link("VRAM")
    assert link.choose(BOTH, 500, 1152 * MIB) == "gather"
    for _ in range(20):
        link.correct("gather", 500, 1152 * MIB, 0.2)
    assert link.choose(BOTH, 500, 1152 * MIB) == "direct"


def test_some_slow_reads_change_no_path() -> None:
    """A busy machine's say nothing of the path: the other one would have been as slow."""
    link = Link("DRAM")
    all_paths: tuple[Path, ...] = ("direct", "staged")
    for _ in range(3):
        link.correct("direct", 1000, MIB, 0.5)
    assert link.choose(all_paths, 1000, MIB) == "direct"


def test_a_path_that_was_slow_is_tried_again() -> None:
    link = Link("VRAM")
    for _ in range(20):
        link.correct("gather", 500, 1152 * MIB, 0.2)
    number = 0
    while link.choose(BOTH, 500, 1152 * MIB) == "direct":
        link.correct("direct", 500, 1152 * MIB, 0.005)
        number += 1
        assert number < 2000
    assert number > 100


def test_what_was_measured_is_expected_until_reads_tell_more() -> None:
    link = Link("VRAM")
    link.on_probed((20e-6, 0.2e-6, 1 / 12e9))
    assert link.estimate("direct").seconds(1, 1) == pytest.approx(20.2e-6, rel=0.01)
    assert link.estimate("direct").seconds(36864, 1 << 30) == pytest.approx(0.0969, rel=0.01)
    assert link.estimate("staged").seconds(1, 1 << 30) == pytest.approx(0.0901, rel=0.01)
    for _ in range(60):
        link.correct("direct", 1000, MIB, 0.004)
    assert link.estimate("direct").seconds(1000, MIB) == pytest.approx(0.004, rel=0.02)


def test_a_link_faster_than_packing_is_no_reason_to_expect_more_of_it() -> None:
    link = Link("DRAM")
    link.on_probed((20e-6, 0.2e-6, 1 / 12e9))
    start, run, byte = FIRST["staged", "DRAM"]
    assert link.estimate("staged").seconds(100, MIB) == pytest.approx(
        start + 100 * run + MIB * byte, rel=1e-3
    )


def test_what_is_measured_after_a_first_load_counts() -> None:
    """A load does not wait until its host has been measured."""
    link = Link("VRAM")
    link.correct("direct", 1000, MIB, 0.004)
    link.on_probed((500e-6, 3e-6, 1 / 12e9))
    direct = link.estimate("direct")
    assert direct.seconds(1, 1 << 30) == pytest.approx(0.09, rel=0.05)
    assert direct.seconds(1000, MIB) == pytest.approx(0.004, rel=0.1)


@pytest.mark.parametrize("costs", [(500e-6, 2e-6, 1 / 12e9), (1e-3, 300e-6, 1e-9)])
def test_what_many_reads_have_taught_counts_more(costs: tuple[float, float, float]) -> None:
    link = Link("VRAM")
    for _ in range(60):
        link.correct("direct", 1000, MIB, 0.03)
    link.on_probed(costs)
    assert link.estimate("direct").seconds(1000, MIB) == pytest.approx(0.03, rel=0.05)


def test_what_was_measured_wrongly_is_tried_again() -> None:
    link = Link("DRAM")
    link.on_probed((0.05, 1e-6, 1e-9))
    both: tuple[Path, ...] = ("direct", "staged")
    assert link.choose(both, 100, MIB) == "staged"
    number = 0
    while link.choose(both, 100, MIB) == "staged":
        link.correct("staged", 100, MIB, 0.006)
        number += 1
        assert number < 1000
