"""Pairs of real vLLM engines on GPUs, with CUDA graphs: exact answers, read and verified.

python -m pytest -s -m gpu tests/gpu/test_engines.py

The recall model answers every prompt exactly, if its KV is right. CUDA graphs need no compiler here
(`GRAPHS`). On a machine with one GPU both engines share it.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="needs vLLM: scripts/install --cuda")

from harness.cluster.client import DIRECT, Client  # noqa: E402
from harness.cluster.cluster import Cluster, pair_specs  # noqa: E402
from harness.cluster.engines import OVERLAP, Engine, EngineSpec  # noqa: E402
from harness.cluster.metrics import (  # noqa: E402
    FAILURES,
    LOADS,
    READS,
    VERIFIED,
    CountersSince,
)
from harness.cluster.models.files import REPO  # noqa: E402
from harness.cluster.pair import Pair  # noqa: E402
from support.engines import expect, expect_free  # noqa: E402
from support.gpus import NUM_GPUS, needs_gpus, visible  # noqa: E402

pytestmark = needs_gpus(1)

MODEL: Final = REPO / "configs/recall"
GRAPHS: Final = (
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
    "--max-model-len",
    "2048",
)
CONFIG: Final = {"offer_ttl_s": 60, "request_timeout_s": 120, "verify": "all"}
START_S: Final = 420.0
KV_BYTES: Final = 1 << 30
LINES: Final = (MODEL / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
QUESTIONS: Final = [json.loads(line) for line in LINES[::5]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("gpu-engines")
    with Cluster(logs, warm=False, start_timeout_s=START_S) as cluster:
        yield cluster


def specs(*flags: str, suffix: str = "", **fields: Any) -> tuple[Any, Any]:
    """Prefill on the first GPU, decode on the last one."""
    prefill, decode = pair_specs(
        MODEL,
        suffix=suffix,
        device="cuda",
        connector_config=CONFIG,
        kv_cache_bytes=KV_BYTES,
        gpu_memory_utilization=0.3,
        cores=frozenset(),
        extra_args=(*GRAPHS, *flags),
        **fields,
    )
    prefill, decode = (
        replace(spec, extra_env={**spec.extra_env, **visible(gpu)})
        for spec, gpu in ((prefill, 0), (decode, NUM_GPUS - 1))
    )
    return prefill, decode


def ask(client: Client, question: dict[str, str], **extra: Any) -> bool:
    """Whether the answer is exact."""
    length = len(question["answer"].split())
    answer = client.complete(question["prompt"], length, **extra)
    return answer.text.split() == question["answer"].split()


def expect_all_loaded(since: CountersSince, count: int) -> None:
    expect(since, {LOADS: count, VERIFIED: count, FAILURES: 0})


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> Iterator[list[Engine]]:
    engines = cluster.start(*specs())
    yield engines
    cluster.end(*engines)


def test_the_readmes_pair_answers_exactly_through_the_router(
    cluster: Cluster, engines: list[Engine]
) -> None:
    prefill, decode = engines
    router = cluster.route([prefill], [decode])
    with Pair(prefill, decode, router) as pair:
        since = CountersSince(pair.to_decode)
        with ThreadPoolExecutor(4) as pool:
            right = list(pool.map(partial(ask, pair.to_router), QUESTIONS))
        assert all(right), f"{right.count(True)} of {len(right)}"
        expect_all_loaded(since, len(QUESTIONS))
        for client in (pair.to_prefill, pair.to_decode):
            expect_free(client)
    print(f"{len(right)} of {len(right)} answers exact, loaded and verified")


def test_a_prompt_that_extends_prefills_is_loaded(engines: list[Engine]) -> None:
    """Decode gets the first word of the answer with the prompt."""
    with Pair(engines[0], engines[1]) as pair:
        since = CountersSince(pair.to_decode)
        for question in QUESTIONS[:8]:
            first, *rest = question["answer"].split()
            longer = {"prompt": f"{question['prompt']} {first}", "answer": " ".join(rest)}
            ticket = pair.to_prefill.ticket(question["prompt"])
            assert ask(pair.to_decode, longer, kv_transfer_params=ticket)
        expect_all_loaded(since, 8)


def test_chunks_are_read_while_prefill_computes_the_next(cluster: Cluster) -> None:
    prefill, decode = specs("--max-num-batched-tokens", "64", suffix="-early")
    prefill, decode = (
        replace(spec, connector_config={**spec.connector_config, **OVERLAP})
        for spec in (prefill, replace(decode, extra_args=GRAPHS))
    )
    first, second = started = cluster.start(prefill, decode)
    with Pair(first, second, cluster.route([first], [second])) as pair:
        since = CountersSince(pair.to_decode)
        with ThreadPoolExecutor(8) as pool:
            right = list(pool.map(partial(ask, pair.to_router), QUESTIONS))
        assert all(right), f"{right.count(True)} of {len(right)}"
        expect_all_loaded(since, len(QUESTIONS))
    cluster.end(*started)
    print(f"{len(right)} of {len(right)} early answers exact, loaded and verified")


def post(engine: Engine, path: str) -> None:
    httpx.post(f"{engine.url}{path}", timeout=120, **DIRECT).raise_for_status()


def test_engines_that_sleep_read_again(cluster: Cluster) -> None:
    """Sleep frees the cache's memory; the KV of tickets from before is gone."""
    sleepy = specs("--enable-sleep-mode", suffix="-sleepy", extra_env={"VLLM_SERVER_DEV_MODE": "1"})
    started = cluster.start(*sleepy)
    with Pair(started[0], started[1]) as pair:
        if pair.to_decode.vllm_version().startswith(("0.31.", "0.32.")):
            pytest.skip("this vLLM tells connectors nothing of sleep")
        since = CountersSince(pair.to_decode)
        for number, question in enumerate(QUESTIONS[:6]):
            ticket = pair.to_prefill.ticket(question["prompt"])
            assert ask(pair.to_decode, question, kv_transfer_params=ticket)
            if number in (1, 3):
                engine = started[number // 2]
                post(engine, "/sleep?level=1")
                post(engine, "/wake_up")
        expect(since, {LOADS: 6, FAILURES: 0})
    cluster.end(*started)


KINDS: Final[dict[str, tuple[tuple[str, ...], dict[str, str]]]] = {
    "pool": ((), {}),
    "cumem": (("--enable-cumem-allocator",), {}),
    # vLLM refuses them beside a connector, but only by the variable's former name.
    "expandable": ((), {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    "sleep": (("--enable-sleep-mode",), {"VLLM_SERVER_DEV_MODE": "1"}),
}
"""GPU memory without a CUDA IPC handle: flags and environment of both engines."""
SLEEPY: Final = "sleep"


def in_containers(kind: str, directory: Path) -> list[EngineSpec]:
    """Engines with PID and IPC namespaces of their own, which share a directory."""
    flags, env = KINDS[kind]
    pair = specs(*flags, suffix=f"-{kind}", extra_env=env, contained=True)
    config = {**CONFIG, "share_dir": str(directory)}
    return [replace(spec, connector_config=config, gpu_memory_utilization=0.1) for spec in pair]


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and `unshare`"
)
def test_a_kernel_reads_between_containers_that_share_a_directory(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Each kind of memory works; prefill's memory comes back when it sleeps, and decode lives."""
    tmp_path.chmod(0o700)
    started = cluster.start(*(spec for kind in KINDS for spec in in_containers(kind, tmp_path)))
    pairs = dict(zip(KINDS, zip(started[::2], started[1::2], strict=True), strict=True))
    for kind, (prefill, decode) in pairs.items():
        with Pair(prefill, decode) as pair:
            if kind == SLEEPY and pair.to_decode.vllm_version().startswith(("0.31.", "0.32.")):
                continue
            since = CountersSince(pair.to_decode)
            ask_directly(pair, QUESTIONS[:4])
            if kind == SLEEPY:
                before, _ = torch.cuda.mem_get_info(0)
                begun = time.monotonic()
                post(prefill, "/sleep?level=1")
                slept = time.monotonic()
                while torch.cuda.mem_get_info(0)[0] < before + KV_BYTES:
                    assert time.monotonic() < slept + 10, "prefill's memory does not come back"
                    time.sleep(0.01)
                print(f"slept in {slept - begun:.2f} s, memory back {time.monotonic() - slept:.2f}")
                post(prefill, "/wake_up")
            ask_directly(pair, QUESTIONS[4:8])
            expect_all_loaded(since, 8)
            changed = since.changed()
            print(kind, {path: changed.get(name, 0) for path, name in READS.items()})
            assert changed.get(READS["gather"], 0) >= 8
        assert "is on this host, but" not in decode.log_text()
    cluster.end(*started)


def ask_directly(pair: Pair, questions: list[dict[str, str]]) -> None:
    for question in questions:
        ticket = pair.to_prefill.ticket(question["prompt"])
        assert ask(pair.to_decode, question, kv_transfer_params=ticket)
