"""Engines that hold what others wait for: does every request end, right, and how soon?

Three scenes of real engines on CPU. `mutual`: two engines prefill for each other, with caches that
each other's offers fill. `paused`: decode is paused while it claims what prefill holds, and prefill
is told to stop: it has to drain. `starved`: one rank to two, on two cores with busy processes
beside. The last line counts the scenes in which all is as it should be.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from harness.cluster.answers import Question, questions_of
from harness.cluster.client import Answer, Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Connector, EngineSpec
from harness.cluster.metrics import FAILURES, LOADS, QUEUED, USAGE, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.processes import busy
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_or_fail, wait_until
from lab.results import Results, Verdict, say_on_stderr, verdict_of
from suites.demo import CONNECTORS

ANSWER: Final = 16
WORDS: Final = 500
"""Of a prompt: four blocks of 128 tokens, and a fifth with the answer."""
NUM_BLOCKS: Final = 18
MAX_LENGTH: Final = ("--max-model-len", "640")
PATIENCE_S: Final = 100.0
"""For how long a client waits."""
DRAIN_S: Final = 120
"""For how long an engine that is told to stop lets its requests go on."""
FULL: Final = 0.9
POLL_S: Final = 0.05
HOLD_S: Final = 5.0
"""The connector's, where decode is paused."""
TALKERS: Final = 4
"""Prompts as long as the others', which leave decode no room for another one."""
TALK: Final = 120
"""Tokens, for so long that decode is paused meanwhile."""
KEEP: Final[Mapping[str, str | bool]] = {"mode": "keep", "clear_cache": False}
"""How decode is paused: its requests stay where they are."""
SEED: Final = 4000


@dataclass(frozen=True)
class Outcome:
    """What came of a scene."""

    scene: str
    connector: Connector
    requests: int
    right: int
    wrong: int
    loads: int
    recomputed: int
    slowest_s: float
    seconds: float
    faults: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """All requests have to end, and right."""
        missing = self.requests - self.right - self.wrong
        return verdict_of(
            *self.faults,
            f"{missing} of {self.requests} did not end" if missing else "",
            f"{self.wrong} wrong" if self.wrong else "",
        )

    def cells(self) -> dict[str, str]:
        """For the table."""
        return {
            "scene": self.scene,
            "connector": self.connector,
            "requests": str(self.requests),
            "right": str(self.right),
            "loads": str(self.loads),
            "recomputed": str(self.recomputed),
            "slowest s": f"{self.slowest_s:.1f}",
            "all s": f"{self.seconds:.1f}",
        }


Scene = Callable[[Cluster, Path, Connector, Sequence[Question]], Outcome]


def draw(single: Client, count: int) -> list[Question]:
    """So many prompts, and what one engine answers to each."""
    prompts = [random_prompt(WORDS, SEED + number) for number in range(count)]
    return questions_of(single, prompts, ANSWER)


@dataclass
class _Load:
    """Requests under way, each by a router's way from one engine to another."""

    since: Sequence[CountersSince]
    begin: float
    asked: list[Future[tuple[bool, float]]]

    @classmethod
    def start(
        cls, pairs: Sequence[Pair], questions: Sequence[Question], pool: ThreadPoolExecutor
    ) -> "_Load":
        """All at once, to the pairs in turn."""
        decode = {pair.to_decode.url: pair.to_decode for pair in pairs}
        load = cls([CountersSince(each) for each in decode.values()], time.monotonic(), [])
        for number, question in enumerate(questions):
            pair = pairs[number % len(pairs)]
            complete = partial(pair.complete, question.prompt, ANSWER)
            load.asked.append(pool.submit(load.ask, question, complete))
        return load

    def ask(self, question: Question, complete: Callable[[], Answer]) -> tuple[bool, float]:
        """Whether the answer is right, and when it came."""
        is_right = question.compare(complete()) in ("same", "tie")
        return is_right, time.monotonic() - self.begin

    def outcome(self, scene: str, connector: Connector, *faults: str) -> Outcome:
        """When all have ended, or failed."""
        errors = [error for asked in self.asked if (error := asked.exception()) is not None]
        ended = [asked.result() for asked in self.asked if asked.exception() is None]
        for words in dict.fromkeys(f"{type(error).__name__}: {error}" for error in errors):
            say_on_stderr(f"  {words}")
        changed = [since.changed() for since in self.since]
        return Outcome(
            scene,
            connector,
            requests=len(self.asked),
            right=sum(is_right for is_right, _ in ended),
            wrong=sum(not is_right for is_right, _ in ended),
            loads=round(sum(one.get(LOADS, 0) for one in changed)),
            recomputed=round(sum(one.get(FAILURES, 0) for one in changed)),
            slowest_s=max((seconds for _, seconds in ended), default=0.0),
            seconds=time.monotonic() - self.begin,
            faults=faults,
        )


