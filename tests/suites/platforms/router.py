"""vLLM's router before several engines, with several ranks of data, and with several front ends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Final

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import PATIENT, Engine
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.router import IN_TURNS
from suites.platforms.asking import MODULE, Engines, Outcome, ask

KV_CACHE_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class Way:
    """How to run it."""

    name: str
    pairs: int = 1
    """Of prefill and decode."""
    ranks: int = 1
    """Data-parallel ones of each, which are engines of their own."""
    engine_args: tuple[str, ...] = ()
    router_options: tuple[str, ...] = IN_TURNS


WAYS: Final = (
    Way("cache_aware, 2 prefill and 2 decode", 2, router_options=("--policy", "cache_aware")),
    Way("round_robin, 2 prefill and 2 decode", 2),
    Way(
        "round_robin, DP 2",
        ranks=2,
        engine_args=("--data-parallel-size", "2"),
        router_options=(*IN_TURNS, "--intra-node-data-parallel-size", "2"),
    ),
    Way("round_robin, 2 API servers each", engine_args=("--api-server-count", "2")),
)


def run(cluster: Cluster, single: Client, ways: Sequence[Way] = WAYS) -> Iterator[Outcome]:
    """In each of these ways; engines go on where the next way has the same ones.

    After the last one all are ended: the platforms that come next start their own.
    """
    started: list[Engine] = []
    for way in ways:
        fields: dict[str, Any] = {"kv_cache_bytes": KV_CACHE_BYTES, "extra_args": way.engine_args}
        specs = pair_specs(ensure_tiny_model(), connector_config=PATIENT, **fields)
        numbers = range(way.pairs)
        engines = cluster.start(
            *(replace(spec, name=f"{spec.name}-{number}") for spec in specs for number in numbers)
        )
        started += engines
        prefill, decode = engines[: way.pairs], engines[way.pairs :]
        router = cluster.route(prefill, decode, options=way.router_options)
        urls = [engine.url for engine in engines]
        with (
            Client(router.url) as platform,
            Client(urls[0]) as engine,
            Engines(*urls) as counted,
        ):
            vllm = engine.vllm_version()
            asked = ask(platform, counted, single)
        router.stop()
        yield Outcome(
            f"vllm-router, {way.name}",
            version("vllm-router"),
            vllm,
            MODULE,
            engines=len(engines) * way.ranks,
            asked=asked,
        )
    cluster.end(*dict.fromkeys(started))
