"""What `scripts/detect --answers` calls good, and which prompts it asks."""

import pytest

from suites.damage import RECALL, Row, held_out


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        pytest.param(Row("none", "off", 4, 0, 3, 4, 4, 0, 0), "good", id="nothing planted"),
        pytest.param(Row("none", "all", 4, 0, 3, 3, 4, 0, 0), "bad", id="an answer is wrong"),
        pytest.param(Row("none", "all", 4, 0, 4, 4, 3, 0, 1), "bad", id="a load failed"),
        pytest.param(Row("byte", "off", 4, 4, 0, 0, 4, 0, 0), "good", id="unseen without verify"),
        pytest.param(Row("byte", "off", 4, 0, 4, 4, 4, 0, 0), "bad", id="byte not planted"),
        pytest.param(Row("layer", "all", 4, 3, 3, 4, 1, 3, 0), "good", id="three of four planted"),
        pytest.param(Row("byte", "all", 4, 4, 3, 4, 0, 4, 0), "good", id="all detected"),
        pytest.param(Row("byte", "all", 4, 4, 4, 4, 1, 3, 0), "bad", id="one of four missed"),
        pytest.param(Row("byte", "all", 4, 4, 3, 3, 0, 4, 0), "bad", id="detected, answer wrong"),
        pytest.param(Row("byte", "all", 4, 4, 4, 4, 0, 4, 1), "bad", id="another failure"),
        pytest.param(Row("byte", "all", 4, 0, 4, 4, 4, 0, 0), "bad", id="verified, none planted"),
    ],
)
def test_row_is_good_only_if_verify_detects_all_that_is_planted(row: Row, kind: str) -> None:
    assert row.verdict.kind == kind


def test_held_out_prompts_are_of_all_lengths() -> None:
    prompts = held_out(RECALL, 40)
    assert prompts == held_out(RECALL, 80)[:40]
    assert {len(prompt.split()) for prompt, _ in prompts} >= {98, 398, 800, 1499}
    assert all(answer.split()[-1] == "end" for _, answer in prompts)
