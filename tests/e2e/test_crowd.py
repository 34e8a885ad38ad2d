"""Engines that hold what others wait for: every request ends, with a single engine's answer."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle

import httpx
import pytest

from harness.cluster.answers import Question, questions_of
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Engine
from harness.cluster.metrics import FAILURES, LOADS, QUEUED, USAGE, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_or_fail
from support.asking import ask, kinds
from support.engines import EVENT_S, started

pytestmark = [pytest.mark.e2e, pytest.mark.crowd]

ANSWER = 16
WORDS = 500  # of a prompt: four blocks of 128 tokens, and a fifth with the answer
NUM_BLOCKS = 18
MAX_LENGTH = ("--max-model-len", "640")
DRAIN_S = 120  # for how long an engine that is told to stop lets its requests go on
TALKERS = 4  # as long as the other prompts, which leave decode no room for another one
TALK = 120  # tokens, for so long that decode is paused meanwhile


def draw(single: Client, count: int) -> list[Question]:
    prompts = [random_prompt(WORDS, 4000 + number) for number in range(count)]
    return questions_of(single, prompts, ANSWER)


def loads_and_failures(since: CountersSince) -> float:
    changed = since.changed()
    return changed.get(LOADS, 0) + changed.get(FAILURES, 0)


@pytest.mark.parametrize("num_prompts", [16, pytest.param(60, marks=pytest.mark.slow)])
def test_two_engines_prefill_for_each_other_with_caches_that_offers_fill(
    cluster: Cluster, single: Client, num_prompts: int
) -> None:
    pair_of = pair_specs(ensure_tiny_model(), num_blocks=NUM_BLOCKS, extra_args=MAX_LENGTH)
    specs = [replace(spec, name=f"both-{spec.name}", role="both") for spec in pair_of]
    questions = draw(single, num_prompts)
    with (
        started(cluster, *specs) as (first, second),
        Pair(first, second) as there,
        Pair(second, first) as back,
        ThreadPoolExecutor(num_prompts) as pool,
    ):
        for pair in (there, back):
            pair.complete(random_prompt(20, seed=0))  # engines load code at their first request
        since = [CountersSince(pair.to_decode) for pair in (there, back)]
        asked = [
            (one, pool.submit(ask, partial(pair.complete, one.prompt, ANSWER)))
            for one, pair in zip(questions, cycle((there, back)), strict=False)
        ]
        ended = [(question, future.result()) for question, future in asked]
        assert kinds(ended) == {"right": num_prompts}
        assert sum(map(loads_and_failures, since)) >= num_prompts


@pytest.mark.slow
def test_prefill_drains_while_decode_is_paused_with_claims(
    cluster: Cluster, single: Client
) -> None:
    """Decode is full, and paused. It has claimed what prefill, which has to stop, holds."""
    specs = pair_specs(
        ensure_tiny_model(),
        suffix="-paused",
        connector_config={"hold_s": 5.0},
        extra_args=(*MAX_LENGTH, "--shutdown-timeout", str(DRAIN_S)),
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},
        num_blocks=NUM_BLOCKS,
    )
    questions = draw(single, 2)
    with (
        started(cluster, *specs) as (prefill, decode),
        Pair(prefill, decode) as pair,
        ThreadPoolExecutor(TALKERS + 2) as pool,
    ):
        tickets = [pair.to_prefill.ticket(question.prompt) for question in questions]
        talk = [
            pool.submit(pair.to_decode.complete, random_prompt(WORDS, number), TALK)
            for number in range(TALKERS)
        ]
        counters, expect = pair.to_decode.counters, partial(wait_or_fail, interval_s=0.05)
        expect(lambda: counters()[USAGE] > 0.9, EVENT_S, "decode is not full")
        since = CountersSince(pair.to_decode)
        asked = [
            (question, pool.submit(ask, partial(pair.decode_with, ticket, question.prompt, ANSWER)))
            for question, ticket in zip(questions, tickets, strict=True)
        ]
        expect(lambda: counters()[QUEUED] >= len(asked), EVENT_S, "nothing is queued")
        call(decode, "/pause?mode=keep&clear_cache=false")
        prefill.signal_leader(signal.SIGTERM)
        expect(lambda: not prefill.is_running(), DRAIN_S, "prefill did not drain")
        call(decode, "/resume")
        assert all(len(one.result().tokens) == TALK for one in talk)
        assert kinds((one, future.result()) for one, future in asked) == {"right": len(asked)}
        assert loads_and_failures(since) >= len(asked)


def call(engine: Engine, path: str) -> None:
    httpx.post(f"{engine.url}{path}", timeout=30, trust_env=False).raise_for_status()
