"""Routers that start both legs themselves, with one id for both, replayed with real engines."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from harness.cluster.client import COMPLETIONS, DIRECT, TIMEOUT_S, Client
from harness.cluster.cluster import Cluster
from harness.cluster.engines import HOST, EngineSpec
from harness.cluster.metrics import FAILURES, LOADS, OFFERS, OFFERS_READ, CountersSince
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from support.engines import EVENT_S, started

pytestmark = pytest.mark.e2e

CHUNK = 128
"""Tokens that prefill computes in one step."""


@pytest.fixture(scope="module", params=["kv_request_id", "request_id"])
def legs(
    cluster: Cluster,
    base_specs: tuple[EngineSpec, EngineSpec],
    request: pytest.FixtureRequest,
) -> Iterator["Legs"]:
    form = {"insecure": False, "verify": "all", "pair_ids": request.param, "peers": [f"{HOST}/32"]}
    specs = (
        replace(
            spec,
            name=f"{request.param}-{spec.role}",
            connector_config={**spec.connector_config, **form},
            extra_args=("--max-num-batched-tokens", str(CHUNK)),
        )
        for spec in base_specs
    )
    with started(cluster, *specs) as engines, Pair(engines[0], engines[1]) as pair:
        yield Legs(pair, request.param)


class Legs:
    """A router: it sends both legs at the same time, and throws prefill's answer away."""

    def __init__(self, pair: Pair, form: str) -> None:
        self.pair = pair
        self._form = form

    def params(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        address = {"remote_host": HOST, "remote_port": self.pair.prefill.side_port}
        if self._form == "kv_request_id":  # llm-d's sidecar, `--kv-connector=offloading`
            named = {"kv_request_id": name}
            return {"remote_decoder": named}, {"remote_prefiller": named | address}
        # vLLM's demo of a proxy for NixlPushConnector
        to_prefill = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host"))
        to_decode = {"remote_engine_id": "prefill", "tp_size": 1, "remote_request_id": name}
        return (
            {"do_remote_decode": True, "do_remote_prefill": False, **to_prefill},
            {"do_remote_decode": False, "do_remote_prefill": True, **to_decode, **address},
        )

    def complete(self, prompt: str, name: str = "", other: str = "") -> str:
        """Decode's text; `other` is another prompt for prefill."""
        name = name or str(uuid.uuid4())
        to_prefill, to_decode = self.params(name)
        asked = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 16}
        first = {**asked, "prompt": other or prompt, "max_tokens": 1, "stream": False}
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(
                self._post, self.pair.prefill.url, {**first, "kv_transfer_params": to_prefill}, name
            )
            second = {**asked, "prompt": prompt, "kv_transfer_params": to_decode}
            answer = self._post(self.pair.decode.url, second, name).json()
            sent.result().raise_for_status()
        return str(answer["choices"][0]["text"])

    def _post(self, url: str, body: dict[str, Any], name: str) -> httpx.Response:
        headers = {"X-Request-Id": name}
        return httpx.post(
            url + COMPLETIONS, json=body, headers=headers, timeout=TIMEOUT_S, **DIRECT
        )


def test_legs_that_start_together_move_their_kv(legs: Legs, single: Client) -> None:
    """Of short prompts, and of prompts that prefill computes in several steps."""
    prompts = [random_prompt(90 + 97 * n, seed=9300 + n) for n in range(8)]
    expected = [single.complete(prompt, logprobs=None).text for prompt in prompts]
    pair = legs.pair
    offers, loads = CountersSince(pair.to_prefill), CountersSince(pair.to_decode)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(legs.complete, prompts)) == expected
    assert loads.wait_for(LOADS, len(prompts), timeout_s=EVENT_S)[LOADS] == len(prompts)
    assert loads.changed()[FAILURES] == 0
    assert offers.wait_for(OFFERS_READ, len(prompts), timeout_s=EVENT_S)[OFFERS] == len(prompts)


def test_an_id_gives_nobody_the_kv_of_another_prompt(legs: Legs, single: Client) -> None:
    prompt, other = (random_prompt(150, seed=9400 + n) for n in range(2))
    since = CountersSince(legs.pair.to_decode)
    expected = single.complete(prompt, logprobs=None).text
    assert legs.complete(prompt, other=other) == expected
    assert since.wait_for(FAILURES, timeout_s=EVENT_S)[LOADS] == 0
    assert "another prompt" in legs.pair.prefill.log_text()


def test_an_id_that_comes_again_is_computed(legs: Legs, single: Client) -> None:
    prompt, other = (random_prompt(150, seed=9500 + n) for n in range(2))
    name = str(uuid.uuid4())
    texts = [single.complete(each, logprobs=None).text for each in (prompt, other)]
    since = CountersSince(legs.pair.to_decode)
    assert [legs.complete(each, name) for each in (prompt, other)] == texts
    assert since.wait_for(LOADS, timeout_s=EVENT_S)[LOADS] == 1
    assert since.changed()[FAILURES] == 0
