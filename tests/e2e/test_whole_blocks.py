"""DeepSeek-V4: decode reads whole blocks of every cache, also those that the prompt fills partly.

Its layers keep one state for 4 or 128 tokens, and rows of windows in blocks of 4, 8 or 64 tokens.
Other numbers of ranks are in the matrix.
"""

import itertools
from collections.abc import Iterator

import pytest

from harness.cluster.answers import Question
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import python_path, shim_env
from harness.cluster.metrics import LOADS, VERIFIED
from harness.cluster.models.deepseek_v4 import DeepseekV4
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until
from support.digesting_connector import ENDED, LANDED, digests_in
from support.engines import (
    EVENT_S,
    HAS_AMX,
    HAS_BFLOAT16,
    NO_BFLOAT16,
    PATIENT,
    Accounts,
    connected,
    started,
    without_connector,
)
from support.planting import TESTS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_BFLOAT16, reason=NO_BFLOAT16),
]

BLOCK = 256
"""To a multiple of this number vLLM's prefix cache finds a prompt."""
ANSWER = 8
LENGTHS = (20, 130, 300)
SEEDS = itertools.count(150_000)  # no prompt is in a cache before
SHIM = shim_env("deepseek_v4_on_cpu")


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[tuple[Pair, Client]]:
    """A pair, and a single engine of the same model."""
    prefill, decode = pair_specs(
        ensure_tiny_model(model=DeepseekV4()),
        suffix="-whole",
        dtype="bfloat16",
        connector_config={**PATIENT, "overlap": "off"},
        module="support.digesting_connector",
        extra_env=SHIM | {"PYTHONPATH": f"{SHIM['PYTHONPATH']}:{python_path(TESTS)}"},
    )
    single = without_connector(decode, "single-whole")
    with (
        started(cluster, prefill, decode, single) as (producer, consumer, alone),
        connected(producer, consumer) as pair,
        Client(alone.url) as client,
    ):
        yield pair, client
        Accounts(pair).expect_free()


def expect_answer(question: Question, pair: Pair) -> None:
    answer = pair.complete(question.prompt, question.num_tokens)
    assert question.compare(answer, tie=DeepseekV4.tie) != "other"


def test_prompts_are_read_but_for_their_last_token(engines: tuple[Pair, Client]) -> None:
    """Also those that prefill has in its prefix cache."""
    pair, single = engines
    questions = [
        Question.of(single, random_prompt(length, seed=next(SEEDS)), ANSWER) for length in LENGTHS
    ]
    for _ in range(2):
        accounts = Accounts(pair)
        for question in questions:
            expect_answer(question, pair)
        changed = accounts.expect_loaded(*(length - 1 for length in LENGTHS))
        assert changed[VERIFIED] == changed[LOADS]


def test_a_load_begins_where_decodes_own_prefix_ends(engines: tuple[Pair, Client]) -> None:
    """Decode has computed the prompt's beginning itself, and with it the windows of that point."""
    pair, single = engines
    prompt = random_prompt(BLOCK + 10, seed=next(SEEDS))
    pair.to_decode.complete(prompt, 1, kv_transfer_params=None)
    question = Question.of(single, f"{prompt} {random_prompt(60, seed=next(SEEDS))}", ANSWER)
    accounts = Accounts(pair)
    expect_answer(question, pair)
    accounts.expect_loaded(70 - 1)


@pytest.mark.parametrize("length", [128, 131])
def test_decode_writes_nothing_but_the_last_tokens_rows_again(
    engines: tuple[Pair, Client], length: int
) -> None:
    """Prefill has written them too, so they are in the blocks that decode reads.

    With 128 tokens, the last one completes a state of each kind; with 131, of none. On CPUs with
    AMX, kernels round a batch of one token otherwise than a prompt; elsewhere the values are equal.
    """
    pair, _ = engines
    before, accounts = pair.decode.log_size(), Accounts(pair)
    pair.complete(random_prompt(length, seed=next(SEEDS)), 1)
    accounts.expect_loaded(length - 1)

    def has_ended() -> bool:
        pair.to_decode.complete("step", 1, kv_transfer_params=None)
        return bool(digests_in(pair.decode.log_text(before))[ENDED])

    assert wait_until(has_ended, EVENT_S)
    digests = digests_in(pair.decode.log_text(before))
    ((landed,), (ended,)) = digests[LANDED], digests[ENDED]
    assert landed.keys() == ended.keys()
    changed = {
        layer: sum(one != other for one, other in zip(rows, ended[layer], strict=True))
        for layer, rows in landed.items()
    }
    print({layer: (count, len(landed[layer])) for layer, count in changed.items()})
    assert max(changed.values()) <= HAS_AMX
