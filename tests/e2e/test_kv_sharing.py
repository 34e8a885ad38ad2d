"""A model whose last layers share the cache of earlier ones, prefill without what nobody reads.

Prefill runs with --kv-sharing-fast-prefill and computes nothing in these layers but for a prompt's
last token; decode runs without.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.cluster.answers import Question
from harness.cluster.client import Client, RefusedError
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Engine
from harness.cluster.metrics import NBYTES
from harness.cluster.models.families import Gemma4
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import PATIENT, Accounts, connected, started, without_connector

pytestmark = pytest.mark.e2e

RECIPE = Gemma4()
OWNING_SLIDING = 3  # of 6 in 8 layers, of which the last 4 share
OWNING_FULL = 1
BLOCK_BYTES = 128 * RECIPE.kv_heads * RECIPE.head_dim * 2 * 4  # tokens, heads, K and V, float32


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[list[Engine]]:
    """Prefill, decode and single."""
    prefill, decode = pair_specs(
        ensure_tiny_model(model=RECIPE),
        suffix="-sharing",
        kv_cache_bytes=256 << 20,
        connector_config=PATIENT,
    )
    prefill = replace(prefill, extra_args=("--kv-sharing-fast-prefill",))
    single = without_connector(decode, "single-sharing")
    with started(cluster, prefill, decode, single) as engines:
        yield engines


@pytest.fixture(scope="module")
def sharing(engines: list[Engine]) -> Iterator[Pair]:
    with connected(*engines[:2]) as pair:
        yield pair
        Accounts(pair).expect_free()


@pytest.fixture
def alone(engines: list[Engine]) -> Iterator[Client]:
    with Client(engines[2].url) as client:
        yield client


@pytest.mark.parametrize(
    ("tokens", "full", "sliding"),
    [(5, 1, 1), (129, 1, 1), (130, 2, 2), (328, 3, 2), (1100, 9, 2)],
)
def test_only_layers_that_own_a_cache_are_moved(
    sharing: Pair, alone: Client, tokens: int, full: int, sliding: int
) -> None:
    """`full` blocks of a layer of full attention, `sliding` of one with a window of 200.

    All tokens but the last are wanted, and of these the last 199; 327 tokens before 328 begin with
    128.
    """
    prompt, accounts = random_prompt(tokens, seed=40), Accounts(sharing)
    question = Question.of(alone, prompt, 16)
    assert question.compare(sharing.complete(prompt)) != "other"
    owned = (OWNING_FULL * full + OWNING_SLIDING * sliding) * BLOCK_BYTES
    assert accounts.expect_loaded(tokens - 1)[NBYTES] == owned


def test_prefill_alone_skips_layers_that_nobody_reads(sharing: Pair) -> None:
    """With the flag vLLM refuses log probabilities of the prompt, which would be wrong.

    Not 0 of them: its frontend (0.32) takes that for none, and its worker ends the engine.
    """
    prompt = random_prompt(10, seed=41)
    with pytest.raises(RefusedError, match="kv-sharing-fast-prefill produces incorrect"):
        sharing.to_prefill.complete(prompt, prompt_logprobs=1)
    assert sharing.to_decode.complete(prompt, prompt_logprobs=1).tokens