def mutual(
    cluster: Cluster, model: Path, connector: Connector, questions: Sequence[Question]
) -> Outcome:
    """Half of the prompts are prefilled by the first engine for the second, half the other way."""
    first, second = cluster.start(
        *(
            EngineSpec(
                f"{name}-{connector}",
                model,
                "both",
                connector,
                num_blocks=NUM_BLOCKS,
                extra_args=MAX_LENGTH,
                cores=spec.cores,
            )
            for name, spec in zip(("first", "second"), pair_specs(model), strict=True)
        )
    )
    with (
        Pair(first, second, timeout_s=PATIENCE_S) as there,
        Pair(second, first, timeout_s=PATIENCE_S) as back,
        ThreadPoolExecutor(len(questions)) as pool,
    ):
        for pair in (there, back):
            pair.complete(random_prompt(20, seed=0))  # engines load code at their first request
        outcome = _Load.start((there, back), questions, pool).outcome("mutual", connector)
    cluster.end(first, second)
    return outcome


def paused(
    cluster: Cluster, model: Path, connector: Connector, questions: Sequence[Question]
) -> Outcome:
    """Decode is full, and paused; it has claimed what prefill holds. Prefill has to drain."""
    extra: dict[str, Any] = {} if connector == "in-tree" else {"hold_s": HOLD_S}
    prefill, decode = cluster.start(
        *pair_specs(
            model,
            connector,
            suffix=f"-{connector}",
            connector_config=extra,
            extra_args=(*MAX_LENGTH, "--shutdown-timeout", str(DRAIN_S)),
            extra_env={"VLLM_SERVER_DEV_MODE": "1"},
            num_blocks=NUM_BLOCKS,
        )
    )
    with Pair(prefill, decode, timeout_s=PATIENCE_S) as pair, ThreadPoolExecutor(64) as pool:
        tickets = [pair.to_prefill.ticket(question.prompt) for question in questions]
        talk = [
            pool.submit(pair.to_decode.complete, random_prompt(WORDS, number), TALK)
            for number in range(TALKERS)
        ]
        counters, expect = pair.to_decode.counters, partial(wait_or_fail, interval_s=POLL_S)
        expect(lambda: counters()[USAGE] > FULL, PATIENCE_S, "decode is not full")
        begin = time.monotonic()
        load = _Load([CountersSince(pair.to_decode)], begin, [])
        for question, ticket in zip(questions, tickets, strict=True):
            complete = partial(pair.decode_with, ticket, question.prompt, ANSWER)
            load.asked.append(pool.submit(load.ask, question, complete))
        expect(lambda: counters()[QUEUED] >= len(questions), PATIENCE_S, "nothing is queued")
        httpx.post(f"{decode.url}/pause", params=KEEP, timeout=30).raise_for_status()
        told = time.monotonic()
        prefill.signal_leader(signal.SIGTERM)
        has_drained = wait_until(lambda: not prefill.is_running(), DRAIN_S, interval_s=POLL_S)
        drained_s = time.monotonic() - told
        fault = "" if has_drained else "prefill did not drain"
        say_on_stderr(f"  prefill ended {drained_s:.1f} s after it was told to")
        httpx.post(f"{decode.url}/resume", timeout=30).raise_for_status()
        for each in talk:
            each.result()
        outcome = load.outcome(f"paused: drained in {drained_s:.1f} s", connector, fault)
    cluster.end(decode)
    return outcome


def starved(
    cluster: Cluster, model: Path, connector: Connector, questions: Sequence[Question]
) -> Outcome:
    """One rank to two, on all cores, with as many busy processes beside."""
    prefill_spec, decode_spec = pair_specs(
        model, connector, suffix=f"-starved-{connector}", cores=frozenset(), extra_args=MAX_LENGTH
    )
    two = {**vars(decode_spec), "tensor_parallel": 2}
    prefill, decode = cluster.start(prefill_spec, EngineSpec(**two))
    with (
        Pair(prefill, decode, timeout_s=PATIENCE_S) as pair,
        busy(len(os.sched_getaffinity(0))),
        ThreadPoolExecutor(2) as pool,
    ):
        outcome = _Load.start((pair,), questions, pool).outcome("starved", connector)
    cluster.end(prefill, decode)
    return outcome


SCENES: Final[Mapping[str, tuple[Scene, int]]] = {
    "mutual": (mutual, 60),
    "paused": (paused, 2),
    "starved": (starved, 9),
}
"""Each with its number of prompts."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="crowd", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*SCENES], default=[*SCENES])
    parser.add_argument("--connector", choices=[*CONNECTORS, "both"], default="nixl-kv")
    parser.add_argument("--prompts", type=int, help="instead of each scene's own number")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    return parser.parse_args()


def main() -> int:
    """Run; the exit status."""
    options = parse_arguments()
    connectors = CONNECTORS if options.connector == "both" else (options.connector,)
    results = Results("engines that hold what others wait for", "scenes are good", options.json)
    model = ensure_tiny_model()
    counts = {name: options.prompts or SCENES[name][1] for name in options.only}
    with Cluster(options.log_dir) as cluster:
        (single,) = cluster.start(EngineSpec("single", model, extra_args=MAX_LENGTH))
        with Client(single.url) as client:
            questions = draw(client, max(counts.values()))
        cluster.end(single)
        for name, count in counts.items():
            for connector in connectors:
                say_on_stderr(f"{name} ({connector})")
                results.add(SCENES[name][0](cluster, model, connector, questions[:count]))
    return results.print(len(options.only) * len(connectors))


if __name__ == "__main__":
    sys.exit(main())
