"""What is around the launcher (proxies, folders, an environment of its own) changes no result."""

import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pd.accuracy_eval import environment
from pd.accuracy_models import Subject
from pd.engines import apart, past_proxies
from pd.processes import ManagedProcess, Ports
from pd.router import Router

REPO = Path(__file__).resolve().parents[2]
SUBJECT = Subject("m", "/models/m", "recall", 1.0, 0.02)
TORCH = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")
ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10).close()"


@pytest.mark.parametrize(
    ("env", "hosts"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "", "NO_PROXY": "a.b"}, "a.b,127.0.0.1,localhost"),
        ({"no_proxy": "a.b, .c", "NO_PROXY": "d"}, "a.b,.c,d,127.0.0.1,localhost"),
        ({"no_proxy": "localhost"}, "localhost,127.0.0.1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_our_engines_come_on_top_of_what_is_exempt(env: Mapping[str, str], hosts: str) -> None:
    assert past_proxies(env) == {"no_proxy": hosts, "NO_PROXY": hosts}


@pytest.fixture
def server() -> Iterator[str]:
    serving = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/"
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_lm_eval_and_the_router_ask_past_a_proxy(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    given: list[Mapping[str, str]] = [environment(SUBJECT)]
    monkeypatch.setattr(ManagedProcess, "launch", lambda _, *launched: given.append(launched[1]))
    Router([], [], log_dir=tmp_path, ports=Ports()).start()
    assert len(given) == 2
    for env in given:
        assert "example.org" in env["no_proxy"]
        subprocess.run([sys.executable, "-c", ASK, server], env=dict(env), check=True)
    without = subprocess.run([sys.executable, "-c", ASK, server], capture_output=True, check=False)
    assert without.returncode == 1  # else the above would say nothing


def test_only_an_old_python_runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as old:
        old.setattr(sys, "version_info", (3, 10, 12))
        found = apart(tmp_path)
    assert found == tmp_path
    with monkeypatch.context() as new:
        new.setattr(sys, "version_info", (3, 11, 0))
        found = apart(tmp_path)
    assert found is None


def run(script: str, *arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(REPO / "scripts" / script), *arguments],
        env={**os.environ, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs PYTHONSAFEPATH")
@pytest.mark.parametrize("script", ["run_accuracy_test.sh", "sweep"])
def test_modules_do_not_come_from_where_it_is_started(tmp_path: Path, script: str) -> None:
    stubs = write(tmp_path / "stubs" / "torch.py", TORCH).parent
    here = write(tmp_path / "checkout" / "httpx.py", "raise SystemExit('shadowed')\n").parent
    env = {"NIXL_KV_PYTHON": sys.executable, "PYTHONPATH": str(stubs), "TOLERANCE": "2"}
    ended = run(script, cwd=here, **env)
    assert ended.returncode == 2, ended.stderr
    assert "TOLERANCE=2: allowed is a number from 0 up to 1" in ended.stderr


def test_an_interpreter_that_lacks_something_is_named_before_anything_starts(
    tmp_path: Path,
) -> None:
    hidden = "import sys\nsys.modules['vllm_router'] = None\n"
    stubs = write(tmp_path / "stubs" / "torch.py", TORCH + hidden).parent
    for name in ("vllm", "lm_eval"):
        write(stubs / name / "__init__.py", "")
    env = {"NIXL_KV_PYTHON": sys.executable, "PYTHONPATH": str(stubs)}
    ended = run("run_accuracy_test.sh", cwd=tmp_path, **env)
    assert ended.returncode == 2, ended.stderr
    assert f"vllm_router: {sys.executable} lacks it" in ended.stderr


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Up to date, of the CPU build; its Python only says what it is asked to run."""
    folder = tmp_path / "venv"
    write(folder / "bin" / "python", '#!/bin/sh\necho "ran $*"\n', 0o755)
    sources = [(REPO / name).read_bytes() for name in ("pyproject.toml", "scripts/install")]
    sum_of_both = hashlib.sha256(b"".join(sources)).hexdigest()
    write(folder / ".nixl-kv-installed", f"cpu {sum_of_both}\n")
    return folder


def on_gpus(folder: Path) -> dict[str, str]:
    """The environment of a machine with one."""
    smi = write(folder / "bin" / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA X'\n", 0o755)
    env = {"PATH": f"{smi.parent}{os.pathsep}{os.environ['PATH']}", "NIXL_KV_PYTHON": ""}
    return env | {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("script", ["run_accuracy_test.sh", "sweep"])
def test_gpus_and_the_cpu_build_do_not_go_together(tmp_path: Path, venv: Path, script: str) -> None:
    env = on_gpus(tmp_path) | {"NIXL_KV_VENV": str(venv)}
    ended = run(script, cwd=tmp_path, **env)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"scripts/install --cuda --venv {venv}" in ended.stderr
    assert "CUDA_VISIBLE_DEVICES=" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["--kv_buffer_device", "cpu"], {}),
        (["--single", "--kv_buffer_device=cpu"], {}),
        ([], {"CUDA_VISIBLE_DEVICES": ""}),
        (["--help"], {}),
    ],
)
def test_who_asks_for_the_cpu_gets_it(
    tmp_path: Path, venv: Path, arguments: list[str], changed: dict[str, str]
) -> None:
    env = on_gpus(tmp_path) | {"NIXL_KV_VENV": str(venv)} | changed
    ended = run("run_accuracy_test.sh", *arguments, cwd=tmp_path, **env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["ran", "-m", "pd.accuracy", *arguments]
