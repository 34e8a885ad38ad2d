"""How long does the first token take: through the router, and on a single engine?

Prompts that no engine has seen, one at a time.
"""

import argparse
import statistics
from typing import Final

from lab.bench import engines
from lab.cluster.client import Client
from lab.cluster.cluster import Cluster
from lab.cluster.engines import EngineSpec
from lab.cluster.models.files import ensure_tiny_model
from lab.cluster.prompts import random_prompt
from lab.results import Figures, Results

REQUESTS: Final = 20
PROMPT_TOKENS: Final = 300


def run(options: argparse.Namespace) -> int:
    """A row for a single engine, and one for each connector."""
    model = ensure_tiny_model()
    title = f"time to first token, {REQUESTS} prompts of {PROMPT_TOKENS} tokens"
    results = Results(title, "ways to ask are measured", options.json)
    with Cluster(options.log_dir, warm=False) as cluster:
        (single,) = cluster.start(EngineSpec("single", model))
        results.add(measure("single", single.url))
        cluster.end(single)
        for connector in options.connector:
            with engines.running_pair(cluster, model, connector) as router:
                results.add(measure(connector, router.url))
    return results.print(1 + len(options.connector))


def measure(name: str, url: str) -> Figures:
    """Prompts differ from their first word on; a warm-up request goes first."""
    prompts = [random_prompt(PROMPT_TOKENS, seed) for seed in range(REQUESTS + 1)]
    with Client(url) as client:
        ms = [client.time_to_first_token(prompt) * 1e3 for prompt in prompts][1:]
    return Figures(
        {"engines": name, "min ms": min(ms), "median ms": statistics.median(ms), "max ms": max(ms)}
    )
