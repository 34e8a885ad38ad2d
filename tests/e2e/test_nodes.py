"""Engines on several hosts find each other, move KV between them, and survive a cut link.

Four hosts, which are network namespaces behind one switch: prefill on two of them, decode on the
third, the router on the fourth. All engines have a key.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from harness.cluster.answers import questions_of
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import PATIENT, EngineSpec
from harness.cluster.metrics import FAILURES, LOADS, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.netns import WIRE, Namespace, Switch
from harness.cluster.pair import Pair
from harness.cluster.processes import Ports, nixl_kv_command
from harness.cluster.prompts import random_prompt
from support.asking import ask, kinds
from support.engines import EVENT_S, expect_load, started

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.nodes,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and `ip` of iproute2"
    ),
]

KEY = "5e" * 32
KEY_VARIABLE = {"NIXL_KV_KEY": KEY}
REQUESTS = 8
WORDS = 300  # of a prompt: three blocks of 128 tokens
SEEDS = itertools.count(13_000)
CONFIG: Mapping[str, object] = {**PATIENT, "peer_timeout_s": 10, "request_timeout_s": 60}
"""A cut link has to be noticed."""
MASTER = Ports()


class Hosts(NamedTuple):
    first: Namespace
    second: Namespace
    decode: Namespace
    router: Namespace


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        names = ("prefill-1", "prefill-2", "decode", "router")
        made = [Namespace(f"kv-{name}", number) for number, name in enumerate(names, start=1)]
        yield Hosts(*map(stack.enter_context, made))


@pytest.fixture(params=[False])
def switch(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Switch]:
    """The parameter says whether it is for IPv6."""
    with Switch(*hosts, ipv6=request.param) as switch:
        yield switch


def spec_at(host: Namespace, name: str, config: Mapping[str, object], **fields: Any) -> EngineSpec:
    return EngineSpec(
        name,
        ensure_tiny_model(),
        connector="nixl-kv",
        connector_config={**CONFIG, **config},
        kv_cache_bytes=128 << 20,
        host=host,
        extra_env={} if "key_file" in config else KEY_VARIABLE,
        **{"role": "prefill", **fields},
    )


def on_two_hosts(
    hosts: Hosts, first: tuple[str, ...], second: tuple[str, ...], **fields: Any
) -> Any:
    """The two parts of a prefill engine, by their own arguments."""
    spec = spec_at(hosts.first, extra_args=first, **fields)
    other = replace(
        spec, name=f"{spec.name}-2", host=hosts.second, headless=True, extra_args=second
    )
    return spec, other


def tensor_parallel(hosts: Hosts, **fields: Any) -> Any:
    """One engine with a rank on each of prefill's hosts."""
    port = str(MASTER.next_free())
    args = ("--nnodes", "2", "--master-addr", hosts.first.wire_address, "--master-port", port)
    parts = (*args, "--node-rank", "0"), (*args, "--node-rank", "1")
    return on_two_hosts(hosts, *parts, tensor_parallel=2, **fields)


def data_parallel(hosts: Hosts, **fields: Any) -> Any:
    """An engine on each of prefill's hosts, and one API server before both."""
    args = (
        *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
        *("--data-parallel-address", hosts.first.wire_address),
        *("--data-parallel-rpc-port", str(MASTER.next_free())),
    )
    return on_two_hosts(hosts, args, (*args, "--data-parallel-start-rank", "1"), **fields)


@contextlib.contextmanager
def running(cluster: Cluster, router: Namespace, *specs: EngineSpec) -> Iterator[Pair]:
    """The parts of prefill, decode, and a router before them."""
    with started(cluster, *specs) as (first, _, decode):
        route = cluster.route([first], [decode], router)
        try:
            with Pair(first, decode, route) as pair:
                # Engines load code at their first request.
                expect_load(pair.to_decode, pair.to_router.complete)
                yield pair
        finally:
            route.stop()


def expect_right(single: Client, pair: Pair, *, loads: int = REQUESTS) -> None:
    """Requests through the router are answered as by a single engine; decode read some's KV."""
    prompts = [random_prompt(WORDS, next(SEEDS)) for _ in range(REQUESTS)]
    questions = questions_of(single, prompts, 16)
    since = CountersSince(pair.to_decode)
    with ThreadPoolExecutor(4) as pool:
        calls = [partial(pair.to_router.complete, one.prompt, 16) for one in questions]
        ended = list(pool.map(ask, calls))
    assert kinds(zip(questions, ended, strict=True)) == {"right": REQUESTS}
    counted = since.wait(lambda now: now[LOADS] + now[FAILURES] >= REQUESTS, EVENT_S, step=True)
    assert counted[LOADS] == loads


def ranks_of(router: Namespace, host: Namespace, port: int) -> list[str]:
    """Where the ranks listen that tell `nixl-kv status`, on the router's host, how they are."""
    address = f"[{host.wire_address}]" if ":" in host.wire_address else host.wire_address
    command = nixl_kv_command("status", "--at", f"{address}:{port}", "--json")
    env = os.environ | KEY_VARIABLE
    done = subprocess.run(router.inside(command), env=env, capture_output=True, check=True)
    endpoints = [one["endpoint"] for one in json.loads(done.stdout)["ranks"] if "error" not in one]
    return [str(urlsplit(endpoint).hostname) for endpoint in endpoints]


