"""Asks a platform the same as a single engine, and counts what its engines did for it."""

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import Self

from harness.cluster.answers import Question, questions_of
from harness.cluster.client import Answer, Client, RefusedError
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until
from lab.results import Verdict, verdict_of

ANSWER_TOKENS: Final = 16
LENGTHS: Final = (10, 40, 127, 128, 129, 200, 257, 300, 512, 640, 1000, 1500)
AT_A_TIME: Final = 4
"""Questions; a front end of several processes gives each connection to one of them."""
STREAMED: Final = 3
"""Every so many answers one is streamed."""
WARM_UP: Final = 20
"""Tokens of a prompt that is asked before anything is counted."""
START_S: Final = 900.0
"""Several engines import vLLM on few cores."""
LAG_S: Final = 60.0
"""How long what is counted may lag: platforms collect it by themselves, every few seconds."""
MODULE: Final = '"kv_connector_module_path": "nixl_kv.connector"'
WITH_KEY: Final = f"{MODULE}; NIXL_KV_KEY"
OURS: Final = "nixl_kv_"
WHO: Final = ("engine", "ReplicaId")
"""Labels that tell engines behind one /metrics apart: vLLM's, of data-parallel ones, and Ray's."""

Who = tuple[str | None, ...]
"""One engine: where its metrics are, and its labels there."""

_SEEDS = itertools.count(50_000)
"""No prompt is asked twice: decode would have it."""


class Engines:
    """What all engines of a platform count, under whatever names the platform publishes it."""

    def __init__(self, *urls: str) -> None:
        """Where their metrics are."""
        self._clients = [Client(url) for url in urls]

    def __enter__(self) -> Self:
        """Connections are closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close them."""
        for client in self._clients:
            client.close()

    def tokens_loaded(self) -> int:
        """By all of them since they began."""
        return round(sum(self._count("tokens_loaded").values()))

    def work(self) -> dict[Who, float]:
        """How many offers and loads, by engine."""
        return self._count("offers", "loads")

    def _count(self, *names: str) -> dict[Who, float]:
        counted: dict[Who, float] = defaultdict(float)
        for client in self._clients:
            for who, amount in count(client.metrics(), *names).items():
                counted[(client.url, *who)] += amount
        return counted


def count(metrics: str, *names: str) -> dict[Who, float]:
    """The sum of our counters of these names in a Prometheus exposition, by engine."""
    counted: dict[Who, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.partition(OURS)[2].removesuffix("_total") in names:
                counted[tuple(sample.labels.get(label) for label in WHO)] += sample.value
    return counted


@dataclass(frozen=True)
class Asked:
    """What came of the questions."""

    working: int = 0
    """How many engines offered or loaded something."""
    requests: int = 0
    loadable: int = 0
    """Tokens: all of each prompt but the last one, which decode computes itself."""
    loaded: int = 0
    right: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of one way to run one platform."""

    platform: str
    version: str
    vllm: str
    to_write: str = ""
    """By the user, beside the platform's own quick start."""
    engines: int = 0
    asked: Asked = Asked()
    trouble: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether all answers are right, all KV has moved, and every engine took part."""
        asked = self.asked
        wrong, missing = asked.requests - asked.right, asked.loadable - asked.loaded
        idle = self.engines - asked.working
        return verdict_of(
            self.trouble,
            f"{wrong} of {asked.requests} answers differ" if wrong else "",
            f"{missing} tokens not loaded" if missing else "",
            f"{idle} of {self.engines} engines did nothing" if idle else "",
            "" if asked.requests else "nothing was asked",
        )

    def cells(self) -> Mapping[str, str]:
        """See `lab.results.Result`."""
        asked = self.asked
        return {
            "platform": self.platform,
            "version": self.version,
            "vLLM": self.vllm,
            "engines": f"{asked.working} of {self.engines}",
            "requests": str(asked.requests),
            "tokens loaded": f"{asked.loaded} of {asked.loadable}",
            "answers right": f"{asked.right}/{asked.requests}",
            "to write": self.to_write,
        }


def ask(platform: Client, engines: Engines, single: Client) -> Asked:
    """New questions of all lengths.

    Raises:
        TimeoutError: if no KV is moved for anything.
    """
    prompts = [random_prompt(length, seed=next(_SEEDS)) for length in LENGTHS]
    questions = questions_of(single, prompts, ANSWER_TOKENS)
    _warm_up(platform, engines)
    loaded_before, work_before = engines.tokens_loaded(), engines.work()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = pool.map(lambda numbered: _answer(platform, *numbered), enumerate(questions, 1))
        likenesses = [
            question.compare(answer) for question, answer in zip(questions, answers, strict=True)
        ]
    loadable = sum(question.expected.prompt_tokens - 1 for question in questions)
    wait_until(lambda: engines.tokens_loaded() - loaded_before >= loadable, LAG_S)
    work = engines.work()
    return Asked(
        working=sum(amount > work_before.get(engine, 0) for engine, amount in work.items()),
        requests=len(questions),
        loadable=loadable,
        loaded=engines.tokens_loaded() - loaded_before,
        right=len(likenesses) - likenesses.count("other"),
    )


def _warm_up(platform: Client, engines: Engines) -> None:
    """Ask until KV moves: a platform may answer before it knows of all its engines."""
    before, deadline = engines.tokens_loaded(), time.monotonic() + START_S

    def answers() -> bool:
        try:
            platform.complete(random_prompt(WARM_UP, seed=next(_SEEDS)), 1)
        except (RefusedError, httpx.TransportError):
            return False
        return True

    while time.monotonic() < deadline:
        if answers() and wait_until(lambda: engines.tokens_loaded() > before, LAG_S / 4):
            return
    raise TimeoutError(f"no KV is moved within {START_S:g} s")


def _answer(platform: Client, number: int, question: Question) -> Answer:
    if number % STREAMED:
        return platform.complete(question.prompt, ANSWER_TOKENS)
    streamed = platform.stream(question.prompt, ANSWER_TOKENS)
    return Answer("".join(streamed.pieces), streamed.tokens, question.expected.prompt_tokens, 0.0)
