"""KV moves on real platforms, each in an environment of its own: see suites.platforms."""

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from suites.platforms import dynamo, ray_serve, router
from suites.platforms.__main__ import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(
    ("run", "ways"),
    [
        pytest.param(router.run, len(router.WAYS), id="vllm-router"),
        pytest.param(ray_serve.run, 1, id="Ray Serve LLM"),
        pytest.param(dynamo.run, 1, id="Dynamo"),
    ],
)
def test_all_kv_moves_through_every_engine_and_answers_are_right(
    cluster: Cluster, single: Client, run: Run, ways: int
) -> None:
    outcomes = list(run(cluster, single))
    assert [str(outcome.verdict) for outcome in outcomes] == ["ok"] * ways
