"""Prefill answers before it has computed, so that a router starts both legs together."""

import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from harness.cluster.answers import Question
from harness.cluster.client import COMPLETIONS, DIRECT, WANT_TICKET, Client, Ticket
from harness.cluster.cluster import Cluster
from harness.cluster.engines import (
    HOST,
    MODEL_NAME,
    OVERLAP,
    START_TIMEOUT_S,
    Engine,
    EngineSpec,
    python_path,
)
from harness.cluster.metrics import (
    EARLY_ENDS,
    FAILURES,
    LOADS,
    OFFERS,
    OFFERS_READ,
    PROBE,
    PROMPT_TOKENS,
    QUEUED,
    TICKETS_REFUSED,
    CountersSince,
)
from harness.cluster.models.families import DeepseekV2
from harness.cluster.models.files import REPO, ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.processes import ManagedProcess, Ports
from harness.cluster.prompts import random_prompt
from harness.cluster.waiting import wait_until
from nixl_kv.protocol.ticket import FIELD, SealedTicket
from nixl_kv.protocol.ticket import Ticket as OpenedTicket
from support.asking import Ended, ask
from support.engines import EVENT_S, connected, expect_free, expect_load, started, without_connector

pytestmark = pytest.mark.e2e

CHUNK = 128
"""Tokens that prefill computes in one step."""
SEATS = 2
"""Requests that prefill computes at a time; others are queued."""
EARLY = (*("--max-num-batched-tokens", str(CHUNK)), *("--max-num-seqs", str(SEATS)))
SCALE_OUT = "--enable-scale-out"  # has /inference/v1/generate
SETTINGS = {**OVERLAP, "insecure": False, "verify": "all"}
ANSWER_TOKENS = 12


@contextmanager
def early_pair(cluster: Cluster, specs: tuple[EngineSpec, EngineSpec], name: str) -> Iterator[Pair]:
    """Two engines with a key behind a router; prefill answers early."""
    prefill, decode = (
        replace(
            spec,
            name=f"{name}-{spec.role}",
            extra_args=(*extra_args, SCALE_OUT, *spec.extra_args),
            connector_config={**spec.connector_config, **SETTINGS},
        )
        for spec, extra_args in zip(specs, (EARLY, ()), strict=True)
    )
    with started(cluster, prefill, decode) as engines, connected(*engines):
        router = cluster.route(engines[:1], engines[1:])
        with Pair(engines[0], engines[1], router) as pair:
            yield pair


@pytest.fixture(scope="module")
def pair(cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]) -> Iterator[Pair]:
    with early_pair(cluster, base_specs, "early") as pair:
        yield pair


def opened(params: Ticket) -> OpenedTicket:
    """The ticket in the `kv_transfer_params` of prefill's answer."""
    return SealedTicket.parse({FIELD: params[FIELD]}).open()


# Prefill does not answer a request for log probabilities early: the harness's requests have one.
def early_ticket(pair: Pair, prompt: str) -> Ticket:
    ticket, _ = pair.to_prefill.timed_ticket(prompt, logprobs=None)
    assert opened(ticket).is_early
    return ticket


def test_legs_start_together_and_the_answers_are_right(pair: Pair, single: Client) -> None:
    prompts = [random_prompt(100 + 30 * n, seed=7300 + n) for n in range(12)]
    expected = [single.complete(prompt, logprobs=None).text for prompt in prompts]
    offers, loads = CountersSince(pair.to_prefill), CountersSince(pair.to_decode)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda p: pair.to_router.complete(p, logprobs=None), prompts))
    assert [answer.text for answer in answers] == expected
    assert loads.wait_for(LOADS, len(prompts), timeout_s=EVENT_S)[LOADS] == len(prompts)
    assert loads.changed()[FAILURES] == 0
    assert offers.wait_for(OFFERS_READ, len(prompts), timeout_s=EVENT_S)[OFFERS] == len(prompts)


def test_chunks_are_read_while_prefill_computes_the_next(pair: Pair, single: Client) -> None:
    prompts = [random_prompt(7 * CHUNK + 33 * n, seed=7350 + n) for n in range(6)]
    expected = [single.complete(prompt, logprobs=None).text for prompt in prompts]
    since = CountersSince(pair.to_decode)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda p: pair.to_router.complete(p, logprobs=None), prompts))
    assert [answer.text for answer in answers] == expected
    assert since.wait_for(LOADS, len(prompts), timeout_s=EVENT_S)[LOADS] == len(prompts)
    assert since.changed()[FAILURES] == 0


