"""scripts/contract, with breaks planted in the installed vLLM. scripts/check runs it without."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
PLANTED = {
    "a hook's parameter has another name": (
        BASE,
        "num_computed_tokens: int,\n    ) -> tuple[int | None, bool]:",
        "num_computed: int,\n    ) -> tuple[int | None, bool]:",
        '"def get_num_new_matched_tokens(self, request: Request, num_computed: int',
    ),
    "a hook is gone": (
        BASE,
        "def build_connector_worker_meta(",
        "def build_worker_meta(",
        'has no attribute "build_connector_worker_meta"',
    ),
    "a platform lacks a method": (
        "platforms/interface.py",
        "def is_cuda_alike(",
        "def is_gpu(",
        '"type[Platform]" has no attribute "is_cuda_alike"',
    ),
}


def contract(*releases: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, REPO / "scripts" / "contract", *releases],
        env={**os.environ, "NIXL_KV_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_planted_breaks_are_found(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM: scripts/install")
    release = tmp_path / "planted"

    shutil.copytree(
        Path(spec.origin).parent, release / "vllm", ignore=shutil.ignore_patterns("*.so", "*.pyc")
    )
    for path, old, new, _ in PLANTED.values():
        file = release / "vllm" / path
        text = file.read_text(encoding="utf-8")
        assert text.count(old) >= 1, old
        file.write_text(text.replace(old, new), encoding="utf-8")
    done = contract(release)
    assert done.returncode == 1, done.stderr
    missed = [name for name, (*_, message) in PLANTED.items() if message not in done.stdout]
    assert missed == [], done.stdout
