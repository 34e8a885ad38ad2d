"""Time answers of engines in containers of one host: vLLM's own connector, and `share_dir`.

Each engine has PID, IPC and mount namespaces of its own and, unless `--one-network`, a network
namespace behind a switch, as pods have. All pairs are up at once, and one at a time answers, in
random order. "share_dir" and "nixl-kv" are this connector with and without that setting. TTFT is
the time from the request to prefill until decode's first token, "decode ms" the part of it after
prefill's answer. "GB/s" is that of decode's reads, from their start until the fence or vLLM's
connector has confirmed them, and "of link" its share of the speed at which torch copies between
the two GPUs.
"""

import argparse
import contextlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import engines
from benchmarks.floor import prompt
from benchmarks.shapes import Row
from harness.cluster.client import Counters
from harness.cluster.cluster import Cluster
from harness.cluster.engines import Connector, Engine, EngineSpec
from harness.cluster.metrics import LOADED_METRICS, READS, CountersSince, Loaded
from harness.cluster.netns import ADDRESSES, Namespace, Switch
from harness.cluster.pair import Pair

ARMS: Final = ("in-tree", "nixl-kv", "share_dir")
TOLD: Final = ("is on this host, but", "cannot be shared", "pool to share", "does not map")
"""Lines of an engine's log that explain a path."""
SLOW_S: Final = 20.0
"""A request that takes longer is the last one of its length and pair of engines."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines, the prompts and the namespaces."""
    engines.add_options(parser)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-utilization", type=float, default=0.25, help="of each engine")
    parser.add_argument("--cache-gib", type=int, default=8, help="of each engine")
    parser.add_argument(
        "--one-network", action="store_true", help="leave all engines in this network namespace"
    )


