"""What is evaluated: a model, the task that fits it, and the accuracy that it is known to have."""

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Protocol

from pd.accuracy_settings import SettingError, Settings

Task = Literal["gsm8k", "recall"]

REPO: Final = Path(__file__).resolve().parents[2]
BUNDLED: Final = REPO / "configs" / "recall"
HELDOUT: Final = "heldout.jsonl"
WEIGHTS: Final = "model.safetensors"
DATA_SET: Final = "openai/gsm8k"
HUB: Final = "https://huggingface.co"
HUB_TIMEOUT_S = 10.0
EXPECTED: Final[Mapping[str, float]] = {
    "Qwen/Qwen3-0.6B": 0.41,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 0.65,
    "deepseek-ai/deepseek-vl2-small": 0.59,
    "google/gemma-3-4b-it": 0.74,
    "google/gemma-4-E2B-it": 0.485,
}
"""gsm8k, strict match, as in vLLM's tests of its own connector (test_accuracy.py)."""

CHAT_ONLY: Final = frozenset({"google/gemma-4-E2B-it"})
MODEL_ARGS: Final[Mapping[str, tuple[str, ...]]] = {
    "deepseek-ai/deepseek-vl2-small": (
        "--hf-overrides",
        '{"architectures": ["DeepseekVLV2ForCausalLM"]}',
        "--trust-remote-code",
    ),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": ("--trust-remote-code",),
}
EXPECTED_OF_BUNDLED = 1.0
TOLERANCES: Final[Mapping[Task, float]] = {"gsm8k": 0.03, "recall": 0.02}
"""vLLM's was 0.03 before one Mamba model, which is not for this connector, needed 0.05."""


@dataclass(frozen=True)
class Subject:
    """One model and its task. Paths that do not begin with / are names on the hub."""

    name: str
    path: str
    task: Task
    expected: float | None
    tolerance: float
    heldout: Path | None = None  # the items of the recall task
    online: bool = False  # whether engines and lm-eval may ask the hub
    instead_of: str = ""  # the names that this stands for, with spaces between

    @property
    def chat(self) -> bool:
        """Whether its accuracy is known for chat completions only."""
        return self.name in CHAT_ONLY

    @property
    def engine_args(self) -> tuple[str, ...]:
        """What vLLM needs to be told to serve it."""
        return MODEL_ARGS.get(self.name, ())


class Hub(Protocol):
    """Where named models come from."""

    def reachable(self) -> bool:
        """Whether it answers now."""

    def has_model(self, name: str) -> bool:
        """Whether there is a local copy."""

    def has_data_set(self) -> bool:
        """Whether there is a local copy of gsm8k."""


class HuggingFace:
    """The hub, unless the environment says that we are offline, and its caches."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Takes the environment; asks nobody yet."""
        self._env = env
        self._answers: bool | None = None

    def reachable(self) -> bool:
        """Asked once.

        Raises:
            SettingError: if HF_ENDPOINT is no URL.
        """
        if self._answers is None:
            offline = self._env.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
            self._answers = not offline and _answers(self._env.get("HF_ENDPOINT") or HUB)
        return self._answers

    def has_model(self, name: str) -> bool:
        """Its configuration is in the cache: what else is missing, vLLM will say."""
        return _is_cached(name, "config.json", "model")

    def has_data_set(self) -> bool:
        """As the files of the hub, or as `datasets` keeps it."""
        home = Path(self._env.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        kept = Path(self._env.get("HF_DATASETS_CACHE") or home / "datasets")
        return (kept / DATA_SET.replace("/", "___")).is_dir() or _is_cached(
            DATA_SET, "README.md", "dataset"
        )


def subjects(settings: Settings, hub: Hub) -> list[Subject]:
    """What the settings name; the bundled model where they name nothing, or nothing is there.

    Raises:
        SettingError: if a model cannot be evaluated.
    """
    found = [_named(name, hub) for name in settings.models] or [bundled()]
    return [_with_expectation(subject, settings) for subject in _once(found)]


def bundled(instead_of: str = "") -> Subject:
    """The model that comes with this repository.

    Raises:
        SettingError: if its weights are missing.
    """
    if not (BUNDLED / WEIGHTS).is_file():
        allowed = f"the bundled model has no weights ({BUNDLED / WEIGHTS}); name another one"
        raise SettingError("MODEL_NAMES", instead_of or "(nothing)", allowed)
    found = _recall("recall", BUNDLED)
    return replace(found, expected=EXPECTED_OF_BUNDLED, instead_of=instead_of)


def _named(name: str, hub: Hub) -> Subject:
    folder = Path(name)
    if (folder / "config.json").is_file():
        # A link's name may be the model's, and what it leads to may have any.
        return _local(folder.resolve() if ".." in folder.parts else folder.absolute(), hub)
    if name.startswith((".", "/", "~")):
        raise SettingError("MODEL_NAMES", name, "no folder with a config.json")
    online = hub.reachable()
    if not online and not (hub.has_model(name) and hub.has_data_set()):
        return bundled(instead_of=name)
    return _gsm8k(name, name, online=online)


def _local(folder: Path, hub: Hub) -> Subject:
    """With items of its own for the recall task, or with gsm8k."""
    if (folder / HELDOUT).is_file():
        return bundled() if folder.samefile(BUNDLED) else _recall(folder.name, folder)
    online = hub.reachable()
    if not online and not hub.has_data_set():
        allowed = f"its task is gsm8k, and {DATA_SET} is neither on this machine nor reachable"
        raise SettingError("MODEL_NAMES", folder, allowed)
    known = [name for name in EXPECTED if name.split("/")[1] == folder.name]
    return _gsm8k(known[0] if known else folder.name, str(folder), online=online)


def _recall(name: str, folder: Path) -> Subject:
    return Subject(
        name, str(folder), "recall", None, TOLERANCES["recall"], heldout=folder / HELDOUT
    )


def _gsm8k(name: str, path: str, *, online: bool) -> Subject:
    return Subject(name, path, "gsm8k", EXPECTED.get(name), TOLERANCES["gsm8k"], online=online)


def _once(found: Sequence[Subject]) -> list[Subject]:
    """One substitute for all that cannot be had, after those that can."""
    substitutes = [subject for subject in found if subject.instead_of]
    names = " ".join(subject.instead_of for subject in substitutes)
    kept = [subject for subject in found if not subject.instead_of]
    return kept + [replace(subject, instead_of=names) for subject in substitutes[:1]]


def _with_expectation(subject: Subject, settings: Settings) -> Subject:
    """What the settings expect goes before what is known; but they mean no substitute."""
    if subject.instead_of:
        return subject
    expected = subject.expected if settings.expected is None else settings.expected
    tolerance = subject.tolerance if settings.tolerance is None else settings.tolerance
    return replace(subject, expected=expected, tolerance=tolerance)


def _answers(endpoint: str) -> bool:
    """Whether a web server speaks there, whatever it says."""
    bad = SettingError("HF_ENDPOINT", endpoint, f"allowed is a URL such as {HUB}")
    if not endpoint.startswith(("http://", "https://")):
        raise bad
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except (ValueError, http.client.InvalidURL) as error:
        raise bad from error
    except (OSError, http.client.HTTPException):
        return False
    return True


def _is_cached(name: str, file: str, kind: str) -> bool:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - it takes a second
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(name, file, repo_type=kind)
    except HFValidationError as error:
        raise SettingError("MODEL_NAMES", name, "no folder, and no name on the hub") from error
    return isinstance(found, str) and os.path.exists(found)  # noqa: PTH110
