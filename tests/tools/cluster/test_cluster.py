"""A cluster names an engine that does not start, and ends them all."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.cluster import cluster as cluster_module
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.processes import ManagedProcess, ProcessDiedError, stop_all
from harness.cluster.waiting import wait_until

PATIENCE_S = 60
SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
FAIL = [sys.executable, "-c", "raise ValueError('no such model')"]
STUBBORN = (
    "setsid sleep 300 & trap '' TERM; echo $! > new; mv new child; while :; do sleep 0.05; done"
)


class SleepingEngine(Engine):
    """A process that does nothing instead of vLLM; a model named `broken` ends at once."""

    def start(self) -> None:
        self.launch(FAIL if self.spec.model.name == "broken" else SLEEP, os.environ)

    def is_ready(self) -> bool:
        self.check_alive()
        return self.spec.model.name != "broken"


def spec_of(name: str, *, model: str = "model") -> EngineSpec:
    return EngineSpec(name, Path(model))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(cluster_module, "Engine", SleepingEngine)
    cluster = Cluster(tmp_path, most_ranks=3)
    yield cluster
    cluster.stop()
    assert running(cluster) == set()


def running(cluster: Cluster) -> set[str]:
    return {engine.name for engine in cluster.engines if engine.is_running()}


def test_an_engine_that_does_not_start_is_named_once_the_others_are_up(cluster: Cluster) -> None:
    with pytest.raises(ProcessDiedError, match="broken did not start: ValueError: no such model"):
        cluster.start(spec_of("broken", model="broken"), spec_of("a"))
    assert running(cluster) == {"a"}


def test_a_process_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    process = ManagedProcess("stubborn", tmp_path / "log")
    process.launch(["bash", "-c", STUBBORN], os.environ, tmp_path)
    assert wait_until((tmp_path / "child").exists, PATIENCE_S)
    child = psutil.Process(int((tmp_path / "child").read_text()))
    stop_all([process], grace_s=0.1)
    assert process.exit_code() == -signal.SIGKILL
    assert wait_until(lambda: not child.is_running(), PATIENCE_S)
