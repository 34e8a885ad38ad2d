"""Do prefill and decode apart give the answers of a single engine? Twenty prompts tell.

The exit status is 0 only if every answer is the same, token for token, and KV was moved.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pd.client import Answer, Client
from pd.cluster import Cluster, one_pair, say_on_stderr
from pd.engines import MODEL_NAME, Connector
from pd.measure import Measured, ask_and_measure
from pd.processes import ProcessDiedError
from pd.prompts import first_prompts, later_prompts, random_prompt
from pd.report import Runs, matches, print_table
from pd.tiny_model import ensure_tiny_model

ANSWER_TOKENS = 16
CONNECTORS: tuple[Connector, ...] = ("nixl-kv", "in-tree")
WATCH_S = 1.0


def ask_single(url: str) -> tuple[list[str], list[Answer]]:
    """The prompts, and the single engine's answers to them."""
    with Client(url) as single:
        prompts = first_prompts()
        answers = [single.complete(prompt, ANSWER_TOKENS) for prompt in prompts]
        later = later_prompts(prompts, [answer.text for answer in answers])
        answers += [single.complete(prompt, ANSWER_TOKENS) for prompt in later]
    return prompts + later, answers


def ask_pair(cluster: Cluster, prompts: Sequence[str], connector: Connector) -> list[Measured]:
    """The same prompts through the router, one after another."""
    with Client(cluster.router_url) as router, Client(cluster.decode[0].url) as decode:
        router.complete(random_prompt(20, seed=0))  # engines load code at their first request
        return [
            ask_and_measure(router, decode, prompt, connector=connector, max_tokens=ANSWER_TOKENS)
            for prompt in prompts
        ]


def compare(connectors: Sequence[Connector], log_dir: Path) -> bool:
    """Run all prompts with each connector and print the table; True if all is well."""
    model = ensure_tiny_model()
    prompts: list[str] = []
    reference: list[Answer] = []
    runs: dict[str, list[Measured]] = {}
    for connector in connectors:
        spec = one_pair(model, connector, single=not reference)
        with Cluster(spec, log_dir=log_dir / connector) as cluster:
            if cluster.single:
                say_on_stderr("asking the single engine")
                prompts, reference = ask_single(cluster.single.url)
                cluster.single.stop()
            say_on_stderr(f"asking through the router ({connector})")
            runs[connector] = ask_pair(cluster, prompts, connector)
    print_table(reference, runs)
    return report_verdict(reference, runs)


def report_verdict(reference: Sequence[Answer], runs: Runs) -> bool:
    """Print what is wrong, and as the last line how many answers match."""
    moved = True
    for name, run in runs.items():
        if not any(measured.moved.tokens and measured.moved.nbytes for measured in run):
            moved = False
            print(f"{name}: nothing was moved; the decode engine computed every prompt itself")
    same = sum(matches(reference, run) for run in runs.values())
    total = len(reference) * len(runs)
    print(f"{same}/{total} answers match")
    return moved and same == total


def serve(connector: Connector, log_dir: Path) -> None:
    """Leave prefill, decode and router running until Ctrl-C."""
    with Cluster(one_pair(ensure_tiny_model(), connector), log_dir=log_dir) as cluster:
        body = f'{{"model": "{MODEL_NAME}", "prompt": "{random_prompt(6, seed=0)}"}}'
        print(f"curl {cluster.router_url}/v1/completions \\")
        print(f"  -H 'Content-Type: application/json' -d '{body}'")
        print("Ctrl-C ends it.", flush=True)
        while True:
            cluster.check_alive()
            time.sleep(WATCH_S)


def parse_arguments() -> argparse.Namespace:
    """The command line; `connectors` are those chosen."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--connector", choices=[*CONNECTORS, "both"], default="nixl-kv")
    parser.add_argument("--serve", action="store_true", help="start all and leave it running")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    options = parser.parse_args()
    if options.serve and options.connector == "both":
        parser.error("--serve runs one connector")
    options.connectors = CONNECTORS if options.connector == "both" else (options.connector,)
    return options


def main() -> int:
    """Run; the exit status."""
    options = parse_arguments()
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="nixl-kv-demo-"))
    try:
        if options.serve:
            serve(options.connector, log_dir)
        return 0 if compare(options.connectors, log_dir) else 1
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
