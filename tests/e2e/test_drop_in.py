"""A user of vLLM's own NixlConnector adds the module path, and changes nothing else."""

from collections.abc import Iterator

import pytest

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import EngineSpec
from harness.cluster.metrics import LOADS, TOKENS, UNREACHABLE, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

THEIR_KEYS = {"backends": ["UCX"], "num_threads": 4, "kv_lease_duration": 30}


@pytest.fixture
def pair(cluster: Cluster) -> Iterator[Pair]:
    """Two engines with the role, keys and variables of in-tree's guide: no key, no policy."""
    prefill, decode = cluster.start(
        *(
            EngineSpec(
                f"drop-in-{name}",
                ensure_tiny_model(),
                "both",
                "nixl-kv",
                drop_in=True,
                connector_config=THEIR_KEYS,
                kv_cache_bytes=64 << 20,
            )
            for name in ("prefill", "decode")
        )
    )
    with Pair(prefill, decode, cluster.route([prefill], [decode])) as pair:
        yield pair
    cluster.end(prefill, decode)


def test_it_starts_moves_kv_and_answers_when_prefill_is_gone(pair: Pair, single: Client) -> None:
    prompts = [random_prompt(150, seed=9100 + number) for number in range(4)]
    since = CountersSince(pair.to_decode)
    for prompt in prompts[:3]:
        assert pair.to_router.complete(prompt).tokens == single.complete(prompt).tokens
    assert since.wait_for(LOADS, 3)[LOADS] == 3
    assert since.changed()[TOKENS] >= 3 * 100
    log = pair.prefill.log_text()
    assert "kv_connector_extra_config['kv_lease_duration'] counts as 'offer_ttl_s'" in log
    assert "kv_connector_extra_config['num_threads'] has no effect: " in log

    ticket = pair.to_prefill.ticket(prompts[3])
    pair.prefill.kill()
    answer = pair.decode_with(ticket, prompts[3])
    assert answer.tokens == single.complete(prompts[3]).tokens
    assert since.wait_for(UNREACHABLE)[UNREACHABLE] == 1
