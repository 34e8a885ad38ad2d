"""Measure one prefill/decode pair on this machine.

ttft: time to the first token of prompts that no engine has seen, through the router and on a
single engine. idle: CPU time of the pair's processes when nothing runs and nothing is held.
transfer: how fast KV moves, and how much longer a first token takes (bench transfer --help).
link: how fast NIXL reads between two processes, by UCX options (bench link --help).
plan: how planning and a request's indices grow (bench plan --help).
"""

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pd import digest_bench, link, plan_bench, transfer
from pd.client import Client
from pd.cluster import Cluster, ClusterSpec, one_pair, say_on_stderr
from pd.demo import CONNECTORS
from pd.engines import Connector, EngineSpec
from pd.idle import IDLE_S, measure_idle
from pd.processes import ProcessDiedError
from pd.prompts import random_prompt
from pd.tiny_model import ensure_tiny_model

REQUESTS = 20
PROMPT_TOKENS = 300


def pair(model: Path, connector: Connector) -> ClusterSpec:
    """Without digests, which the connector inside vLLM does not have."""
    config = {"verify": "off"} if connector == "nixl-kv" else {}
    return one_pair(model, connector, config=config)


def bench_ttft(connectors: Sequence[Connector], log_dir: Path) -> None:
    """Print a line for a single engine, and one for each connector."""
    model = ensure_tiny_model()
    single = ClusterSpec(single=one_pair(model, connectors[0], single=True).single)
    print(f"time to first token, ms, {REQUESTS} prompts of {PROMPT_TOKENS} tokens")
    print(f"{'':10}{'min':>10}{'median':>10}{'max':>10}")
    with Cluster(single, log_dir=log_dir / "single") as cluster:
        print_row("single", times_to_first_token(cluster.engines[0].url))
    for connector in connectors:
        with Cluster(pair(model, connector), log_dir=log_dir / connector) as cluster:
            print_row(connector, times_to_first_token(cluster.router_url))


def times_to_first_token(url: str) -> list[float]:
    """Seconds, for prompts that differ from their first word on; a warm-up request goes first."""
    prompts = [random_prompt(PROMPT_TOKENS, seed) for seed in range(REQUESTS + 1)]
    with Client(url) as client:
        return [client.time_to_first_token(prompt) for prompt in prompts][1:]


def print_row(name: str, seconds: Sequence[float]) -> None:
    """One row of milliseconds."""
    figures = (min(seconds), statistics.median(seconds), max(seconds))
    cells = "".join(f"{figure * 1e3:10.1f}" for figure in figures)
    print(f"{name:10}{cells}", flush=True)


def bench_idle(connectors: Sequence[Connector], log_dir: Path) -> None:
    """Print what two idle engines cost without a connector, and with each."""
    model = ensure_tiny_model()
    engines = [EngineSpec(f"plain-{number}", model, dtype="float32") for number in (1, 2)]
    print(f"CPU time of two idle engines over {IDLE_S:.0f} s, percent of one core")
    with Cluster(ClusterSpec(prefill=engines), log_dir=log_dir / "none") as cluster:
        base = measure_idle(cluster, [engine.url for engine in cluster.engines])
    print(f"{'none':10}{base:10.1f}", flush=True)
    for connector in connectors:
        with Cluster(pair(model, connector), log_dir=log_dir / connector) as cluster:
            share = measure_idle(cluster, [cluster.router_url])
        print(f"{connector:10}{share:10.1f}{share - base:+10.1f}", flush=True)


def main() -> int:
    """Run what the first argument names; the exit status."""
    others = {
        "transfer": transfer.main,
        "link": link.main,
        "plan": plan_bench.main,
        "digest": digest_bench.main,
    }
    if len(sys.argv) > 1 and sys.argv[1] in others:
        return others[sys.argv[1]](sys.argv[2:])
    return main_pair()


def main_pair() -> int:
    """Parse the command line of ttft and idle, and run."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["ttft", "idle"])
    parser.add_argument("--connector", choices=[*CONNECTORS, "both"], default="nixl-kv")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    options = parser.parse_args()
    chosen = CONNECTORS if options.connector == "both" else (options.connector,)
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-bench-"))
    say_on_stderr(f"logs in {log_dir}")
    try:
        (bench_ttft if options.what == "ttft" else bench_idle)(chosen, log_dir)
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
