"""How much CPU do two engines use that have nothing to do: without a connector, and with each?

After a few requests, when nothing is held any more.
"""

import argparse

from lab.bench import engines
from lab.cluster.cluster import Cluster
from lab.cluster.engines import EngineSpec
from lab.cluster.idle import IDLE_S, measure_idle
from lab.cluster.models.files import ensure_tiny_model
from lab.results import Figures, Results


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which connectors."""
    engines.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """A row without a connector, and one for each."""
    model = ensure_tiny_model()
    title = f"CPU time of two idle engines over {IDLE_S:.0f} s, percent of one core"
    results = Results(title, "pairs of engines are measured", options.json)
    with Cluster(options.log_dir, warm=False) as cluster:
        plain = cluster.start(*(EngineSpec(f"plain-{number}", model) for number in (1, 2)))
        base = measure_idle(plain, [engine.url for engine in plain])
        results.add(Figures({"connector": "none", "CPU %": base, "more than none": 0.0}))
        cluster.end(*plain)
        for connector in options.connector:
            with engines.running_pair(cluster, model, connector) as router:
                percent = measure_idle([*router.prefill, *router.decode], [router.url])
            figures = {"connector": connector, "CPU %": percent, "more than none": percent - base}
            results.add(Figures(figures))
    return results.print(1 + len(options.connector))
