"""The accuracy launcher: its knobs, its models, its engines, its verdict; and the recall models."""

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors

import accuracy
from accuracy import KNOWN, Outcome, Settings, find_subjects, pair_specs, recall

REPO = Path(__file__).resolve().parents[2]
LAUNCHER = REPO / "scripts/run_accuracy_test.sh"
CPU: tuple[str, ...] = ()
GPU = ("0",)
GPUS = ("0", "1")
QWEN = "Qwen/Qwen3-0.6B"
BUNDLED = recall(accuracy.BUNDLED)
GSM8K = accuracy.Subject("m", "/models/m", "gsm8k", None, 0.03)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(accuracy, "is_reachable", lambda _: False)


def settings(gpus: tuple[str, ...] = CPU, /, flags: Any = (), **env: str) -> Settings:
    return accuracy.read_settings(gpus, env, dict(flags))


def test_the_document_has_all_knobs_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPO / "docs/accuracy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+`|--[\w-]+)", text, re.MULTILINE)
    knobs = {name for name in accuracy.types(CPU) if not name.startswith("-")}
    with pytest.raises(SystemExit):
        accuracy.parse_flags(["--help"])
    flags = set(re.findall(r"\[(--[\w-]+)", capsys.readouterr().out))
    refused = {"CROSS_LAYERS_BLOCKS", "DP_EP", "ENFORCE_EAGER"}
    assert knobs - refused | flags == {row.strip("`") for row in rows}


def test_values_are_read_and_empty_ones_count_as_not_set() -> None:
    env = {"VLLM_ATTENTION_BACKEND": "CPU_ATTN", "ATTENTION_BACKEND": "cpu_mla"}
    assert settings(**env).knobs["ATTENTION_BACKEND"] == "CPU_MLA"
    flag = {"--attention-backend": "AMX_MLA"}
    assert settings(CPU, flag, **env).knobs["ATTENTION_BACKEND"] == "AMX_MLA"
    flags = {"--limit": "20", "--kv_buffer_device": "cuda"}
    given = settings(
        GPUS, flags, MODEL_NAMES="a/b  c/d,e/f, ", VLLM_SERVE_EXTRA_ARGS="--max-model-len, 8192,"
    )
    assert given.knobs["MODEL_NAMES"] == ("a/b", "c/d", "e/f")
    assert given.knobs["VLLM_SERVE_EXTRA_ARGS"] == ("--max-model-len", "8192")
    assert given.knobs["--limit"] == 20
    assert given.knobs["NUM_CONCURRENT"] == 100
    names = accuracy.types(CPU).keys() - {"VERIFY"}
    assert settings(**dict.fromkeys(names, "")) == settings()
    assert settings().knobs["VERIFY"] == "all"
    assert settings(VERIFY="").knobs["VERIFY"] == "off"
    assert settings(GPU, CROSS_LAYERS_BLOCKS="False", ENFORCE_EAGER="1").knobs["DP_EP"] is None


@pytest.mark.parametrize(
    ("gpus", "name", "value", "message"),
    [
        (GPU, "DECODER_TP_SIZE", "2", "less than or equal to 1"),
        (CPU, "PREFILL_BLOCK_SIZE", "48", "multiple of 32"),
        (GPU, "GPU_MEMORY_UTILIZATION", "0.6", "2 engines share a GPU.* at most 0.5"),
        (CPU, "ATTENTION_BACKEND", "FLASHINFER", "one of CPU_ATTN"),
        (CPU, "VLLM_KV_CACHE_LAYOUT", "NHD", "'HND' or 'LBHNC'"),
        (GPU, "PREFILLER_KV_LAYOUT", "DHN", "'HND', 'NHD'"),
        (CPU, "TOLERANCE", "nan", "finite"),
        (CPU, "VERIFY", "sample:2", "pattern"),
        (GPU, "ENFORCE_EAGER", "0", "'TRUE' or '1'"),
        (CPU, "--kv_buffer_device", "CUDA", "'CPU'"),
    ],
)
def test_a_bad_value_is_named(gpus: tuple[str, ...], name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: .*{message}"):
        accuracy.read_settings(gpus, {}, {name: value})


# --- Models and engines


def write(folder: Path, *names: str) -> str:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}", encoding="utf-8")
    return str(folder)


