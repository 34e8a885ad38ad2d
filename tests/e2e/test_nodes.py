"""Engines on several hosts, which are network namespaces: all of lab.suites.nodes."""

import os
import shutil

import pytest

from lab.cluster.client import Client
from lab.cluster.cluster import Cluster
from lab.results import Results
from lab.suites.nodes import NUM_SCENES, run_all

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
