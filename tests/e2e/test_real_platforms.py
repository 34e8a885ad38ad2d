"""KV moves on real platforms: vLLM's router before several engines, Ray Serve LLM, and Dynamo.

    pytest -m platforms tests/e2e/test_real_platforms.py

Each has its own quick start, and our connector's module path. Ray and Dynamo run in environments of
their own, which are made in .environments at the first run.
"""

import ast
import contextlib
import itertools
import json
import os
import re
import secrets
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.cluster.answers import Question, questions_of
from harness.cluster.client import Answer, Client, RefusedError, is_healthy
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import (
    CPU_DTYPE,
    CPU_ENV,
    HOST,
    MODEL_NAME,
    NO_TORCHVISION,
    PATIENT,
    QUIET_ENV,
)
from harness.cluster.models.files import REPO, ensure_tiny_model
from harness.cluster.processes import ManagedProcess, Ports, stop_all
from harness.cluster.prompts import random_prompt
from harness.cluster.router import IN_TURNS
from harness.cluster.waiting import wait_until
from nixl_kv.config import DYNAMO_VARIABLE
from nixl_kv.connector.stats import METRICS
from nixl_kv.protocol.ticket import FIELD, SealedTicket, Ticket
from support.engines import started

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.platforms]

ANSWER_TOKENS: Final = 16
LENGTHS: Final = (10, 40, 127, 128, 129, 200, 257, 300, 512, 640, 1000, 1500)
AT_A_TIME: Final = 4  # a front end of several processes gives each connection to one of them
START_S: Final = 900.0  # several engines import vLLM on few cores
LAG_S: Final = 60.0  # platforms collect what engines count by themselves, every few seconds
OURS: Final = "nixl_kv_"
WHO: Final = ("engine", "ReplicaId")
"""Labels that tell engines behind one /metrics apart: vLLM's, of data-parallel ones, and Ray's."""
SEEDS = itertools.count(50_000)  # no prompt is asked twice: decode would have it


def count(urls: Sequence[str], *names: str) -> Counter[tuple[str | None, ...]]:
    """The sum of our counters of these names, by engine, under any platform's prefix."""
    assert METRICS.keys() >= set(names)
    counted: Counter[tuple[str | None, ...]] = Counter()
    for url in urls:
        with Client(url) as client:
            metrics = client.metrics()
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name.partition(OURS)[2].removesuffix("_total") in names:
                    counted[(url, *map(sample.labels.get, WHO))] += sample.value
    return counted


def count_tokens(urls: Sequence[str]) -> int:
    return round(count(urls, "loaded_tokens").total())


def check(
    url: str, metrics_urls: Sequence[str], single: Client, num_engines: int, **asked: object
) -> None:
    """All answers are right, all KV is moved, and every engine takes part."""
    prompts = [random_prompt(length, seed=next(SEEDS)) for length in LENGTHS]
    questions = questions_of(single, prompts, ANSWER_TOKENS)
    with Client(url) as platform:
        wait_until_it_moves_kv(platform, metrics_urls)
        tokens, work = count_tokens(metrics_urls), count(metrics_urls, "offers", "loads")
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            answers = list(pool.map(partial(ask, platform, asked), itertools.count(), questions))
    # Dynamo names special tokens otherwise, so equal texts may have other tokens.
    others = [
        (one.expected.text, got.text)
        for one, got in zip(questions, answers, strict=True)
        if one.expected.text != got.text and one.compare(got) == "other"
    ]
    assert others == []
    loadable = sum(question.expected.prompt_tokens - 1 for question in questions)
    wait_until(lambda: count_tokens(metrics_urls) - tokens >= loadable, LAG_S)
    assert count_tokens(metrics_urls) - tokens == loadable
    assert len(count(metrics_urls, "offers", "loads") - work) == num_engines


def wait_until_it_moves_kv(platform: Client, metrics_urls: Sequence[str]) -> None:
    """A platform may answer before it knows of all its engines."""
    before = count_tokens(metrics_urls)

    def does() -> bool:
        with contextlib.suppress(RefusedError, httpx.TransportError):
            platform.complete(random_prompt(20, seed=next(SEEDS)), 1)
            return wait_until(lambda: count_tokens(metrics_urls) > before, LAG_S / 4)
        return False

    assert wait_until(does, START_S)


