"""Which model and task a name stands for, and what accuracy it must have."""

import importlib.util
import json
from pathlib import Path

import pytest
from pd import accuracy_models
from pd.accuracy_machine import Machine
from pd.accuracy_models import EXPECTED, HuggingFace, subjects
from pd.accuracy_settings import SettingError, Settings, parse

TASK = Path(__file__).resolve().parents[2] / "configs/lm_eval/recall.py"


class FakeHub:
    def __init__(
        self, *, online: bool = False, models: tuple[str, ...] = (), data: bool = False
    ) -> None:
        self.online, self.models, self.data = online, models, data

    def reachable(self) -> bool:
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
    monkeypatch.setattr(accuracy_models, "BUNDLED", folder)
    return folder


def test_without_a_name_the_bundled_model_runs(bundled: Path) -> None:
    (found,) = subjects(settings(), ONLINE)
    assert (found.name, found.task, found.path) == ("recall", "recall", str(bundled))
    assert found.heldout == bundled / "heldout.jsonl"
    assert found.expected == accuracy_models.EXPECTED_OF_BUNDLED
    assert not found.instead_of


def test_known_models_have_vllms_expectations() -> None:
    found = subjects(settings(MODEL_NAMES=" ".join(EXPECTED)), ONLINE)
    assert {one.name: one.expected for one in found} == EXPECTED
    assert EXPECTED["Qwen/Qwen3-0.6B"] == 0.41
    assert {one.tolerance for one in found} == {0.03}
    assert {one.task for one in found} == {"gsm8k"}
    assert [one.name for one in found if one.chat] == ["google/gemma-4-E2B-it"]


def test_a_hub_model_may_have_a_local_copy() -> None:
    name = "Qwen/Qwen3-0.6B"
    (found,) = subjects(settings(MODEL_NAMES=name), FakeHub(models=(name,), data=True))
    assert (found.name, found.task, found.online) == (name, "gsm8k", False)


@pytest.mark.parametrize("hub", [OFFLINE, FakeHub(data=True), FakeHub(models=("Qwen/Qwen3-0.6B",))])
def test_offline_the_bundled_model_runs_instead_and_says_so(hub: FakeHub) -> None:
    (found,) = subjects(settings(MODEL_NAMES="Qwen/Qwen3-0.6B"), hub)
    assert (found.name, found.instead_of) == ("recall", "Qwen/Qwen3-0.6B")


def test_a_folder_with_items_has_the_recall_task(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "mine", "config.json", "heldout.jsonl")
    (found,) = subjects(settings(MODEL_NAMES=str(folder), EXPECTED_ACCURACY="0.9"), OFFLINE)
    assert (found.name, found.task, found.expected) == ("mine", "recall", 0.9)
    assert found.heldout == folder / "heldout.jsonl"


def test_a_folder_that_is_named_as_on_the_hub(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "Qwen3-0.6B", "config.json")
    (found,) = subjects(settings(MODEL_NAMES=str(folder)), FakeHub(data=True))
    assert (found.name, found.path) == ("Qwen/Qwen3-0.6B", str(folder))
    assert found.expected == 0.41


def test_what_is_expected_of_a_model_is_not_expected_of_its_substitute() -> None:
    wanted = settings(MODEL_NAMES="a/b", EXPECTED_ACCURACY="0.4", TOLERANCE="0.5")
    (found,) = subjects(wanted, OFFLINE)
    assert (found.expected, found.tolerance) == (1.0, 0.02)


def test_one_substitute_stands_for_all_that_cannot_be_had() -> None:
    here = FakeHub(models=("c/d",), data=True)
    wanted = settings(MODEL_NAMES="a/b c/d e/f", EXPECTED_ACCURACY="0.4")
    found = subjects(wanted, here)
    assert [(one.name, one.instead_of) for one in found] == [("c/d", ""), ("recall", "a/b e/f")]
    assert [one.expected for one in found] == [0.4, 1.0]