def test_a_chat_is_answered_early(pair: Pair, single: Client) -> None:
    messages = [{"role": "user", "content": random_prompt(90, seed=7400)}]
    since = CountersSince(pair.to_decode)
    answer, expected = (to.chat(messages, logprobs=False) for to in (pair.to_router, single))
    assert answer.text == expected.text
    assert answer.prompt_tokens == expected.prompt_tokens  # vllm-router merges prefill's usage
    assert since.wait_for(LOADS, timeout_s=EVENT_S)[LOADS] == 1


GENERATE: Final = "/inference/v1/generate"
LIMITS: Final = {
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    COMPLETIONS: "max_tokens",
}


def body_of(path: str, seed: int, limit: int) -> dict[str, object]:
    """A greedy request for this many tokens."""
    words, token_ids = random_prompt(60, seed), list(range(seed % 1000, seed % 1000 + 100))
    if path == GENERATE:
        return {"token_ids": token_ids, "sampling_params": {"temperature": 0, "max_tokens": limit}}
    prompts: dict[str, dict[str, object]] = {
        "/v1/responses": {"input": words},
        "/v1/messages": {"messages": [{"role": "user", "content": words}]},
        COMPLETIONS: {"prompt": token_ids, "return_token_ids": True},
    }
    return {**prompts[path], LIMITS[path]: limit, "temperature": 0}


def pieces(reply: object) -> Sequence[object]:
    """The answer in a reply, or in one event of a stream: texts, or ids of tokens."""
    match reply:
        case {"output": [{"content": [{"text": text}]}]}:
            return [text]
        case {"content": [{"text": text}]}:
            return [text]
        case {"choices": [{"token_ids": [*token_ids]}]}:
            return token_ids
        case {"type": "response.output_text.delta", "delta": text}:
            return [text]
        case {"type": "content_block_delta", "delta": {"text": text}}:
            return [text]
    return []


def joined(pieces_of_answer: Sequence[object]) -> str:
    return "".join(
        f"{piece} " if isinstance(piece, int) else str(piece) for piece in pieces_of_answer
    )


def events_of(reply: httpx.Response) -> list[dict[str, object]]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def ask_at(url: str, path: str, body: dict[str, object], **more: object) -> httpx.Response:
    asked = {"model": MODEL_NAME, **body, **more}
    reply = httpx.post(f"{url}{path}", json=asked, timeout=EVENT_S, **DIRECT)
    assert reply.status_code == httpx.codes.OK, reply.text
    return reply


@pytest.mark.parametrize(
    ("path", "seed"),
    [("/v1/responses", 7420), ("/v1/messages", 7430), (GENERATE, 7440)],
)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_other_endpoints_are_answered_early_and_decode_loads(
    pair: Pair, single: Client, path: str, seed: int, *, is_streamed: bool
) -> None:
    seed += is_streamed
    # Completions stand for `generate`, which an engine without --enable-scale-out does not have.
    alone = COMPLETIONS if path == GENERATE else path
    expected = pieces(ask_at(single.url, alone, body_of(alone, seed, ANSWER_TOKENS)).json())
    asked = body_of(path, seed, 1)
    prefill = ask_at(pair.prefill.url, path, asked, kv_transfer_params=WANT_TICKET)
    ticket = prefill.json()["kv_transfer_params"]
    assert opened(ticket).is_early
    since = CountersSince(pair.to_decode)
    wanted = {"kv_transfer_params": ticket, "stream": is_streamed}
    reply = ask_at(pair.decode.url, path, body_of(path, seed, ANSWER_TOKENS), **wanted)
    events = events_of(reply) if is_streamed else [reply.json()]
    found = [piece for event in events for piece in pieces(event)]
    assert joined(found) == joined(expected) != ""
    assert not is_streamed or len(found) > 1
    changed = since.wait_for(LOADS, timeout_s=EVENT_S)
    assert (changed[LOADS], changed[FAILURES]) == (1, 0)


