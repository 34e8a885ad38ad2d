"""Engines on several hosts, which are network namespaces: all of suites.nodes."""

import os
import shutil

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from lab.results import Results
from suites.nodes import NUM_SCENES, run_all

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root, and `ip` of iproute2",
    ),
]


def test_kv_moves_between_hosts_unless_a_link_is_cut(cluster: Cluster, single: Client) -> None:
    results = Results("", "scenes are as they should be")
    run_all(cluster, single, results)
    assert [str(outcome.verdict) for outcome in results.all] == ["ok"] * NUM_SCENES
