"""A process that forks others: each is what a command line would have made of it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster.engines import EngineSpec
from harness.cluster.processes import ManagedProcess, ProcessDiedError
from harness.cluster.waiting import wait_until
from harness.cluster.warm import Launch, WarmServer

PATIENCE_S = 60
MAIN = """\
import os, sys, time
def main():
    print(sys.argv[1:], os.environ["COLOUR"], os.getcwd(), flush=True)
    print("HOME" in os.environ, sorted(os.sched_getaffinity(0)), flush=True)
    if sys.argv[1:] == ["sleep"]:
        time.sleep(300)
    sys.exit(3)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmServer]:
    """It imports a module of this test instead of vLLM."""
    (tmp_path / "warm_main.py").write_text(MAIN, encoding="utf-8")
    script = tmp_path / "serve.py"
    script.write_text(
        "from harness.cluster import warm\n"
        "warm.MAIN, warm.PRELOADED = 'warm_main', ()\n"
        "warm.preload = lambda: None\n"
        "warm.main()\n",
        encoding="utf-8",
    )
    server = WarmServer("warm", tmp_path)
    launch = server.launch

    def launch_script(command: list[str], *arguments: object, **named: object) -> None:
        launch([sys.executable, str(script), command[-1]], *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(server, "launch", launch_script)
    server.start({**os.environ, "PYTHONPATH": str(tmp_path)}, Path(sys.executable))
    yield server
    server.close()


def launch_of(folder: Path, *arguments: str) -> Launch:
    core = min(os.sched_getaffinity(0))
    log_path = str(folder / "engine.log")
    return Launch(arguments, {"COLOUR": "blue"}, log_path, str(folder), (core,))


def test_a_forked_process_has_its_own_arguments_environment_folder_log_and_cores(
    server: WarmServer, tmp_path: Path
) -> None:
    forked = server.fork(launch_of(tmp_path, "a", "b"))
    assert forked.wait() == 3
    core = min(os.sched_getaffinity(0))
    log = (tmp_path / "engine.log").read_text(encoding="utf-8").splitlines()
    assert log == [f"['a', 'b'] blue {tmp_path}", f"False [{core}]"]


def test_engines_outlive_the_server_and_lead_sessions_that_can_be_killed(
    server: WarmServer, tmp_path: Path
) -> None:
    process = ManagedProcess("engine", tmp_path / "engine.log")
    process.adopt(server.fork(launch_of(tmp_path, "sleep")))
    assert wait_until(lambda: "blue" in process.log_text(), PATIENCE_S)
    assert [member.pid for member in process.members()] == [process.pid]
    server.kill()
    assert process.is_running()
    with pytest.raises(ProcessDiedError, match="warm has ended"):
        server.fork(launch_of(tmp_path))
    process.kill()
    assert not process.is_running()


def test_engines_share_a_server_unless_they_import_differently(tmp_path: Path) -> None:
    spec = EngineSpec("a", tmp_path)
    assert spec.imports() == EngineSpec("b", tmp_path, extra_env={"UCX_TLS": "tcp"}).imports()
    for other in (
        EngineSpec("a", tmp_path, extra_env={"HF_HUB_OFFLINE": "0"}),
        EngineSpec("a", tmp_path, python=tmp_path / "python"),
    ):
        assert other.imports() != spec.imports()
