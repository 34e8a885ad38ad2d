"""Each alert fires in an outage of engines under load and clears after it; each panel has data.

Prometheus reads configs/prometheus/alerts.yaml with windows and limits of seconds.
"""

import itertools
import math
import operator
import re
import resource
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import httpx
import psutil
import pytest

from harness.cluster.client import Answer, Client, NoTicketError
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, Engine, python_path
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.processes import nixl_kv_command
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import look_until, wait_or_fail
from support.asking import Load
from support.engines import EVENT_S
from support.planting import TESTS, planted_spec
from support.prometheus import (
    ALERTS,
    RULES,
    expressions,
    firing,
    needs_prometheus,
    query,
    scraping,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, needs_prometheus]

WINDOW = "30s"
PACE_S = 0.4  # between two requests that decode computes at once
SHORTER = (
    (r"\[\d+[mh]\]", f"[{WINDOW}]"),
    (r"for: \d+m", "for: 4s"),
    (r"> 0\) > 120", "> 0) > 8"),  # the age of an offer
)
CONFIG = {"offer_ttl_s": 25, "lease_s": 30, "peer_timeout_s": 10, "request_timeout_s": 60}
UCX_PORTS = range(19_000, 19_500)
"""Prefill's. Other listeners of vLLM, such as gloo's, abort without descriptors."""
BLOCK = 64  # prefill's has 128 tokens, so prefill packs KV
LONG = 1000  # tokens of a prompt: 16 of the 47 blocks of decode


@dataclass(frozen=True)
class Site:
    """Prefill with a key, decode with it, and decode with another one."""

    prefill: Engine
    decode: Engine
    stranger: Engine
    prometheus: httpx.Client
    plan: Path
    """The file that names the fault in decode; see `support.planted_connector`."""

    def complete(self, prompt: str, num_tokens: int, decode: Engine | None = None) -> Answer:
        ticket = None
        with Client(self.prefill.url) as to_prefill, suppress(NoTicketError):
            ticket = to_prefill.ticket(prompt)
        with Client((decode or self.decode).url) as to_decode:
            return to_decode.complete(prompt, num_tokens, kv_transfer_params=ticket)

    def wait_for(self, condition: Callable[[set[str]], bool]) -> set[str]:
        """Wait until the alerts that fire are like this, and return them."""
        return look_until(lambda: firing(self.prometheus), condition, EVENT_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, plan = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("plan") / "plan"
    plan.write_text("")
    rules = ALERTS.read_text("utf-8")
    for pattern, shorter in SHORTER:
        rules, count = re.subn(pattern, shorter, rules)
        assert count, pattern
    (folder / "rules.yaml").write_text(rules, "utf-8")
    # With the same PYTHONPATH, which `planted_spec` sets, one process forks all engines.
    key, other = (
        {"NIXL_KV_KEY": secrets.token_hex(32), "PYTHONPATH": python_path(TESTS)} for _ in range(2)
    )
    prefill, decode = pair_specs(
        ensure_tiny_model(), kv_cache_bytes=320 << 20, connector_config=CONFIG, extra_env=key
    )
    ucx = {"UCX_TCP_PORT_RANGE": f"{UCX_PORTS.start}-{UCX_PORTS.stop - 1}"}
    prefill = replace(prefill, extra_env=key | ucx)
    stranger = replace(decode, name="stranger", extra_env=other)
    decode = replace(
        planted_spec(decode, plan),
        block_size=BLOCK,
        num_blocks=48,
        extra_args=("--max-model-len", "2048"),
    )
    with Cluster(folder / "logs") as cluster:
        engines = cluster.start(prefill, decode, stranger)
        targets = {"vllm": [f"{HOST}:{engine.port}" for engine in engines]}
        with scraping(folder, targets, rules=folder / "rules.yaml") as prometheus:
            # A rate sees what happens after the first scrape.
            scraped = f"sum(up) == {len(engines)}"
            wait_or_fail(lambda: bool(query(prometheus, scraped)), EVENT_S, "no scrape")
            first, second, third = engines
            yield Site(first, second, third, prometheus, plan)


Complete: TypeAlias = Callable[[str, int], Answer]
"""A client's request."""
Outage: TypeAlias = Callable[[Site], AbstractContextManager[Complete]]


# --- outages


@contextmanager
def router_without_tickets(site: Site) -> Iterator[Complete]:
    def complete(prompt: str, num_tokens: int) -> Answer:
        with Client(site.prefill.url) as to_prefill, Client(site.decode.url) as to_decode:
            to_prefill.ticket(prompt)
            return to_decode.complete(prompt, num_tokens)

    yield complete


@contextmanager
def router_that_loses(site: Site) -> Iterator[Complete]:
    """Decode never hears of every tenth request."""
    numbers = itertools.count()

    def complete(prompt: str, num_tokens: int) -> Answer:
        if next(numbers) % 10 == 0:
            with Client(site.prefill.url) as to_prefill:
                to_prefill.ticket(prompt)
        return site.complete(prompt, num_tokens)

    yield complete


@contextmanager
def another_key(site: Site) -> Iterator[Complete]:
    yield lambda prompt, num_tokens: site.complete(prompt, num_tokens, site.stranger)


@contextmanager
def stopped_prefill(site: Site) -> Iterator[Complete]:
    """Decode has tickets of an engine that does not answer."""
    prompts = [random_prompt(100, seed) for seed in range(round(2 * EVENT_S / PACE_S))]
    with Client(site.prefill.url) as to_prefill:
        tickets = [(prompt, to_prefill.ticket(prompt)) for prompt in prompts]
    pace = threading.Lock()

    def complete(_: str, num_tokens: int) -> Answer:
        with pace:
            time.sleep(PACE_S)
            prompt, ticket = tickets.pop()
        with Client(site.decode.url) as to_decode:
            return to_decode.complete(prompt, num_tokens, kv_transfer_params=ticket)

    site.prefill.suspend()
    try:
        yield complete
    finally:
        site.prefill.resume()


@contextmanager
def small_cache(site: Site) -> Iterator[Complete]:
    """Long prompts with long answers: decode's cache has room for two of them."""

    def complete(prompt: str, _: int) -> Answer:
        words = prompt.split() * LONG
        return site.complete(" ".join(words[:LONG]), 400)

    yield complete


@contextmanager
def drained_prefill(site: Site) -> Iterator[Complete]:
    command = nixl_kv_command("drain", "--at", f"{HOST}:{site.prefill.side_port}")
    call = partial(subprocess.run, check=True, capture_output=True, env=site.prefill.environment())
    call(command)
    yield site.complete
    call([*command, "--undo"])


@contextmanager
def planted(site: Site, fault: str) -> Iterator[Complete]:
    one_at_a_time = threading.Lock()

    def complete(prompt: str, num_tokens: int) -> Answer:
        with one_at_a_time:
            return site.complete(prompt, num_tokens)

    site.plan.write_text(fault)
    yield complete
    site.plan.write_text("")


@contextmanager
def no_descriptors(site: Site) -> Iterator[Complete]:
    """A connection that prefill cannot accept makes UCX close the port."""
    limits = {
        one: resource.prlimit(one.pid, resource.RLIMIT_NOFILE) for one in site.prefill.members()
    }
    ports = {one: ucx_ports(one) for one in limits}
    worker = max(ports, key=lambda one: len(ports[one]))
    used = worker.num_fds()
    try:
        for one, (_, hard) in limits.items():
            low = used if one is worker else max(used, one.num_fds() + 16)
            resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (low, hard))
        for port in ports[worker]:
            with suppress(OSError), socket.create_connection((HOST, port), 1.0) as connection:
                connection.settimeout(1.0)
                connection.recv(1)
        yield site.complete
    finally:
        for one, former in limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(one.pid, resource.RLIMIT_NOFILE, former)


