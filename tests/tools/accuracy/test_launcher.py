"""The script itself: what it refuses before anything starts, and which interpreter it runs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cluster.models.files import REPO

LAUNCHER = REPO / "scripts/run_accuracy_test.sh"
TORCH = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
"""In the place of torch, which takes seconds: a machine without a GPU."""


def launch(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LAUNCHER, *arguments],
        env={**os.environ, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@pytest.fixture
def interpreter(tmp_path: Path) -> dict[str, str]:
    """This one, with a stub for torch."""
    stubs = write(tmp_path / "stubs" / "torch.py", TORCH).parent
    return {"NIXL_KV_PYTHON": sys.executable, "PYTHONPATH": str(stubs)}


def test_bad_knob_is_refused_before_anything_starts(
    tmp_path: Path, interpreter: dict[str, str]
) -> None:
    env = interpreter | {"NUM_PREFILL_INSTANCES": "0"}
    ended = launch("--log-dir", str(tmp_path / "logs"), cwd=tmp_path, **env)
    assert ended.returncode == 2
    assert ended.stderr.strip() == "NUM_PREFILL_INSTANCES=0: allowed is a whole number from 1 to 64"
    assert not (tmp_path / "logs").exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs PYTHONSAFEPATH")
def test_modules_do_not_come_from_where_it_is_started(
    tmp_path: Path, interpreter: dict[str, str]
) -> None:
    here = write(tmp_path / "checkout" / "httpx.py", "raise SystemExit('shadowed')\n").parent
    ended = launch(cwd=here, **interpreter, TOLERANCE="2")
    assert ended.returncode == 2, ended.stderr
    assert "TOLERANCE=2: allowed is a number from 0 up to 1" in ended.stderr


def test_interpreter_that_lacks_something_is_named_before_anything_starts(
    tmp_path: Path, interpreter: dict[str, str]
) -> None:
    stubs = Path(interpreter["PYTHONPATH"])
    write(stubs / "torch.py", TORCH + "import sys\nsys.modules['vllm_router'] = None\n")
    for name in ("vllm", "lm_eval"):
        write(stubs / name / "__init__.py", "")
    ended = launch(cwd=tmp_path, **interpreter)
    assert ended.returncode == 2, ended.stderr
    assert f"vllm_router: {sys.executable} lacks it" in ended.stderr


@pytest.fixture
def cpu_build_on_gpus(tmp_path: Path) -> dict[str, str]:
    """On a machine with a GPU; its Python only says what it would run."""
    venv = tmp_path / "venv"
    write(venv / "bin" / "python", '#!/bin/sh\necho "ran $*"\n', 0o755)
    sources = [(REPO / name).read_bytes() for name in ("pyproject.toml", "scripts/install")]
    digest = hashlib.sha256(b"".join(sources)).hexdigest()
    write(venv / ".nixl-kv-installed", f"cpu {digest}\n")
    smi = write(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA X'\n", 0o755)
    return {
        "PATH": f"{smi.parent}{os.pathsep}{os.environ['PATH']}",
        "NIXL_KV_PYTHON": "",
        "NIXL_KV_VENV": str(venv),
        "CUDA_VISIBLE_DEVICES": "0",
    }


def test_cpu_build_on_a_machine_with_gpus_is_refused(
    tmp_path: Path, cpu_build_on_gpus: dict[str, str]
) -> None:
    ended = launch(cwd=tmp_path, **cpu_build_on_gpus)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"scripts/install --cuda --venv {cpu_build_on_gpus['NIXL_KV_VENV']}" in ended.stderr
    assert "CUDA_VISIBLE_DEVICES=" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["--kv_buffer_device", "cpu"], {}),
        (["--single", "--kv_buffer_device=cpu"], {}),
        ([], {"CUDA_VISIBLE_DEVICES": ""}),
        (["--help"], {}),
    ],
    ids=["flag", "flag with =", "no device is visible", "help"],
)
def test_cpu_build_runs_where_the_cpu_is_asked_for(
    tmp_path: Path,
    cpu_build_on_gpus: dict[str, str],
    arguments: list[str],
    changed: dict[str, str],
) -> None:
    ended = launch(*arguments, cwd=tmp_path, **cpu_build_on_gpus | changed)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["ran", "-m", "lab.accuracy", *arguments]
