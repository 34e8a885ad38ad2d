"""A prefill and a decode engine to be treated badly, and what came of it."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx

from pd.asking import LIKELY, TIES, WANT_TICKET, likeness
from pd.client import Answer, Client, is_healthy
from pd.cluster import CPU_DTYPE, PAIR_ROLES, Cluster, ClusterSpec
from pd.engines import Connector, Engine, EngineSpec
from pd.processes import ProcessDiedError
from pd.prompts import random_prompt
from pd.tiny_model import ensure_tiny_model
from pd.waiting import wait_until

Ticket = dict[str, Any]

TIMEOUT_S = 25.0  # of a request: it waits that long before it counts as hung
PATIENCE_S = 4.0  # a busy engine may miss a question or two
HELD_S = 6  # how long prefill holds what nobody reads
ANSWER_TOKENS = 16
PROMPT_TOKENS = 150
SHOWN_ERROR = 60  # characters
# A small cache of prefill: it is soon used again.
SMALL_CACHE: Final = ("--num-gpu-blocks-override", "24", "--max-model-len", "2048")
CONFIGS: Final[Mapping[Connector, Mapping[str, object]]] = {
    # One address of this machine is a peer, so that others of it are foreign.
    "nixl-kv": {"offer_ttl_s": HELD_S, "lease_s": HELD_S, "peers": ["127.0.0.1/32"]},
    "in-tree": {"kv_lease_duration": HELD_S},
}
LOADS: Final[Mapping[Connector, str]] = {
    "nixl-kv": "vllm:nixl_kv_loads_total",
    "in-tree": "vllm:nixl_bytes_transferred_count",
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
        said = [f"{count} {kind}" for kind, count in self.counts.items()]
        return ", ".join([*said, *dict.fromkeys(self.errors), *self.notes])


class EngineGoneError(Exception):
    """An engine died: the rest of the case has nobody to talk to."""


class Pair:
    """The two engines. Prefill's own answers are what decode's are compared with."""

    def __init__(self, connector: Connector, cluster: Cluster) -> None:
        """Of a cluster that runs."""
        self.connector = connector
        self.prefill, self.decode = cluster.prefill[0], cluster.decode[0]
        self.source = Client(self.prefill.url, timeout_s=TIMEOUT_S)
        self.target = Client(self.decode.url, timeout_s=TIMEOUT_S)
        self._seeds = iter(range(10**6))

    def prompt(self, tokens: int = PROMPT_TOKENS) -> str:
        """One that no engine has seen."""
        return random_prompt(tokens, next(self._seeds))

    def ticket(self, prompt: str) -> Ticket:
        """As a router gets it from prefill."""
        found = self.source.ticket(prompt, WANT_TICKET)
        if found is None:
            raise RuntimeError("prefill gave no ticket")
        return found

    def ask(self, tally: Tally, prompt: str, params: object = None, **extra: object) -> None:
        """Ask decode, and note whether the answer is the right one."""
        extra |= {} if params is None else {"kv_transfer_params": params}
        with self.noted(tally):
            answer = self.target.complete(prompt, ANSWER_TOKENS, **extra)
            tally.counts["right" if self.is_right(prompt, answer) else "wrong"] += 1

    def ask_all(self, tally: Tally, prompt: Any, **extra: object) -> None:
        """Ask decode for several answers; prefill is asked for the same. `prompt` may be a list."""
        with self.noted(tally):
            got = self.target.texts(prompt, ANSWER_TOKENS, **extra)
            expected = self.source.texts(
                prompt, ANSWER_TOKENS, **(extra | {"kv_transfer_params": None})
            )
            for mine, theirs in zip(got, expected, strict=True):
                tally.counts["right" if mine == theirs else "wrong"] += 1

    def is_right(self, prompt: str, answer: Answer) -> bool:
        """Whether prefill gives this answer as well, or finds it as likely."""
        expected = self.source.complete(prompt, ANSWER_TOKENS, logprobs=LIKELY)
        return likeness(expected, answer, TIES[CPU_DTYPE]) != "other"

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
        except RuntimeError as error:
            status = str(error).partition("HTTP ")[2][:3]
            refused = status.isdecimal() and int(status) < HTTPStatus.INTERNAL_SERVER_ERROR
            tally.counts["refused" if refused else "failed"] += 1
            said = re.search(rf'"message":"([^"]{{,{SHOWN_ERROR}}})', str(error))
            tally.errors.append(f"HTTP {status}{f' {said[1]!r}' if said else ''}")
        else:
            return
        if self.dead():
            raise EngineGoneError

    def dead(self) -> list[str]:
        """The engines that are no more, by name."""
        engines = (self.prefill, self.decode)
        return [one.name for one in engines if not wait_until(lambda: _lives(one), PATIENCE_S)]  # noqa: B023

    def usable(self) -> tuple[bool, str]:
        """Whether an ordinary request still gets its KV from prefill; and in words."""
        tally = Tally()
        before = self.target.counters()
        try:
            prompt = self.prompt()
            self.ask(tally, prompt, self.ticket(prompt))
            loads = self.target.counters_after(before, LOADS[self.connector])
        except (RuntimeError, httpx.HTTPError, EngineGoneError) as error:
            return False, f"afterwards: {type(error).__name__}"
        loaded = loads.get(LOADS[self.connector], 0) > 0
        words = f"afterwards: {tally}, {'KV loaded' if loaded else 'KV NOT loaded'}"
        return tally.counts["right"] == 1 and loaded, words

    def close(self) -> None:
        """Close the connections."""
        self.source.__exit__()
        self.target.__exit__()


def cluster_of(connector: Connector, log_dir: Path) -> Cluster:
    """The engines, not started."""
    model = ensure_tiny_model()
    prefill, decode = (
        EngineSpec(
            role,
            model,
            role,
            connector,
            CONFIGS[connector],
            dtype=CPU_DTYPE,
            extra_args=SMALL_CACHE,
        )
        for role in PAIR_ROLES
    )
    return Cluster(ClusterSpec([prefill], [decode]), log_dir=log_dir, route=False)


def _lives(engine: Engine) -> bool:
    try:
        engine.check_alive()
    except ProcessDiedError:
        return False
    return is_healthy(engine.url)


@dataclass(frozen=True)
class Resources:
    """What all processes of an engine have now."""

    nbytes: int
    files: int

    @classmethod
    def of(cls, engine: Engine) -> "Resources":
        """Its processes are one session."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]  # noqa: PTH208
        found = [_of_process(pid) for pid in pids if _session(pid) == engine.pid]
        return cls(sum(nbytes for nbytes, _ in found), sum(files for _, files in found))

    def grown(self, before: "Resources") -> str:
        """In words."""
        return (
            f"{(self.nbytes - before.nbytes) / 2**20:+.0f} MiB, {self.files - before.files:+} fds"
        )


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _of_process(pid: int) -> tuple[int, int]:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    except OSError:
        return 0, 0