class OfflinePrefill(ManagedProcess):
    """`support/offline_prefill.py`, with the configuration of an engine that is not started."""

    def __init__(self, engine: Engine, prompts: Sequence[str]) -> None:
        super().__init__(engine.name, engine.log_path)
        self._engine = engine
        self._prompts = prompts

    def start(self) -> None:
        spec = self._engine.spec
        arguments = {
            "model": str(spec.model.absolute()),
            "served_model_name": spec.served_name,
            "dtype": spec.actual_dtype,
            "enforce_eager": True,
            "kv_cache_memory_bytes": spec.kv_cache_bytes,
            "max_num_batched_tokens": CHUNK,
            "kv_transfer_config": self._engine.kv_transfer_config(),
        }
        settings = json.dumps({"engine": arguments, "prompts": self._prompts})
        env = self._engine.environment() | {"PYTHONPATH": python_path(REPO / "tests")}
        self.launch([sys.executable, str(REPO / "tests/support/offline_prefill.py"), settings], env)
        os.sched_setaffinity(self.pid, spec.cores)

    @property
    def answers(self) -> list[dict[str, Any]]:
        lines = self.log_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"ticket"')]

    def is_ready(self) -> bool:
        self.check_alive()
        return len(self.answers) == len(self._prompts)

    def close(self) -> None:
        self.stop()


@pytest.mark.slow
def test_the_offline_class_gives_ordinary_tickets(
    cluster: Cluster, pair: Pair, single: Client
) -> None:
    prompts = [random_prompt(length, seed=7565) for length in (20, CHUNK, 3 * CHUNK + 33)]
    config = {**pair.prefill.spec.connector_config, "offer_ttl_s": EVENT_S}
    assert config["overlap"] == "on"
    spec = replace(pair.prefill.spec, name="early-offline", connector_config=config)
    # Before its offers are open: vLLM then steps without a pause, on a core that `single` shares.
    expected = [single.complete(prompt) for prompt in prompts]
    first = [single.complete(prompt, 1).text for prompt in prompts]
    loads = CountersSince(pair.to_decode)
    with closing(OfflinePrefill(Engine(spec, cluster.log_dir, Ports()), prompts)) as prefill:
        prefill.start()
        prefill.wait_ready(START_TIMEOUT_S)
        given = prefill.answers
        assert [answer["text"] for answer in given] == first
        assert not any(opened(answer["ticket"]).is_early for answer in given)
        answers = [
            pair.decode_with(answer["ticket"], prompt)
            for answer, prompt in zip(given, prompts, strict=True)
        ]
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        changed = loads.wait_for(LOADS, len(prompts), timeout_s=EVENT_S)
        assert (changed[LOADS], changed[FAILURES]) == (len(prompts), 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_loads_end_between_steps(
    cluster: Cluster, pair: Pair, single: Client, workers: int
) -> None:
    """Requests decode at the same time, until a load ends while a step of another one goes on."""
    spec = replace(
        pair.decode.spec,
        name=f"early-{workers}",
        module="support.collecting_connector",
        tensor_parallel=workers,
        extra_args=("--scheduler-cls", "support.collecting_connector.HookedScheduler"),
    )
    seeds = itertools.count(7450)
    with started(cluster, spec) as (decode,), connected(pair.prefill, decode) as two:
        loads = CountersSince(two.to_decode)

        def has_ended() -> bool:
            prompts = [random_prompt(40, seed=next(seeds)) for _ in range(4)]
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(lambda prompt: two.complete(prompt, 32).tokens, prompts))
            assert answers == [single.complete(prompt, 32).tokens for prompt in prompts]
            return loads.changed()[EARLY_ENDS] > 0

        assert wait_until(has_ended, EVENT_S)
        assert loads.changed()[FAILURES] == 0


def test_an_early_ticket_is_good_once_and_for_its_prompt(pair: Pair, single: Client) -> None:
    prompt, other = (random_prompt(150, seed=7500 + n) for n in range(2))
    since = CountersSince(pair.to_decode)
    ticket = early_ticket(pair, prompt)
    assert pair.decode_with(ticket, other).tokens == single.complete(other).tokens
    assert since.wait_for(TICKETS_REFUSED, timeout_s=EVENT_S)[LOADS] == 0
    assert "the ticket is for another prompt" in pair.decode.log_text()
    assert pair.decode_with(ticket, prompt).tokens == single.complete(prompt).tokens
    assert since.wait_for(LOADS, timeout_s=EVENT_S)[FAILURES] == 0
    assert pair.decode_with(ticket, prompt).tokens == single.complete(prompt).tokens
    assert since.wait_for(TICKETS_REFUSED, 2, timeout_s=EVENT_S)[LOADS] == 1


