"""NIXL_KV_EXPECTED_SKIPS: a run fails if a test skips for a reason that is not on the list."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from support.skips import ENVIRONMENT, LIST, read_groups

TESTS: Final = LIST.parent
LISTED, UNLISTED = "needs promtool", "the moon is full"


def run(folder: Path, text: str, groups: str, *options: str) -> tuple[int, str]:
    """The exit status and the output of pytest for a file with this text."""
    (folder / "test_one.py").write_text(f"import pytest\n{text}\n", encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "support.skips", *options, folder],
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": "", ENVIRONMENT: groups},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(
    ("reason", "groups", "status"),
    [(LISTED, "runner", 0), (UNLISTED, "runner", 1), (UNLISTED, "", 0)],
)
def test_an_unlisted_reason_fails_a_run_of_ci(
    tmp_path: Path, reason: str, groups: str, status: int
) -> None:
    code, output = run(tmp_path, f"def test_a(): pytest.skip({reason!r})", groups)
    assert code == status, output
    assert (f"test_one.py::test_a: {reason}" in output) == bool(status)


def test_a_skipped_file_fails_a_run_in_several_processes(tmp_path: Path) -> None:
    text = f"pytest.skip({UNLISTED!r}, allow_module_level=True)"
    code, output = run(tmp_path, text, "runner", "-n", "2")
    assert code == 1, output
    assert f"test_one.py: {UNLISTED}" in output


def test_an_unknown_group_is_an_error() -> None:
    with pytest.raises(KeyError, match="no-such-group"):
        read_groups("runner no-such-group")


def test_each_listed_reason_is_a_pattern() -> None:
    groups = msgspec.yaml.decode(LIST.read_bytes(), type=dict[str, list[str]])
    assert all(re.compile(pattern) for patterns in groups.values() for pattern in patterns)
