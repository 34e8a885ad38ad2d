"""When a run is good: the accuracy, and that it was reached over NIXL."""

import json
from pathlib import Path

import pytest
from pd.accuracy_eval import Evaluation, Job, Score
from pd.accuracy_machine import Machine
from pd.accuracy_models import Subject
from pd.accuracy_report import Outcome, print_outcome, write_json
from pd.accuracy_run import Part, add_up
from pd.accuracy_settings import parse

SUBJECT = Subject("m", "/models/m", "recall", 0.9, 0.02)
GOOD = {"loads_total": 10.0, "loads_verified_total": 10.0, "bytes_read_total": 1e6}


def score(accuracy: float = 0.9, *, errors: int = 0, right: int = 9) -> Score:
    answers = {f"{number} none": "yes" if number < right else "no" for number in range(10)}
    return Score(accuracy, 10, answers, errors, 1.0)


def outcome(
    pair: Score | None = None,
    single: Score | None = None,
    counters: dict[str, float] | None = None,
    **env: str,
) -> Outcome:
    part = Part(pair or score(), 1.0, GOOD if counters is None else counters)
    other = None if single is None else Part(single, 1.0)
    return Outcome(SUBJECT, parse([], env, Machine()), part, other)


def test_a_good_run() -> None:
    found = outcome(single=score())
    assert found.verdict == ""
    assert found.differing == 0


@pytest.mark.parametrize(
    ("accuracy", "good"), [(0.92, True), (0.88, True), (0.87, False), (0.93, False)]
)
def test_the_accuracy_is_near_what_is_expected_on_either_side(
    accuracy: float, *, good: bool
) -> None:
    assert ("not within 0.02 of 0.9000 (expected)" not in outcome(score(accuracy)).verdict) is good


def test_the_accuracy_is_near_the_single_engines() -> None:
    found = outcome(score(0.9), score(0.95, right=10))
    assert found.verdict == "accuracy 0.9000 is not within 0.02 of 0.9500 (the single engine)"
    assert found.differing == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"load_failures_total": 1.0}, "1 loads failed: what decode recomputes proves nothing"),
        ({"tickets_refused_total": 2.0}, "2 tickets were refused"),
        ({"tickets_missing_total": 3.0}, "3 prompts came to decode without a ticket"),
        ({"loads_total": 0.0}, "nothing was loaded over NIXL"),
        ({"bytes_read_total": 0.0}, "nothing was loaded over NIXL"),
        ({"loads_total": 9.0}, "only 9 of 10 loads"),
        ({"loads_verified_total": 9.0}, "only 9 of 10 loads were verified"),
    ],
)
def test_right_answers_that_were_computed_prove_nothing(
    changed: dict[str, float], said: str
) -> None:
    assert said in outcome(counters=GOOD | changed).verdict


def test_without_a_connector_nothing_was_loaded() -> None:
    assert "nothing was loaded over NIXL" in outcome(counters={}).verdict


def test_each_rank_of_decode_loads() -> None:
    assert "only 10 of 20 loads" in outcome(DECODER_TP_SIZE="2").verdict


def test_what_was_not_asked_to_be_verified_need_not_be() -> None:
    counters = GOOD | {"loads_verified_total": 0.0}
    assert outcome(counters=counters, VERIFY="").verdict == ""
    assert outcome(counters=counters, VERIFY="off").verdict == ""


def test_requests_that_were_sent_again_are_told() -> None:
    assert outcome(score(errors=1)).verdict == "1 requests failed and were sent again"


def test_counters_are_added_up_over_engines() -> None:
    one = {"vllm:nixl_kv_loads_total": 2.0, "vllm:nixl_kv_loads_created": 9.0, "vllm:other": 1.0}
    assert add_up([one, one]) == {"loads_total": 4.0}


def test_what_lm_eval_leaves_is_read(tmp_path: Path) -> None:
    job = Job(SUBJECT, parse([], {}, Machine()), tmp_path)
    evaluation = Evaluation("lm-eval", "http://127.0.0.1:1", job)
    folder = evaluation.output / "m"
    folder.mkdir(parents=True)
    results = {"results": {"recall": {"alias": "recall", "exact_match,none": 0.5}}}
    (folder / "results_2026.json").write_text(json.dumps(results), encoding="utf-8")
    lines = [
        json.dumps({"doc_id": number, "filter": "none", "resps": [[f" a{number}\u2028b"]]},
                   ensure_ascii=False)
        for number in range(2)
    ]  # fmt: skip
    (folder / "samples_recall_2026.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    evaluation.log_path.write_text(
        "API request failed! Status code: 500\nException:ClientError(), (), retrying.\n",
        encoding="utf-8",
    )
    found = evaluation.score(3.0)
    assert (found.accuracy, found.items, found.errors, found.seconds) == (0.5, 2, 1, 3.0)
    assert found.answers == {"0 none": " a0\u2028b", "1 none": " a1\u2028b"}


def test_what_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = outcome(single=score(0.8, right=8))
    print_outcome(found)
    said = capsys.readouterr().out
    assert "answers that differ from the single engine's: 1 of 10" in said
    assert "m: FAILED: accuracy 0.9000 is not within 0.02 of 0.8000" in said
    write_json(tmp_path / "new" / "out.json", [found])
    (written,) = json.loads((tmp_path / "new" / "out.json").read_text(encoding="utf-8"))
    assert (written["accuracy"], written["single"], written["expected"]) == (0.9, 0.8, 0.9)
    assert written["counters"] == GOOD