@contextmanager
def no_free_seats(engine: Client) -> Iterator[None]:
    """Other answers occupy an engine until the end of the block."""
    prompts = [random_prompt(20, seed=7550 + n) for n in range(SEATS)]
    with engine.streaming(prompts, 1500) as choices:
        begun: set[int] = set()
        while len(begun) < SEATS:
            begun.add(next(choices)["index"])
        yield


def expect_abort(pair: Pair, ticket: Ticket) -> None:
    nonce = opened(ticket).nonce
    line = f"(offer {nonce[:8]}) was answered early and is aborted: decode has released it"
    assert wait_until(lambda: line in pair.prefill.log_text(), EVENT_S)


@pytest.mark.parametrize("reason", ["its client hangs up", "decode has it in its cache"])
def test_prefill_aborts_a_queued_request_that_decode_does_not_need(pair: Pair, reason: str) -> None:
    prompt = random_prompt(3 * 128 + 1, seed=7560 + len(reason))  # whole blocks, and one token
    if reason == "decode has it in its cache":
        pair.to_decode.complete(prompt, 1)
    decode = CountersSince(pair.to_decode)
    with no_free_seats(pair.to_prefill):
        prefill = CountersSince(pair.to_prefill)
        ticket = early_ticket(pair, prompt)
        with pair.to_decode.streaming(
            prompt, 4, kv_transfer_params=ticket, logprobs=None
        ) as answer:
            if reason == "decode has it in its cache":
                assert len(list(answer)) >= 4
            else:
                assert decode.wait(lambda now: now[QUEUED] == 1, EVENT_S, step=True)[QUEUED] == 1
        expect_abort(pair, ticket)
        assert prefill.wait(lambda now: now[QUEUED] == 0, EVENT_S)[QUEUED] == 0
    pair.to_prefill.complete(PROBE, 1)
    changed = prefill.wait_for(PROMPT_TOKENS, timeout_s=EVENT_S)
    assert changed[PROMPT_TOKENS] == 1, "none of its prompt was computed, only the probe"
    assert changed[OFFERS] == 0
    for engine in (pair.to_prefill, pair.to_decode):
        expect_free(engine)


@contextmanager
def stopped(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.mark.slow
def test_each_api_server_answers_early_and_aborts(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec], single: Client
) -> None:
    """Each asks the engine for its address. While one is stopped, the other serves."""
    prefill, decode = base_specs
    with early_pair(cluster, (replace(prefill, api_servers=2), decode), "servers") as pair:
        found = re.findall(r"\(ApiServer_\d+ pid=(\d+)\)", pair.prefill.log_text())
        servers = sorted({int(process) for process in found})
        assert len(servers) == 2
        for seed, server in enumerate(servers, 7570):
            prompt, other = (random_prompt(3 * 128 + 1, seed=seed + 2 * n) for n in range(2))
            pair.to_decode.complete(other, 1)
            with stopped(server), Pair(*pair.engines) as one:
                loads = CountersSince(one.to_decode)
                ticket = early_ticket(one, prompt)
                assert one.decode_with(ticket, prompt).tokens == single.complete(prompt).tokens
                assert loads.wait_for(LOADS, timeout_s=EVENT_S)[FAILURES] == 0
                with no_free_seats(one.to_prefill):
                    ticket = early_ticket(one, other)
                    one.decode_with(ticket, other, 1)
                    expect_abort(one, ticket)


