"""Accounts of two engines: their counters while a test asks them, and no block held after it."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.cluster.client import Client, Counters
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.metrics import (
    FAILURES,
    LOADS,
    OFFERS,
    OFFERS_ABORTED,
    OFFERS_NOT_NEEDED,
    OFFERS_READ,
    OFFERS_UNCLAIMED,
    PROBE,
    TOKENS,
    USAGE,
    CountersSince,
)
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until

OFFER_TTL_S = 8  # long enough that a busy machine does not end an offer, which tests then wait for

PATIENT: Mapping[str, object] = {
    "lease_s": 30,
    "offer_ttl_s": OFFER_TTL_S,
    "peer_timeout_s": 30,
    "request_timeout_s": 60,
}
"""The connector's configuration: on few cores signs of life may come seconds late."""

EVENT_S = 90.0
"""How long an event may take on a busy machine. Nothing but a failed test waits so long."""

SETTLING = 8  # tokens, each a step: then an engine has published all that it had counted before

CPU_FLAGS = frozenset(Path("/proc/cpuinfo").read_text("utf-8").split())
HAS_BFLOAT16 = "avx512_bf16" in CPU_FLAGS
HAS_AMX = "amx_bf16" in CPU_FLAGS
NO_BFLOAT16 = "vLLM's kernels of this model need bfloat16 (AVX512-BF16 or AMX)"


def without_connector(spec: EngineSpec, name: str) -> EngineSpec:
    """An engine of the same shape that answers alone, to compare answers with."""
    return replace(spec, name=name, role="single", connector="none", connector_config={})


_SEEDS = itertools.count(10**6)


@contextmanager
def started(cluster: Cluster, *specs: EngineSpec) -> Iterator[list[Engine]]:
    """Engines that end with the block."""
    engines = cluster.start(*specs)
    yield engines
    cluster.end(*engines)


def expect_load(to_decode: Client, complete: Callable[[str, int], object]) -> None:
    """Decode reads the KV of a request that is made like this, now or soon."""
    since = CountersSince(to_decode)

    def has_read() -> bool:
        complete(random_prompt(20, seed=next(_SEEDS)), 1)
        return since.wait_for(LOADS, timeout_s=1)[LOADS] > 0

    assert wait_until(has_read, EVENT_S)


@contextmanager
def connected(prefill: Engine, decode: Engine) -> Iterator[Pair]:
    """A pair whose decode has read from prefill once: no test begins with their first handshake.

    On a very busy machine that may take longer than it is allowed, and a prompt is then computed.
    """
    with Pair(prefill, decode) as pair:
        expect_load(pair.to_decode, pair.complete)
        for client in (pair.to_prefill, pair.to_decode):
            client.complete(PROBE, SETTLING)
        yield pair


class Accounts:
    """Counters of prefill and decode since this was built.

    An engine publishes them when it steps, so each is made to.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.prefill = CountersSince(pair.to_prefill)
        self.decode = CountersSince(pair.to_decode)

    def expect_loaded(self, *tokens: int) -> Counters:
        """Decode has read these numbers of tokens, one for each request, and no load failed."""
        wanted = {LOADS: len(tokens), TOKENS: sum(tokens), FAILURES: 0}
        return expect(self.decode, wanted)

    def expect_offers(
        self, published: int, *, read: int, aborted: int = 0, unclaimed: int = 0
    ) -> None:
        wanted = {OFFERS: published, OFFERS_READ: read}
        expect(self.prefill, wanted | {OFFERS_ABORTED: aborted, OFFERS_UNCLAIMED: unclaimed})

    def expect_released(self) -> None:
        """Prefill published one offer, and decode let go of it: before or after its grant."""

        def released(now: Counters) -> float:
            return now[OFFERS_ABORTED] + now[OFFERS_NOT_NEEDED]

        changed = self.prefill.wait(lambda now: released(now) >= 1, EVENT_S, step=True)
        assert (changed[OFFERS], released(changed)) == (1, 1)

    def expect_free(self) -> None:
        for client in (self.pair.to_prefill, self.pair.to_decode):
            expect_free(client)


def expect(since: CountersSince, wanted: Mapping[str, float]) -> Counters:
    """Wait until counters have grown by that much; all that have changed."""
    changed = since.wait(
        lambda now: all(now[name] == amount for name, amount in wanted.items()),
        EVENT_S,
        step=True,
    )
    assert {name: changed[name] for name in wanted} == wanted
    return changed


def expect_free(client: Client, within_s: float = EVENT_S) -> None:
    """Wait until an engine holds no block."""

    def is_free() -> bool:
        client.complete(PROBE, 1)  # the gauge is as of the last step
        return client.counters()[USAGE] == 0

    assert wait_until(is_free, within_s), f"{client.url} holds blocks"
