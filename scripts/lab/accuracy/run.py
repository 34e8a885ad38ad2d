"""A pair and perhaps a single engine, each started, evaluated and ended."""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final

from pd.accuracy_eval import Job, Score, evaluate
from pd.accuracy_settings import SHAPE_KNOBS, Settings, Side
from pd.client import Client, Counters
from pd.cluster import CPU_DTYPE, Cluster, ClusterSpec
from pd.engines import Engine, EngineSpec, Role
from pd.outcomes import Figures
from pd.pool import PATIENT, halves

START_TIMEOUT_S = 1200.0  # vLLM's own launcher waits as long: weights may have to be fetched
COUNTERS_LAG_S = 5.0
PREFIX: Final = "vllm:nixl_kv_"
IGNORED: Final = "_created"  # when a counter was made
# Long prompts on CPU: the cache of a model's whole context would not fit into memory.
CPU_CONTEXT: Final = ("--max-model-len", "4096")
CPU_CACHE_GIB: Final = {"VLLM_CPU_KVCACHE_SPACE": "4"}


@dataclass(frozen=True)
class Part:
    """One evaluation: of prefill and decode apart, or of a single engine."""

    score: Score
    start_s: float
    counters: Mapping[str, float] = field(default_factory=dict)
    """Of our connector, added up over the decode engines; none for a single engine."""

    computed: int = 0
    """How many tokens of the prompts decode neither had nor read."""


@dataclass(frozen=True)
class Placed:
    """An engine's name, its role and its GPUs, which are none on CPU."""

    name: str
    role: Role
    gpus: tuple[str, ...]


def run_pair(job: Job) -> Part:
    """Prefill, decode and a router, evaluated through the router."""
    begin = time.monotonic()
    with _cluster(pair_spec(job), job) as cluster:
        start_s = time.monotonic() - begin
        score = evaluate("lm-eval", cluster.router_url, job, check=cluster.check_alive)
        ranks = job.settings.decode.tensor_parallel
        counters = settled(cluster.decode, score.items * ranks)
        computed = sum(figures(engine).computed for engine in cluster.decode)
    return Part(score, start_s, counters, computed)


def run_single(job: Job) -> Part:
    """One engine without a connector, on the same items."""
    begin = time.monotonic()
    with _cluster(ClusterSpec(single=single_spec(job)), job) as cluster:
        start_s = time.monotonic() - begin
        url = cluster.engines[0].url
        return Part(evaluate("lm-eval-single", url, job, check=cluster.check_alive), start_s)


def clear(folder: Path) -> None:
    """What an earlier run has left in the same folder is no part of this one."""
    for log in folder.glob("*.log"):
        log.unlink()
    for output in folder.glob("lm-eval*"):
        shutil.rmtree(output)


def pair_spec(job: Job) -> ClusterSpec:
    """All engines of both sides."""
    settings = job.settings
    gpus = settings.gpus()
    cut = settings.prefill.instances
    prefill = _engines("prefill", settings.prefill, job, gpus=gpus[:cut])
    return ClusterSpec(prefill, _engines("decode", settings.decode, job, gpus=gpus[cut:]))


def single_spec(job: Job) -> EngineSpec:
    """As a prefill engine on one rank, but without a connector, wherever it likes."""
    side = job.settings.prefill
    shape = Side(1, 1, side.block_size, None)
    placed = Placed("single", "single", job.settings.machine.gpus[:1])
    return _engine(placed, shape, job)


def settled(engines: Sequence[Engine], loads: int) -> Counters:
    """The connector's counters; waits a moment until that many loads have ended."""
    deadline = time.monotonic() + COUNTERS_LAG_S
    while True:
        total = add_up([_counters(engine.url) for engine in engines])
        ended = total.get("loads_total", 0.0) + total.get("load_failures_total", 0.0)
        if ended >= loads or time.monotonic() > deadline:
            return total
        time.sleep(0.1)


def figures(engine: Engine) -> Figures:
    """What an engine has counted since its start."""
    return Figures.from_counters(_counters(engine.url))


def add_up(counters: Sequence[Counters]) -> Counters:
    """Those of our connector over all engines, by name without prefix."""
    total: Counters = {}
    for one in counters:
        for name, value in one.items():
            if name.startswith(PREFIX) and not name.endswith(IGNORED):
                short = name.removeprefix(PREFIX)
                total[short] = total.get(short, 0.0) + value
    return total


def _counters(url: str) -> Counters:
    with Client(url) as client:
        return client.counters()


def _cluster(spec: ClusterSpec, job: Job) -> Cluster:
    return Cluster(spec, log_dir=job.log_dir, start_timeout_s=START_TIMEOUT_S)


def _engines(
    role: Role, side: Side, job: Job, *, gpus: Sequence[tuple[str, ...]]
) -> list[EngineSpec]:
    placed = (Placed(f"{role}-{number}", role, mine) for number, mine in enumerate(gpus))
    return [_engine(one, side, job) for one in placed]


def _engine(placed: Placed, side: Side, job: Job) -> EngineSpec:
    settings, subject = job.settings, job.subject
    device = settings.machine.device
    alone = placed.role == "single"
    return EngineSpec(
        placed.name,
        Path(subject.path),
        placed.role,
        "none" if alone else "nixl-kv",
        connector_config={} if alone else connector_config(settings),
        device=device,
        dtype=CPU_DTYPE if device == "cpu" else "auto",
        tensor_parallel=side.tensor_parallel,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        extra_args=_arguments(side, job),
        extra_env=_environment(side, job, placed.gpus),
        without_env=SHAPE_KNOBS,  # each engine is told its own
        cores=_cores(placed.role) if device == "cpu" else frozenset(),
        served_name=subject.name,
    )


def connector_config(settings: Settings) -> dict[str, object]:
    """Of both sides. Few cores make everything slow, also the signs of life."""
    patient = PATIENT if settings.machine.device == "cpu" else {}
    return patient | {"verify": settings.verify or "off"}


def _arguments(side: Side, job: Job) -> tuple[str, ...]:
    settings = job.settings
    arguments = ["--block-size", str(side.block_size)]
    if settings.attention_backend:
        arguments += ["--attention-backend", settings.attention_backend]
    if settings.machine.device == "cuda":
        arguments += ["--enforce-eager"]  # on CPU it always is
    elif job.subject.task == "gsm8k":
        arguments += CPU_CONTEXT
    wanted = () if job.subject.instead_of else settings.engine_args  # meant for another model
    return (*arguments, *job.subject.engine_args, *wanted)


def _environment(side: Side, job: Job, gpus: Sequence[str]) -> dict[str, str]:
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    if side.layout:
        env["VLLM_KV_CACHE_LAYOUT"] = side.layout
    if job.subject.online:
        env |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "0")
    if job.subject.task == "gsm8k" and not gpus:
        env |= CPU_CACHE_GIB
    return env


def _cores(role: Role) -> frozenset[int]:
    """Prefill on one half, decode on the other: whoever waits spins, and starves who works."""
    if role == "single":
        return frozenset()
    parts = cycle(halves(os.sched_getaffinity(0)))
    first = next(parts)
    return first if role == "prefill" else next(parts)
