"""Do engines on several hosts find each other, move KV between them, and survive a cut link?

Four hosts, which are network namespaces behind one switch: prefill on two of them, decode on the
third, the router on the fourth. The scenes: prefill as one engine of two tensor-parallel ranks; the
link between decode and the second of them cut, and healed; prefill as two data-parallel engines,
told which network interface to use; all of it over IPv6. All have a key.

The columns: where prefill's ranks listen, as `nixl-kv status` says on the router's host; requests
through the router; how many were answered as a single engine does; of how many decode read the KV,
and how many it computed after all; how long all took; and how long, once the link was healed, until
KV was read again. Needs root.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from harness.cluster.answers import Question, questions_of
from harness.cluster.client import Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import PATIENT, Engine, EngineSpec
from harness.cluster.metrics import FAILURES, LOADS, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.netns import WIRE, Namespace, Switch
from harness.cluster.pair import Pair
from harness.cluster.processes import Ports, ProcessDiedError, nixl_kv_command
from harness.cluster.prompts import random_prompt
from lab.results import Results, Verdict, say_on_stderr, verdict_of

KEY: Final = "5e" * 32
KEY_VARIABLE: Final = {"NIXL_KV_KEY": KEY}
REQUESTS: Final = 8
AT_A_TIME: Final = 4
WORDS: Final = 300
"""Of a prompt: three blocks of 128 tokens."""
ANSWER: Final = 16
SEED: Final = 13_000
UNCOUNTED_SEED: Final = 14_000
"""Of prompts whose answers nobody looks at."""
KV_CACHE_BYTES: Final = 128 << 20
TIMEOUT_S: Final = 120.0
COUNTED_S: Final = 30.0
"""How long a busy engine's counters may lag its answers."""
AGAIN_S: Final = 60.0
CONFIG: Final[Mapping[str, object]] = {
    **PATIENT,
    "peer_timeout_s": 10,
    "request_timeout_s": 60,
}
"""A link that is cut has to be noticed."""
NUM_SCENES: Final = 5


@dataclass(frozen=True)
class Hosts:
    """What runs where."""

    prefill: tuple[Namespace, Namespace]
    decode: Namespace
    router: Namespace

    @property
    def all(self) -> tuple[Namespace, ...]:
        """In the order of their addresses."""
        return (*self.prefill, self.decode, self.router)


@dataclass(frozen=True)
class Outcome:
    """What came of a scene."""

    scene: str
    ranks: tuple[str, ...]
    requests: int
    right: int
    loads: int
    recomputed: int
    seconds: float
    is_cut: bool = False
    again_s: float | None = None
    """From the end of a cut until KV was read."""
    troubles: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """All answers are right, and come from KV that was read unless that is out of reach."""
        wanted = 0 if self.is_cut else self.requests
        wrong = self.requests - self.right
        return verdict_of(
            *self.troubles,
            f"{wrong} of {self.requests} not right" if wrong else "",
            f"KV was read for {self.loads}, not {wanted}" if self.loads != wanted else "",
        )

    def cells(self) -> dict[str, str]:
        """See `lab.results.Result`."""
        return {
            "scene": self.scene,
            "prefill's ranks at": " ".join(self.ranks),
            "requests": str(self.requests),
            "right": str(self.right),
            "KV loaded": str(self.loads),
            "recomputed": str(self.recomputed),
            "seconds": f"{self.seconds:.1f}",
            "again after s": "" if self.again_s is None else f"{self.again_s:.1f}",
        }


