"""Runs a job: a pair and perhaps a single engine, each started, evaluated and ended."""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import httpx

from harness.cluster.client import Client, Counters
from harness.cluster.cluster import Cluster
from harness.cluster.engines import PATIENT, EngineSpec, Role, halves
from harness.cluster.metrics import FAILURES, LOADS, PREFIX, CountersSince, Loaded
from harness.cluster.processes import stop_all
from harness.cluster.router import Router
from harness.cluster.waiting import wait_until
from lab.accuracy.evaluation import Evaluation, Job, Score
from lab.accuracy.outcome import Outcome
from lab.accuracy.settings import SHAPE_KNOBS, Side
from lab.results import say_on_stderr

START_TIMEOUT_S: Final = 1200.0
"""vLLM's own launcher waits as long: weights may have to be fetched."""
COUNTERS_LAG_S: Final = 5.0
CREATED: Final = "_created"
"""Samples that say when a counter began."""
CPU_CONTEXT: Final = ("--max-model-len", "4096")
"""For gsm8k: the cache of a model's whole context would not fit into memory."""
CPU_CACHE_GIB: Final = {"VLLM_CPU_KVCACHE_SPACE": "4"}
TROUBLES: Final = (RuntimeError, httpx.HTTPError, OSError, ValueError, LookupError)
"""What an engine, a router or lm-eval can do wrong; the next model runs all the same."""


def run(job: Job) -> Outcome:
    """The pair, then the single engine if wanted; trouble is part of the outcome."""
    begin = time.monotonic()
    outcome = Outcome.before(job)
    try:
        clear(job.log_dir)
        with Cluster(job.log_dir, start_timeout_s=START_TIMEOUT_S) as cluster:
            outcome, pair = run_pair(job, cluster)
            if job.settings.single:
                outcome = compare(outcome, pair, run_single(job, cluster))
    except TROUBLES as error:
        kind = "" if isinstance(error, RuntimeError) else type(error).__name__  # ours say enough
        trouble = ": ".join(filter(None, [kind, str(error)]))
        say_on_stderr(trouble)
        outcome = replace(outcome, trouble=trouble.split("\n")[0])
    return replace(outcome, seconds=time.monotonic() - begin)


def run_pair(job: Job, cluster: Cluster) -> tuple[Outcome, Score]:
    """Start prefill, decode and a router, evaluate them, and end them."""
    begin = time.monotonic()
    prefill, decode = pair_specs(job)
    engines = cluster.start(*prefill, *decode)
    router = cluster.route(engines[: len(prefill)], engines[len(prefill) :])
    start_s = time.monotonic() - begin
    outcome, score = judge_pair(job, router)
    stop_all([router, *engines])
    return replace(outcome, start_s=start_s), score


