"""Pairs of engines behind a router whose cost is measured: the same for each connector."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from lab.cluster.cluster import Cluster, pair_specs
from lab.cluster.engines import Connector
from lab.cluster.router import Router
from lab.suites.demo import CONNECTORS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which connectors."""
    parser.add_argument("--connector", nargs="+", choices=CONNECTORS, default=["nixl-kv"])
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")


@contextlib.contextmanager
def running_pair(cluster: Cluster, model: Path, connector: Connector) -> Iterator[Router]:
    """Prefill and decode on all cores, without digests, which the one inside vLLM does not have."""
    config = {"verify": "off"} if connector == "nixl-kv" else {}
    specs = pair_specs(
        model, connector, suffix=f"-{connector}", cores=frozenset(), connector_config=config
    )
    prefill, decode = cluster.start(*specs)
    try:
        yield cluster.route([prefill], [decode])
    finally:
        cluster.end(prefill, decode)
