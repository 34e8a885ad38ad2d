"""A ticket that does not hold costs a log line and a counter; the answer is right."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cluster.client import Client, RefusedError, Ticket
from harness.cluster.cluster import Cluster
from harness.cluster.engines import EngineSpec
from harness.cluster.metrics import FAILURES, LOADS, TICKETS_MISSING, TICKETS_REFUSED, CountersSince
from harness.cluster.models.families import TinyModel
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.tickets import sealed, values
from harness.cluster.waiting import wait_until
from nixl_kv.protocol.ticket import FIELD
from support.engines import EVENT_S, PATIENT, Accounts, started

pytestmark = pytest.mark.e2e

REQUEST_TIMEOUT_S = 60  # decode's; a ticket of nobody must not cost that
PARAMETERS = (
    *("remote_engine_id", "remote_request_id", "remote_host", "remote_port"),
    *("remote_block_ids", "tp_size"),
)
"""What is beside the ticket."""
ROUTED = itertools.count(270)  # seeds: no prompt is in decode's cache before


def lines_with(words: str, log: str) -> list[str]:
    return [line for line in log.splitlines() if words in line]


def beside(*missing: str, **fields: object) -> Callable[[Ticket], Ticket]:
    """Other fields beside the string that is the ticket, and some missing."""
    return lambda ticket: {k: v for k, v in (ticket | fields).items() if k not in missing}


def having(**fields: object) -> Callable[[Ticket], Ticket]:
    """Other values in the string."""
    return lambda ticket: sealed(ticket, list((values(ticket) | fields).values()))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(beside(do_remote_prefill=True, do_remote_decode=False), id="flags set"),
        pytest.param(beside(remote_host="http://prefill.example:8000"), id="overwritten host"),
        pytest.param(beside(*PARAMETERS), id="nothing but the string"),
    ],
)
def test_what_a_router_does_beside_the_ticket_does_not_matter(
    pair: Pair, single: Client, change: Callable[[Ticket], Ticket]
) -> None:
    prompt = random_prompt(140, seed=next(ROUTED))
    ticket = pair.to_prefill.ticket(prompt)
    assert set(ticket) >= {*PARAMETERS, FIELD}
    since = CountersSince(pair.to_decode)
    answer = pair.decode_with(change(ticket), prompt)
    assert answer.tokens == single.complete(prompt).tokens
    assert since.wait_for(LOADS, timeout_s=EVENT_S)[LOADS] == 1


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(beside(FIELD), "lacks the field 'nixl_kv_ticket'", id="no ticket"),
        pytest.param(lambda _: {"do_remote_decode": True}, "do_remote_decode", id="for prefill"),
        pytest.param(having(nonce="../etc/passwd"), "nonce", id="bad nonce"),
        pytest.param(having(port=-1), "$.port", id="negative port"),
        pytest.param(having(host="example.org"), "example.org", id="host name"),
        pytest.param(having(context="0" * 32), "for another prompt", id="another prompt's"),
    ],
)
def test_a_malformed_ticket_is_computed_locally(
    pair: Pair,
    single: Client,
    spoil: Callable[[Ticket], Ticket],
    named: str,
) -> None:
    prompt = random_prompt(150, seed=200)
    ticket = pair.to_prefill.ticket(prompt)
    since, start = CountersSince(pair.to_decode), pair.decode.log_size()
    answer = pair.decode_with(spoil(ticket), prompt)
    assert answer.tokens == single.complete(prompt).tokens
    counted = since.wait_for(TICKETS_REFUSED, timeout_s=EVENT_S)
    assert (counted[TICKETS_REFUSED], counted[LOADS]) == (1, 0)
    (line,) = lines_with("is computed here", pair.decode.log_text(start))
    assert named in line


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(having(port=1), "cannot connect", id="nobody listens"),
        pytest.param(having(engine="other"), "instead of 'other'", id="another engine"),
        pytest.param(having(incarnation="f" * 32), "incarnation", id="a former life"),
    ],
)
def test_a_ticket_of_nobody_is_computed_locally(
    pair: Pair,
    single: Client,
    spoil: Callable[[Ticket], Ticket],
    named: str,
) -> None:
    """These look right, so decode asks."""
    prompt = random_prompt(160 + len(named), seed=201)
    ticket = spoil(pair.to_prefill.ticket(prompt))
    since, start = CountersSince(pair.to_decode), pair.decode.log_size()
    answer = pair.decode_with(ticket, prompt)
    assert answer.tokens == single.complete(prompt).tokens
    assert answer.seconds < REQUEST_TIMEOUT_S
    assert since.wait_for(FAILURES, timeout_s=EVENT_S)[FAILURES] == 1
    (line,) = lines_with("KV not loaded", pair.decode.log_text(start))
    assert named in line


def test_a_ticket_is_good_once_and_for_its_prompt(pair: Pair, single: Client) -> None:
    """It comes with another prompt of the same length, with its own, and then with both again."""
    prompt, other, third = (random_prompt(170, seed=seed) for seed in (202, 207, 208))
    ticket = pair.to_prefill.ticket(prompt)
    since = CountersSince(pair.to_decode)
    for asked in (other, prompt, prompt, third):
        assert pair.decode_with(ticket, asked).tokens == single.complete(asked).tokens
    counted = since.wait_for(TICKETS_REFUSED, 3, timeout_s=EVENT_S)
    assert (counted[TICKETS_REFUSED], counted[LOADS]) == (3, 1)


def test_a_request_without_a_ticket_is_counted(pair: Pair, single: Client) -> None:
    prompt = random_prompt(180, seed=203)
    since = CountersSince(pair.to_decode)
    assert pair.to_decode.complete(prompt).tokens == single.complete(prompt).tokens
    assert since.wait_for(TICKETS_MISSING, timeout_s=EVENT_S)[TICKETS_MISSING] == 1


@pytest.mark.slow
def test_a_refused_ticket_is_an_error_if_the_operator_says_so(
    cluster: Cluster, single: Client
) -> None:
    spec = EngineSpec(
        "strict",
        ensure_tiny_model(),
        "decode",
        "nixl-kv",
        kv_cache_bytes=64 << 20,
        connector_config={"on_load_failure": "fail"},
    )
    prompt = random_prompt(210, seed=209)
    with started(cluster, spec) as (strict,), Client(strict.url) as client:
        with pytest.raises(RefusedError, match="500"):
            client.complete(prompt, kv_transfer_params={FIELD: "not a ticket"})
        assert "fails with HTTP 500" in strict.log_text()
        assert client.complete(prompt).tokens == single.complete(prompt).tokens


def test_a_peer_of_another_model_is_refused_in_words(cluster: Cluster, pair: Pair) -> None:
    """Decode has another model of the same words, both roles, and our connector by name alone."""
    spec = EngineSpec(
        "stranger",
        ensure_tiny_model(model=TinyModel(layers=2, kv_heads=2, hidden=128)),
        "both",
        "nixl-kv",
        by_name=True,
        kv_cache_bytes=64 << 20,
        connector_config={"insecure": True},
    )
    prompt, seeds = random_prompt(200, seed=205), itertools.count(205)
    with started(cluster, spec) as (stranger,), Client(stranger.url) as client:
        expected = client.complete(prompt).tokens
        since = CountersSince(client)

        def is_refused() -> bool:
            """On a very busy machine the first handshakes may fail before."""
            other = random_prompt(201, seed=next(seeds))
            answer = client.complete(other, kv_transfer_params=pair.to_prefill.ticket(other))
            assert len(answer.tokens) == len(expected)
            return "num_hidden_layers is '2' here and '4' there" in stranger.log_text()

        assert wait_until(is_refused, EVENT_S)
        asked = next(seeds) - 205
        counted = since.wait_for(FAILURES, asked, timeout_s=EVENT_S)
        assert client.complete(prompt).tokens == expected
        assert (counted[FAILURES], counted[LOADS]) == (asked, 0)
        assert "num_key_value_heads is '2' here and '4' there" in stranger.log_text()


@pytest.mark.slow
@pytest.mark.skipif(
    not {"avx512f", "amx_tile"} & set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split()),
    reason="vLLM's CPU build keeps KV in fp8 with AVX-512 or AMX only",
)
def test_kv_of_eight_bits_is_read_by_its_like_alone(cluster: Cluster) -> None:
    """What `fp8` stands for is compared, and not only that it has eight bits."""
    model = ensure_tiny_model()
    specs = [
        EngineSpec(
            f"eight-bits-{dtype}",
            model,
            "both",
            "nixl-kv",
            kv_cache_bytes=64 << 20,
            connector_config=PATIENT,
            extra_args=("--kv-cache-dtype", dtype),
        )
        for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")
    ]
    prompt = random_prompt(200, seed=206)
    with started(cluster, *specs) as (prefill, same, other):
        with Pair(prefill, same) as pair:
            accounts = Accounts(pair)
            answer = pair.decode_with(pair.to_prefill.ticket(prompt), prompt)
            accounts.expect_loaded(199)
            assert answer.tokens == pair.to_prefill.complete(prompt).tokens
        with Pair(prefill, other) as pair:
            pair.decode_with(pair.to_prefill.ticket(prompt), prompt)
        refusal = "is 'float8_e5m2 in CPU_ATTN", "' here and 'float8_e4m3fn in CPU_ATTN"
        assert all(words in other.log_text() for words in refusal)
