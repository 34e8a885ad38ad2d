"""Which model and task a name stands for, and what accuracy it must have."""

import importlib.util
import json
from pathlib import Path

import pytest

from harness.cluster.models.files import REPO
from lab.accuracy import models
from lab.accuracy.hub import HuggingFace
from lab.accuracy.machine import Machine
from lab.accuracy.models import KNOWN, subjects
from lab.accuracy.settings import SettingError, Settings, parse

TASK = REPO / "configs/lm_eval/recall.py"
QWEN = "Qwen/Qwen3-0.6B"


class FakeHub:
    def __init__(
        self, *, online: bool = False, models: tuple[str, ...] = (), data: bool = False
    ) -> None:
        self.online, self.models, self.data = online, models, data

    def is_reachable(self) -> bool:
        return self.online

    def has_model(self, name: str) -> bool:
        return name in self.models

    def has_data_set(self) -> bool:
        return self.data


OFFLINE = FakeHub()
ONLINE = FakeHub(online=True)


def settings(*flags: str, **env: str) -> Settings:
    return parse(flags, env, Machine())


def folder_of(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text("{}\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = folder_of(tmp_path / "recall", "config.json", "heldout.jsonl", "model.safetensors")
    monkeypatch.setattr(models, "BUNDLED", folder)
    return folder


def test_without_a_name_the_bundled_model_runs(bundled: Path) -> None:
    (subject,) = subjects(settings(), ONLINE)
    assert (subject.name, subject.task, subject.path) == ("recall", "recall", str(bundled))
    assert subject.heldout == bundled / "heldout.jsonl"
    assert (subject.expected, subject.tolerance) == (1.0, 0.02)
    assert not subject.instead_of


def test_known_models_have_vllms_expectations() -> None:
    named = subjects(settings(MODEL_NAMES=" ".join(KNOWN)), ONLINE)
    assert {one.name: one.expected for one in named} == {
        "Qwen/Qwen3-0.6B": 0.41,
        "deepseek-ai/DeepSeek-V2-Lite-Chat": 0.65,
        "deepseek-ai/deepseek-vl2-small": 0.59,
        "google/gemma-3-4b-it": 0.74,
        "google/gemma-4-E2B-it": 0.485,
    }
    assert {(one.task, one.tolerance, one.online) for one in named} == {("gsm8k", 0.03, True)}
    assert [one.name for one in named if one.chat] == ["google/gemma-4-E2B-it"]
    assert [one.name for one in named if "--trust-remote-code" in one.engine_args] == [
        "deepseek-ai/DeepSeek-V2-Lite-Chat",
        "deepseek-ai/deepseek-vl2-small",
    ]


def test_hub_model_may_have_a_local_copy() -> None:
    (subject,) = subjects(settings(MODEL_NAMES=QWEN), FakeHub(models=(QWEN,), data=True))
    assert (subject.name, subject.task, subject.online) == (QWEN, "gsm8k", False)


@pytest.mark.parametrize(
    "hub",
    [
        pytest.param(OFFLINE, id="nothing is here"),
        pytest.param(FakeHub(data=True), id="data without model"),
        pytest.param(FakeHub(models=(QWEN,)), id="model without data"),
    ],
)
def test_offline_the_bundled_model_runs_instead_and_says_so(hub: FakeHub) -> None:
    (subject,) = subjects(settings(MODEL_NAMES=QWEN), hub)
    assert (subject.name, subject.instead_of) == ("recall", QWEN)


def test_folder_with_items_has_the_recall_task(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "mine", "config.json", "heldout.jsonl")
    (subject,) = subjects(settings(MODEL_NAMES=str(folder), EXPECTED_ACCURACY="0.9"), OFFLINE)
    assert (subject.name, subject.task, subject.expected) == ("mine", "recall", 0.9)
    assert subject.heldout == folder / "heldout.jsonl"


def test_folder_that_is_named_as_on_the_hub_is_that_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "Qwen3-0.6B", "config.json")
    (subject,) = subjects(settings(MODEL_NAMES=str(folder)), FakeHub(data=True))
    assert (subject.name, subject.path, subject.expected) == (QWEN, str(folder), 0.41)


def test_what_is_expected_of_a_model_is_not_expected_of_its_substitute() -> None:
    wanted = settings(MODEL_NAMES="a/b", EXPECTED_ACCURACY="0.4", TOLERANCE="0.5")
    (subject,) = subjects(wanted, OFFLINE)
    assert (subject.expected, subject.tolerance) == (1.0, 0.02)


def test_one_substitute_stands_for_all_that_cannot_be_had() -> None:
    hub = FakeHub(models=("c/d",), data=True)
    named = subjects(settings(MODEL_NAMES="a/b c/d e/f", EXPECTED_ACCURACY="0.4"), hub)
    assert [(one.name, one.instead_of) for one in named] == [("c/d", ""), ("recall", "a/b e/f")]
    assert [one.expected for one in named] == [0.4, 1.0]


def test_name_of_a_link_counts(tmp_path: Path) -> None:
    link = tmp_path / "Qwen3-0.6B"
    link.symlink_to(folder_of(tmp_path / "snapshots" / "0a1b2c", "config.json"))
    (subject,) = subjects(settings(MODEL_NAMES=str(link)), ONLINE)
    assert (subject.name, subject.path) == (QWEN, str(link))


def test_path_beside_a_link_is_beside_what_it_leads_to(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder_of(tmp_path / "snapshots" / "0a1b2c", "config.json"))
    beside = link / ".." / "0a1b2c"
    (subject,) = subjects(settings("--single", MODEL_NAMES=str(beside)), ONLINE)
    assert subject.path == str(tmp_path / "snapshots" / "0a1b2c")


def test_link_to_the_bundled_model_is_that_model(tmp_path: Path, bundled: Path) -> None:
    link = tmp_path / "other"
    link.symlink_to(bundled)
    (subject,) = subjects(settings(MODEL_NAMES=str(link)), ONLINE)
    assert (subject.name, subject.expected) == ("recall", 1.0)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, (None, 0.03), id="not given"),
        pytest.param({"EXPECTED_ACCURACY": "0", "TOLERANCE": "0.1"}, (0.0, 0.1), id="given"),
    ],
)
def test_accuracy_of_an_unknown_model_may_be_given(
    env: dict[str, str], expected: tuple[float | None, float]
) -> None:
    (subject,) = subjects(settings(MODEL_NAMES="a/b", **env), ONLINE)
    assert (subject.expected, subject.tolerance) == expected


