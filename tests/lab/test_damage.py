"""What scripts/damage calls well, and which prompts it asks."""

import pytest

from lab.suites.damage import RECALL, Row, held_out


@pytest.mark.parametrize(
    ("row", "well"),
    [
        pytest.param(Row("none", "off", 0, 3, 4, 4, 0, 0), True, id="nothing planted"),
        pytest.param(Row("none", "all", 0, 3, 3, 4, 0, 0), False, id="an answer is wrong"),
        pytest.param(Row("none", "all", 0, 4, 4, 3, 0, 1), False, id="a load failed"),
        pytest.param(Row("byte", "off", 4, 0, 0, 4, 0, 0), True, id="unseen without verify"),
        pytest.param(Row("byte", "off", 0, 4, 4, 4, 0, 0), False, id="byte not planted"),
        pytest.param(Row("layer", "all", 3, 3, 4, 1, 3, 0), True, id="three of four planted"),
        pytest.param(Row("byte", "all", 4, 3, 4, 0, 4, 0), True, id="all detected"),
        pytest.param(Row("byte", "all", 4, 4, 4, 1, 3, 0), False, id="one of four missed"),
        pytest.param(Row("byte", "all", 4, 3, 3, 0, 4, 0), False, id="detected, answer wrong"),
        pytest.param(Row("byte", "all", 4, 4, 4, 0, 4, 1), False, id="another failure"),
        pytest.param(Row("byte", "all", 0, 4, 4, 4, 0, 0), False, id="verified, none planted"),
    ],
)
def test_row_of_the_damage_table_is_well(row: Row, *, well: bool) -> None:
    assert row.is_good(4) is well


def test_held_out_prompts_are_of_all_lengths() -> None:
    prompts = held_out(RECALL, 40)
    assert prompts == held_out(RECALL, 80)[:40]
    assert {len(prompt.split()) for prompt, _ in prompts} >= {98, 398, 800, 1499}
    assert all(answer.split()[-1] == "end" for _, answer in prompts)
