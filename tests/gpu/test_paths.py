"""Each path between two processes on one GPU: the bytes are right, also as prefill's digest says.

python -m pytest -s -m gpu tests/gpu/test_paths.py
"""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

from benchmarks import __main__ as bench  # noqa: E402
from support.gpus import needs_gpus  # noqa: E402

pytestmark = needs_gpus(1)


@pytest.mark.parametrize("path", ["gather", "staged", "direct"])
def test_the_right_bytes_arrive(path: str, tmp_path: Path) -> None:
    """The program compares them, and ends well only if all are right and all loads verified."""
    figures = tmp_path / "figures.json"
    command = ["transfer", "--device", "cuda", "--shape", "tiny", "--tokens", "512", "--verify"]
    command += ["--paths", path, "--repeat", "2", "--tp", "1-1", "2-1", "1-2"]
    command += ["--orders", "BHLNC", "LBHNC", "--blocks", "16-16", "16-64", "64-16"]
    assert bench.main(["--record", str(figures), *command]) == 0
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 3 * 2 * 3 * 2
