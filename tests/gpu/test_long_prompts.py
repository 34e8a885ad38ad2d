"""A prompt of 128k tokens between two GPUs: it loads, its digests match, and memory comes back.

The test prints figures of each load: seconds by phase, runs, and the most memory that it took.
"""

import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import psutil
import pytest
from typing_extensions import Self

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="needs vLLM: scripts/install --cuda")

from benchmarks.engines import DECODE_GRAPHS  # noqa: E402 - after the skip
from benchmarks.floor import prompt  # noqa: E402 - likewise
from benchmarks.shapes import MODELS  # noqa: E402 - likewise
from harness.cluster.cluster import Cluster, pair_specs  # noqa: E402 - likewise
from harness.cluster.engines import Engine  # noqa: E402 - likewise
from harness.cluster.metrics import (  # noqa: E402 - likewise
    FAILURES,
    LOADS,
    NBYTES,
    PREFIX,
    READS,
    VERIFIED,
    CountersSince,
)
from harness.cluster.models.files import ensure_tiny_model  # noqa: E402 - likewise
from harness.cluster.pair import Pair  # noqa: E402 - likewise
from support.gpus import NUM_GPUS, needs_gpus, visible  # noqa: E402 - likewise

pytestmark = needs_gpus(2)

LENGTH: Final = 131_072  # tokens
ROOM: Final = 135_168  # tokens; the answer and the prompt fit
KV_BYTES: Final = 22 << 30  # 147,456 bytes a token: one prompt, and part of a second one
START_S: Final = 420.0
LOADED: Final = 4  # per path; the first one connects
POLL_S: Final = 0.01
LEAK_BYTES: Final = 64 << 20  # vLLM's own buffers grow by less from one prompt to the next
DIGESTS: Final = f"{PREFIX}digest_seconds_sum"
RUNS: Final = "vllm:nixl_num_descriptors_sum"
FILES: Final = f"{PREFIX}open_descriptors"
PHASES: Final = ("ask", "blocks", "queue", "read", "verify")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Engine]]:
    """Prefill on the first GPU; two decode engines on the last, one for each path."""
    model = replace(MODELS["qwen3-8b"], max_positions=ROOM)
    extra = ("--load-format", "dummy", "--max-num-batched-tokens", "16384", *DECODE_GRAPHS)
    config = {"verify": "all", "request_timeout_s": 300}
    prefill, decode = pair_specs(
        ensure_tiny_model(model=model, weights=False),
        device="cuda",
        dtype="bfloat16",
        connector_config=config,
        kv_cache_bytes=KV_BYTES,
        gpu_memory_utilization=0.4,
        cores=frozenset(),
        extra_args=(*extra, "--no-enable-prefix-caching"),
    )
    decode = replace(decode, extra_env={**decode.extra_env, **visible(NUM_GPUS - 1)})
    prefill = replace(prefill, extra_env={**prefill.extra_env, **visible(0)})
    direct = replace(decode, name="direct", connector_config={**config, "path": "direct"})
    logs = tmp_path_factory.mktemp("long-prompts")
    with Cluster(logs, warm=False, start_timeout_s=START_S) as cluster:
        started = cluster.start(prefill, replace(decode, name="gather"), direct)
        yield dict(zip(("prefill", "gather", "direct"), started, strict=True))
        cluster.end(*started)


class Memory:
    """The peak of the memory in use while this ran, in bytes beyond the memory in use before."""

    def __init__(self, engine: Engine) -> None:
        self._processes = psutil.Process(engine.pid).children(recursive=True)
        self._begin = self.used()
        self.most = dict(self._begin)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def used(self) -> dict[str, int]:
        gpus = {}
        for name, number in (("prefill's GPU", 0), ("decode's GPU", NUM_GPUS - 1)):
            free, total = torch.cuda.mem_get_info(number)
            gpus[name] = total - free
        return {**gpus, "decode's processes": sum(one.memory_info().rss for one in self._processes)}

    def _watch(self) -> None:
        while not self._end.wait(POLL_S):
            self.most = {name: max(self.most[name], now) for name, now in self.used().items()}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def growth(self) -> dict[str, int]:
        return {name: most - self._begin[name] for name, most in self.most.items()}


@pytest.mark.parametrize("path", ["gather", "direct"])
def test_a_prompt_of_128k_tokens_is_loaded_and_verified(
    engines: Mapping[str, Engine], path: str
) -> None:
    prefill, decode = engines["prefill"], engines[path]
    rows = []
    with Pair(prefill, decode) as pair:
        gauges: Callable[[], dict[str, float]] = pair.to_decode.counters
        files = None
        for number in range(LOADED):
            tokens = prompt(LENGTH, f"{path}/{number}")
            ticket, computed = pair.to_prefill.timed_ticket(tokens, logprobs=0)
            since = CountersSince(pair.to_decode)
            with Memory(decode) as memory:
                answer = pair.decode_with(ticket, tokens, 1, logprobs=None)
                changed = since.wait_for(LOADS)
            assert changed[LOADS] == changed[VERIFIED] == 1, changed
            assert not changed[FAILURES]
            assert changed[READS[path]] == 1
            row = {"prefill s": computed, "decode s": answer.seconds, "GB": changed[NBYTES] / 1e9}
            row |= {f"{one} ms": changed[phase(one)] * 1e3 for one in PHASES}
            row |= {"digest ms": changed[DIGESTS] * 1e3, "runs": changed[RUNS]}
            row |= {f"{name}, MB": some / 1e6 for name, some in memory.growth.items()}
            rows.append(row)
            if number:  # the first load connects
                files = files or gauges()[FILES]
                assert gauges()[FILES] == files
                assert memory.growth["decode's GPU"] < LEAK_BYTES
    first, *later = rows
    print(f"{path}, first:", shown(first))
    print(f"{path}, later:", shown({k: statistics.median(one[k] for one in later) for k in first}))
    print(f"{path}: {files:.0f} open files, {os.cpu_count()} cores")


def phase(name: str) -> str:
    return f"{PREFIX}wait_seconds_sum{{phase={name}}}"


def shown(row: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in row.items())
