"""The kernel by itself, run by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest

from lab.bench.record import REPO

pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_gather_runs_its_kernel() -> None:
    """The interpreter is asked for when a kernel is defined."""
    command = [sys.executable, "-m", "lab.bench", "gather", "--device", "cpu", "--shape", "tiny"]
    command += ["--tokens", "32", "--orders", "LBHNC", "--blocks", "16-32"]
    command += ["--programs", "1", "3", "--repeat", "2"]
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{REPO}:{REPO}/scripts:{REPO}/tests",
    }
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "2/2 rows are good" in ended.stdout