def test_the_bundled_model_runs_alone_or_for_models_that_are_not_available(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_subjects(settings()) == [BUNDLED]
    assert (BUNDLED.model, BUNDLED.expected, BUNDLED.tolerance) == ("recall", 1.0, 0.02)
    monkeypatch.setattr(accuracy, "has_data_set", lambda: True)
    monkeypatch.setattr(accuracy, "is_cached", QWEN.__eq__)
    names = f"a/b {QWEN} c/d"
    qwen, instead = find_subjects(settings(MODEL_NAMES=names, EXPECTED_ACCURACY="0.4"))
    assert (qwen.model, qwen.expected, qwen.online) == (QWEN, 0.4, False)
    assert instead == replace(BUNDLED, instead_of="a/b c/d")
    assert "MODEL_NAMES=a/b c/d:" in capsys.readouterr().err


def test_a_folder_has_its_own_items_or_is_the_model_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "has_data_set", lambda: True)
    mine = write(tmp_path / "mine", "config.json", "heldout.jsonl")
    link = tmp_path / "Qwen3-0.6B"
    link.symlink_to(write(tmp_path / "0a1b2c", "config.json"))
    first, second = find_subjects(settings(MODEL_NAMES=f"{mine} {link}", TOLERANCE="0.1"))
    assert (first.task, first.expected, first.tolerance) == ("recall", None, 0.1)
    assert (second.model, second.path, second.expected) == (QWEN, str(link), 0.41)


def test_models_of_the_hub_have_the_expectations_in_the_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accuracy, "is_reachable", lambda _: True)
    *known, other = find_subjects(settings(MODEL_NAMES=" ".join([*KNOWN, "a/b"])))
    text = (REPO / "docs/accuracy.md").read_text(encoding="utf-8")
    for subject in known:
        chat = ", chat completions" if subject.chat else ""
        row = f"`{subject.model}` | gsm8k, strict match{chat} | {subject.expected:g} | 0.03 |"
        assert row in text
    assert (other.task, other.expected, other.online) == ("gsm8k", None, True)


def test_a_model_that_cannot_be_evaluated_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "has_data_set", lambda: False)
    other = write(tmp_path / "other", "config.json")
    for name, problem in (("./nowhere", "no config.json"), (other, "gsm8k is neither")):
        with pytest.raises(ValueError, match=f"MODEL_NAMES={name}: .*{problem}"):
            find_subjects(settings(MODEL_NAMES=name))
    with pytest.raises(ValueError, match="MODEL_NAMES=a/b/c: "):
        find_subjects(settings(MODEL_NAMES="a/b/c"))


def test_engines_are_as_the_knobs_say() -> None:
    env = {
        "ATTENTION_BACKEND": "FLASHINFER",
        "DECODER_KV_LAYOUT": "NHD",
        "DECODER_TP_SIZE": "2",
        "DECODE_BLOCK_SIZE": "64",
        "NUM_PREFILL_INSTANCES": "2",
        "VLLM_KV_CACHE_LAYOUT": "HND",
        "VLLM_SERVE_EXTRA_ARGS": "--max-model-len,8192",
    }
    given = settings(GPUS, **env)
    *prefill, decode = pair_specs(GSM8K, given)
    assert [one.name for one in prefill] == ["prefill-0", "prefill-1"]
    assert (decode.tensor_parallel, decode.block_size, prefill[0].block_size) == (2, 64, 128)
    arguments = ("--attention-backend", "FLASHINFER", "--enforce-eager", "--max-model-len", "8192")
    assert decode.extra_args == arguments
    assert decode.connector_config == {"verify": "all"}
    assert decode.extra_env == {"CUDA_VISIBLE_DEVICES": "0,1", "VLLM_KV_CACHE_LAYOUT": "NHD"}
    assert prefill[1].extra_env == {"CUDA_VISIBLE_DEVICES": "1", "VLLM_KV_CACHE_LAYOUT": "HND"}
    assert "VLLM_KV_CACHE_LAYOUT" in decode.without_env
    single = accuracy.engine_spec("single", replace(GSM8K, instead_of="x"), given, ["0"])
    assert (single.connector, single.extra_env) == ("none", {"CUDA_VISIBLE_DEVICES": "0"})
    assert "--max-model-len" not in single.extra_args  # meant for another model


# --- Evaluation and verdict

