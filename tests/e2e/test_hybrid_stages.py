"""Recurrent state between engines of one pipeline stage and of two, either way.

vLLM wants attention in each stage, on CPU: each has a layer with a state, and one with KV.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.cluster.answers import Question
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Engine
from harness.cluster.metrics import LOADS, VERIFIED
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.models.qwen3_next import Qwen3Next
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import PATIENT, Accounts, connect, started, without_connector

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DTYPE = "bfloat16"
ANSWER = 16
LENGTHS = (2, 17, 384, 385, 386, 769)
"""Blocks have 384 tokens."""
SEEDS = itertools.count(150_000)


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[list[Engine]]:
    """Prefill and decode of one stage, the same of two, and a single engine."""
    prefill, decode = pair_specs(
        ensure_tiny_model(model=Qwen3Next(period=2, sparse_step=2)),
        suffix="-stages",
        dtype=DTYPE,
        kv_cache_bytes=96 << 20,
        connector_config=PATIENT,
        extra_args=("--mamba-ssm-cache-dtype", "float32", "--max-num-batched-tokens", "512"),
    )
    two = [
        replace(spec, name=f"{spec.name}-pp2", pipeline_parallel=2) for spec in (prefill, decode)
    ]
    single = without_connector(decode, "single-stages")
    with started(cluster, prefill, decode, *two, single) as running:
        yield running


@pytest.mark.parametrize(
    "sides", [pytest.param((2, 1), id="PP 2 to 1"), pytest.param((0, 3), id="PP 1 to 2")]
)
def test_each_stage_has_its_part_of_the_state(
    engines: list[Engine], sides: tuple[int, int]
) -> None:
    prefill, decode = (engines[number] for number in sides)
    connect(prefill, decode)
    with Pair(prefill, decode) as pair, Client(engines[-1].url) as alone:
        accounts = Accounts(pair)
        for length in LENGTHS:
            prompt = random_prompt(length, seed=next(SEEDS))
            question = Question.of(alone, prompt, ANSWER)
            assert question.compare(pair.complete(prompt, ANSWER), DTYPE) != "other"
        ranks = decode.spec.ranks
        changed = accounts.expect_loaded(*[n - 1 for n in LENGTHS for _ in range(ranks)])
        assert changed[VERIFIED] == changed[LOADS]
        accounts.expect_free()
