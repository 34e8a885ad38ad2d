"""A draft model on prefill, on decode, or on both. It drafts with the model's own weights.

So each of its tokens is accepted, as long as it sees the KV of the prompt. Beside them, vLLM counts
placeholders: a first step of one token gets zeros for drafts, as it does too where vLLM's own cache
has all of a prompt but one.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from harness.cluster.answers import Question, questions_of
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Engine
from harness.cluster.metrics import ACCEPTED, DRAFTED, FAILURES, LOADS, VERIFIED, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import (
    EVENT_S,
    PATIENT,
    Accounts,
    connected,
    expect,
    started,
    without_connector,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

AHEAD = 3
ANSWER = 1 + 6 * (AHEAD + 1)  # tokens: prefill's, and those of six steps
LENGTHS = (2, 100, 128, 129, 300)
SEEDS = itertools.count(150_000)  # no prompt is in a cache before


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[Mapping[str, Engine]]:
    model = ensure_tiny_model()
    prefill, decode = pair_specs(
        model, suffix="-plain", kv_cache_bytes=96 << 20, connector_config=PATIENT
    )
    speculation = {
        "method": "draft_model",
        "model": str(model.absolute()),
        "num_speculative_tokens": AHEAD,
    }
    drafting = ("--speculative-config", json.dumps(speculation))
    specs = {
        "prefill": prefill,
        "decode": decode,
        "drafting prefill": replace(prefill, name="prefill-drafting", extra_args=drafting),
        "drafting decode": replace(decode, name="decode-drafting", extra_args=drafting),
        "single": without_connector(decode, "single-plain"),
    }
    with started(cluster, *specs.values()) as running:
        yield dict(zip(specs, running, strict=True))


@pytest.fixture
def questions(engines: Mapping[str, Engine]) -> list[Question]:
    """A prompt of each length, and the answer of an engine alone."""
    prompts = [random_prompt(length, seed=next(SEEDS)) for length in LENGTHS]
    with Client(engines["single"].url) as alone:
        return questions_of(alone, prompts, ANSWER)


def expect_answers(pair: Pair, questions: list[Question]) -> None:
    for question in questions:
        assert question.compare(pair.complete(question.prompt, ANSWER)) != "other"


def test_one_prefill_with_a_draft_model_serves_decode_with_and_without(
    engines: Mapping[str, Engine], questions: list[Question]
) -> None:
    """Both at once. The one reads the draft's KV too, and the other does not."""
    prefill = engines["drafting prefill"]
    plain, drafting = engines["decode"], engines["drafting decode"]
    with (
        connected(prefill, plain) as one,
        connected(prefill, drafting) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        accounts = Accounts(one), Accounts(other)
        speculated = CountersSince(other.to_decode)
        for done in [pool.submit(expect_answers, pair, questions) for pair in (one, other)]:
            done.result()
        for account in accounts:
            changed = account.expect_loaded(*(n - 1 for n in LENGTHS))
            assert changed[VERIFIED] == changed[LOADS]
            account.expect_free()
        wanted = 6 * AHEAD * len(LENGTHS)
        counts = speculated.wait(lambda now: now[ACCEPTED] >= wanted, EVENT_S)
        assert counts[DRAFTED] - counts[ACCEPTED] == AHEAD * len(LENGTHS), "the placeholders"


def test_decode_with_a_draft_model_computes_what_a_prefill_without_offers(
    engines: Mapping[str, Engine], questions: list[Question]
) -> None:
    """The draft would look at KV of the prompt that no engine has."""
    with Pair(engines["prefill"], engines["drafting decode"]) as pair:
        accounts = Accounts(pair)
        expect_answers(pair, questions)
        expect(accounts.decode, {LOADS: 0, FAILURES: len(LENGTHS)})
        accounts.expect_free()
    assert "draft model (prefill needs the same --speculative-config) is" in pair.decode.log_text()