@pytest.mark.slow
def test_the_ticket_names_the_data_parallel_rank_that_computes(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec], single: Client
) -> None:
    """vLLM's own balancer chooses it."""
    prefill, decode = base_specs
    prefill = replace(
        prefill,
        kv_cache_bytes=256 << 20,
        extra_args=("--data-parallel-size", "2", *prefill.extra_args),
    )
    prompts = [random_prompt(150, seed=7580 + n) for n in range(8)]
    with early_pair(cluster, (prefill, decode), "ranks") as pair:
        loads, ports = CountersSince(pair.to_decode), set[int]()
        for prompt in prompts:
            ticket = early_ticket(pair, prompt)
            ports.add(opened(ticket).port)
            assert pair.decode_with(ticket, prompt).tokens == single.complete(prompt).tokens
        assert len(ports) == 2
        changed = loads.wait_for(LOADS, len(prompts), timeout_s=EVENT_S)
        assert (changed[LOADS], changed[FAILURES]) == (len(prompts), 0)


def group_of(size: int) -> tuple[str, ...]:
    """How processes of one data-parallel group find each other."""
    port = str(Ports().next_free())
    address = ("--data-parallel-address", HOST, "--data-parallel-rpc-port", port)
    return ("--data-parallel-size", str(size), *address)


@pytest.mark.slow
def test_the_ticket_names_a_data_parallel_rank_of_the_node_that_a_router_chooses(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec], single: Client
) -> None:
    """Two nodes of two ranks each: a router chooses the node, and vLLM's balancer the rank."""
    prefill, decode = (
        replace(
            spec,
            name=f"hybrid-{spec.role}",
            kv_cache_bytes=256 << 20,
            connector_config={**spec.connector_config, **SETTINGS},
        )
        for spec in base_specs
    )
    group = ("--data-parallel-hybrid-lb", "--data-parallel-size-local", "2", *group_of(4))
    nodes = [
        replace(
            prefill,
            name=f"{prefill.name}-{start}",
            extra_args=(*EARLY, *group, "--data-parallel-start-rank", str(start)),
        )
        for start in (0, 2)
    ]
    with started(cluster, *nodes, decode) as (*engines, loading), Client(loading.url) as to_decode:
        loads, ranks = CountersSince(to_decode), [set[int](), set[int]()]
        prompts = [random_prompt(150, seed=7610 + n) for n in range(16)]
        for number, prompt in enumerate(prompts):
            engine, found = engines[number % 2], ranks[number % 2]
            with Pair(engine, loading) as pair:
                params = early_ticket(pair, prompt)
                found.add(opened(params).port - engine.side_port)
                assert pair.decode_with(params, prompt).tokens == single.complete(prompt).tokens
        assert ranks == [{0, 1}, {2, 3}]
        changed = loads.wait_for(LOADS, len(prompts), timeout_s=EVENT_S)
        assert (changed[LOADS], changed[FAILURES]) == (len(prompts), 0)


MLA_ON_CPU: Final = tuple(
    msgspec.yaml.decode((REPO / "configs/matrix.yaml").read_bytes())["models"]["mla"]["cpu_flags"]
)


@contextmanager
def external_group(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]
) -> Iterator[list[Engine]]:
    """Two prefill ranks with an API server each; then decode, and a single engine.

    vLLM allows this only for models with experts, and its CPU build lacks the `all_gatherv` of
    their layers. The configuration of this model names experts, so both ranks step together, but
    none of its layers has any.
    """
    prefill, decode = (
        replace(
            spec,
            name=f"external-{spec.role}",
            model=ensure_tiny_model(model=DeepseekV2()),
            connector_config={**spec.connector_config, **SETTINGS},
            extra_args=MLA_ON_CPU,
        )
        for spec in base_specs
    )
    group = ("--data-parallel-external-lb", *group_of(2))
    ranks = [
        replace(
            prefill,
            name=f"{prefill.name}-{rank}",
            extra_args=(*EARLY, *MLA_ON_CPU, *group, "--data-parallel-rank", str(rank)),
        )
        for rank in range(2)
    ]
    single = without_connector(decode, "external-single")
    with started(cluster, *ranks, decode, single) as engines:
        yield engines