def judge_pair(job: Job, router: Router) -> tuple[Outcome, Score]:
    """Evaluate what runs behind a router, and count what its decode engines load meanwhile."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(engine.url)) for engine in router.decode]
        counting = [CountersSince(client) for client in clients]
        asked = (router, *router.prefill, *router.decode)
        score = Evaluation("lm-eval", router.url, job).run(asked)
        changed = settled(counting, score.items * job.settings.decode.tensor_parallel)
    outcome = replace(
        Outcome.before(job),
        accuracy=score.accuracy,
        items=score.items,
        errors=score.errors,
        computed=sum(Loaded.from_counters(one).computed for one in changed),
        counters=add_up(changed),
        eval_s=score.seconds,
    )
    return outcome, score


def run_single(job: Job, cluster: Cluster) -> Score:
    """One engine without a connector, on the same items."""
    (engine,) = cluster.start(single_spec(job))
    return Evaluation("lm-eval-single", engine.url, job).run([engine])


def compare(outcome: Outcome, pair: Score, single: Score) -> Outcome:
    """The outcome beside that of a single engine."""
    keys = pair.answers.keys() | single.answers.keys()
    differing = sum(pair.answers.get(key) != single.answers.get(key) for key in keys)
    return replace(
        outcome, single=single.accuracy, differing=differing, single_eval_s=single.seconds
    )


def clear(folder: Path) -> None:
    """What an earlier run has left in the same folder is no part of this one."""
    for log in folder.glob("*.log"):
        log.unlink()
    for output in folder.glob("lm-eval*"):
        shutil.rmtree(output)


def settled(counting: Sequence[CountersSince], loads: int) -> list[Counters]:
    """What each engine has counted; waits a moment until that many loads have ended in all."""
    changed: list[Counters] = []

    def have_ended() -> bool:
        changed[:] = [one.changed() for one in counting]
        return sum(one.get(LOADS, 0) + one.get(FAILURES, 0) for one in changed) >= loads

    wait_until(have_ended, COUNTERS_LAG_S)
    return changed


def add_up(counters: Sequence[Counters]) -> dict[str, float]:
    """Those of our connector over all engines, by name without prefix."""
    total: dict[str, float] = {}
    for one in counters:
        for name, value in one.items():
            if name.startswith(PREFIX) and not name.endswith(CREATED):
                short = name.removeprefix(PREFIX)
                total[short] = total.get(short, 0.0) + value
    return total


def pair_specs(job: Job) -> tuple[list[EngineSpec], list[EngineSpec]]:
    """All engines of both sides, each on the next GPUs, or on a half of the cores.

    Whoever waits spins, and starves who works: prefill has one half, decode the other.
    """
    settings = job.settings
    gpus = iter(settings.gpus())
    cores = halves(os.sched_getaffinity(0))
    sides: Mapping[Role, Side] = {"prefill": settings.prefill, "decode": settings.decode}
    prefill, decode = (
        [
            _spec(f"{role}-{number}", role, side, job, gpus=next(gpus), cores=half)
            for number in range(side.instances)
        ]
        for (role, side), half in zip(sides.items(), cores, strict=True)
    )
    return prefill, decode


def single_spec(job: Job) -> EngineSpec:
    """As a prefill engine on one rank, but without a connector, and wherever it likes."""
    side = Side(1, 1, job.settings.prefill.block_size, None)
    return _spec("single", "single", side, job, gpus=job.settings.machine.gpus[:1])


def _spec(
    name: str,
    role: Role,
    side: Side,
    job: Job,
    *,
    gpus: Sequence[str],
    cores: frozenset[int] = frozenset(),
) -> EngineSpec:
    settings, subject = job.settings, job.subject
    on_cpu = settings.machine.device == "cpu"
    config = {**(PATIENT if on_cpu else {}), "verify": settings.verify or "off"}
    return EngineSpec(
        name,
        Path(subject.path),
        role,
        "none" if role == "single" else "nixl-kv",
        connector_config={} if role == "single" else config,
        device=settings.machine.device,
        tensor_parallel=side.tensor_parallel,
        block_size=side.block_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        extra_args=_arguments(job),
        extra_env=_environment(side, job, gpus),
        without_env=SHAPE_KNOBS,  # each engine is given its own
        cores=cores if on_cpu else frozenset(),
        served_name=subject.name,
    )


def _arguments(job: Job) -> tuple[str, ...]:
    settings, subject = job.settings, job.subject
    backend = settings.attention_backend
    arguments = ["--attention-backend", backend] if backend else []
    if settings.machine.device == "cuda":
        arguments += ["--enforce-eager"]  # on CPU it always is
    elif subject.task == "gsm8k":
        arguments += CPU_CONTEXT
    wanted = () if subject.instead_of else settings.engine_args  # meant for another model
    return (*arguments, *subject.engine_args, *wanted)


def _environment(side: Side, job: Job, gpus: Sequence[str]) -> dict[str, str]:
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    if side.layout:
        env["VLLM_KV_CACHE_LAYOUT"] = side.layout
    if job.subject.online:
        env |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "0")
    if job.subject.task == "gsm8k" and not gpus:
        env |= CPU_CACHE_GIB
    return env
