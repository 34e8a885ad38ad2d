"""This checkout of nixl_kv, and another one to compare with."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

REPO: Final = Path(__file__).resolve().parents[3]
OURS: Final = "this one"
AGAINST: Final = "against"


def checkout(text: str) -> Path:
    """A folder from which Python can import nixl_kv.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    path = Path(text).resolve()
    if not (path / "nixl_kv" / "connector").is_dir():
        raise argparse.ArgumentTypeError(f"{path} has no nixl_kv/connector")
    return path


def environment_of(path: Path) -> dict[str, str]:
    """Variables of processes that import nixl_kv, and `lab` if it is there, from this checkout.

    Raises:
        RuntimeError: if they do not.
    """
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(path), str(path / "scripts"), *([inherited] if inherited else [])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "import nixl_kv; print(nixl_kv.__file__)"]
    imported = subprocess.check_output(command, env=os.environ | env, cwd="/", text=True).strip()
    if not Path(imported).is_relative_to(path):
        raise RuntimeError(f"nixl_kv is imported from {imported}, not from {path}")
    return env
