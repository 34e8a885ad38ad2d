"""Measure what `conversations` costs the engine whose cached KV others read.

vLLM's own scheduler decodes for many requests; no model computes. All other blocks are cached, as
of conversations before. The engine takes turns of 16 steps with the hooks of the setting ("on") and
without ("off"). In 16 steps each request fills one block. "more" is the median difference between
two turns in succession. Times are CPU times of the scheduler's thread in microseconds, for a step
and its output.

An ask is a `Find` from its bytes to the bytes of its answer, as on the directory's thread, while no
step runs. Its hashes are of one cached prompt. "tail" is the 99th percentile.
"""

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

from vllm.config import KVTransferConfig

from benchmarks.shapes import Row
from nixl_kv.ids import ANY_INCARNATION, EngineId, new_nonce
from nixl_kv.protocol import messages
from nixl_kv.transport.base import FromPeer
from support.vllm_scheduler import BLOCK, OURS, SteppedScheduler, make_config

TURN: Final = 16  # steps, in which each request fills a block
HOOKS: Final = ("get_new_blocks", "cache_full_blocks", "reset_prefix_cache")
ANSWER: Final = 1 << 12  # tokens; more than there are steps
PROMPT: Final = 16_000  # tokens of a cached conversation
ENGINE: Final = EngineId("owner")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engine."""
    parser.add_argument("--running", type=int, default=256, help="requests; default 256")
    parser.add_argument("--blocks", type=int, default=100_000, help="of 16 tokens; default 100000")
    parser.add_argument("--ask", type=int, default=1_000, help="blocks of an ask; default 1000")
    parser.add_argument("--repeat", type=int, default=80, help="turns of each kind; default 80")


class Owner(SteppedScheduler):
    """An engine's scheduler, with a full prefix cache."""

    def __init__(self, options: argparse.Namespace) -> None:
        extra = {"port": 0, "insecure": True, "conversations": "on"}
        transfer = KVTransferConfig(
            **OURS, engine_id=ENGINE, kv_role="kv_consumer", kv_connector_extra_config=extra
        )
        most = options.running * PROMPT  # tokens of a step
        config = make_config(
            transfer,
            options.blocks,
            max_num_seqs=options.running,
            max_num_batched_tokens=most,
        )
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = config.scheduler_config.max_model_len = PROMPT + ANSWER
        super().__init__(config)
        self.describe()
        # Twice as many as fit, so that the latest ones fill the cache.
        self.prompts = [
            [number * 31 + place for place in range(PROMPT)]
            for number in range(2 * options.blocks * BLOCK // PROMPT)
        ]
        for number, prompt in enumerate(self.prompts):
            self.latest = self.add(f"cached{number}", prompt)
            while self.vllm.has_unfinished_requests():
                self.step()
        for number in range(options.running):
            # In each step, the same share of requests fills a block.
            self.add(f"running{number}", [number] * (64 + number % BLOCK), max_tokens=ANSWER)
        self.step()

    def turn(self, *, is_on: bool) -> float:
        """The mean time of a step, in seconds, with the hooks or without."""
        pool: Any = self.vllm.kv_cache_manager.block_pool
        parts, hooks = self.connector._parts, {name: vars(pool)[name] for name in HOOKS}  # noqa: SLF001
        if not is_on:
            self.connector._parts = []  # noqa: SLF001
            for name in HOOKS:
                delattr(pool, name)
        seconds = statistics.mean(self.step() for _ in range(TURN))
        self.connector._parts = parts  # noqa: SLF001
        for name, hook in hooks.items():
            setattr(pool, name, hook)
        return seconds

    def step(self) -> float:
        """Returns the CPU time of the scheduler, in seconds."""
        begin = time.thread_time()
        self.end(self.vllm.schedule())
        return time.thread_time() - begin

    def ask(self, count: int) -> float:
        """Ask for the first blocks of the latest prompt; returns the CPU time in seconds."""
        find = messages.Find(
            incarnation=ANY_INCARNATION,
            engine=ENGINE,
            nonce=new_nonce(),
            weights="",
            first_block=0,
            hashes=tuple(self.latest.block_hashes[:count]),
        )
        question = FromPeer(b"", messages.encode(find))
        directory = self.connector._directory  # noqa: SLF001 - without its socket
        begin = time.thread_time()
        answer = directory._answer(question)  # noqa: SLF001
        seconds = time.thread_time() - begin
        found: Any = messages.decode_to_finder(answer)
        if found.num_blocks != len(find.hashes):
            raise RuntimeError(f"{found.num_blocks} of {len(find.hashes)} blocks are found")
        return seconds


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """One row."""
    owner = Owner(options)
    ask = min(options.ask, PROMPT // BLOCK)
    asks = [owner.ask(ask) for _ in range(500)]
    gc.collect()
    gc.freeze()  # as vLLM does once an engine has started
    off, on = list[float](), list[float]()
    for number in range(options.repeat):
        for is_on in (False, True) if number % 2 else (True, False):
            (on if is_on else off).append(owner.turn(is_on=is_on))
    more = [b - a for a, b in zip(off, on, strict=True)]
    yield {
        "running": options.running,
        "blocks": options.blocks,
        "step off us": round(statistics.median(off) * 1e6),
        "step on us": round(statistics.median(on) * 1e6),
        "more us": round(statistics.median(more) * 1e6),
        "ask blocks": ask,
        "ask us": round(statistics.median(asks) * 1e6),
        "ask tail us": round(statistics.quantiles(asks, n=100)[98] * 1e6),
    }
    owner.connector.shutdown()
