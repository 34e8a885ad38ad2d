"""A model whose last layers share the cache of earlier ones, prefill without what nobody reads."""

from collections.abc import Iterator, Sequence

import pytest
from pd.client import Client
from pd.cluster import Cluster
from pd.kv_sharing import Row, measure, sharing_pair
from pd.prompts import random_prompt
from pd.tiny_families import Gemma4
from pd.tiny_model import ensure_tiny_model
from pd.waiting import wait_until

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
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = ensure_tiny_model(model=RECIPE)
    with Cluster(sharing_pair(model), log_dir=tmp_path_factory.mktemp("sharing")) as started:
        yield started


@pytest.fixture(scope="module")
def rows(sharing: Cluster) -> Sequence[Row]:
    return measure(sharing, RECIPE, tuple(BLOCKS))


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


def test_only_layers_that_own_a_cache_are_moved(rows: Sequence[Row]) -> None:
    for row in rows:
        full, sliding = BLOCKS[row.tokens]
        owned = (OWNING_FULL * full + OWNING_SLIDING * sliding) * BLOCK_BYTES
        assert row.nbytes == owned
        assert (row.owned, row.unshared) == (owned, 2 * owned)


def test_prefill_alone_takes_the_short_way(sharing: Cluster) -> None:
    """With the flag vLLM refuses log probabilities of the prompt, which would be wrong.

    Not 0 of them: its frontend (0.32) takes that for none, and its worker ends the engine.
    """
    prompt = random_prompt(10, seed=41)
    with Client(sharing.prefill[0].url) as prefill, Client(sharing.decode[0].url) as decode:
        with pytest.raises(RuntimeError, match="kv-sharing-fast-prefill produces incorrect"):
            prefill.complete(prompt, prompt_logprobs=1)
        assert decode.complete(prompt, prompt_logprobs=1).tokens


def test_a_second_turn_reads_what_is_new(sharing: Cluster) -> None:
    assert sharing.single is not None
    with (
        Client(sharing.router_url) as router,
        Client(sharing.single.url) as single,
        Client(sharing.decode[0].url) as decode,
    ):
        first = random_prompt(300, seed=42)
        second = f"{first} {router.complete(first).text.strip()} {random_prompt(100, seed=43)}"
        before = decode.counters()
        assert router.complete(second).tokens == single.complete(second).tokens
        moved = decode.counters_after(before, "vllm:nixl_kv_loads_total")
    assert moved["vllm:nixl_kv_tokens_loaded_total"] == 415 - 256
    assert moved["vllm:nixl_kv_bytes_read_total"] == 2 * 4 * BLOCK_BYTES
    assert moved["vllm:nixl_kv_load_failures_total"] == 0


def test_prefill_holds_no_block_afterwards(sharing: Cluster, rows: Sequence[Row]) -> None:
    del rows  # after these
    with Client(sharing.prefill[0].url) as prefill:

        def is_free() -> bool:
            prefill.complete("ba", 1)  # an idle engine does not tell
            return prefill.counters()["vllm:kv_cache_usage_perc"] == 0

        assert wait_until(is_free, 15.0)
