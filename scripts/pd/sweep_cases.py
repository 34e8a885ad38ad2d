"""The cases of a sweep, read from YAML: knobs of the launcher, and what a machine must have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from pd.accuracy_machine import Machine
from pd.accuracy_settings import SHAPE_KNOBS, SettingError
from pd.engines import Device

KEYS: Final = frozenset({"name", "about", "device", "gpus", "env"})
DEVICES: Final[Sequence[Device]] = ("cpu", "cuda")


@dataclass(frozen=True)
class Case:
    """One run of the launcher. Without a device it runs on either; `gpus` counts on cuda alone."""

    name: str
    about: str = ""
    device: Device | None = None
    gpus: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    def missing(self, machine: Machine) -> str:
        """What the machine lacks, in words; empty if it can run the case."""
        if self.device not in (None, machine.device):
            return f"needs {self.device}, this is {machine.device}"
        if machine.device == "cuda" and self.gpus > len(machine.gpus):
            return f"needs {self.gpus} GPUs, here are {len(machine.gpus)}"
        return ""

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment with this case's knobs, and no other ones of shape."""
        return {key: value for key, value in env.items() if key not in SHAPE_KNOBS} | self.env


def load(path: Path) -> list[Case]:
    """All cases of a file.

    Raises:
        SettingError: if the file is not of this form; names the case and what is allowed.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SettingError("--config", path, f"cannot be read: {error}") from error
    cases = found.get("cases") if isinstance(found, dict) else None
    if not isinstance(cases, list) or not cases:
        raise SettingError("--config", path, "must have a list `cases`")
    parsed = [_case(raw) for raw in cases]
    names = [case.name for case in parsed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingError("name", twice[0], "each case needs a name of its own")
    return parsed


def chosen(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Those that are named, in the file's order; all, if nothing is named.

    Raises:
        SettingError: for a name that no case has.
    """
    known = [case.name for case in cases]
    for name in names:
        if name not in known:
            raise SettingError("--only", name, f"allowed are {', '.join(known)}")
    return [case for case in cases if not names or case.name in names]


def _case(raw: Any) -> Case:
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        raise SettingError("cases", raw, "each case is a mapping with a name")
    name = raw["name"]
    _known(f"{name}: key", raw, KEYS)
    device, gpus, env = raw.get("device"), raw.get("gpus", 1), raw.get("env") or {}
    if device not in (None, *DEVICES):
        raise SettingError(f"{name}: device", device, f"allowed is {' or '.join(DEVICES)}")
    if not isinstance(gpus, int) or gpus < 1:
        raise SettingError(f"{name}: gpus", gpus, "allowed is a whole number from 1")
    if not isinstance(env, dict):
        raise SettingError(f"{name}: env", env, "allowed is a mapping of knobs to values")
    _known(f"{name}: env", env, SHAPE_KNOBS)
    texts = {key: str(value) for key, value in env.items()}
    return Case(name, str(raw.get("about", "")), device, gpus, texts)


def _known(what: str, found: Mapping[str, object], allowed: frozenset[str]) -> None:
    for key in found:
        if key not in allowed:
            raise SettingError(what, key, f"allowed are {', '.join(sorted(allowed))}")
