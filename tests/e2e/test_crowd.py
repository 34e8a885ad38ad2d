"""Engines that hold what others wait for: some of suites.crowd, with fewer prompts."""

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.models.files import ensure_tiny_model
from suites.crowd import Scene, draw, mutual, paused, starved

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("scene", "num_prompts"),
    [
        pytest.param(mutual, 16, id="two engines prefill for each other"),
        pytest.param(paused, 2, id="decode is paused", marks=pytest.mark.slow),
        pytest.param(starved, 6, id="too few cores", marks=pytest.mark.slow),
    ],
)
def test_every_request_ends_right(
    cluster: Cluster, single: Client, scene: Scene, num_prompts: int
) -> None:
    questions = draw(single, num_prompts)
    outcome = scene(cluster, ensure_tiny_model(), "nixl-kv", questions)
    assert outcome.verdict.words == "ok"
    assert outcome.loads + outcome.recomputed >= num_prompts
