"""A prompt that prefill computes finds no blocks, while offers hold some. vLLM's own scheduler."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from nixl_kv.connector.prefill import BLOCK_WAIT_S
from nixl_kv.connector.stats import RankReports
from nixl_kv.connector.worker import WorkerMetadata
from nixl_kv.ids import RequestId
from nixl_kv.protocol.events import OfferGranted
from support.stepped import Clock
from support.vllm_scheduler import WANT_TICKET, SteppedScheduler, make_config, ours

PROMPT = 480
"""Tokens: 30 of the cache's 80 blocks. Three prompts do not fit."""


class Engine(SteppedScheduler):
    """Prefill, with an offer, and two prompts that it computes in chunks of 64 tokens."""

    def __init__(self, role: str = "kv_producer", params: Any = WANT_TICKET) -> None:
        transfer = KVTransferConfig(**ours(role))
        limits: dict[str, Any] = {
            "max_num_batched_tokens": 128,
            "long_prefill_token_threshold": 64,
        }
        super().__init__(make_config(transfer, 81, **limits))
        self.describe()
        self.clock = Clock()
        self.connector._prefill._clock = self.clock
        self.add("offered", range(9000, 9000 + PROMPT), WANT_TICKET)
        while "offered" not in self.connector._prefill._offers:
            self.step()
        for number, name in enumerate("AB"):
            self.add(name, range(20_000 * number, 20_000 * number + PROMPT), params)
        self.computed = 0

    def step(self, **reported: Any) -> set[str]:
        """The requests that vLLM preempts."""
        output = self.vllm.schedule()
        self.computed = getattr(self, "computed", 0) + output.total_num_scheduled_tokens
        self.end(output, **reported)
        return set(output.preempted_req_ids or ())

    def grant(self, *requests: str) -> None:
        reports = RankReports()
        reports.add([OfferGranted(RequestId(each)) for each in requests])
        self.step(kv_connector_worker_meta=WorkerMetadata({}, reports))

    @property
    def is_short(self) -> bool:
        """Whether A and B have all blocks but those of the offer, and need more."""
        return self.free_blocks < 8

    def until_short(self) -> None:
        while not self.is_short:
            assert not self.step()

    def finish(self) -> None:
        """Decode reads A and B as soon as they are offered."""
        prefill = self.connector._prefill
        for _ in range(60):
            ended = {"A", "B"} & set(prefill._offers)
            self.step(**({"finished_sending": ended} if ended else {}))
            if not {"A", "B"} & {*prefill._awaited, *prefill._offers}:
                return
        raise AssertionError("they never end")


Make = Callable[..., Engine]


@pytest.fixture
def make(engines_of: Callable[[type[Engine]], Make]) -> Make:
    return engines_of(Engine)


def test_no_prompt_is_preempted_while_decode_reads(make: Make) -> None:
    engine = make()
    engine.grant("offered")
    engine.until_short()
    for _ in range(5):
        assert not engine.step()
    assert not engine.step(finished_sending={"offered"})
    engine.finish()
    assert engine.computed == 2 * PROMPT, "nothing twice"


def test_a_dead_reader_stalls_prefill_for_a_second_once(make: Make) -> None:
    engine = make()
    engine.grant("offered")
    engine.until_short()
    preempted = set[str]()
    started = engine.clock.now
    while not preempted:
        engine.clock.now += BLOCK_WAIT_S / 10
        preempted = engine.step()
    assert BLOCK_WAIT_S <= engine.clock.now - started < 1.5 * BLOCK_WAIT_S
    engine.finish()  # with one after the other, as its clock stands still from now on
    assert engine.computed > 2 * PROMPT
