"""Measure the CPU time of two idle engines, in percent of one core, with and without a connector.

They have answered a few requests before, and hold nothing for anybody.
"""

import argparse
from collections.abc import Iterator

from harness.cluster.idle import measure_idle
from lab.bench import engines
from lab.results import Figures


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and their connectors."""
    engines.add_options(parser)
    engines.add_connectors(parser)


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """A row for each connector."""
    with engines.cluster_of(options) as cluster:
        for name in options.connector:
            if name == "none":
                specs = [engines.plain_engine(options, f"plain-{number}") for number in (1, 2)]
            else:
                specs = engines.pair_of(name, options)
            started = cluster.start(*specs)
            urls = [engine.url for engine in started]
            if name != "none":
                urls = [cluster.route(started[:1], started[1:]).url]
            yield Figures({"connector": name, "CPU %": measure_idle(started, urls)})
            cluster.end(*started)
