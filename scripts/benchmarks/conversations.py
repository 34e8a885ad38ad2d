"""Time the first token of each turn of a chat, and count the tokens that prefill computes.

Chats begin with new prompts. Each turn sends the history and --new further tokens to prefill, and
then to decode, which answers with --answer tokens. "cold": prefill's prefix cache is emptied before
each turn, as if another prefill engine had computed the turns before. "warm": it has them, but not
decode's answers. All pairs start at once and take turns in random order:

    off       nixl_kv without `conversations`
    on        nixl_kv with `conversations`: prefill reads from decode
    in-tree   vLLM's NixlConnector with `bidirectional_kv_xfer`; decode's kv_transfer_params go with
              the next turn, as vLLM's multi-turn proxy sends them

"computed" is the share of a turn's prompt that prefill computed, "over" how many tokens more than
the new ones. All chats of a turn are asked one after the other, each once the one before has its
first token. TTFT is the time of prefill's answer ("prefill"), and decode's own metric after it.
Figures are medians over chats, of turn 2 on.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from benchmarks import engines
from benchmarks.floor import prompt
from benchmarks.shapes import Row
from harness.cluster.client import DIRECT, WANT_TICKET, Client, Ticket
from harness.cluster.engines import MODEL_NAME, Connector, Engine, EngineSpec
from harness.cluster.metrics import COMPUTED_TOKENS, PROBE, PROMPT_TOKENS, CountersSince
from harness.cluster.waiting import wait_or_fail

ARMS: Final = ("off", "on", "in-tree")
CACHES: Final = ("cold", "warm")
BIDIRECTIONAL: Final = {"bidirectional_kv_xfer": True}
DEV_MODE: Final = {"VLLM_SERVER_DEV_MODE": "1"}
"""Resets of a cache need it."""
FIRST_SUM: Final = "vllm:time_to_first_token_seconds_sum"
FIRST_COUNT: Final = "vllm:time_to_first_token_seconds_count"
PATIENCE_S: Final = 600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engines and the chats."""
    engines.add_options(parser)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES)
    parser.add_argument("--chats", type=int, default=4, help="for each pair and cache, default 4")
    parser.add_argument("--turns", type=int, default=8, help="2 or more, default 8")
    parser.add_argument("--new", type=int, default=400, help="tokens of a question, default 400")
    parser.add_argument("--answer", type=int, default=600, help="tokens, default 600")
    parser.add_argument("--seed", type=int, default=0)


@dataclass
class Chat:
    """A conversation with one pair of engines."""

    seed: str
    tokens: list[int] = field(default_factory=list)
    carried: Mapping[str, Any] = field(default_factory=dict)  # decode's last kv_transfer_params


@dataclass(frozen=True)
class Turn:
    """One turn of one chat."""

    length: int  # tokens of the prompt
    computed: float  # of these, by prefill
    prefill: float  # seconds
    ttft: float  # seconds, prefill's among them


@dataclass(frozen=True)
class Arm:
    """A pair of engines."""

    name: str
    prefill: Engine
    decode: Engine
    to_prefill: Client
    to_decode: Client

    def reset(self) -> None:
        """Empty prefill's prefix cache. Blocks that decode has read become free in a step.

        Raises:
            TimeoutError: blocks stay in use.
        """
        why = f"{self.name}: no reset; see {self.prefill.log_path}"
        wait_or_fail(self._is_reset, PATIENCE_S, why)

    def _is_reset(self) -> bool:
        self.to_prefill.complete(PROBE, 1)
        return self.to_prefill.reset_prefix_cache()

    def ask(self, chat: Chat, length: int, pool: ThreadPoolExecutor) -> tuple[Turn, Future[None]]:
        """Ask both engines. Returns once decode has the first token; the rest of the answer comes.

        Raises:
            TimeoutError: no first token came.
        """
        since = CountersSince(self.to_prefill)
        asked = {**WANT_TICKET, **(chat.carried if self.name == "in-tree" else {})}
        ticket, seconds = self.to_prefill.timed_ticket(
            chat.tokens, logprobs=None, kv_transfer_params=asked
        )
        prompted = len(chat.tokens)
        computed = since.wait_for(PROMPT_TOKENS, prompted)[COMPUTED_TOKENS]
        since = CountersSince(self.to_decode)
        answer = pool.submit(self._answer, chat, length, ticket)
        changed = since.wait(
            lambda changed: changed[FIRST_COUNT] > 0 or has_failed(answer), PATIENCE_S
        )
        if not changed[FIRST_COUNT]:
            answer.result(timeout=0)
            raise TimeoutError(f"{self.name}: no first token; see {self.decode.log_path}")
        return Turn(prompted, computed, seconds, seconds + changed[FIRST_SUM]), answer

    def _answer(self, chat: Chat, length: int, ticket: Ticket) -> None:
        """Add decode's answer to the chat; vLLM streams no kv_transfer_params."""
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": chat.tokens, "max_tokens": length}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body["kv_transfer_params"] = ticket
        url = f"{self.decode.url}/v1/completions"
        reply = httpx.post(url, json=body, timeout=PATIENCE_S, **DIRECT)
        reply.raise_for_status()
        (choice,) = reply.json()["choices"]
        chat.tokens = [*chat.tokens, *choice["token_ids"]]
        chat.carried = reply.json().get("kv_transfer_params") or {}