def test_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingError, match=r"MODEL_NAMES=./nowhere: no folder"):
        subjects(settings(MODEL_NAMES="./nowhere"), ONLINE)


def test_name_that_no_hub_can_have_is_named() -> None:
    hub = HuggingFace({"HF_HUB_OFFLINE": "1"})
    with pytest.raises(SettingError, match=r"MODEL_NAMES=a/b/c: no folder, and no name on the hub"):
        subjects(settings(MODEL_NAMES="a/b/c"), hub)


def test_missing_data_set_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "other", "config.json")
    with pytest.raises(SettingError, match="openai/gsm8k is neither"):
        subjects(settings("--single", MODEL_NAMES=str(folder)), OFFLINE)


def test_bundled_model_without_weights_is_named(bundled: Path) -> None:
    (bundled / "model.safetensors").unlink()
    with pytest.raises(SettingError, match="no weights"):
        subjects(settings(), ONLINE)


def test_lm_eval_reads_the_items_from_any_folder_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="needs lm-eval: scripts/install")
    spec = importlib.util.spec_from_file_location("recall_task", TASK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.HELDOUT == REPO / "configs/recall/heldout.jsonl"
    items = [{"prompt": f"p{number}", "answer": f"a{number}"} for number in range(50)]
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, items)) + "\n", encoding="utf-8")
    monkeypatch.setenv("RECALL_HELDOUT", str(path))
    monkeypatch.chdir(tmp_path)
    first, second = (list(module.load(model="any")["test"]) for _ in range(2))
    assert first == second
    assert sorted(first, key=str) == sorted(items, key=str)
    assert first != items
