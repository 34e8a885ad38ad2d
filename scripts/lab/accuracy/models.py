"""What is evaluated: a model, the task that fits it, and the accuracy that it is known to have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from harness.cluster.models.files import REPO
from lab.accuracy.hub import DATA_SET, Hub
from lab.accuracy.settings import SettingError, Settings

Task = Literal["gsm8k", "recall"]

BUNDLED: Final = REPO / "configs" / "recall"
HELDOUT: Final = "heldout.jsonl"
WEIGHTS: Final = "model.safetensors"
EXPECTED_OF_BUNDLED: Final = 1.0
TOLERANCES: Final[Mapping[Task, float]] = {"gsm8k": 0.03, "recall": 0.02}
"""vLLM's was 0.03 before one Mamba model, which is not for this connector, needed 0.05."""


@dataclass(frozen=True)
class Known:
    """What is known of a model on the hub."""

    accuracy: float
    """On gsm8k, strict match, as in vLLM's tests of its own connector (test_accuracy.py)."""
    chat: bool = False
    """Whether that is the accuracy of chat completions."""
    engine_args: tuple[str, ...] = ()
    """What vLLM needs to serve it."""


KNOWN: Final[Mapping[str, Known]] = {
    "Qwen/Qwen3-0.6B": Known(0.41),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": Known(0.65, engine_args=("--trust-remote-code",)),
    "deepseek-ai/deepseek-vl2-small": Known(
        0.59,
        engine_args=(
            "--hf-overrides",
            '{"architectures": ["DeepseekVLV2ForCausalLM"]}',
            "--trust-remote-code",
        ),
    ),
    "google/gemma-3-4b-it": Known(0.74),
    "google/gemma-4-E2B-it": Known(0.485, chat=True),
}


@dataclass(frozen=True)
class Subject:
    """One model and its task."""

    name: str
    path: str
    """A name on the hub, if it does not begin with /."""
    task: Task
    expected: float | None
    tolerance: float
    heldout: Path | None = None
    """The items of the recall task."""
    online: bool = False
    """Whether engines and lm-eval may ask the hub."""
    instead_of: str = ""
    """The names that this stands for, with spaces between."""

    @property
    def chat(self) -> bool:
        """Whether its accuracy is known for chat completions only."""
        return self.name in KNOWN and KNOWN[self.name].chat

    @property
    def engine_args(self) -> tuple[str, ...]:
        """What vLLM needs to serve it."""
        return KNOWN[self.name].engine_args if self.name in KNOWN else ()


def subjects(settings: Settings, hub: Hub) -> list[Subject]:
    """What the settings name; the bundled model where they name nothing, or nothing is there.

    Raises:
        SettingError: if a model cannot be evaluated.
    """
    named = [_named(name, hub) for name in settings.models] or [bundled()]
    return [_with_expectation(subject, settings) for subject in _with_one_substitute(named)]


def bundled(instead_of: str = "") -> Subject:
    """The model that comes with this repository.

    Raises:
        SettingError: if its weights are missing.
    """
    if not (BUNDLED / WEIGHTS).is_file():
        allowed = f"the bundled model has no weights ({BUNDLED / WEIGHTS}); name another one"
        raise SettingError("MODEL_NAMES", instead_of or "(nothing)", allowed)
    subject = _recall("recall", BUNDLED)
    return replace(subject, expected=EXPECTED_OF_BUNDLED, instead_of=instead_of)


def _named(name: str, hub: Hub) -> Subject:
    folder = Path(name)
    if (folder / "config.json").is_file():
        # A link's name may be the model's, and what it leads to may have any.
        return _local(folder.resolve() if ".." in folder.parts else folder.absolute(), hub)
    if name.startswith((".", "/", "~")):
        raise SettingError("MODEL_NAMES", name, "no folder with a config.json")
    online = hub.is_reachable()
    if not online and not (hub.has_model(name) and hub.has_data_set()):
        return bundled(instead_of=name)
    return _gsm8k(name, name, online=online)


def _local(folder: Path, hub: Hub) -> Subject:
    """With items of its own for the recall task, or with gsm8k."""
    if (folder / HELDOUT).is_file():
        return bundled() if folder.samefile(BUNDLED) else _recall(folder.name, folder)
    online = hub.is_reachable()
    if not online and not hub.has_data_set():
        allowed = f"its task is gsm8k, and {DATA_SET} is neither on this machine nor reachable"
        raise SettingError("MODEL_NAMES", folder, allowed)
    known = [name for name in KNOWN if name.split("/")[1] == folder.name]
    return _gsm8k(known[0] if known else folder.name, str(folder), online=online)


def _recall(name: str, folder: Path) -> Subject:
    heldout = folder / HELDOUT
    return Subject(name, str(folder), "recall", None, TOLERANCES["recall"], heldout=heldout)


def _gsm8k(name: str, path: str, *, online: bool) -> Subject:
    expected = KNOWN[name].accuracy if name in KNOWN else None
    return Subject(name, path, "gsm8k", expected, TOLERANCES["gsm8k"], online=online)


def _with_one_substitute(named: Sequence[Subject]) -> list[Subject]:
    """One for all that cannot be had, after those that can."""
    substitutes = [subject for subject in named if subject.instead_of]
    names = " ".join(subject.instead_of for subject in substitutes)
    others = [subject for subject in named if not subject.instead_of]
    return others + [replace(subject, instead_of=names) for subject in substitutes[:1]]


def _with_expectation(subject: Subject, settings: Settings) -> Subject:
    """What the settings expect goes before what is known; but they mean no substitute."""
    if subject.instead_of:
        return subject
    expected = subject.expected if settings.expected is None else settings.expected
    tolerance = subject.tolerance if settings.tolerance is None else settings.tolerance
    return replace(subject, expected=expected, tolerance=tolerance)