def has_failed(answer: Future[None]) -> bool:
    return answer.done() and answer.exception() is not None


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each pair and state of prefill's cache, of the last turn and of all."""
    with engines.new_cluster() as cluster, ExitStack() as stack:
        specs = {name: specs_of(name, options) for name in options.arms}
        started = iter(cluster.start(*(spec for pair in specs.values() for spec in pair)))
        arms = []
        for name in specs:
            prefill, decode = next(started), next(started)
            clients = (
                stack.enter_context(Client(e.url, timeout_s=PATIENCE_S)) for e in (prefill, decode)
            )
            arms.append(Arm(name, prefill, decode, *clients))
        pool = stack.enter_context(ThreadPoolExecutor(options.chats))
        for arm in arms:  # connects, and compiles kernels
            chats_of(arm, "warm", replace_counts(options, chats=2, turns=2), pool, "warm-up")
        order = [(arm, cache) for arm in arms for cache in options.caches]
        random.Random(options.seed).shuffle(order)  # noqa: S311 - the same each time
        for arm, cache in order:
            turns = chats_of(arm, cache, options, pool, f"{options.seed}/{cache}")
            yield {"engines": arm.name, "prefill's cache": cache, **figures(turns, options)}


def specs_of(name: str, options: argparse.Namespace) -> list[EngineSpec]:
    """Prefill may read from decode in each arm, so that arms differ in one setting."""
    connector: Connector = "in-tree" if name == "in-tree" else "nixl-kv"
    more: Mapping[str, object] = BIDIRECTIONAL if name == "in-tree" else {"conversations": name}
    return [
        replace(
            spec,
            name=f"{spec.name}-{name}",
            role="both" if number == 0 and connector == "nixl-kv" else spec.role,
            connector_config={**spec.connector_config, **more},
            extra_env={**spec.extra_env, **DEV_MODE},
            gpu_memory_utilization=0.9 / len(options.arms),
        )
        for number, spec in enumerate(engines.pair_of(connector, options, caching=True))
    ]


def replace_counts(options: argparse.Namespace, **changed: int) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), **changed})


def chats_of(
    arm: Arm, cache: str, options: argparse.Namespace, pool: ThreadPoolExecutor, seed: str
) -> list[list[Turn]]:
    """The turns of each chat."""
    chats = [Chat(f"{seed}/{arm.name}/{number}") for number in range(options.chats)]
    found: list[list[Turn]] = [[] for _ in chats]
    for number in range(options.turns):
        coming: list[Future[None]] = []
        if cache == "cold":
            arm.reset()  # once: chats have nothing in common
        for chat, turns in zip(chats, found, strict=True):
            chat.tokens += prompt(options.new, f"{chat.seed}/{number}")
            turn, answer = arm.ask(chat, options.answer, pool)
            turns.append(turn)
            coming.append(answer)
        for answer in coming:
            answer.result()
    return found


def figures(chats: Sequence[Sequence[Turn]], options: argparse.Namespace) -> Row:
    later = [turn for turns in chats for turn in turns[1:]]
    last = [turns[-1] for turns in chats]
    return {
        "chats": len(chats),
        "tokens of the last turn": last[0].length,
        "computed": sum(turn.computed for turn in later) / sum(turn.length for turn in later),
        "most over": max(turn.computed for turn in later) - options.new,
        "prefill of the last turn p50 ms": statistics.median(turn.prefill for turn in last) * 1e3,
        "TTFT of the last turn p50 ms": statistics.median(turn.ttft for turn in last) * 1e3,
        "TTFT of turn 2 on p50 ms": statistics.median(turn.ttft for turn in later) * 1e3,
        "most ms": max(turn.ttft for turn in later) * 1e3,
    }
