"""Measure what requests that wait for prefill cost each step of decode's scheduler.

vLLM's own scheduler runs 8 requests; no model computes. Beside them, conversations wait for
prefill: all but the last 512 tokens of each are in decode's prefix cache. "aside" is an engine with
the hooks that take them out of vLLM's queue, "queued" one without. The two take turns of 10 steps.
Figures are medians of the scheduler's CPU time for a step, in microseconds, and "more" is the
difference to no waiting conversation.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

from vllm.config import KVTransferConfig

from benchmarks.shapes import Row
from nixl_kv.ids import new_nonce
from support.records import ticket_for
from support.vllm_scheduler import BLOCK, OURS, SteppedScheduler, hooked, make_config

NEW_TOKENS: Final = 512  # of a conversation's next turn
RUNNING: Final = 8
ANSWER: Final = 1 << 13  # tokens; more than there are steps
ENGINES: Final = ("queued", "aside")
TURN: Final = 10  # steps; after another engine's steps, the first one finds cold caches


def add_options(parser: argparse.ArgumentParser) -> None:
    """The conversations."""
    parser.add_argument("--tokens", type=int, default=16384, help="of each; default 16384")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 16, 100])
    parser.add_argument(
        "--repeat", type=int, default=60, help="steps of each engine, 10 or more; default 60"
    )


class Decode(SteppedScheduler):
    """A decode engine's scheduler, and the conversations that it has seen."""

    def __init__(self, tokens: int, conversations: int, *, sets_aside: bool) -> None:
        extra = {"port": 0, "insecure": True}
        transfer = KVTransferConfig(**OURS, kv_role="kv_consumer", kv_connector_extra_config=extra)
        room = tokens + ANSWER
        blocks = (conversations * tokens + RUNNING * room) // BLOCK + 1024
        config = make_config(
            transfer, blocks, max_num_seqs=2 * RUNNING, max_num_batched_tokens=room
        )
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = config.scheduler_config.max_model_len = room
        super().__init__(config, hooked(config))
        hooks: Any = self.vllm
        hooks._sets_aside = sets_aside  # noqa: SLF001 - the other half of the comparison
        self.describe()
        self.prompts = [[31 * n + t for t in range(tokens)] for n in range(conversations)]
        for number, prompt in enumerate(self.prompts):
            self.add(f"first{number}", prompt[:-NEW_TOKENS])
            while self.vllm.has_unfinished_requests():
                self.step()
        for number in range(RUNNING):
            self.add(f"running{number}", [number, 7], max_tokens=ANSWER)
        self.step()

    def wait_for_prefill(self, number: int) -> None:
        prompt = self.prompts[number]
        params = ticket_for(prompt, new_nonce(), is_early=True).params(None)
        self.add(f"next{number}", prompt, params)

    def step(self) -> float:
        """Returns the CPU time of the scheduler, in seconds."""
        begin = time.thread_time()
        output = self.vllm.schedule()
        seconds = time.thread_time() - begin
        self.end(output)
        return seconds


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each number of waiting conversations."""
    most = max(options.waiting)
    engines = {name: Decode(options.tokens, most, sets_aside=name == "aside") for name in ENGINES}
    num_waiting, alone = 0, dict[str, float]()
    for wanted in sorted(options.waiting):
        for number in range(num_waiting, wanted):
            for engine in engines.values():
                engine.wait_for_prefill(number)
        num_waiting = wanted
        for engine in engines.values():
            for _ in range(TURN):  # in the first, vLLM asks about the new ones
                engine.step()
        times: dict[str, list[float]] = {name: [] for name in ENGINES}
        for _ in range(options.repeat // TURN):
            for name, engine in engines.items():
                times[name] += [engine.step() for _ in range(TURN)]
        row: dict[str, Any] = {"tokens": options.tokens, "waiting": wanted}
        for name in ENGINES:
            median = statistics.median(times[name]) * 1e6
            alone.setdefault(name, median)
            row |= {f"{name} us": round(median), f"{name} more us": round(median - alone[name])}
        yield row
    for engine in engines.values():
        engine.connector.shutdown()
