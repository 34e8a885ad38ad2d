"""Engines whose requests wait for each other: each ends, with a single engine's answer."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest

from harness.cluster.answers import questions_of
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.metrics import FAILURES, LOADS, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.asking import ask, kinds
from support.engines import started

pytestmark = [pytest.mark.e2e, pytest.mark.crowd]

ANSWER = 16
WORDS = 500  # of a prompt: four blocks of 128 tokens, and a fifth with the answer
NUM_BLOCKS = 18
MAX_LENGTH = ("--max-model-len", "640")


@pytest.mark.parametrize("num_prompts", [16, pytest.param(60, marks=pytest.mark.slow)])
def test_two_engines_prefill_for_each_other_with_caches_that_offers_fill(
    cluster: Cluster, single: Client, num_prompts: int
) -> None:
    pair_of = pair_specs(ensure_tiny_model(), num_blocks=NUM_BLOCKS, extra_args=MAX_LENGTH)
    specs = [replace(spec, name=f"both-{spec.name}", role="both") for spec in pair_of]
    prompts = [random_prompt(WORDS, 4000 + number) for number in range(num_prompts)]
    questions = questions_of(single, prompts, ANSWER)
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
        changed = [one.changed() for one in since]
        assert sum(one.get(LOADS, 0) + one.get(FAILURES, 0) for one in changed) >= num_prompts
