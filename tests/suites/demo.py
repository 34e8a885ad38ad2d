"""Do prefill and decode apart give the answers of a single engine? Twenty prompts tell.

The exit status is 0 only if every answer is the same, token for token, and KV was moved. With
--family the model is another one; in bfloat16 an answer may part from the single engine's where two
tokens are as good as equally likely.
"""

import argparse
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.cluster.answers import Question
from harness.cluster.client import Answer, Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import CPU_DTYPE, MODEL_NAME, Connector, EngineSpec
from harness.cluster.metrics import LOADED_METRICS, CountersSince, Loaded
from harness.cluster.models import FAMILIES
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.models.qwen3 import TinyModel
from harness.cluster.pair import Pair
from harness.cluster.processes import ProcessDiedError
from harness.cluster.prompts import first_prompts, later_prompts, random_prompt
from lab.results import print_table, say_on_stderr

ANSWER_TOKENS: Final = 16
CONNECTORS: Final[tuple[Connector, ...]] = ("nixl-kv", "in-tree")
WATCH_S: Final = 1.0
LAG_S: Final = 1.0
"""How long decode's counters may lag an answer; a prompt that it knows moves nothing."""
MIB: Final = 2**20


@dataclass(frozen=True)
class Measured:
    """An answer through the router, and what was moved for it."""

    answer: Answer
    moved: Loaded


Runs = Mapping[Connector, Sequence[Measured]]


def ask_single(url: str) -> list[Question]:
    """The prompts, and the single engine's answers to them."""
    with Client(url) as single:
        prompts = first_prompts()
        first = [Question.of(single, prompt, ANSWER_TOKENS) for prompt in prompts]
        later = later_prompts(prompts, [question.expected.text for question in first])
        return first + [Question.of(single, prompt, ANSWER_TOKENS) for prompt in later]


def ask_pair(pair: Pair, questions: Sequence[Question], connector: Connector) -> list[Measured]:
    """The same prompts through the router, one after another."""
    pair.to_router.complete(random_prompt(20, seed=0))  # engines load code at their first request
    measured = []
    for question in questions:
        since = CountersSince(pair.to_decode)
        answer = pair.to_router.complete(question.prompt, ANSWER_TOKENS)
        changed = since.wait_for(LOADED_METRICS[connector]["nbytes"], timeout_s=LAG_S)
        measured.append(Measured(answer, Loaded.from_counters(changed, connector)))
    return measured


def compare(connectors: Sequence[Connector], family: str, log_dir: Path | None) -> bool:
    """Run all prompts with each connector and print the table; True if all is well."""
    maker = FAMILIES[family]()
    model, dtype = ensure_tiny_model(model=maker), maker.dtype
    runs: dict[Connector, Sequence[Measured]] = {}
    with Cluster(log_dir) as cluster:
        (single,) = cluster.start(EngineSpec("single", model, dtype=dtype))
        say_on_stderr("asking the single engine")
        questions = ask_single(single.url)
        cluster.end(single)
        for connector in connectors:
            specs = pair_specs(model, connector, suffix=f"-{connector}", dtype=dtype)
            prefill, decode = cluster.start(*specs)
            with Pair(prefill, decode, cluster.route([prefill], [decode])) as pair:
                say_on_stderr(f"asking through the router ({connector})")
                runs[connector] = ask_pair(pair, questions, connector)
            cluster.end(prefill, decode)
    print_table(
        "prefill and decode apart, compared with a single engine",
        [_cells(number, one, runs, dtype) for number, one in enumerate(questions)],
    )
    return report_verdict(questions, runs, dtype)


def report_verdict(questions: Sequence[Question], runs: Runs, dtype: str) -> bool:
    """Print a line for each connector, and as the last line how many answers match."""
    moved, right = True, 0
    for name, run in runs.items():
        count = sum(
            match(question, measured.answer, dtype) != "NO"
            for question, measured in zip(questions, run, strict=True)
        )
        tokens = sum(measured.moved.tokens for measured in run)
        slowest = max(measured.answer.seconds for measured in run)
        print(
            f"{name}: {count} of {len(run)} right, {tokens:,} tokens moved, slowest {slowest:.2f} s"
        )
        right += count
        if not any(measured.moved.tokens and measured.moved.nbytes for measured in run):
            moved = False
            print(f"{name}: nothing was moved; the decode engine computed every prompt itself")
    total = len(questions) * len(runs)
    print(f"{right}/{total} answers match")
    return moved and right == total


def match(question: Question, answer: Answer, dtype: str) -> str:
    """Of a type that is not coarse, the tokens have to be the same."""
    words = {"same": "yes", "tie": "tie" if dtype != CPU_DTYPE else "NO", "other": "NO"}
    return words[question.compare(answer, dtype)]


def _cells(number: int, question: Question, runs: Runs, dtype: str) -> dict[str, str]:
    """One row; the runs of several connectors side by side."""
    cells = {"#": str(number + 1), "prompt\ntokens": str(question.expected.prompt_tokens)}
    for name, run in runs.items():
        answer, moved = run[number].answer, run[number].moved
        prefix = f"{name}\n" if len(runs) > 1 else ""
        cells |= {
            f"{prefix}tokens\nmoved": str(moved.tokens),
            f"{prefix}MiB": f"{moved.nbytes / MIB:.2f}",
            f"{prefix}descr.": str(moved.descriptors),
            f"{prefix}transfer\nms": f"{moved.seconds * 1e3:.1f}",
            f"{prefix}answer\nms": f"{answer.seconds * 1e3:.0f}",
            f"{prefix}match": match(question, answer, dtype),
        }
    return cells


def serve(connector: Connector, log_dir: Path | None) -> None:
    """Leave prefill, decode and router running until Ctrl-C."""
    with Cluster(log_dir) as cluster:
        prefill, decode = cluster.start(*pair_specs(ensure_tiny_model(), connector))
        url = cluster.route([prefill], [decode]).url
        body = f'{{"model": "{MODEL_NAME}", "prompt": "{random_prompt(6, seed=0)}"}}'
        print(f"curl {url}/v1/completions \\")
        print(f"  -H 'Content-Type: application/json' -d '{body}'")
        print("Ctrl-C ends it.", flush=True)
        while True:
            cluster.check_alive()
            time.sleep(WATCH_S)


def parse_arguments() -> argparse.Namespace:
    """The command line; `connectors` are those chosen."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--connector", choices=[*CONNECTORS, "both"], default="nixl-kv")
    parser.add_argument(
        "--family", choices=list(FAMILIES), default=TinyModel.family, help="of the tiny model"
    )
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
    try:
        if options.serve:
            serve(options.connectors[0], options.log_dir)
        return 0 if compare(options.connectors, options.family, options.log_dir) else 1
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
