"""A cluster keeps engines by their specs, bounds how many run, and ends them all."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster import cluster as cluster_module
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Engine, EngineSpec, halves
from harness.cluster.processes import ProcessDiedError
from harness.cluster.waiting import wait_until

PATIENCE_S = 60
SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
FAIL = [sys.executable, "-c", "raise ValueError('no such model')"]


class SleepingEngine(Engine):
    """A process that does nothing, in the place of vLLM; a model named `broken` ends at once."""

    def start(self) -> None:
        self.launch(FAIL if self.spec.model.name == "broken" else SLEEP, os.environ)

    def is_ready(self) -> bool:
        self.check_alive()
        return self.spec.model.name != "broken"


def spec_of(name: str, *, ranks: int = 1, model: str = "model") -> EngineSpec:
    return EngineSpec(name, Path(model), tensor_parallel=ranks)


Make = Callable[..., Cluster]


@pytest.fixture
def make_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(cluster_module, "Engine", SleepingEngine)
    clusters: list[Cluster] = []

    def make(most_ranks: int | None = None) -> Cluster:
        cluster = Cluster(tmp_path, most_ranks=most_ranks, say=lambda _: None)
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.stop()
        assert not [engine for engine in cluster.engines if engine.is_running()]


def running(cluster: Cluster) -> set[str]:
    return {engine.name for engine in cluster.engines if engine.is_running()}


def test_equal_specs_are_the_same_engine(make_cluster: Make) -> None:
    cluster = make_cluster()
    one, other = cluster.start(spec_of("a"), spec_of("b"))
    assert cluster.start(spec_of("b"), spec_of("a")) == [other, one]
    assert one is not other
    (another,) = cluster.start(replace(spec_of("a"), block_size=64))
    assert another is not one


def test_an_engine_that_ended_is_started_again_on_its_ports(make_cluster: Make) -> None:
    cluster = make_cluster()
    (engine,) = cluster.start(spec_of("a"))
    pid, port = engine.pid, engine.port
    engine.kill()
    assert cluster.start(spec_of("a")) == [engine]
    assert engine.is_running()
    assert (engine.pid != pid, engine.port) == (True, port)


def test_engines_end_that_nobody_has_asked_for_the_longest(make_cluster: Make) -> None:
    cluster = make_cluster(most_ranks=3)
    cluster.start(spec_of("a"), spec_of("b"), spec_of("c"))
    cluster.start(spec_of("a"))
    cluster.start(spec_of("d"))
    assert running(cluster) == {"a", "c", "d"}
    cluster.start(spec_of("e", ranks=2))
    assert running(cluster) == {"d", "e"}


def test_what_is_asked_for_runs_even_above_the_limit(make_cluster: Make) -> None:
    cluster = make_cluster(most_ranks=2)
    cluster.start(spec_of("a"), spec_of("b", ranks=4))
    assert running(cluster) == {"a", "b"}


def test_what_does_not_start_is_said_once_the_others_are_up_and_not_tried_again(
    make_cluster: Make,
) -> None:
    cluster = make_cluster()
    broken = spec_of("broken", model="broken")
    with pytest.raises(ProcessDiedError, match="broken did not start: ValueError: no such model"):
        cluster.start(broken, spec_of("a"))
    assert running(cluster) == {"a"}
    with pytest.raises(ProcessDiedError, match="broken did not start: ValueError: no such model"):
        cluster.start(broken)
    assert cluster.engines[-1].spec == broken
    assert cluster.engines[-1].log_text().count("ValueError") == 1


def test_an_interrupted_start_leaves_nothing(
    make_cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    monkeypatch.setattr(SleepingEngine, "is_ready", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.start(spec_of("a"), spec_of("b"))
    assert running(cluster) == set()


def _interrupt(_: Engine) -> bool:
    raise KeyboardInterrupt


def test_a_suspended_engine_goes_on_when_it_is_resumed(make_cluster: Make) -> None:
    (engine,) = make_cluster().start(spec_of("a"))
    (process,) = engine.members()
    engine.suspend()
    assert wait_until(lambda: process.status() == "stopped", PATIENCE_S)
    engine.resume()
    assert wait_until(lambda: process.status() != "stopped", PATIENCE_S)


def test_a_suspended_engine_can_be_ended(make_cluster: Make) -> None:
    (engine,) = make_cluster().start(spec_of("a"))
    engine.suspend()
    engine.kill()
    assert engine.exit_code() == -signal.SIGKILL


def test_a_pair_runs_on_different_halves_of_the_cores() -> None:
    prefill, decode = pair_specs(Path("model"), suffix="-x", num_blocks=9)
    assert (prefill.name, decode.name) == ("prefill-x", "decode-x")
    assert (prefill.num_blocks, decode.num_blocks) == (9, 9)
    assert prefill.cores | decode.cores == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("cores", "parts"),
    [
        pytest.param({0, 1}, ({0}, {1}), id="two"),
        pytest.param({4, 2, 3}, ({2, 4}, {3}), id="three"),
        pytest.param({5}, ({5}, {5}), id="one"),
    ],
)
def test_cores_in_halves(cores: set[int], parts: tuple[set[int], set[int]]) -> None:
    assert halves(cores) == parts


def test_a_role_needs_a_connector() -> None:
    with pytest.raises(ValueError, match="a: role 'prefill' with connector 'none'"):
        EngineSpec("a", Path("model"), "prefill")