@dataclass
class Measured:
    """The answers of one pair of engines to prompts of one length."""

    loaded: Loaded = field(default_factory=lambda: Loaded(0, 0, 0, 0.0))
    paths: dict[str, int] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def add(self, changed: Counters, connector: Connector) -> None:
        more, last = Loaded.from_counters(changed, connector), self.loaded
        self.loaded = Loaded(
            loads=last.loads + more.loads,
            tokens=last.tokens + more.tokens,
            nbytes=last.nbytes + more.nbytes,
            seconds=last.seconds + more.seconds,
        )
        for path, metric in READS.items():
            self.paths[path] = self.paths.get(path, 0) + round(changed.get(metric, 0))

    @property
    def path(self) -> str:
        return ", ".join(f"{path} {count}" for path, count in self.paths.items() if count)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each length and pair of engines. All prompts must be loaded."""
    link = link_speed(options) if options.device == "cuda" else 0.0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
        hosts: list[Namespace] = []
        if not options.one_network:
            if shutil.which("ip") is None:
                sys.exit("`ip` of iproute2 is missing: use --one-network")
            hosts = [stack.enter_context(Namespace(one, n)) for n, one in enumerate(("p", "d"), 1)]
            stack.enter_context(Switch(*hosts))
        cluster = stack.enter_context(engines.new_cluster())
        specs = {arm: specs_of(arm, options, hosts, folder) for arm in options.arms}
        started = cluster.start(*(spec for pair in specs.values() for spec in pair))
        pairs = {arm: started[2 * n : 2 * n + 2] for n, arm in enumerate(specs)}
        for arm, pair in pairs.items():
            warm_up(arm, pair, options, cluster)
        for tokens in options.tokens:
            measured = ask_all(pairs, tokens, options)
            for arm, each in measured.items():
                yield row_of(arm, tokens, each, link)
        for engine in started:
            for line in engine.log_text().splitlines():
                if any(words in line for words in TOLD):
                    print(engine.name, line[:700], file=sys.stderr)


def specs_of(
    arm: str, options: argparse.Namespace, hosts: list[Namespace], folder: Path
) -> list[EngineSpec]:
    connector: Connector = "in-tree" if arm == "in-tree" else "nixl-kv"
    pair = []
    for number, spec in enumerate(engines.pair_of(connector, options)):
        config: dict[str, Any] = dict(spec.connector_config)
        host = hosts[number] if hosts else None
        if connector == "nixl-kv" and host is not None:
            config |= {"host": host.wire_address, "insecure": True, "peers": [ADDRESSES]}
        if arm == "share_dir":
            config["share_dir"] = str(folder / "share")
        env = {"UCX_TLS": "all"} if host is not None else {}
        pair.append(
            replace(
                spec,
                name=f"{spec.role}-{arm}",
                contained=True,
                host=host,
                connector_config=config,
                gpu_memory_utilization=options.memory_utilization,
                kv_cache_bytes=options.cache_gib << 30 if options.device == "cuda" else None,
                extra_env={**spec.extra_env, **env},
            )
        )
    return pair


def warm_up(arm: str, pair: list[Engine], options: argparse.Namespace, cluster: Cluster) -> None:
    """The first requests of each length make connections, and compile kernels."""
    with Pair(pair[0], pair[1]) as both:
        for tokens in options.tokens:
            for number in range(2):
                begin = time.perf_counter()
                both.complete(prompt(tokens, f"{options.seed}/warm/{arm}/{number}"), 1)
                seconds = time.perf_counter() - begin
                print(f"{arm}: warm-up of {tokens} tokens {seconds:.2f} s", file=sys.stderr)
                if seconds > SLOW_S:
                    break
    cluster.check_alive()


def ask_all(
    pairs: dict[str, list[Engine]], tokens: int, options: argparse.Namespace
) -> dict[str, Measured]:
    measured = {arm: Measured() for arm in pairs}
    order = random.Random(f"{options.seed}/{tokens}")  # noqa: S311 - the same each time
    slow = set[str]()
    for number in range(options.repeat):
        for arm in order.sample(list(pairs), len(pairs)):
            if arm in slow:
                continue
            connector: Connector = "in-tree" if arm == "in-tree" else "nixl-kv"
            words = prompt(tokens, f"{options.seed}/{tokens}/{arm}/{number}")
            prefill, decode = pairs[arm]
            with Pair(prefill, decode) as pair:
                since = CountersSince(pair.to_decode)
                begin = time.perf_counter()
                ticket = pair.to_prefill.ticket(words)
                middle = time.perf_counter()
                pair.decode_with(ticket, words, 1)
                end = time.perf_counter()
                changed = since.wait_for(LOADED_METRICS[connector]["loads"], 1, 10.0)
            measured[arm].ttft.append(end - begin)
            measured[arm].decode.append(end - middle)
            measured[arm].add(changed, connector)
            if end - begin > SLOW_S:
                slow.add(arm)
    return measured


def row_of(arm: str, tokens: int, measured: Measured, link: float) -> Row:
    loaded = measured.loaded
    speed = loaded.nbytes / loaded.seconds / 1e9 if loaded.seconds else 0.0
    missing = len(measured.ttft) - loaded.loads
    return {
        "engines": arm,
        "tokens": tokens,
        "requests": len(measured.ttft),
        "path": measured.path or "NIXL",
        "MB a load": loaded.nbytes / max(1, loaded.loads) / 1e6,
        "GB/s": speed,
        **({"of link": speed / link} if link else {}),
        "TTFT p50 ms": statistics.median(measured.ttft) * 1e3,
        "TTFT max ms": max(measured.ttft) * 1e3,
        "decode ms": statistics.median(measured.decode) * 1e3,
        **({"fault": f"{missing} not loaded"} if missing else {}),
    }


def link_speed(options: argparse.Namespace) -> float:
    """GB/s of a copy of 1 GiB from prefill's first GPU to decode's."""
    import torch  # noqa: PLC0415 - not in every environment

    first = int((options.prefill_gpus or "0").split(",")[0])
    last = int((options.decode_gpus or "0").split(",")[0])
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=f"cuda:{first}")
    target = torch.empty_like(source, device=f"cuda:{last}")
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        for gpu in (first, last):
            torch.cuda.synchronize(gpu)
        seconds.append(time.perf_counter() - begin)
    return source.numel() / min(seconds) / 1e9