def ask(platform: Client, asked: Mapping[str, object], number: int, question: Question) -> Answer:
    """Every third answer is streamed."""
    complete = platform.complete if number % 3 else platform.stream
    return complete(question.prompt, ANSWER_TOKENS, **asked)


# --- vLLM's router


@pytest.mark.parametrize(
    ("pairs", "ranks", "engine_args", "options"),
    [
        pytest.param(2, 1, (), ("--policy", "cache_aware"), id="cache_aware"),
        pytest.param(2, 1, (), IN_TURNS, id="round_robin"),
        pytest.param(
            1,
            2,
            ("--data-parallel-size", "2"),
            (*IN_TURNS, "--intra-node-data-parallel-size", "2"),
            id="data parallel",
        ),
        pytest.param(1, 1, ("--api-server-count", "2"), IN_TURNS, id="two API servers"),
    ],
)
def test_vllm_router(
    cluster: Cluster,
    single: Client,
    pairs: int,
    ranks: int,
    engine_args: tuple[str, ...],
    options: tuple[str, ...],
) -> None:
    specs = pair_specs(
        ensure_tiny_model(),
        suffix="-behind-router",
        connector_config=PATIENT,
        kv_cache_bytes=256 << 20,
        extra_args=engine_args,
    )
    named = [replace(one, name=f"{one.name}-{n}") for one in specs for n in range(pairs)]
    with started(cluster, *named) as engines:
        router = cluster.route(engines[:pairs], engines[pairs:], options=options)
        check(router.url, [engine.url for engine in engines], single, len(engines) * ranks)
        router.stop()


# --- platforms in environments of their own

NEVER: Final = '; sys_platform == "never"'
"""A marker: the package is not installed. CPU builds replace some, and some are not needed."""
FOR_CPU: Final = (
    *(f"{name} {NEVER}" for name in ("vllm", "torchvision", "torchaudio", "torchcodec")),
    *(f"{name}==1.5.1" for name in ("nixl", "nixl-cu12", "nixl-cu13")),
)
TRANSFER: Final = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "nixl_kv.connector",  # the one line that is ours
    "kv_role": "kv_both",
}


def environment(name: str, vllm: str, package: str, *overrides: str) -> Path:
    """The interpreter of an environment with vLLM's CPU build, this checkout, and a platform."""
    folder = REPO / ".environments" / name
    install: list[str | Path] = [REPO / "scripts/install", "--quiet"]
    subprocess.run([*install, "--vllm", vllm, "--venv", folder], check=True)
    python, overridden = folder / "bin/python", folder / "platform-overrides"
    overridden.write_text("\n".join((*FOR_CPU, *overrides, "")))
    command: list[str | Path] = [folder / "bin/uv", "pip", "install", "--quiet"]
    command += ["--python", python, "--override", overridden, package]
    subprocess.run(command, check=True)
    return python


class Part(ManagedProcess):
    """A process of a platform. `ready` is what its log says, or its URL answers."""

    def __init__(self, log: Path, port: int, ready: str = "") -> None:
        super().__init__(log.stem, log)
        self.url = f"http://{HOST}:{port}"
        self._ready = ready

    def start(self, command: Sequence[object], env: dict[str, str]) -> None:
        usual = os.environ | QUIET_ENV | CPU_ENV
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):  # it has its own environment
            usual.pop(name, None)
        self.launch(list(map(str, command)), usual | env)

    def is_ready(self) -> bool:
        self.check_alive()
        return self._ready in self.log_text() if self._ready else is_healthy(self.url)


