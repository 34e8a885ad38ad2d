"""A prefill and a decode engine to be treated badly, and what came of it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import httpx
import psutil

from harness.cluster.answers import Question
from harness.cluster.client import Answer, Prompt, RefusedError, Ticket, is_healthy
from harness.cluster.cluster import pair_specs
from harness.cluster.engines import Connector, Engine, EngineSpec
from harness.cluster.metrics import LOADED_METRICS, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until

TIMEOUT_S: Final = 25.0
"""Of a request: it waits that long before it counts as hung."""
PATIENCE_S: Final = 4.0
"""A busy engine may miss a question or two."""
HELD_S: Final = 6
"""How long prefill holds what nobody reads."""
ANSWER_TOKENS: Final = 16
PROMPT_TOKENS: Final = 150
NUM_BLOCKS: Final = 24
"""Of either cache: blocks are soon used again."""
KV_CACHE_BYTES: Final = 64 << 20
"""Enough for so few blocks."""
LONGEST_ERROR: Final = 60
LAG_S: Final = 5.0
CONFIGS: Final[Mapping[Connector, Mapping[str, object]]] = {
    # One address of this machine is a peer, so that others of it are foreign. Without a key, more
    # of what strangers send gets past the handshake and the MAC.
    "nixl-kv": {
        "insecure": True,
        "offer_ttl_s": HELD_S,
        "lease_s": HELD_S,
        "peers": ["127.0.0.1/32"],
    },
    "in-tree": {"kv_lease_duration": HELD_S},
}


@dataclass
class Tally:
    """What came of the requests of one case, and what else was seen."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether all was right, or refused by the frontend with a status that says so."""
        return not {"wrong", "failed", "hung", "cut off"} & set(self.counts)

    def __str__(self) -> str:
        """In words."""
        counts = [f"{count} {kind}" for kind, count in self.counts.items()]
        return ", ".join([*counts, *dict.fromkeys(self.errors), *self.notes])


class EngineGoneError(Exception):
    """An engine died: the rest of the case has nobody to talk to."""


class Victims:
    """The two engines. Prefill's own answers are what decode's are compared with."""

    def __init__(self, connector: Connector, pair: Pair) -> None:
        """Of engines that run."""
        self.connector = connector
        self.pair = pair
        self._seeds = iter(range(10**6))

    def prompt(self, num_tokens: int = PROMPT_TOKENS) -> str:
        """One that no engine has seen."""
        return random_prompt(num_tokens, next(self._seeds))

    def ticket(self, prompt: str) -> Ticket:
        """As a router gets it from prefill."""
        return self.pair.to_prefill.ticket(prompt)

    def ask(self, tally: Tally, prompt: str, params: object = None, **extra: object) -> None:
        """Ask decode, and note whether the answer is the right one."""
        extra |= {} if params is None else {"kv_transfer_params": params}
        with self.noted(tally):
            answer = self.pair.to_decode.complete(prompt, ANSWER_TOKENS, **extra)
            tally.counts["right" if self.is_right(prompt, answer) else "wrong"] += 1

    def ask_all(self, tally: Tally, prompt: Prompt, **extra: object) -> None:
        """Ask decode for several answers; prefill is asked for the same."""
        with self.noted(tally):
            answers = self.pair.to_decode.answers(prompt, ANSWER_TOKENS, **extra)
            plain = extra | {"kv_transfer_params": None}
            expected = self.pair.to_prefill.answers(prompt, ANSWER_TOKENS, **plain)
            for one, wanted in zip(answers, expected, strict=True):
                tally.counts["right" if one.text == wanted.text else "wrong"] += 1

    def is_right(self, prompt: str, answer: Answer) -> bool:
        """Whether prefill gives this answer as well, or thinks it as likely."""
        question = Question.of(self.pair.to_prefill, prompt, ANSWER_TOKENS)
        return question.compare(answer) != "other"

    @contextmanager
    def noted(self, tally: Tally) -> Iterator[None]:
        """Errors of a request go into the tally.

        Raises:
            EngineGoneError: if it has killed an engine.
        """
        try:
            yield
        except httpx.TimeoutException:
            tally.counts["hung"] += 1
            tally.notes.append(f"no answer in {TIMEOUT_S:.0f} s")
        except httpx.TransportError:
            tally.counts["cut off"] += 1
        except RefusedError as error:
            refused = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
            tally.counts["refused" if refused else "failed"] += 1
            said = str(error.error.get("message", ""))[:LONGEST_ERROR]
            tally.errors.append(f"HTTP {error.status}{f' {said!r}' if said else ''}")
        else:
            return
        if self.dead():
            raise EngineGoneError

    def dead(self) -> list[str]:
        """The engines that are no more, by name."""
        return [one.name for one in self.pair.engines if not _lives(one)]

    def usable(self) -> tuple[bool, str]:
        """Whether an ordinary request still gets its KV from prefill; and in words."""
        tally = Tally()
        loads = LOADED_METRICS[self.connector]["loads"]
        since = CountersSince(self.pair.to_decode)
        try:
            prompt = self.prompt()
            self.ask(tally, prompt, self.ticket(prompt))
            loaded = since.wait_for(loads, timeout_s=LAG_S)[loads] > 0
        except (RuntimeError, httpx.HTTPError, EngineGoneError) as error:
            return False, f"afterwards: {type(error).__name__}"
        words = f"afterwards: {tally}, {'KV loaded' if loaded else 'KV NOT loaded'}"
        return tally.counts["right"] == 1 and loaded, words


def specs_of(connector: Connector) -> tuple[EngineSpec, EngineSpec]:
    """Prefill and decode."""
    return pair_specs(
        ensure_tiny_model(),
        connector,
        suffix=f"-{connector}",
        connector_config=CONFIGS[connector],
        num_blocks=NUM_BLOCKS,
        kv_cache_bytes=KV_CACHE_BYTES,
        extra_args=("--max-model-len", "2048"),
    )


def _lives(engine: Engine) -> bool:
    """Whether it answers, or will in a moment."""

    def answers() -> bool:
        return not engine.is_running() or is_healthy(engine.url)

    return wait_until(answers, PATIENCE_S) and engine.is_running()


@dataclass(frozen=True)
class Resources:
    """What all processes of an engine have now."""

    num_bytes: int
    num_files: int

    @classmethod
    def of(cls, engine: Engine) -> "Resources":
        """Of all of its processes that are there."""
        each = [_resources(process) for process in engine.members()]
        return cls(sum(num_bytes for num_bytes, _ in each), sum(files for _, files in each))

    def growth(self, before: "Resources") -> str:
        """In words."""
        mib = (self.num_bytes - before.num_bytes) / 2**20
        return f"{mib:+.0f} MiB, {self.num_files - before.num_files:+} fds"


def _resources(process: psutil.Process) -> tuple[int, int]:
    """Its bytes of memory and its open files; none if it has ended."""
    try:
        return process.memory_info().rss, process.num_fds()
    except psutil.NoSuchProcess:
        return 0, 0