@pytest.mark.slow
def test_the_ticket_names_the_data_parallel_rank_that_a_router_chooses(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]
) -> None:
    with (
        external_group(cluster, base_specs) as (*ranks, decode, alone),
        Client(alone.url) as single,
    ):
        addresses = set()
        for seed, rank in enumerate(ranks * 2, 7590):
            with connected(rank, decode) as pair:
                loads, prompt = CountersSince(pair.to_decode), random_prompt(150, seed)
                params = early_ticket(pair, prompt)
                assert pair.decode_with(params, prompt).tokens == single.complete(prompt).tokens
                changed = loads.wait_for(LOADS, timeout_s=EVENT_S)
                assert (changed[LOADS], changed[FAILURES]) == (1, 0)
                # The rank itself answers a request for log probabilities.
                early, late = opened(params), opened(pair.to_prefill.ticket(prompt))
                assert not late.is_early
                assert (early.engine, early.incarnation) == (late.engine, late.incarnation)
                assert early.endpoint == late.endpoint
                addresses.add((early.engine, early.endpoint))
        assert len(addresses) == 2
        with Pair(ranks[0], decode, cluster.route(ranks, [decode])) as pair:
            expect_loads_from_both(pair, ranks, single)


def expect_loads_from_both(pair: Pair, ranks: list[Engine], single: Client) -> None:
    """Ask the router at the same time."""
    prompts = [random_prompt(150, seed=7596 + n) for n in range(8)]
    expected = [single.complete(prompt, logprobs=None).text for prompt in prompts]
    with ExitStack() as clients:
        offers = [CountersSince(clients.enter_context(Client(rank.url))) for rank in ranks]
        loads = CountersSince(pair.to_decode)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda p: pair.to_router.complete(p, logprobs=None), prompts))
        assert [answer.text for answer in answers] == expected
        changed = loads.wait_for(LOADS, len(prompts), timeout_s=EVENT_S)
        assert (changed[LOADS], changed[FAILURES]) == (len(prompts), 0)
        for of_rank in offers:
            assert of_rank.wait_for(OFFERS_READ, timeout_s=EVENT_S)[OFFERS_READ] > 0


def test_decode_computes_a_prompt_whose_prefill_dies(pair: Pair, single: Client) -> None:
    prompt = random_prompt(150, seed=7600)
    ticket = early_ticket(pair, prompt)
    pair.prefill.kill()
    assert pair.decode_with(ticket, prompt).tokens == single.complete(prompt).tokens


# --- engines that hang, and that stand still

HUNG_S = 6.0
"""The requests' timeout here: an engine without a step for a third of it hangs."""


@pytest.mark.slow
@pytest.mark.faults
def test_a_hung_engine_looks_hung(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec], single: Client
) -> None:
    """Its core stands still, and its workers go on: decode computes, and routers get no answer."""
    specs = (
        replace(spec, connector_config={**spec.connector_config, "request_timeout_s": HUNG_S})
        for spec in base_specs
    )
    prefill, decode = specs
    with early_pair(cluster, (replace(prefill, tensor_parallel=2), decode), "hung") as pair:
        found = re.findall(r"\(EngineCore\w* pid=(\d+)\)", pair.prefill.log_text())
        prompts = [random_prompt(20 * CHUNK, seed=7650 + n) for n in range(SEATS)]
        expected = [single.complete(prompt).tokens for prompt in prompts]
        tickets = [early_ticket(pair, prompt) for prompt in prompts]
        with stopped(int(found[0])):
            begin = time.monotonic()
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(pair.decode_with, tickets, prompts))
            seconds = time.monotonic() - begin
            assert [answer.tokens for answer in answers] == expected
            print(f"answered after {seconds:.1f} s; an unknown request waits for 10 s")
            with Pair(*pair.engines, timeout_s=3.0) as impatient:

                def has_no_answer() -> bool:
                    to_prefill = impatient.to_prefill
                    asked = partial(to_prefill.timed_ticket, prompts[0], logprobs=None)
                    return bool(ask(lambda: asked() and None).error)

                assert wait_until(has_no_answer, EVENT_S)
        expect_load(pair.to_decode, pair.complete)


@pytest.mark.slow
@pytest.mark.faults
def test_a_decode_engine_that_stood_still_loads(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec], single: Client
) -> None:
    """For longer than a request's timeout: its own time stood still too."""
    prefill, decode = (
        replace(spec, connector_config={**spec.connector_config, "request_timeout_s": 3.0})
        for spec in base_specs
    )
    prompt = random_prompt(150, seed=7660)
    with early_pair(cluster, (prefill, decode), "still") as pair, ThreadPoolExecutor(1) as pool:
        pair.complete(PROBE, 1)
        loads = CountersSince(pair.to_decode)
        with no_free_seats(pair.to_prefill):
            queued = CountersSince(pair.to_decode)
            ticket = early_ticket(pair, prompt)
            answer = pool.submit(pair.decode_with, ticket, prompt)
            assert queued.wait(lambda now: now[QUEUED] == 1, EVENT_S, step=True)[QUEUED] == 1
            pair.decode.suspend()
            time.sleep(7.0)
            pair.decode.resume()
        assert answer.result().tokens == single.complete(prompt).tokens
        assert loads.wait_for(LOADS, timeout_s=EVENT_S)[FAILURES] == 0


