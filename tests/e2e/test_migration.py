"""A fleet moves from vLLM's own NixlConnector engine by engine: pairs of unlike engines under load.

Such a pair moves no KV. Decode computes every prompt, and both engines go on.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.cluster.client import Client, RefusedError
from harness.cluster.cluster import Cluster
from harness.cluster.engines import KV_ROLES, Engine, EngineSpec, Role
from harness.cluster.metrics import LOADS, TICKETS_REFUSED, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.prompts import random_prompt
from platforms.play import Played
from platforms.replays import REPLAYS
from support.engines import EVENT_S, expect_free, started

pytestmark = pytest.mark.e2e

CLIENTS = 8
NUM_PROMPTS = 120
ANSWER = 4  # tokens
LEASE_S = 6
"""An in-tree prefill engine holds the blocks of a prompt that nobody reads for this long."""


def in_tree(role: Role) -> EngineSpec:
    """An engine as vLLM's guide starts it."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLES[role],
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    return EngineSpec(
        f"in-tree-{role}",
        ensure_tiny_model(),
        role,
        "in-tree",
        kv_cache_bytes=320 << 20,
        extra_args=("--kv-transfer-config", json.dumps(transfer)),  # the last one counts
    )


@pytest.fixture(scope="module")
def in_tree_decode(cluster: Cluster) -> Iterator[Engine]:
    with started(cluster, in_tree("decode")) as (engine,):
        yield engine


def prompts_from(seed: int, number: int) -> list[str]:
    return [random_prompt(20 + 37 * (n % 12), seed=seed + n) for n in range(number)]


def answers(client: Client, prompts: Sequence[str]) -> list[tuple[str, ...]]:
    """Several clients ask at the same time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return [a.tokens for a in pool.map(lambda p: client.complete(p, ANSWER), prompts)]


def test_an_in_tree_decode_engine_computes_our_prefills_prompts(
    cluster: Cluster,
    base_engines: Sequence[Engine],
    in_tree_decode: Engine,
    single: Client,
) -> None:
    prefill, prompts = base_engines[0], prompts_from(610_000, 24)
    router = cluster.route([prefill], [in_tree_decode])
    with Client(router.url) as client:
        assert answers(client, prompts) == answers(single, prompts)
    for engine in (prefill, in_tree_decode):
        engine.check_alive()
        with Client(engine.url) as to_engine:
            expect_free(to_engine)


@pytest.mark.slow
def test_our_decode_engine_computes_an_in_tree_prefills_prompts(
    cluster: Cluster,
    base_engines: Sequence[Engine],
    single: Client,
) -> None:
    decode, prompts = base_engines[1], prompts_from(620_000, NUM_PROMPTS)
    start = decode.log_size()
    with started(cluster, in_tree("prefill")) as (prefill,), Client(decode.url) as to_decode:
        since = CountersSince(to_decode)
        with Client(cluster.route([prefill], [decode]).url) as client:
            assert answers(client, prompts) == answers(single, prompts)
        changed = since.wait_for(TICKETS_REFUSED, NUM_PROMPTS, EVENT_S)
        assert (changed[TICKETS_REFUSED], changed[LOADS]) == (NUM_PROMPTS, 0)
        prefill.check_alive()
    log = decode.log_text(start)
    assert "Traceback" not in log
    words = "prefill runs vLLM's own NixlConnector"
    assert 0 < log.count(words) <= 1 + NUM_PROMPTS // 24, "one line a minute"
    decode.check_alive()


def test_a_platform_that_sets_the_flags_anew_costs_a_request_not_the_engine(
    base_engines: Sequence[Engine], in_tree_decode: Engine, single: Client
) -> None:
    """llm-d's coordinator. vLLM's default is to fail a request whose KV cannot be read."""
    (coordinator,) = [replay for replay in REPLAYS if "coordinator" in replay.name]
    prefill, prompts = base_engines[0], prompts_from(630_000, 16)
    played = Played(coordinator, prefill, in_tree_decode)

    def ask(prompt: str) -> int:
        with pytest.raises(RefusedError) as refused:
            client.complete(prompt, ANSWER)
        return refused.value.status

    with Client(in_tree_decode.url, transport=played) as client, ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, prompts)) == {500}
    in_tree_decode.check_alive()
    with Client(in_tree_decode.url) as client:
        assert answers(client, prompts) == answers(single, prompts)
        expect_free(client)
