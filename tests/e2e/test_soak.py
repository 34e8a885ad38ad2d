"""A healthy pair loses nothing under load, also on a busy host.

Some clients hang up at a random moment. NIXL_KV_SOAK_S is for how many seconds they ask.
"""

import os
import random
import time

import pytest

from harness.cluster.client import Answer
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.metrics import PREFIX, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.processes import busy
from support.asking import Load, judge, kinds
from support.engines import expect_free, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.soak]

SECONDS = float(os.environ.get("NIXL_KV_SOAK_S", "60"))
HANG_UP = 0.1  # the share of clients that do
CHECKED = 200  # answers, among them the slowest
UNHEALTHY = [
    f"{PREFIX}{name}_total"
    for name in (
        *("load_failures", "offers_expired", "offers_lost", "asks_denied", "tickets_refused"),
        *("messages_dropped", "peers_lost", "agents_recycled", "thread_restarts"),
    )
]
"""Counters that an operator should act on."""


@pytest.mark.parametrize("num_busy", [0, 2], ids=["idle host", "busy host"])
def test_a_pair_under_load_loses_nothing(cluster: Cluster, num_busy: int) -> None:
    chooser = random.Random(0)  # noqa: S311 - hang-ups need no secret

    def complete(prompt: str, num_tokens: int) -> Answer | None:
        if chooser.random() < HANG_UP:
            after_s = chooser.uniform(0.001, 0.5)
            pair.to_router.disconnect_early(prompt, after_s, max_tokens=num_tokens)
            return None
        return pair.to_router.complete(prompt, num_tokens)

    specs = pair_specs(ensure_tiny_model(), suffix="-soak", num_blocks=400, cores=frozenset())
    with (
        started(cluster, *specs) as (prefill, decode),
        Pair(prefill, decode, cluster.route([prefill], [decode])) as pair,
    ):
        clients = pair.to_prefill, pair.to_decode
        since = [CountersSince(client) for client in clients]
        with busy(num_busy), Load(complete, clients=6) as load:
            time.sleep(SECONDS)
        for client in clients:
            expect_free(client)
        answered = {seed: one for seed, one in load.ended.items() if one.answer is not None}
        slowest = sorted(answered, key=lambda seed: -answered[seed].seconds)[: CHECKED // 2]
        checked = {*list(answered)[: CHECKED // 2], *slowest}
        judged = kinds(judge(pair.to_prefill, {seed: answered[seed] for seed in checked}))
        changed = [one.changed() for one in since]
    print(f"{len(load.ended)} requests, {len(answered)} answered")
    assert judged == {"right": len(checked)}
    assert [one.error for one in load.ended.values() if one.error] == []
    assert [name for one in changed for name in UNHEALTHY if one.get(name)] == []
