"""Do prefill and decode apart give the answers of a single engine? Twenty prompts tell.

The exit status is 0 only if every answer is the same, token for token, and KV was moved.
"""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from typing_extensions import Self

from harness.cluster.answers import Question
from harness.cluster.client import Answer, Client
from harness.cluster.cluster import Cluster, pair_specs, say
from harness.cluster.engines import MODEL_NAME, Connector, EngineSpec
from harness.cluster.metrics import LOADED_METRICS, CountersSince, Loaded
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.processes import ProcessDiedError
from harness.cluster.prompts import random_prompt

ANSWER_TOKENS: Final = 16
# Short and long, on and beside the edges of a block of 128 tokens.
LENGTHS: Final = (
    *(10, 40, 100, 127, 128, 129, 200, 255, 256, 257, 300, 512, 640, 800, 1000, 1280, 1500, 2000),
)
CONNECTORS: Final[tuple[Connector, ...]] = ("nixl-kv", "in-tree")
SILENCE_S: Final = 10.0
"""A step takes a minute where Python compiles vLLM first, or where others use the machine."""


class Progress:
    """Says what the demo does, at each step and then every SILENCE_S, from a thread of its own."""

    def __init__(self) -> None:
        self._step, self._begin = "", time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def begin(self, step: str) -> None:
        self._step, self._begin = step, time.monotonic()
        say(step)

    def _run(self) -> None:
        while not self._is_over.wait(SILENCE_S):
            say(f"  {time.monotonic() - self._begin:3.0f} s: {self._step}")


def ask_single(single: Client) -> list[Question]:
    """Prompts of many lengths, a second turn, and a plain repetition."""
    first = {n: Question.of(single, random_prompt(n, seed=1), ANSWER_TOKENS) for n in LENGTHS}
    second = f"{first[300].prompt} {first[300].expected.text.strip()} {random_prompt(84, seed=2)}"
    later = [Question.of(single, prompt, ANSWER_TOKENS) for prompt in (second, first[1000].prompt)]
    return [*first.values(), *later]


def ask_pair(pair: Pair, question: Question, connector: Connector) -> tuple[Answer, Loaded]:
    """The answer through the router, and the KV that was moved for it."""
    since = CountersSince(pair.to_decode)
    answer = pair.to_router.complete(question.prompt, ANSWER_TOKENS)
    # Counters may lag an answer; a prompt that decode has cached moves nothing.
    changed = since.wait_for(LOADED_METRICS[connector]["nbytes"], timeout_s=1)
    return answer, Loaded.from_counters(changed, connector)


def compare(connectors: Sequence[Connector], log_dir: Path | None) -> bool:
    """Ask all prompts with each connector, and print a table; whether all is well."""
    num_right, has_moved = 0, True
    table = Table(title="prefill and decode apart, compared with a single engine")
    with Progress() as progress, Cluster(log_dir) as cluster:
        progress.begin("making a small model")
        model = ensure_tiny_model()
        progress.begin("starting a single engine")
        (engine,) = cluster.start(EngineSpec("single", model))
        progress.begin(f"asking it {len(LENGTHS) + 2} prompts")
        with Client(engine.url) as single:
            questions = ask_single(single)
        cluster.end(engine)
        rows = [[str(one.expected.prompt_tokens)] for one in questions]
        table.add_column("prompt\ntokens", justify="right")
        for name in connectors:
            progress.begin(f"starting prefill and decode with {name}")
            prefill, decode = cluster.start(*pair_specs(model, name, suffix=f"-{name}"))
            with Pair(prefill, decode, cluster.route([prefill], [decode])) as pair:
                progress.begin("asking them the same prompts")
                pair.to_router.complete(random_prompt(20, seed=0))  # the first one loads code
                run = [ask_pair(pair, question, name) for question in questions]
            cluster.end(prefill, decode)
            for heading in ("tokens moved", "MiB", "transfer ms", "answer ms", "match"):
                table.add_column(f"{name}\n{heading}", justify="right")
            for row, question, (answer, moved) in zip(rows, questions, run, strict=True):
                is_right = question.compare(answer) == "same"
                num_right += is_right
                row += [str(moved.tokens), f"{moved.nbytes / 2**20:.2f}"]
                row += [f"{moved.seconds * 1e3:.1f}", f"{answer.seconds * 1e3:.0f}"]
                row.append("yes" if is_right else "NO")
            has_moved &= any(moved.tokens for _, moved in run)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if not has_moved:
        print("nothing was moved: the decode engine computed every prompt itself")
    total = len(questions) * len(connectors)
    print(f"{num_right}/{total} answers match those of a single engine")
    print("Next: scripts/demo --serve leaves the engines running; `. .venv/bin/activate` puts")
    print("`nixl-kv` on your PATH: nixl-kv doctor checks this host.")
    return has_moved and num_right == total


def serve(connector: Connector, log_dir: Path | None) -> None:
    """Leave prefill, decode and router running until Ctrl-C."""
    with Cluster(log_dir) as cluster:
        with Progress() as progress:
            progress.begin("starting prefill, decode and a router")
            prefill, decode = cluster.start(*pair_specs(ensure_tiny_model(), connector))
            url = cluster.route([prefill], [decode]).url
        body = f'{{"model": "{MODEL_NAME}", "prompt": "{random_prompt(6, seed=0)}"}}'
        print(f"curl {url}/v1/completions \\")
        print(f"  -H 'Content-Type: application/json' -d '{body}'")
        print("Then, in another terminal, after `. .venv/bin/activate`:")
        for engine in (prefill, decode):
            print(f"nixl-kv status --at 127.0.0.1:{engine.side_port}    # {engine.spec.role}")
        print("Ctrl-C ends it.", flush=True)
        while True:
            cluster.check_alive()
            time.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--connector", choices=[*CONNECTORS, "both"], default="nixl-kv")
    parser.add_argument("--serve", action="store_true", help="start all and leave it running")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    options = parser.parse_args()
    if options.serve and options.connector == "both":
        parser.error("--serve runs one connector")
    try:
        if options.serve:
            serve(options.connector, options.log_dir)
        both = options.connector == "both"
        return not compare(CONNECTORS if both else [options.connector], options.log_dir)
    except ProcessDiedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