class Stage:
    """Four hosts, and what has to be known to start engines there and to ask them."""

    def __init__(self, cluster: Cluster, single: Client, hosts: Hosts) -> None:
        """Nothing runs yet. The single engine says what is right."""
        self.hosts = hosts
        self._cluster = cluster
        self._model = ensure_tiny_model()
        self._ports = Ports()
        prompts = [random_prompt(WORDS, SEED + number) for number in range(NUM_SCENES * REQUESTS)]
        self._questions = iter(questions_of(single, prompts, ANSWER))
        self._uncounted = itertools.count(UNCOUNTED_SEED)

    def decode(self, name: str, **config: object) -> EngineSpec:
        """Decode, on its host."""
        return self._spec(name, self.hosts.decode, config, role="decode")

    def tensor_parallel(self, name: str, **config: object) -> list[EngineSpec]:
        """One engine with a rank on each of prefill's hosts."""
        first, second = self.hosts.prefill
        args = ["--nnodes", "2", "--master-addr", first.wire_address]
        args += ["--master-port", str(self._ports.next_free()), "--node-rank"]
        spec = self._spec(name, first, config, tensor_parallel=2, extra_args=(*args, "0"))
        return [spec, _part(spec, second, (*args, "1"))]

    def data_parallel(self, name: str, **config: object) -> list[EngineSpec]:
        """An engine on each of prefill's hosts, and one API server before both."""
        first, second = self.hosts.prefill
        args = ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
        args += ["--data-parallel-address", first.wire_address]
        args += ["--data-parallel-rpc-port", str(self._ports.next_free())]
        spec = self._spec(name, first, config, extra_args=tuple(args))
        return [spec, _part(spec, second, (*args, "--data-parallel-start-rank", "1"))]

    @contextlib.contextmanager
    def running(
        self, prefill: Sequence[EngineSpec], decode: EngineSpec
    ) -> Iterator[tuple[Pair, list[Engine]]]:
        """A router before them, and all parts of prefill; only decode goes on after the block."""
        *parts, reader = self._cluster.start(*prefill, decode)
        router = self._cluster.route(parts[:1], [reader], self.hosts.router)
        with Pair(parts[0], reader, router, timeout_s=TIMEOUT_S) as pair:
            self.wait_for_load(pair)  # engines load code at their first request
            yield pair, parts
        router.stop()
        self._cluster.end(*parts)

    def end(self) -> None:
        """End all engines on the hosts."""
        self._cluster.end(*(one for one in self._cluster.engines if one.spec.host is not None))

    def ask(
        self,
        scene: str,
        pair: Pair,
        directories: Mapping[Namespace, int],
        *,
        is_cut: bool = False,
        again_s: float | None = None,
    ) -> Outcome:
        """A few requests through the router; `directories` are prefill's, by host."""
        say_on_stderr(scene)
        questions = list(itertools.islice(self._questions, REQUESTS))
        since, begin = CountersSince(pair.to_decode), time.monotonic()
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            troubles = list(pool.map(partial(_ask, pair.to_router), questions))
        seconds = time.monotonic() - begin
        counted = since.wait(
            lambda now: now[LOADS] + now[FAILURES] >= REQUESTS, COUNTED_S, step=True
        )
        return Outcome(
            scene,
            tuple(rank for host in directories for rank in self._ranks(host, directories[host])),
            REQUESTS,
            right=troubles.count(""),
            loads=round(counted[LOADS]),
            recomputed=round(counted[FAILURES]),
            seconds=seconds,
            is_cut=is_cut,
            again_s=again_s,
            troubles=tuple(filter(None, dict.fromkeys(troubles))),
        )

    def wait_for_load(self, pair: Pair) -> float:
        """Ask until KV is read: after how many seconds it was.

        Raises:
            TimeoutError: if it is not for too long.
        """
        begin = time.monotonic()
        since = CountersSince(pair.to_decode)
        while time.monotonic() - begin < AGAIN_S:
            pair.to_router.complete(random_prompt(WORDS, next(self._uncounted)), 1)
            if since.wait_for(LOADS, timeout_s=1.0)[LOADS]:
                return time.monotonic() - begin
        raise TimeoutError(f"{pair.decode.name} has read no KV for {AGAIN_S:g} s")

    def _spec(
        self, name: str, host: Namespace, config: Mapping[str, object], **fields: Any
    ) -> EngineSpec:
        spec = EngineSpec(
            name,
            self._model,
            "prefill",
            "nixl-kv",
            {**CONFIG, **config},
            kv_cache_bytes=KV_CACHE_BYTES,
            host=host,
            extra_env={} if "key_file" in config else KEY_VARIABLE,
        )
        return replace(spec, **fields)

    def _ranks(self, host: Namespace, port: int) -> list[str]:
        """Where the ranks listen that answer with their status, on the router's host."""
        address = f"[{host.wire_address}]" if ":" in host.wire_address else host.wire_address
        command = nixl_kv_command("status", "--at", f"{address}:{port}", "--json")
        done = subprocess.run(
            self.hosts.router.inside(command),
            env=os.environ | KEY_VARIABLE,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return [done.stderr.strip()]
        ranks = json.loads(done.stdout)["ranks"]
        return [rank["endpoint"] for rank in ranks if "error" not in rank]


def _part(spec: EngineSpec, host: Namespace, extra_args: tuple[str, ...]) -> EngineSpec:
    """The part of the same engine that runs on a further host."""
    name = f"{spec.name}-second"
    return replace(spec, name=name, host=host, headless=True, extra_args=extra_args)


def _ask(router: Client, question: Question) -> str:
    """What is wrong with the answer; empty if it is right."""
    try:
        answer = router.complete(question.prompt, question.num_tokens)
    except (RuntimeError, httpx.HTTPError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if question.compare(answer) != "other" else "a wrong answer"


def run_all(cluster: Cluster, single: Client, results: Results) -> None:
    """All scenes; results are added as they come."""
    with contextlib.ExitStack() as stack:
        names = ("prefill-1", "prefill-2", "decode", "router")
        first, second, decode, router = (
            stack.enter_context(Namespace(f"kv-{name}", number))
            for number, name in enumerate(names, start=1)
        )
        stage = Stage(cluster, single, Hosts((first, second), decode, router))
        with Switch(*stage.hosts.all) as switch:
            run_with_ipv4(stage, switch, results)
            stage.end()
        with Switch(*stage.hosts.all, ipv6=True):
            run_with_ipv6(stage, cluster.log_dir / "key", results)
            stage.end()


def run_with_ipv4(stage: Stage, switch: Switch, results: Results) -> None:
    """Addresses are found: by the default route, or by the name of an interface."""
    first, second = stage.hosts.prefill
    decode = stage.decode("decode", host="auto")
    with stage.running(stage.tensor_parallel("prefill-tp", host="auto"), decode) as (pair, parts):
        ports = {first: parts[0].side_port}
        results.add(stage.ask("TP 2", pair, ports))
        switch.cut(second, stage.hosts.decode)
        results.add(stage.ask("TP 2, a link is cut", pair, ports, is_cut=True))
        switch.heal()
        again_s = stage.wait_for_load(pair)
        results.add(stage.ask("TP 2, healed", pair, ports, again_s=again_s))
    with stage.running(stage.data_parallel("prefill-dp", host=WIRE), decode) as (pair, parts):
        ports = {first: parts[0].side_port, second: parts[1].side_port + 1}
        results.add(stage.ask("DP 2", pair, ports))


def run_with_ipv6(stage: Stage, key_file: Path, results: Results) -> None:
    """Addresses are configured: both hosts of prefill have the first one's."""
    key_file.write_text(f"{KEY}\n", encoding="utf-8")
    key_file.chmod(0o600)
    first, _ = stage.hosts.prefill
    key = {"key_file": str(key_file.absolute())}
    decode = stage.decode("decode-ipv6", host=stage.hosts.decode.wire_address, **key)
    prefill = stage.tensor_parallel("prefill-ipv6", host=first.wire_address, **key)
    with stage.running(prefill, decode) as (pair, parts):
        results.add(stage.ask("TP 2, IPv6", pair, {first: parts[0].side_port}))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="nodes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary folder")
    return parser.parse_args()


def main() -> int:
    """Run; 0 only if all is well in every scene."""
    options = parse_arguments()
    if os.geteuid():
        print("network namespaces need root", file=sys.stderr)
        return 2
    title = "prefill on two hosts, decode on a third, the router on a fourth"
    results = Results(title, "scenes are as they should be", options.json)
    status = 1
    try:
        with contextlib.suppress(KeyboardInterrupt), Cluster(options.log_dir) as cluster:
            (single,) = cluster.start(EngineSpec("single", ensure_tiny_model()))
            with Client(single.url) as client:
                run_all(cluster, client, results)
    except (ProcessDiedError, TimeoutError) as error:
        print(error, file=sys.stderr)
    finally:
        status = results.print(NUM_SCENES)
    return status


if __name__ == "__main__":
    sys.exit(main())
