"""When a run is good: the accuracy, and that it was reached over NIXL."""

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pd import accuracy, accuracy_run
from pd.accuracy_eval import Evaluation, Job, Score
from pd.accuracy_machine import Machine
from pd.accuracy_models import Subject
from pd.accuracy_report import Outcome, print_outcome, write_json
from pd.accuracy_run import Part, add_up, clear, run_pair
from pd.accuracy_settings import parse
from typing_extensions import Self

SUBJECT = Subject("m", "/models/m", "recall", 0.9, 0.02)
GOOD = {
    "loads_total": 10.0,
    "loads_verified_total": 10.0,
    "tokens_loaded_total": 90.0,
    "bytes_read_total": 1e6,
}


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
        ({"tokens_loaded_total": 0.0}, "nothing was loaded over NIXL"),
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


@pytest.mark.parametrize(("computed", "good"), [(0, True), (10, True), (11, False)])
def test_decode_computes_one_token_of_each_prompt(computed: int, *, good: bool) -> None:
    found = outcome()
    assert found.pair is not None
    found = replace(found, pair=replace(found.pair, computed=computed))
    assert (found.verdict == "") is good
    assert good or found.verdict == f"decode computed {computed} tokens of 10 prompts itself"


class FakeCluster:
    """Two decode engines, by their URLs."""

    router_url = "http://router"

    def __init__(self, *_: object, **__: object) -> None:
        self.decode = [type("E", (), {"url": f"http://decode-{number}"}) for number in range(2)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check_alive(self) -> None:
        pass


def test_what_decode_computed_is_what_it_neither_had_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = {
        "vllm:nixl_kv_loads_total": 5.0,
        "vllm:prompt_tokens_total": 500.0,
        "vllm:prompt_tokens_cached_total": 480.0,
    }
    monkeypatch.setattr(accuracy_run, "Cluster", FakeCluster)
    monkeypatch.setattr(accuracy_run, "evaluate", lambda *_, **__: score())
    monkeypatch.setattr(accuracy_run, "_counters", lambda _: counted)
    part = run_pair(Job(SUBJECT, parse([], {}, Machine()), tmp_path))
    assert (part.computed, part.counters) == (40, {"loads_total": 10.0})


def test_what_was_not_asked_to_be_verified_need_not_be() -> None:
    counters = GOOD | {"loads_verified_total": 0.0}
    assert outcome(counters=counters, VERIFY="").verdict == ""
    assert outcome(counters=counters, VERIFY="off").verdict == ""


def test_requests_that_were_sent_again_are_told() -> None:
    assert outcome(score(errors=1)).verdict == "1 requests failed and were sent again"


def test_an_accuracy_that_is_compared_with_nothing_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = replace(outcome(), subject=replace(SUBJECT, expected=None))
    assert found.verdict == ""
    print_outcome(found)
    assert "0.9000 was compared with NOTHING: no accuracy is known" in capsys.readouterr().out
    print_outcome(replace(found, single=Part(score(), 1.0)))
    assert "NOTHING" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (
            RuntimeError("http://decode/metrics: HTTP 500: no\nmore"),
            "http://decode/metrics: HTTP 500: no",
        ),
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (KeyError("exact_match,none"), "KeyError: 'exact_match,none'"),
        (PermissionError(13, "Permission denied"), "PermissionError: [Errno 13] Permission denied"),
    ],
)
def test_trouble_with_one_model_is_its_verdict_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: str
) -> None:
    def run(job: Job) -> Part:
        if job.subject.name == "bad":
            raise error
        return Part(score(), 1.0, GOOD)

    monkeypatch.setattr(accuracy, "run_pair", run)
    result = tmp_path / "result.json"
    settings = parse(["--json", str(result)], {}, Machine())
    found = [replace(SUBJECT, name=name) for name in ("bad", "good")]
    assert accuracy.run_all(found, settings, tmp_path) == 1
    written = json.loads(result.read_text(encoding="utf-8"))
    assert [one["verdict"] for one in written] == [verdict, "ok"]


def test_what_an_earlier_run_left_is_cleared(tmp_path: Path) -> None:
    old = tmp_path / "lm-eval" / "m"
    old.mkdir(parents=True)
    for path in (tmp_path / "lm-eval.log", tmp_path / "decode-0.log", old / "results_1.json"):
        path.write_text("API request failed\n", encoding="utf-8")
    (tmp_path / "notes.txt").touch()
    clear(tmp_path)
    clear(tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


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