def test_tensor_parallel_ranks_on_two_hosts_one_of_which_is_cut_off(
    cluster: Cluster, single: Client, hosts: Hosts, switch: Switch
) -> None:
    """Addresses are found by the default route."""
    decode = spec_at(hosts.decode, "decode-tp", {"host": "auto"}, role="decode")
    prefill = tensor_parallel(hosts, name="prefill-tp", config={"host": "auto"})
    with running(cluster, hosts.router, *prefill, decode) as pair:
        expect_right(single, pair)
        ranks = ranks_of(hosts.router, hosts.first, pair.prefill.side_port)
        assert ranks == [hosts.first.wire_address, hosts.second.wire_address]
        switch.cut(hosts.second, hosts.decode)
        expect_right(single, pair, loads=0)
        switch.heal()
        expect_load(pair.to_decode, pair.to_router.complete)
        expect_right(single, pair)


@pytest.mark.usefixtures("switch")
def test_data_parallel_engines_on_two_hosts(cluster: Cluster, single: Client, hosts: Hosts) -> None:
    """Addresses are found by the name of an interface."""
    decode = spec_at(hosts.decode, "decode-dp", {"host": WIRE}, role="decode")
    prefill = data_parallel(hosts, name="prefill-dp", config={"host": WIRE})
    with running(cluster, hosts.router, *prefill, decode) as pair:
        expect_right(single, pair)
        second = next(one for one in cluster.engines if one.spec == prefill[1])
        ports = {hosts.first: pair.prefill.side_port, hosts.second: second.side_port + 1}
        for host, port in ports.items():
            assert ranks_of(hosts.router, host, port) == [host.wire_address]


@pytest.mark.parametrize("switch", [True], ids=["IPv6"], indirect=True)
@pytest.mark.usefixtures("switch")
def test_tensor_parallel_ranks_on_two_hosts_over_ipv6(
    cluster: Cluster, single: Client, hosts: Hosts, tmp_path: Path
) -> None:
    """Addresses are configured: both hosts of prefill have the first one's."""
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n", encoding="utf-8")
    key_file.chmod(0o600)
    key = {"key_file": str(key_file)}
    at_decode = {"host": hosts.decode.wire_address, **key}
    decode = spec_at(hosts.decode, "decode-ipv6", at_decode, role="decode")
    at_first = {"host": hosts.first.wire_address, **key}
    prefill = tensor_parallel(hosts, name="prefill-ipv6", config=at_first)
    with running(cluster, hosts.router, *prefill, decode) as pair:
        expect_right(single, pair)
        ranks = ranks_of(hosts.router, hosts.first, pair.prefill.side_port)
        assert ranks == [hosts.first.wire_address, hosts.second.wire_address]


RANGES = {"ranks": range(5700, 5702), "UCX": range(14000, 15000)}
CONNECT = """\
import os, socket, sys
"x".encode("idna")
os.setuid(int(sys.argv[1]))
for port in sys.argv[3:]:
    try:
        socket.create_connection((sys.argv[2], int(port)), 0.3).close()
        print(port)
    except OSError:
        pass
"""


def listening(host: Namespace, side_port: int) -> dict[str, list[str]]:
    """The ports on the wire where the processes of an engine listen, by their kind."""
    command = host.inside(["ss", "--no-header", "--numeric", "--listening", "--tcp"])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    places = [line.split()[3].rpartition(":") for line in done.stdout.splitlines()]
    ports = [port for place, _, port in places if place == host.wire_address]
    kinds = {"description": range(side_port, side_port + 1), **RANGES}
    return {kind: [p for p in ports if int(p) in kinds[kind]] for kind in kinds}


def reached(host: Namespace, ports: list[str], source: Namespace, user: int = 0) -> int:
    """To how many of the ports a process at `source` can connect."""
    arguments = [str(user), host.wire_address, *ports]
    command = source.inside([sys.executable, "-c", CONNECT, *arguments])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return len(done.stdout.split())


@pytest.mark.parametrize("has_peers", [False, True], ids=["without peers", "with peers"])
@pytest.mark.usefixtures("switch")
def test_only_the_intended_hosts_can_connect_to_each_port(
    cluster: Cluster, hosts: Hosts, *, has_peers: bool
) -> None:
    """Prefill has two ranks. Decode's host has the key, the router's has not. Prints a table."""
    networks = [f"{host.wire_address}/32" for host in (hosts.first, hosts.decode)]
    config = {"host": WIRE, "rank_port": 5700, **({"peers": networks} if has_peers else {})}
    env = KEY_VARIABLE | {"UCX_TCP_PORT_RANGE": "14000-14999"}
    name = f"ports-{has_peers}"
    specs = (
        spec_at(hosts.first, f"prefill-{name}", config, tensor_parallel=2),
        spec_at(hosts.decode, f"decode-{name}", config, role="decode"),
    )
    prefill, decode = (replace(spec, extra_env=env) for spec in specs)
    with started(cluster, prefill, decode) as (first, second), Pair(first, second) as pair:
        for is_met in (False, True):
            if is_met:
                expect_load(pair.to_decode, pair.complete)
            for engine, own, other in (
                (first, hosts.first, hosts.decode),
                (second, hosts.decode, hosts.first),
            ):
                for kind, ports in listening(own, engine.side_port).items():
                    assert ports, kind
                    found = {
                        "with the key": reached(own, ports, other),
                        "without it": reached(own, ports, hosts.router),
                        "another user, here": reached(own, ports, own, 65534),
                    }
                    print(f"{has_peers=} {is_met=} {own.name}: {len(ports)} {kind}: {found}")
                    is_ucx = kind == "UCX"
                    assert found == {
                        "with the key": len(ports) * (is_met or not is_ucx),
                        "without it": len(ports) * (not is_ucx and not has_peers),
                        "another user, here": len(ports),
                    }