def test_a_link_has_the_name_that_counts(tmp_path: Path, bundled: Path) -> None:
    link = tmp_path / "Qwen3-0.6B"
    link.symlink_to(folder_of(tmp_path / "snapshots" / "0a1b2c", "config.json"))
    (found,) = subjects(settings(MODEL_NAMES=str(link)), ONLINE)
    assert (found.name, found.path) == ("Qwen/Qwen3-0.6B", str(link))
    up = link / ".." / "0a1b2c"  # beside what it leads to, not beside itself
    (found,) = subjects(settings("--single", MODEL_NAMES=str(up)), ONLINE)
    assert found.path == str(tmp_path / "snapshots" / "0a1b2c")
    other = tmp_path / "other"
    other.symlink_to(bundled)
    (found,) = subjects(settings(MODEL_NAMES=str(other)), ONLINE)
    assert (found.name, found.expected) == ("recall", 1.0)


def test_an_unknown_accuracy_may_be_told() -> None:
    (alone,) = subjects(settings(MODEL_NAMES="a/b"), ONLINE)
    assert alone.expected is None
    (told,) = subjects(settings(MODEL_NAMES="a/b", EXPECTED_ACCURACY="0", TOLERANCE="0.1"), ONLINE)
    assert (told.expected, told.tolerance) == (0.0, 0.1)


def test_what_is_not_there_is_named(tmp_path: Path, bundled: Path) -> None:
    with pytest.raises(SettingError, match=r"MODEL_NAMES=./nowhere: no folder"):
        subjects(settings(MODEL_NAMES="./nowhere"), ONLINE)
    folder = folder_of(tmp_path / "other", "config.json")
    with pytest.raises(SettingError, match="openai/gsm8k is neither"):
        subjects(settings("--single", MODEL_NAMES=str(folder)), OFFLINE)
    (bundled / "model.safetensors").unlink()
    with pytest.raises(SettingError, match="no weights"):
        subjects(settings(), ONLINE)


def test_the_environment_may_say_that_we_are_offline(tmp_path: Path) -> None:
    assert not HuggingFace({"HF_HUB_OFFLINE": "1"}).reachable()
    assert not HuggingFace({"HF_ENDPOINT": "http://127.0.0.1:9"}).reachable()
    assert not HuggingFace({"HF_ENDPOINT": "", "HF_HUB_OFFLINE": "1"}).reachable()
    kept = tmp_path / "datasets" / "openai___gsm8k"
    assert not HuggingFace({"HF_HOME": str(tmp_path)}).has_data_set()
    kept.mkdir(parents=True)
    assert HuggingFace({"HF_HOME": str(tmp_path)}).has_data_set()


@pytest.mark.parametrize("endpoint", ["hub", "file:///", "http://a:b", "http://[::1", "http://a b"])
def test_an_endpoint_that_is_no_url_is_named(endpoint: str) -> None:
    with pytest.raises(SettingError) as raised:
        HuggingFace({"HF_ENDPOINT": endpoint}).reachable()
    assert str(raised.value).startswith(f"HF_ENDPOINT={endpoint}: allowed is a URL")


def test_an_empty_endpoint_is_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(accuracy_models, "_answers", lambda url: bool(asked.append(url)))
    assert not HuggingFace({"HF_ENDPOINT": ""}).reachable()
    assert asked == ["https://huggingface.co"]


def test_the_items_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="needs lm-eval: scripts/install")
    spec = importlib.util.spec_from_file_location("recall_task", TASK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Path = module.HELDOUT
    assert found == TASK.parents[1] / "recall" / "heldout.jsonl"
    items = [{"prompt": f"p{number}", "answer": f"a{number}"} for number in range(50)]
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, items)) + "\n", encoding="utf-8")
    monkeypatch.setenv("RECALL_HELDOUT", str(path))
    monkeypatch.chdir(tmp_path)
    first, second = (list(module.load(model="any")["test"]) for _ in range(2))
    assert first == second
    assert sorted(first, key=str) == sorted(items, key=str)
    assert first != items