def ucx_ports(process: psutil.Process) -> set[int]:
    connections = process.net_connections("tcp4")
    ports = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
    return ports & set(UCX_PORTS)


OUTAGES: dict[str, tuple[Outage, set[str]]] = {
    "a router that hands on no tickets": (
        router_without_tickets,
        {"NixlKVRequestsWithoutTicket", "NixlKVOffersUnclaimed"},
    ),
    "a router that loses some requests": (router_that_loses, {"NixlKVOldOffer"}),
    "decode with another key": (another_key, {"NixlKVKeyMismatch", "NixlKVRequestsRecomputed"}),
    "prefill is stopped": (
        stopped_prefill,
        {"NixlKVPeerUnreachable", "NixlKVRequestsRecomputed"},
    ),
    "decode's cache is small": (small_cache, {"NixlKVWaitingForBlocks"}),
    "prefill drains": (drained_prefill, {"NixlKVDraining"}),
    "bytes change on their way": (partial(planted, fault="byte"), {"NixlKVCorruptBytes"}),
    "an exception in the transfer thread": (
        partial(planted, fault="exception"),
        {"NixlKVThreadRestarted"},
    ),
    "reads take long": (partial(planted, fault="slow"), {"NixlKVReadsSlow"}),
    "prefill has no file descriptors": (
        no_descriptors,
        {"NixlKVDescriptorsNearLimit", "NixlKVRankUnreadable"},
    ),
}


def test_the_outages_concern_every_alert() -> None:
    expected = set().union(*(alerts for _, alerts in OUTAGES.values()))
    assert expected == {rule["alert"] for rule in RULES}


def test_every_panel_has_data_under_load(site: Site) -> None:
    """Some only after decode's first contact with prefill."""
    queries = expressions(WINDOW)
    empty = dict(queries)

    def look() -> dict[str, str]:
        for title, expression in list(empty.items()):
            if not all(map(math.isnan, query(site.prometheus, expression))):
                del empty[title]
        return empty

    with Load(site.complete, clients=4):
        look_until(look, operator.not_, EVENT_S)
    print(f"{len(queries) - len(empty)} of {len(queries)} queries have data")
    assert empty == {}


@pytest.mark.parametrize(("outage", "alerts"), OUTAGES.values(), ids=OUTAGES)
def test_the_alerts_of_an_outage_fire_and_clear(
    site: Site, outage: Outage, alerts: set[str]
) -> None:
    begin = time.monotonic()
    with outage(site) as complete, Load(complete, clients=4):
        fired = site.wait_for(alerts.issubset)
    over = time.monotonic()
    with Load(site.complete, clients=4):
        left = site.wait_for(operator.not_)
    cleared = time.monotonic()
    print(f"{sorted(fired)} after {over - begin:.0f} s, cleared {cleared - over:.0f} s later")
    assert alerts <= fired
    assert left == set()
