"""What lm-eval is started with, and what is read of what it leaves."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.models.files import REPO
from lab.accuracy.evaluation import Evaluation, Job, environment
from lab.accuracy.machine import Machine
from lab.accuracy.models import Subject
from lab.accuracy.settings import parse

SUBJECT = Subject("m", "/models/m", "recall", 0.9, 0.02)
CHAT = Subject("google/gemma-4-E2B-it", "/models/gemma", "gsm8k", 0.485, 0.03)


@pytest.fixture
def evaluation(tmp_path: Path) -> Evaluation:
    job = Job(SUBJECT, parse([], {}, Machine()), tmp_path)
    return Evaluation("lm-eval", "http://127.0.0.1:1", job)


def command_of(subject: Subject, *flags: str) -> str:
    job = Job(subject, parse(flags, {}, Machine()), Path("logs"))
    return " ".join(Evaluation("lm-eval", "http://127.0.0.1:1", job).command())


def test_recall_is_asked_without_lm_evals_own_tasks_and_tokenizer() -> None:
    command = command_of(SUBJECT, "--limit", "7")
    assert "-m lab.accuracy.lm_eval_cli run --model local-completions " in command
    assert '"base_url": "http://127.0.0.1:1/v1/completions"' in command
    assert '"tokenizer_backend": null, "eos_string": "<eos>"' in command
    assert f"--tasks recall --include_path {REPO / 'configs/lm_eval'}" in command
    assert command.endswith("--limit 7")


def test_gsm8k_is_asked_with_the_models_tokenizer() -> None:
    command = command_of(replace(SUBJECT, task="gsm8k"))
    assert "-m lm_eval run --model local-completions " in command
    assert '"tokenizer_backend": "huggingface", "tokenizer": "/models/m"' in command
    assert "--tasks gsm8k " in command


def test_model_that_is_known_for_chat_is_asked_so() -> None:
    command = command_of(CHAT)
    assert '"base_url": "http://127.0.0.1:1/v1/chat/completions"' in command
    assert "--model local-chat-completions" in command
    assert command.endswith("--apply_chat_template --num_fewshot 5")


def test_environment_has_the_items_and_asks_the_hub_only_where_that_is_allowed() -> None:
    heldout = Path("/models/m/heldout.jsonl")
    for online, offline in ((False, "1"), (True, "0")):
        env = environment(replace(SUBJECT, heldout=heldout, online=online))
        assert env["RECALL_HELDOUT"] == str(heldout)
        assert {env["HF_HUB_OFFLINE"], env["HF_DATASETS_OFFLINE"]} == {offline}
        assert str(REPO / "scripts") in env["PYTHONPATH"].split(os.pathsep)
        assert "" not in env["PYTHONPATH"].split(os.pathsep)  # which is where it is started


def test_what_lm_eval_leaves_is_read(evaluation: Evaluation) -> None:
    folder = evaluation.output / "m"
    folder.mkdir(parents=True)
    results = {"results": {"recall": {"alias": "recall", "exact_match,none": 0.5}}}
    (folder / "results_2026.json").write_text(json.dumps(results), encoding="utf-8")
    lines = [
        json.dumps(
            {"doc_id": at, "filter": "none", "resps": [[f" a{at}\u2028b"]]}, ensure_ascii=False
        )
        for at in range(2)
    ]
    (folder / "samples_recall_2026.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    evaluation.log_path.write_text(
        "API request failed! Status code: 500\nException:ClientError(), (), retrying.\n",
        encoding="utf-8",
    )
    score = evaluation.score(3.0)
    assert (score.accuracy, score.items, score.errors, score.seconds) == (0.5, 2, 1, 3.0)
    assert score.answers == {"0 none": " a0\u2028b", "1 none": " a1\u2028b"}
