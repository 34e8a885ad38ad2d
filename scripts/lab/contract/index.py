"""Fetches a published wheel with pip, so from where this machine's pip is told to look."""

import subprocess
import sys
from pathlib import Path
from typing import Final

NOTHING_FOUND: Final = "(from versions: none)"
SOMETHING_FOUND: Final = "(from versions: "


class NoWheelError(Exception):
    """There is no such wheel for this machine."""


class IndexUnreachableError(NoWheelError):
    """The index was not there, or knows nothing of the package."""


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Download one wheel, such as of 'vllm==0.33.0', without what it requires.

    Raises:
        IndexUnreachableError: if the index does not answer.
        NoWheelError: if it does, and has no such wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if NOTHING_FOUND not in ended.stderr and SOMETHING_FOUND in ended.stderr:
        raise NoWheelError(f"the package index has no wheel of {requirement} for this machine")
    raise IndexUnreachableError(f"no package index gave {requirement}: {ended.stderr[-1000:]}")
