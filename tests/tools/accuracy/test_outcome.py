"""When a run is good: the accuracy, and that it was reached over NIXL."""

from dataclasses import replace
from typing import Any

import pytest

from lab.accuracy.outcome import Outcome
from lab.results import as_json

COUNTERS = {
    "loads_total": 10.0,
    "loads_verified_total": 10.0,
    "tokens_loaded_total": 90.0,
    "bytes_read_total": 1e6,
}
GOOD = Outcome(
    model="m",
    task="recall",
    instead_of="",
    expected=0.9,
    tolerance=0.02,
    verify="all",
    ranks=1,
    accuracy=0.9,
    items=10,
    computed=10,
    counters=COUNTERS,
)


def faults_of(**changed: Any) -> str:
    verdict = replace(GOOD, **changed).verdict
    return verdict.words if verdict.kind == "bad" else ""


def test_good_run() -> None:
    assert str(GOOD.verdict) == "ok"
    assert faults_of(single=0.9, differing=0) == ""


@pytest.mark.parametrize(
    ("accuracy", "good"), [(0.92, True), (0.88, True), (0.87, False), (0.93, False)]
)
def test_accuracy_is_near_what_is_expected_on_either_side(accuracy: float, *, good: bool) -> None:
    words = f"accuracy {accuracy:.4f} is not within 0.02 of 0.9000 (expected)"
    assert faults_of(accuracy=accuracy) == ("" if good else words)


def test_accuracy_is_near_that_of_the_single_engine() -> None:
    words = "accuracy 0.9000 is not within 0.02 of 0.9500 (the single engine)"
    assert faults_of(single=0.95) == words


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"load_failures_total": 1.0}, "1 loads failed: what decode recomputes proves nothing"),
        ({"tickets_refused_total": 2.0}, "2 tickets were refused"),
        ({"tickets_missing_total": 3.0}, "3 prompts came to decode without a ticket"),
        ({"loads_total": 0.0}, "nothing was loaded over NIXL"),
        ({"bytes_read_total": 0.0}, "nothing was loaded over NIXL"),
        ({"tokens_loaded_total": 0.0}, "nothing was loaded over NIXL"),
        ({"loads_total": 9.0}, "only 9 of 10 loads"),
        ({"loads_verified_total": 9.0}, "only 9 of 10 loads were verified"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_right_answers_that_were_computed_prove_nothing(
    changed: dict[str, float], words: str
) -> None:
    assert words in faults_of(counters=COUNTERS | changed)


def test_without_a_connector_nothing_was_loaded() -> None:
    assert "nothing was loaded over NIXL" in faults_of(counters={})


def test_each_rank_of_decode_loads() -> None:
    assert "only 10 of 20 loads" in faults_of(ranks=2)


@pytest.mark.parametrize(("computed", "good"), [(0, True), (10, True), (11, False)])
def test_decode_computes_one_token_of_each_prompt(computed: int, *, good: bool) -> None:
    words = f"decode computed {computed} tokens of 10 prompts itself"
    assert faults_of(computed=computed) == ("" if good else words)


@pytest.mark.parametrize("verify", [None, "off"])
def test_loads_need_not_be_verified_where_that_was_not_asked_for(verify: str | None) -> None:
    assert faults_of(counters=COUNTERS | {"loads_verified_total": 0.0}, verify=verify) == ""


def test_requests_that_were_sent_again_are_a_fault() -> None:
    assert faults_of(errors=1) == "1 requests failed and were sent again"


def test_trouble_is_the_only_fault() -> None:
    assert faults_of(trouble="HTTP 500", accuracy=0.0, errors=1) == "HTTP 500"


def test_what_was_not_evaluated_is_not_good() -> None:
    assert faults_of(accuracy=None) == "nothing was evaluated"


@pytest.mark.parametrize(
    ("outcome", "compared"),
    [
        pytest.param(GOOD, True, id="expected"),
        pytest.param(replace(GOOD, expected=None, single=0.9), True, id="single"),
        pytest.param(replace(GOOD, expected=None), False, id="neither"),
    ],
)
def test_accuracy_that_is_compared_with_nothing_says_so(
    capsys: pytest.CaptureFixture[str], outcome: Outcome, *, compared: bool
) -> None:
    outcome.print_details()
    words = "0.9000 was compared with NOTHING: no accuracy is known"
    assert (words in capsys.readouterr().out) is not compared
    assert outcome.verdict.kind == "good"


def test_model_that_was_replaced_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    replace(GOOD, instead_of="a/b c/d").print_details()
    assert "a/b c/d: NOT evaluated: no hub, and no local copy" in capsys.readouterr().out


def test_counters_are_printed_and_those_that_are_zero_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace(GOOD, counters=COUNTERS | {"load_failures_total": 0.0}).print_details()
    printed = capsys.readouterr().out
    assert "1,000,000" in printed
    assert "0: load_failures_total" in printed


def test_programs_get_every_figure() -> None:
    written = as_json(replace(GOOD, single=0.8, differing=1))
    assert (written["accuracy"], written["single"], written["expected"]) == (0.9, 0.8, 0.9)
    assert (written["items"], written["differing"], written["computed"]) == (10, 1, 10)
    assert written["counters"] == COUNTERS
    assert written["verdict"].startswith("accuracy 0.9000 is not within 0.02 of 0.8000")
