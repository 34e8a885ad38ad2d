"""A rolling upgrade of four engines under load: see suites.upgrade."""

from pathlib import Path

import pytest

from harness.cluster.cluster import Cluster
from harness.cluster.models.files import ensure_tiny_model
from suites.upgrade import upgrade
from support.other_version import copy_package

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("crosses", [False, True], ids=["one wire version", "two wire versions"])
def test_no_request_is_lost_while_each_engine_is_drained_and_restarted(
    tmp_path: Path, *, crosses: bool
) -> None:
    to = copy_package(tmp_path) if crosses else None
    with Cluster(tmp_path / "logs") as cluster:
        outcome = upgrade(cluster, ensure_tiny_model(), to)
    assert outcome.verdict.words == "ok"
    computed = int(outcome.figures["computed on decode"])
    assert computed > 0 if crosses else computed == 0
