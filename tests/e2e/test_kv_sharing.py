"""A model whose last layers share the cache of earlier ones, prefill without what nobody reads."""

from collections.abc import Iterator, Sequence

import pytest

from lab.cluster.client import Client, RefusedError
from lab.cluster.cluster import Cluster
from lab.cluster.engines import Engine
from lab.cluster.metrics import NBYTES
from lab.cluster.models.files import ensure_tiny_model
from lab.cluster.models.gemma import Gemma4
from lab.cluster.pair import Pair
from lab.cluster.prompts import random_prompt
from lab.suites.kv_sharing import Row, measure, sharing_specs
from support.engines import Accounts, expect_free, started

pytestmark = pytest.mark.e2e

RECIPE = Gemma4()
OWNING_SLIDING = 3  # of 6 in 8 layers, of which the last 4 share
OWNING_FULL = 1
BLOCK_BYTES = 128 * RECIPE.kv_heads * RECIPE.head_dim * 2 * 4  # tokens, heads, K and V, float32
BLOCKS = {5: (1, 1), 128: (1, 1), 129: (1, 1), 130: (2, 2), 328: (3, 2), 400: (4, 3), 1100: (9, 2)}
"""By prompt length: how many blocks a layer of full attention holds, and one with a window of 200.

All tokens but the last are wanted, and of these the last 199; 327 tokens before 328 begin with 128.
"""


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[list[Engine]]:
    """Prefill, decode and single."""
    with started(cluster, *sharing_specs(ensure_tiny_model(model=RECIPE))) as engines:
        yield engines


@pytest.fixture(scope="module")
def sharing(cluster: Cluster, engines: list[Engine]) -> Iterator[Pair]:
    prefill, decode, _ = engines
    with Pair(prefill, decode, cluster.route([prefill], [decode])) as pair:
        yield pair


@pytest.fixture(scope="module")
def alone(engines: list[Engine]) -> Iterator[Client]:
    with Client(engines[2].url) as client:
        yield client


@pytest.fixture(scope="module")
def rows(sharing: Pair, alone: Client) -> Sequence[Row]:
    return [measure(sharing, alone, RECIPE, length) for length in BLOCKS]


def test_the_recipe_is_what_is_counted_below() -> None:
    kinds = RECIPE.config(0)["layer_types"]
    assert isinstance(kinds, list)
    owning = kinds[: RECIPE.layers - RECIPE.shared_layers]
    assert [owning.count(kind) for kind in ("sliding_attention", "full_attention")] == [
        OWNING_SLIDING,
        OWNING_FULL,
    ]
    assert (RECIPE.full_kv_heads, RECIPE.full_head_dim) == (RECIPE.kv_heads, RECIPE.head_dim)


def test_answers_are_those_of_a_single_engine(rows: Sequence[Row]) -> None:
    assert [row.answer for row in rows].count("other") == 0
    assert [(row.loads, row.failures) for row in rows] == [(1, 0)] * len(rows)
    assert {row.verdict.kind for row in rows} == {"good"}


def test_only_layers_that_own_a_cache_are_moved(rows: Sequence[Row]) -> None:
    for row in rows:
        full, sliding = BLOCKS[row.tokens]
        owned = (OWNING_FULL * full + OWNING_SLIDING * sliding) * BLOCK_BYTES
        assert row.nbytes == owned
        assert (row.owned, row.unshared) == (owned, 2 * owned)


def test_prefill_alone_skips_layers_that_nobody_reads(sharing: Pair) -> None:
    """With the flag vLLM refuses log probabilities of the prompt, which would be wrong.

    Not 0 of them: its frontend (0.32) takes that for none, and its worker ends the engine.
    """
    prompt = random_prompt(10, seed=41)
    with pytest.raises(RefusedError, match="kv-sharing-fast-prefill produces incorrect"):
        sharing.to_prefill.complete(prompt, prompt_logprobs=1)
    assert sharing.to_decode.complete(prompt, prompt_logprobs=1).tokens


def test_a_second_turn_reads_what_is_new(sharing: Pair, alone: Client) -> None:
    router = sharing.to_router
    first = random_prompt(300, seed=42)
    second = f"{first} {router.complete(first).text.strip()} {random_prompt(100, seed=43)}"
    accounts = Accounts(sharing)
    assert router.complete(second).tokens == alone.complete(second).tokens
    assert accounts.expect_loaded(415 - 256)[NBYTES] == 2 * 4 * BLOCK_BYTES


def test_prefill_holds_no_block_afterwards(sharing: Pair, rows: Sequence[Row]) -> None:
    del rows  # after these
    expect_free(sharing.to_prefill)
