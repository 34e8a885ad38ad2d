"""MiniMax-M3's KV and keys from TP 1 to TP 2, on two GPUs: all loads are verified.

python -m pytest -s -m gpu tests/gpu/test_minimax_m3.py

It prints the seconds of a read, and the bytes per second beside a copy from GPU to GPU. Decode's
first rank is on prefill's GPU, so only the second one reads over the link. vLLM's own connector is
measured after ours.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="needs vLLM: scripts/install --cuda")

from benchmarks.engines import DECODE_GRAPHS  # noqa: E402 - after the skip
from benchmarks.floor import prompt  # noqa: E402 - likewise
from harness.cluster.client import Counters  # noqa: E402 - likewise
from harness.cluster.cluster import Cluster, pair_specs  # noqa: E402 - likewise
from harness.cluster.engines import Connector, shim_env  # noqa: E402 - likewise
from harness.cluster.metrics import (  # noqa: E402 - likewise
    FAILURES,
    LOADED_METRICS,
    LOADS,
    SECONDS,
    VERIFIED,
    CountersSince,
)
from harness.cluster.models.families import MiniMaxM3  # noqa: E402 - likewise
from harness.cluster.models.files import ensure_tiny_model  # noqa: E402 - likewise
from harness.cluster.pair import Pair  # noqa: E402 - likewise
from support.engines import EVENT_S  # noqa: E402 - likewise
from support.gpus import needs_gpus, visible  # noqa: E402 - likewise

pytestmark = needs_gpus(2)

RANKS: Final = 2  # of decode
LENGTH: Final = 16_385  # tokens: decode computes the last one, and the others fill their blocks
ROOM: Final = 20_000  # tokens; the answer and the prompt fit
KV_BYTES: Final = 8 << 30  # 138,000 bytes a token in bfloat16
LAYERS: Final = 60  # the caches of the real model, without its experts
LOADED: Final = 6  # the first one connects
START_S: Final = 420.0
RANK_SECONDS: Final = "vllm:nixl_xfer_time_seconds"
"""Both connectors count it for each rank of decode."""
DTYPES: Final = {
    "bfloat16": (),
    "fp8": ("--kv-cache-dtype", "fp8", "--attention-config", '{"indexer_kv_dtype": "fp8"}'),
}


@contextmanager
def engines(connector: Connector, dtype: str, cluster: Cluster) -> Iterator[Pair]:
    """Prefill on the first GPU, decode on the first two."""
    flags: tuple[str, ...] = ("--load-format", "dummy", "--max-num-batched-tokens", "16384")
    flags += (*DECODE_GRAPHS, "--block-size", "128", "--no-enable-prefix-caching", *DTYPES[dtype])
    prefill, decode = pair_specs(
        ensure_tiny_model(model=MiniMaxM3(layers=LAYERS, max_positions=ROOM), weights=False),
        connector,
        suffix=f"-{connector}-{dtype}",
        device="cuda",
        dtype="bfloat16",
        kv_cache_bytes=KV_BYTES,
        gpu_memory_utilization=0.3,
        cores=frozenset(),
        extra_env=shim_env("no_torchvision", is_interpreted=False),
        extra_args=flags,
    )
    prefill = replace(prefill, extra_env={**prefill.extra_env, **visible(0)})
    env = {**decode.extra_env, **visible(*range(RANKS))}
    started = cluster.start(prefill, replace(decode, extra_env=env, tensor_parallel=RANKS))
    try:
        with Pair(started[0], started[1]) as pair:
            yield pair
    finally:
        cluster.end(*started)


def link_gb_per_s(nbytes: int) -> float:
    """A copy of as many bytes from the first GPU to the second, in one piece."""
    of, to = (torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{n}") for n in range(2))
    times = []
    for _ in range(5):
        torch.cuda.synchronize(0)
        begun = time.perf_counter()
        to.copy_(of)
        torch.cuda.synchronize(1)
        times.append(time.perf_counter() - begun)
    return nbytes / min(times) / 1e9


@pytest.mark.parametrize(
    ("connector", "dtype"),
    [("nixl-kv", "bfloat16"), ("nixl-kv", "fp8"), ("in-tree", "bfloat16"), ("in-tree", "fp8")],
)
def test_two_ranks_read_what_one_has_computed(
    connector: Connector, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = []
    names = LOADED_METRICS[connector]

    def has_loaded(now: Counters) -> bool:
        is_counted = connector == "in-tree" or now[LOADS] + now[FAILURES] > 0
        return is_counted and now[f"{RANK_SECONDS}_count"] >= RANKS

    logs = tmp_path_factory.mktemp("minimax-m3")
    with (
        Cluster(logs, warm=False, start_timeout_s=START_S) as cluster,
        engines(connector, dtype, cluster) as pair,
    ):
        for number in range(LOADED):
            tokens = prompt(LENGTH, f"{dtype}/{number}")
            ticket, _ = pair.to_prefill.timed_ticket(tokens, logprobs=0)
            since = CountersSince(pair.to_decode)
            answer = pair.decode_with(ticket, tokens, 1, logprobs=None)
            changed = since.wait(has_loaded, EVENT_S)
            assert changed[f"{RANK_SECONDS}_count"] == RANKS, changed
            if connector == "nixl-kv":
                assert changed[LOADS] == changed[VERIFIED] == 1, changed
                assert not changed[FAILURES]
            row = {"GB": changed[names["nbytes"]] / 1e9, "first token ms": answer.seconds * 1e3}
            row["mean of ranks ms"] = changed[f"{RANK_SECONDS}_sum"] / RANKS * 1e3
            if connector == "nixl-kv":
                row["slowest rank ms"] = changed[SECONDS] * 1e3
            rows.append(row)
    later = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    share = later["GB"] / RANKS  # each rank has half of the heads, and all keys
    speed = share / later.get("slowest rank ms", later["mean of ranks ms"]) * 1e3
    link = link_gb_per_s(round(share * 1e9))
    shown = ", ".join(f"{name} {value:.4g}" for name, value in later.items())
    print(
        f"{connector}, {dtype}: {shown}, {speed:.4g} GB/s a rank, {speed / link:.2f} of {link:.4g}"
    )
