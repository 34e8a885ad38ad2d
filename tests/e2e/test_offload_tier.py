"""Beside vLLM's OffloadingConnector, on prefill and on decode, with the files in configs/.

vLLM's own copies refuse to run on CPU: `harness.cluster.host_tier` stands for them. On decode it
stands also for SimpleCPUOffloadConnector, which is made of CUDA streams.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from harness.cluster.answers import Question
from harness.cluster.client import Answer, Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import EngineSpec
from harness.cluster.metrics import LOADS, TICKETS_REFUSED, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import PATIENT, Accounts, connected, expect, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIGS: Final = Path(__file__).resolve().parents[2] / "configs"
HOST_TIER: Final = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": "HostTierSpec",
        "spec_module_path": "harness.cluster.host_tier",
    },
}
EXTERNAL: Final = "vllm:external_prefix_cache_hits_total"  # tokens that any connector has given

BLOCK: Final = 128
NUM_TOKENS: Final = 400
IN_TIER: Final = NUM_TOKENS // BLOCK * BLOCK


def multi_spec(name: str) -> EngineSpec:
    """An engine with configs/multi-NAME.json, except for parts that this machine lacks."""
    transfer: dict[str, Any] = json.loads((CONFIGS / f"multi-{name}.json").read_text("utf-8"))
    connectors = transfer["kv_connector_extra_config"]["connectors"]
    extra = connectors[0]["kv_connector_extra_config"]
    for name_of_place in ("host", "key_file"):
        extra.pop(name_of_place, None)
    extra |= {"port": 0, "verify": "all", **PATIENT}
    connectors[1] = HOST_TIER
    return EngineSpec(
        f"multi-{name}",
        ensure_tiny_model(),
        kv_cache_bytes=256 << 20,
        block_size=BLOCK,
        extra_args=("--kv-transfer-config", json.dumps(transfer)),
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},  # for `reset_prefix_cache`
    )


@pytest.fixture(scope="module")
def tiered(cluster: Cluster) -> Iterator[Pair]:
    with (
        started(cluster, multi_spec("prefill"), multi_spec("decode")) as engines,
        connected(*engines) as pair,
    ):
        yield pair
        Accounts(pair).expect_free()


def ask(complete: Callable[[str], Answer], question: Question) -> None:
    assert question.compare(complete(question.prompt)) != "other"


def test_decode_reads_blocks_that_prefill_has_from_its_tier(tiered: Pair, single: Client) -> None:
    question = Question.of(single, random_prompt(NUM_TOKENS, seed=50), 16)
    accounts = Accounts(tiered)
    ask(tiered.complete, question)
    accounts.expect_loaded(NUM_TOKENS - 1)
    accounts.expect_free()
    for client in (tiered.to_prefill, tiered.to_decode):
        client.reset_prefix_cache()  # what the tier has stays
    accounts = Accounts(tiered)
    ask(tiered.complete, question)
    expect(accounts.prefill, {EXTERNAL: IN_TIER})
    accounts.expect_loaded(NUM_TOKENS - 1)
    accounts.expect_offers(1, read=1)


def test_blocks_that_decode_has_read_come_back_from_its_tier(tiered: Pair, single: Client) -> None:
    question = Question.of(single, random_prompt(NUM_TOKENS, seed=51), 16)
    ask(tiered.complete, question)
    Accounts(tiered).expect_free()
    tiered.to_decode.reset_prefix_cache()
    accounts, since = Accounts(tiered), CountersSince(tiered.to_decode)
    ask(tiered.to_decode.complete, question)
    expect(since, {EXTERNAL: IN_TIER})
    accounts.expect_loaded()


def test_the_tier_serves_a_request_whose_ticket_is_of_no_use(tiered: Pair, single: Client) -> None:
    question = Question.of(single, random_prompt(NUM_TOKENS, seed=54), 16)
    with_ticket = partial(tiered.decode_with, tiered.to_prefill.ticket(question.prompt))
    ask(with_ticket, question)
    Accounts(tiered).expect_free()
    tiered.to_decode.reset_prefix_cache()
    accounts = Accounts(tiered)
    ask(with_ticket, question)
    expect(accounts.decode, {TICKETS_REFUSED: 1, EXTERNAL: IN_TIER, LOADS: 0})
