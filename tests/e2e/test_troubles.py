"""The nine troubles of an operator: doctor names the cause of each in two minutes.

Prefill and decode on two hosts, which are network namespaces that a wire joins. The time runs from
the begin of a trouble, over the requests that suffer from it, to the sentence that names it.
"""

import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import pytest

from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import PATIENT, Engine
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.netns import BITS, PERFECT, Namespace, Quality, Wire
from harness.cluster.pair import Pair
from harness.cluster.processes import nixl_kv_command
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until
from support.asking import ask
from support.engines import EVENT_S, expect_free, expect_load, started

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and `ip` of iproute2"
    ),
]

FOUND_S = 120.0
KEY = {"NIXL_KV_KEY": "5e" * 32}
UCX_PORTS = range(14_000, 15_000)
CONFIG = {**PATIENT, "peer_timeout_s": 5, "request_timeout_s": 60}
WORDS = 300  # of a prompt: 2.4 MiB of KV
LONG = 1500  # 12 of decode's blocks
CLIENTS = 8
NUM_BLOCKS = 40  # of decode: for three long prompts
SLOW_RATE = 4e6  # bits per second
SEEDS = itertools.count(31_000)


class Site(NamedTuple):
    pair: Pair
    wire: Wire
    hosts: tuple[Namespace, Namespace]

    def at(self, engine: Engine) -> str:
        host = self.hosts[engine is self.pair.decode]
        return f"{host.wire_address}:{engine.side_port}"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `nixl-kv` on decode's host."""
        command = self.hosts[1].inside(nixl_kv_command(*arguments))
        env = os.environ | KEY
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    def doctor(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The checks by group and name. The words `prefill` and `decode` stand for addresses."""
        prefill, decode = self.at(self.pair.prefill), self.at(self.pair.decode)
        done = self.run("doctor", "--at", decode, "--peer", prefill, "--json")
        report = json.loads(done.stdout)
        assert done.returncode == (2 if report["error"] else 1 if report["warning"] else 0)
        short = {f"engine {decode}": "decode", f"peer {prefill}": "prefill"}
        return {
            (short.get(each["group"], each["group"]), each["name"]): each
            for each in report["checks"]
        }

    def complete(self, words: int = WORDS, num_tokens: int = 1) -> object:
        """A request that no engine has seen before; the error it ends with is returned."""
        prompt = random_prompt(words, next(SEEDS))
        return ask(lambda: self.pair.complete(prompt, num_tokens))

    def heal(self) -> None:
        self.wire.quality = PERFECT
        expect_load(self.pair.to_decode, self.pair.complete)


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Iterator[Site]:
    with Namespace("kv-prefill", 1) as first, Namespace("kv-decode", 2) as second:
        env = KEY | {"UCX_TCP_PORT_RANGE": f"{UCX_PORTS.start}-{UCX_PORTS.stop - 1}"}
        specs = [
            replace(
                spec,
                host=host,
                num_blocks=num_blocks,
                extra_env=env,
                connector_config={**CONFIG, "host": host.wire_address},
            )
            for spec, host, num_blocks in zip(
                pair_specs(ensure_tiny_model(), suffix="-troubles", kv_cache_bytes=320 << 20),
                (first, second),
                (None, NUM_BLOCKS),
                strict=True,
            )
        ]
        specs = [replace(spec, engine_id=spec.role) for spec in specs]
        with (
            Wire(first, second) as wire,
            started(cluster, *specs) as (prefill, decode),
            Pair(prefill, decode) as pair,
        ):
            expect_load(pair.to_decode, pair.complete)
            yield Site(pair, wire, (first, second))


READ = ("engines together", "engine 'decode' reads 64 KiB from engine 'prefill'")
Checks = dict[tuple[str, str], dict[str, Any]]


def expect_found(site: Site, begin: float, found: Callable[[Checks], str]) -> Checks:
    """Doctor names the cause in time; prints the sentence."""
    checks = site.doctor()
    took_s = time.monotonic() - begin
    print(f"found in {took_s:.0f} s: {found(checks)}")
    assert took_s < FOUND_S
    return checks


def sentence(checks: Checks, *where: str, verdict: str = "error") -> str:
    check = checks[where]  # type: ignore[index]
    assert check["verdict"] == verdict, check
    return f"{' / '.join(where)}: {check['detail']}; fix: {check['fix']}"


def test_without_trouble_doctor_names_the_link_alone(site: Site) -> None:
    """Both namespaces are on one machine, and their engines have UCX_TLS=tcp."""
    begin = time.monotonic()
    checks = expect_found(site, begin, lambda now: sentence(now, *READ, verdict="warning"))
    assert "UCX_TLS=tcp excludes shared memory" in checks[READ]["detail"]
    assert "64 KiB in " in checks[READ]["detail"]
    bad = {where for where, check in checks.items() if check["verdict"] in ("warning", "error")}
    # A thread of this process is the wire, so reads may be slow, too.
    assert all(where == READ or where[1].startswith("reads from ") for where in bad), bad
    assert "UCX_TLS=tcp" in checks["decode", "UCX's settings"]["detail"]
    assert " of " in checks["prefill", "its file descriptors"]["detail"]


def test_a_slow_link(site: Site) -> None:
    begin = time.monotonic()
    site.wire.quality = Quality(rate=SLOW_RATE, queue_s=2.0)
    try:
        site.complete()
        checks = expect_found(site, begin, lambda now: sentence(now, *READ, verdict="warning"))
        reads = next(now for (_, name), now in checks.items() if name.startswith("reads from "))
        assert reads["verdict"] == "warning"
        assert "slower than a link of 1 Gbit/s" in reads["detail"]
        speed = re.search(r" at ([\d.]+) MB/s", reads["detail"])
        assert speed is not None
        assert float(speed[1]) < 2 * SLOW_RATE / BITS / 1e6
        assert "NixlKVReadsSlow" in reads["fix"]
        assert "the fastest of three" in checks[READ]["detail"]
        shown = site.run("status", "--at", site.at(site.pair.decode)).stdout
        assert "MB/s" in shown
    finally:
        site.heal()


def test_large_packets_that_vanish(site: Site) -> None:
    begin = time.monotonic()
    site.wire.quality = Quality(longest=5000)
    try:
        site.complete()
        checks = expect_found(site, begin, lambda now: sentence(now, *READ))
        assert "16 bytes arrive, but 64 KiB do not" in checks[READ]["detail"]
        assert "MTU" in checks[READ]["fix"]
    finally:
        site.heal()


def test_closed_ports_of_ucx(site: Site) -> None:
    """Those of nixl_kv are open, and the peers had met before."""
    begin = time.monotonic()
    site.wire.quality = Quality(closed=UCX_PORTS)
    try:
        site.complete()
        checks = expect_found(site, begin, lambda now: sentence(now, *READ))
        assert "prefill's own ports answer" in checks[READ]["detail"]
        assert "UCX_TCP_PORT_RANGE" in checks[READ]["fix"]
        assert checks["prefill", "ranks"]["verdict"] == "ok"
        states = {peer["state"] for peer in peers(site)}
        assert "READY" not in states, "no prefill engine can be read"
    finally:
        site.heal()


def peers(site: Site) -> list[dict[str, Any]]:
    status = json.loads(site.run("status", "--at", site.at(site.pair.decode), "--json").stdout)
    return list(status["ranks"][0]["peers"])


def test_a_firewall_that_drops_everything(site: Site) -> None:
    begin = time.monotonic()
    site.wire.quality = Quality(up=False)
    try:
        name = f"TCP to {site.at(site.pair.prefill)}"
        checks = expect_found(site, begin, lambda now: sentence(now, "prefill", name))
        assert "a firewall drops packets" in checks["prefill", name]["detail"]
    finally:
        site.heal()


def test_a_stopped_prefill(site: Site) -> None:
    begin = time.monotonic()
    site.pair.prefill.suspend()
    try:
        name = f"TCP to {site.at(site.pair.prefill)}"
        checks = expect_found(site, begin, lambda now: sentence(now, "prefill", name))
        assert "the process is stopped or hangs" in checks["prefill", name]["detail"]
    finally:
        site.pair.prefill.resume()
        site.heal()


def test_another_label_of_the_weights(site: Site) -> None:
    begin, where = time.monotonic(), site.at(site.pair.prefill)
    assert site.run("set-weights", "step 8", "--at", where).returncode == 0
    try:
        site.complete()
        name = "engine 'decode' reads engine 'prefill'"
        together = "engines together"
        checks = expect_found(site, begin, lambda now: sentence(now, together, name))
        assert "'step 8' there" in checks[together, name]["detail"]
        assert "set-weights" in checks[together, name]["fix"]
    finally:
        assert site.run("set-weights", "", "--at", where).returncode == 0
        site.heal()


def test_a_full_cache_of_decode(site: Site) -> None:
    begin, is_over = time.monotonic(), threading.Event()

    def talk() -> None:
        while not is_over.is_set():
            site.complete(LONG, 400)

    with ThreadPoolExecutor(CLIENTS) as clients:
        talks = [clients.submit(talk) for _ in range(CLIENTS)]
        found: dict[str, Any] = {}

        def look() -> bool:
            found.update(site.doctor().get(("decode", "local blocks"), {}))
            return bool(found)

        has_found = wait_until(look, FOUND_S)
        is_over.set()
        assert has_found, "no load waits for blocks"
        took_s = time.monotonic() - begin
        print(f"found in {took_s:.0f} s: {found['detail']}; fix: {found['fix']}")
        assert took_s < FOUND_S
        assert found["verdict"] == "warning"
        assert "for blocks of its KV cache" in found["detail"]
        for one in talks:
            one.result()
    expect_free(site.pair.to_decode)


def ucx_ports(host: Namespace) -> dict[int, list[int]]:
    """The ports of UCX where a process of the host listens, by its pid."""
    command = host.inside(["ss", "--no-header", "--numeric", "--listening", "--tcp", "--processes"])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[int, list[int]] = {}
    for line in done.stdout.splitlines():
        port = int(line.split()[3].rpartition(":")[2])
        pid = re.search(r"pid=(\d+)", line)
        if port in UCX_PORTS and pid is not None:
            found.setdefault(int(pid[1]), []).append(port)
    return found


CONNECT = """\
import socket, sys
held = []
for number in range(64):
    for port in sys.argv[2:]:
        try:
            held.append(socket.create_connection((sys.argv[1], int(port)), 1.0))
        except OSError:
            sys.exit()
"""
"""The limit is one of numbers, of which some below it may be free."""


def test_exhausted_descriptors_of_prefill(site: Site) -> None:
    """A connection that prefill cannot accept makes UCX close the port; then a few are free."""
    ((pid, ports),) = ucx_ports(site.hosts[0]).items()
    worker, limits = psutil.Process(pid), resource.prlimit(pid, resource.RLIMIT_NOFILE)
    begin = time.monotonic()
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (worker.num_fds(), limits[1]))
        python = [sys.executable, "-c", CONNECT, site.hosts[0].wire_address]
        subprocess.run(site.hosts[0].inside([*python, *map(str, ports)]), check=True)
        is_closed = wait_until(
            lambda: len(ucx_ports(site.hosts[0]).get(pid, [])) < len(ports), EVENT_S
        )
        assert is_closed, "UCX still listens at all of its ports"
        few = worker.num_fds() + 8
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, limits[1]))
        where = ("prefill", "its file descriptors")
        checks = expect_found(site, begin, lambda now: sentence(now, *where))
        assert f" of {few:,} open" in checks[where]["detail"]
        assert "ulimit -n" in checks[where]["fix"]
        listening = sentence(checks, "prefill", "listening sockets")
        assert "UCX has closed a listening socket" in listening
        print(listening)
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        site.heal()


def test_a_killed_prefill(site: Site) -> None:
    """After its restart, its former life does not count as an engine that can be read."""
    begin = time.monotonic()
    prefill = site.pair.prefill
    prefill.kill()
    try:
        name = f"TCP to {site.at(prefill)}"
        checks = expect_found(site, begin, lambda now: sentence(now, "prefill", name))
        assert "nothing listens at this port" in checks["prefill", name]["detail"]
    finally:
        prefill.restart()
    site.heal()
    known = peers(site)
    assert [peer["state"] for peer in known] == ["READY"], known