@contextlib.contextmanager
def ended(parts: Sequence[Part]) -> Iterator[None]:
    """Ray's engines are not its own processes, and may outlive it."""
    try:
        yield
    finally:
        running = [psutil.Process(part.pid) for part in parts if part.is_running()]
        children = [child for one in running for child in one.children(recursive=True)]
        stop_all(parts, LAG_S)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_ray_serve_llm(cluster: Cluster, single: Client) -> None:
    """`build_pd_openai_app` with two replicas of prefill on a node, and decode on another."""
    python, ports = environment("ray", "0.32.0", "ray[serve,llm]==2.60.0"), Ports()
    port, *metrics_ports = (ports.next_free() for _ in range(3))
    settings = {
        "model": str(ensure_tiny_model().absolute()),
        "name": MODEL_NAME,
        "dtype": CPU_DTYPE,
        "port": port,
        "metrics_ports": metrics_ports,
        "num_prefill": 2,
        "transfer": TRANSFER,
    }
    env = {
        "NIXL_KV_KEY": secrets.token_hex(32),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    ray = Part(cluster.log_dir / "ray.log", port, ready="platform is up")
    with ended([ray]):
        ray.start([python, REPO / "tests/platforms/ray_app.py", json.dumps(settings)], env)
        ray.wait_ready(START_S)
        check(ray.url, [f"http://{HOST}:{port}" for port in metrics_ports], single, 3)


def dynamo_environment() -> Path:
    overrides = "certifi>=2026.1", f"aisimulate {NEVER}"
    return environment("dynamo", "0.31.0", "ai-dynamo==1.6.1", *overrides)


def test_dynamos_stand_ins_are_recognised() -> None:
    """They have the sizes of the images, but are not images."""
    command = [dynamo_environment(), REPO / "tests/platforms/dynamo_media.py"]
    env = os.environ | QUIET_ENV | {"PYTHONPATH": str(NO_TORCHVISION)}
    env.pop(DYNAMO_VARIABLE, None)
    ended = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    facts = json.loads(ended.stdout.splitlines()[-1])
    assert facts == {
        "keys": ["image_embeds", "image_grid_thw"],
        "values": [0.0],
        "stand-ins are data": [False, False],
        "pictures are data": [True, True],
        "same sizes": True,
        "variable": "1",
        "has stand-ins": True,
    }


READ_BY_HANDLER: Final = re.compile(r"kv transfer params: (\{.*\})")
"""Dynamo's prefill handler logs this of each output of vLLM, with DYN_LOG=debug."""


def tickets_read(prefill: Part) -> list[Ticket]:
    found = READ_BY_HANDLER.findall(prefill.log_text())
    return [SealedTicket.parse({FIELD: ast.literal_eval(one)[FIELD]}).open() for one in found]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_dynamo(cluster: Cluster, single: Client, overlap: str) -> None:
    """Its frontend and two workers of vLLM, which find each other by files."""
    python = dynamo_environment()
    names, ports = ("frontend", "prefill", "decode"), Ports()
    logs = [cluster.log_dir / f"dynamo-{name}-overlap-{overlap}.log" for name in names]
    parts = [Part(log, ports.next_free()) for log in logs]
    folder = cluster.log_dir / f"dynamo-discovery-overlap-{overlap}"
    folder.mkdir()
    transfer = TRANSFER | {"kv_connector_extra_config": {"overlap": overlap}}
    env = {
        "DYN_LOG": "debug",
        "DYN_FILE_KV": str(folder),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "NIXL_KV_KEY": secrets.token_hex(32),
    }
    worker: list[object] = [python, REPO / "tests/platforms/dynamo_worker.py"]
    worker += ["--model", ensure_tiny_model().absolute(), "--served-model-name", MODEL_NAME]
    worker += ["--dtype", CPU_DTYPE, "--enforce-eager"]
    worker += ["--kv-transfer-config", json.dumps(transfer), "--discovery-backend", "file"]
    frontend: list[object] = [python, "-m", "dynamo.frontend", "--discovery-backend", "file"]
    with ended(parts):
        for part, role in zip(parts, names, strict=True):
            port = part.url.rpartition(":")[2]
            if role == "frontend":
                part.start([*frontend, "--http-host", HOST, "--http-port", port], env)
                continue
            side_port = str(ports.next_free())  # two workers of one machine need two
            more = {"DYN_SYSTEM_PORT": port, "VLLM_NIXL_SIDE_CHANNEL_PORT": side_port}
            part.start([*worker, "--disaggregation-mode", role], env | more)
        for part in parts:
            part.wait_ready(START_S)
        # Prefill does not answer a request for log probabilities early.
        asked = {"logprobs": None} if overlap == "on" else {}
        check(parts[0].url, [part.url for part in parts[1:]], single, 2, **asked)
    are_early = [ticket.is_early for ticket in tickets_read(parts[1])[-len(LENGTHS) :]]
    assert are_early == [overlap == "on"] * len(LENGTHS)