COUNTERS = {
    "loads_total{outcome=loaded}": 10.0,
    "verified_loads_total": 10.0,
    "loaded_tokens_total": 90.0,
    "read_bytes_total": 1e6,
}
GOOD = Outcome(accuracy=0.9, items=10, computed=10, counters=COUNTERS)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (replace(GOOD, single=0.9), ""),
        (replace(GOOD, accuracy=0.92), ""),
        (replace(GOOD, accuracy=0.93), "accuracy 0.9300 is not within 0.02 of 0.9000 (expected)"),
        (replace(GOOD, single=0.95), "is not within 0.02 of 0.9500 (the single engine)"),
        (replace(GOOD, computed=11), "decode computed 11 tokens of 10 prompts itself"),
        (replace(GOOD, errors=1), "1 requests failed and were sent again"),
        (replace(GOOD, counters={}), "nothing was loaded over NIXL"),
        (Outcome(), "nothing was evaluated"),
        *(
            (replace(GOOD, counters=COUNTERS | {name: value}), words)
            for name, value, words in [
                ("load_failures_total", 1.0, "1 loads failed: what decode recomputes proves"),
                ("refused_tickets_total", 2.0, "2 tickets were refused"),
                (
                    "recomputed_requests_total{reason=no_ticket}",
                    3.0,
                    "3 prompts came to decode without a ticket",
                ),
                ("loads_total{outcome=loaded}", 9.0, "only 9 of 10 loads: decode computed"),
                ("read_bytes_total", 0.0, "nothing was loaded over NIXL"),
                ("verified_loads_total", 9.0, "only 9 of 10 loads were verified"),
            ]
        ),
    ],
)
def test_a_run_is_good_if_the_accuracy_is_and_all_was_loaded(outcome: Outcome, words: str) -> None:
    subject = replace(BUNDLED, expected=0.9)
    found = "; ".join(accuracy.faults(outcome, subject, settings().knobs))
    assert words in found
    assert bool(words) == bool(found)


def test_an_error_is_the_verdict_of_its_model_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_pair(outcome: Outcome, subject: accuracy.Subject, *_: object) -> None:
        if subject.model == "bad":
            raise RuntimeError("http://decode: HTTP 500: no\nmore")
        vars(outcome).update(vars(GOOD))

    monkeypatch.setattr(accuracy, "run_pair", run_pair)
    result = tmp_path / "result.json"
    subjects = [replace(BUNDLED, model=name, expected=None) for name in ("bad", "good")]
    assert accuracy.run_all(subjects, settings(), tmp_path, result) == 1
    written = json.loads(result.read_text(encoding="utf-8"))
    assert [one["verdict"] for one in written] == ["http://decode: HTTP 500: no", "ok"]
    printed = capsys.readouterr().out
    assert "compared with NOTHING" in printed
    assert printed.endswith("1/2 models are good\n")


def test_the_result_of_lm_eval_is_read_and_failed_requests_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simple_evaluate(model: str, *, model_args: Any, tasks: Any, **_: Any) -> dict[str, Any]:
        assert (model, tasks) == ("local-completions", ["recall"])
        assert model_args["base_url"] == "http://router/v1/completions"
        assert os.environ["RECALL_HELDOUT"] == str(accuracy.BUNDLED / "heldout.jsonl")
        log = logging.getLogger("lm_eval.models.api_models")
        log.warning("API request failed! Status code: 500, Response text: no. Retrying...")
        log.error("Exception:ClientResponseError(), (no outputs), retrying.")
        samples = [{"doc_id": at} for at in range(2)]
        return {"results": {"recall": {"exact_match,none": 0.5}}, "samples": {"recall": samples}}

    lm_eval = SimpleNamespace(simple_evaluate=simple_evaluate)
    lm_eval.tasks = SimpleNamespace(TaskManager=lambda **_: None)
    monkeypatch.setitem(sys.modules, "lm_eval", lm_eval)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", lm_eval.tasks)
    score = accuracy.evaluate(BUNDLED, "http://router", settings(), tmp_path / "samples.json")
    assert score == {"accuracy": 0.5, "items": 2, "errors": 1}


# --- The script


def launch(arguments: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [LAUNCHER, *arguments], capture_output=True, text=True, check=False, **options
    )


def test_a_bad_value_ends_the_script_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "httpx.py").write_text("raise SystemExit('a module from the folder of the caller')")
    env = {"NIXL_KV_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "TOLERANCE": "2"}
    ended = launch(["--log-dir", str(tmp_path / "logs")], cwd=tmp_path, env={**os.environ, **env})
    assert ended.returncode == 2
    assert ended.stderr.startswith("TOLERANCE=2: ")
    assert not (tmp_path / "logs").exists()


# --- Training


@pytest.mark.slow  # it imports transformers
@pytest.mark.parametrize("name", ["recall", "recall-state"])
def test_training_makes_the_files_of_the_bundled_model(tmp_path: Path, name: str) -> None:
    script = [sys.executable, str(REPO / "scripts/train_recall.py"), name, "--out", str(tmp_path)]
    subprocess.run([*script, "--steps", "1"], check=True, timeout=600)
    shapes = []
    for folder in (tmp_path, REPO / "configs" / name):
        with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
            shapes.append({key: file.get_slice(key).get_shape() for key in file.keys()})  # noqa: SIM118
    assert shapes[0] == shapes[1]
    for file in ("config.json", "heldout.jsonl", "tokenizer.json"):
        assert (tmp_path / file).read_bytes() == (REPO / "configs" / name / file).read_bytes()
