"""Measure what `conversations` costs the engine whose cached KV others read.

vLLM's own scheduler decodes for many requests; no model computes. All other blocks are cached, as
of conversations before. The engines "off" and "on" differ in the setting, and take turns of 16
steps with the same requests. "more" is the median of the differences between the same steps of
both. Times are CPU times of the scheduler's thread in microseconds, for a step and its output.

An ask is a `Find` from its bytes to the bytes of its answer, as on the directory's thread, while no
step runs. Its hashes are of one cached prompt.
"""

import argparse
import copy
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

TURN: Final = 16  # steps; in so many, each request fills a block
ANSWER: Final = 1 << 12  # tokens; more than there are steps
PROMPT: Final = 16_000  # tokens of a cached conversation
ENGINE: Final = EngineId("owner")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The engine."""
    parser.add_argument("--running", type=int, default=256, help="requests; default 256")
    parser.add_argument("--blocks", type=int, default=100_000, help="of 16 tokens; default 100000")
    parser.add_argument("--ask", type=int, default=1_000, help="blocks of an ask; default 1000")
    parser.add_argument("--repeat", type=int, default=40, help="turns of 16 steps; default 40")


class Owner(SteppedScheduler):
    """An engine's scheduler, with a full prefix cache."""

    def __init__(self, options: argparse.Namespace, setting: str) -> None:
        extra = {"port": 0, "insecure": True, "conversations": setting}
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
    off, on = (Owner(options, setting) for setting in ("off", "on"))
    times: dict[Owner, list[float]] = {off: [], on: []}
    for number in range(options.repeat):
        for engine in (off, on) if number % 2 else (on, off):
            # After another engine's steps, the first one finds cold caches.
            times[engine] += [engine.step() for _ in range(TURN)]
    more = [b - a for a, b in zip(times[off], times[on], strict=True)]
    asks = [on.ask(min(options.ask, PROMPT // BLOCK)) for _ in range(20 * options.repeat)]
    yield {
        "running": options.running,
        "blocks": options.blocks,
        "step off us": round(statistics.median(times[off]) * 1e6),
        "step on us": round(statistics.median(times[on]) * 1e6),
        "more us": round(statistics.median(more) * 1e6),
        "ask blocks": min(options.ask, PROMPT // BLOCK),
        "ask us": round(statistics.median(asks) * 1e6),
        "ask p99 us": round(statistics.quantiles(asks, n=100)[98] * 1e6),
    }
    for engine in (off, on):
        engine.connector.shutdown()
