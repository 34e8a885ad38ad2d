"""Fetches a published wheel with pip, so from where this machine's pip is told to look."""

import subprocess
import sys
from pathlib import Path


class IndexUnreachableError(Exception):
    """The package index gave no wheel; says what pip said."""


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Download one wheel, such as of 'vllm==0.33.0', without what it requires.

    Raises:
        IndexUnreachableError: if there is none to be had.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode != 0 or len(wheels) != 1:
        lines = ended.stderr.strip().splitlines() or ["pip said nothing"]
        raise IndexUnreachableError(f"no wheel of {requirement}: {lines[-1]}")
    return wheels[0]