# --- a kill in each phase

LEASE_S = 5.0
MOST_ATTEMPTS = 10
SEEDS = itertools.count(7701)
RUNNING = "vllm:num_requests_running"
GENERATED = "vllm:generation_tokens_total"
PHASES = {
    "before the ask": "1 CONNECTING (PrepareLoad: offer",
    "while queued": "1 Pending: queued",
    "between chunks": "2 READING -> GRANTED (ReadDone)",
    "reading a chunk": "2 GRANTED -> READING (StartLoad)",
    "after the last chunk": "1 READY -> LOADED",
    "after the first token": "",
}
"""The message in decode's log at that moment, and how often."""


@pytest.fixture(scope="module")
def mortals(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec], plan: Path
) -> Iterator[tuple[Engine, Engine]]:
    """A pair whose decode kills either engine; prefill computes one request at a time."""
    prefill, decode = (
        replace(spec, connector_config={**spec.connector_config, "lease_s": LEASE_S})
        for spec in base_specs
    )
    prefill = replace(prefill, extra_args=("--max-num-seqs", "1"))
    kills = {"NIXL_KV_KILL": str(plan)}
    decode = replace(decode, module="support.killing_connector", extra_env=kills)
    with early_pair(cluster, (prefill, decode), "mortal") as pair:
        yield pair.engines


@pytest.fixture
def mortal(mortals: tuple[Engine, Engine]) -> Iterator[Pair]:
    with Pair(*mortals) as pair:
        yield pair


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_kill_in_each_phase(
    mortal: Pair, single: Client, plan: Path, victim: str, phase: str
) -> None:
    moment = PHASES[phase]
    engine = mortal.prefill if victim == "prefill" else mortal.decode
    with ThreadPoolExecutor(2) as pool:
        for _ in range(MOST_ATTEMPTS):  # prefill may be done before decode sees the moment
            prompt, other = random_prompt(7 * CHUNK + 33, next(SEEDS)), random_prompt(20, 7700)
            question = Question.of(single, prompt, 16 if moment else 200)
            if phase == "while queued":
                running = CountersSince(mortal.to_prefill)
                pool.submit(ask, partial(mortal.to_prefill.complete, other, 500))
                assert running.wait_for(RUNNING, timeout_s=EVENT_S)[RUNNING] == 1
            plan.write_text(f"{engine.pid} {moment}" if moment else "")
            ticket = early_ticket(mortal, prompt)
            generated = CountersSince(mortal.to_decode)
            complete = partial(mortal.decode_with, ticket, prompt, question.num_tokens)
            asked = pool.submit(ask, complete)
            if not moment:
                assert generated.wait_for(GENERATED, timeout_s=EVENT_S)[GENERATED] > 0
                engine.kill()
            ended = asked.result()
            if not plan.read_text():
                break
    assert wait_until(lambda: not engine.is_running(), EVENT_S)
    begin = time.monotonic()
    if victim == "decode":
        assert ended.error
        expect_free(mortal.to_prefill)
        print(f"blocks free after {time.monotonic() - begin:.1f} s")
    else:
        expect_answer(question, ended)
    engine.kill()
    engine.restart()
    with Pair(*mortal.engines) as again:  # clients whose connections are new
        if victim == "decode":
            retry = partial(again.decode_with, ticket, prompt, question.num_tokens)
            expect_answer(question, ask(retry))
        expect_load(again.to_decode, again.complete)
        for client in (again.to_prefill, again.to_decode):
            expect_free(client)


def expect_answer(question: Question, ended: Ended) -> None:
    assert ended.kind(question) == "right"
    print(f"answered after {ended.seconds:.1f} s, alone in {question.expected.seconds:.1f} s")
