"""A ticket that does not hold costs a log line and a counter; the answer is right."""

import itertools
from collections.abc import Callable

import pytest

from harness.cluster.client import Client, RefusedError, Ticket
from harness.cluster.cluster import Cluster
from harness.cluster.engines import EngineSpec
from harness.cluster.metrics import FAILURES, LOADS, TICKETS_MISSING, TICKETS_REFUSED, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.tickets import sealed, values
from nixl_kv.protocol.ticket import FIELD
from support.engines import CPU_FLAGS, EVENT_S, PATIENT, Accounts, started

pytestmark = pytest.mark.e2e

REQUEST_TIMEOUT_S = 60  # decode's; a ticket of an absent engine must not cost that
ANSWER = 16
ROUTED = itertools.count(270)  # seeds: no prompt is in decode's cache before


def lines_with(words: str, log: str) -> list[str]:
    return [line for line in log.splitlines() if words in line]


def without_string(ticket: Ticket) -> Ticket:
    return {name: value for name, value in ticket.items() if name != FIELD}


def having(**fields: object) -> Callable[[Ticket], Ticket]:
    """Other values in the string."""
    return lambda ticket: sealed(ticket, list((values(ticket) | fields).values()))


REFUSED = TICKETS_REFUSED, "is computed here"
NOT_READ = FAILURES, "KV not loaded"
"""The counter and the line in the log of a ticket that decode refuses, and of one that looks right,
so that decode asks."""


@pytest.mark.parametrize(
    ("outcome", "spoil", "named"),
    [
        pytest.param(REFUSED, without_string, "lacks the field 'nixl_kv_ticket'", id="no ticket"),
        pytest.param(
            *(REFUSED, lambda _: {"do_remote_decode": True}, "do_remote_decode"), id="for prefill"
        ),
        pytest.param(REFUSED, having(nonce="../etc/passwd"), "nonce", id="bad nonce"),
        pytest.param(REFUSED, having(port=-1), "$.port", id="negative port"),
        pytest.param(REFUSED, having(host="example.org"), "example.org", id="host name"),
        pytest.param(REFUSED, having(context="0" * 32), "for another prompt", id="another prompt"),
        pytest.param(NOT_READ, having(port=1), "cannot connect", id="no listener"),
        pytest.param(NOT_READ, having(engine="other"), "instead of 'other'", id="another engine"),
        pytest.param(NOT_READ, having(incarnation="f" * 32), "incarnation", id="a former life"),
    ],
)
def test_a_ticket_that_does_not_hold_is_computed_locally(
    pair: Pair,
    single: Client,
    outcome: tuple[str, str],
    spoil: Callable[[Ticket], Ticket],
    named: str,
) -> None:
    prompt, (counter, words) = random_prompt(150, seed=next(ROUTED)), outcome
    ticket = spoil(pair.to_prefill.ticket(prompt))
    since, start = CountersSince(pair.to_decode), pair.decode.log_size()
    answer = pair.decode_with(ticket, prompt)
    assert answer.tokens == single.complete(prompt).tokens
    assert answer.seconds < REQUEST_TIMEOUT_S
    counted = since.wait_for(counter, timeout_s=EVENT_S)
    assert (counted[TICKETS_REFUSED] + counted[FAILURES], counted[LOADS]) == (1, 0)
    (line,) = lines_with(words, pair.decode.log_text(start))
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


@pytest.mark.parametrize("more", [1, 30])
@pytest.mark.parametrize("length", [383, 384, 385])
def test_a_ticket_is_good_for_a_longer_prompt(
    pair: Pair, single: Client, accounts: Accounts, length: int, more: int
) -> None:
    """A proxy adds prefill's first token; Dynamo moves a request with the tokens so far."""
    prompt = random_prompt(length, seed=next(ROUTED))
    expected = single.complete(prompt, more + ANSWER)
    longer = f"{prompt} {expected.text.strip()}".split()[: length + more]
    answer = pair.decode_with(pair.to_prefill.ticket(prompt), " ".join(longer), ANSWER)
    assert answer.tokens == expected.tokens[more:]
    accounts.expect_loaded(length)


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
        by_name=True,  # the installed entry point finds our connector
        kv_cache_bytes=64 << 20,
        connector_config={"on_load_failure": "fail"},
    )
    prompt = random_prompt(210, seed=209)
    with started(cluster, spec) as (strict,), Client(strict.url) as client:
        with pytest.raises(RefusedError, match="500"):
            client.complete(prompt, kv_transfer_params={FIELD: "not a ticket"})
        assert "fails with HTTP 500" in strict.log_text()
        assert client.complete(prompt).tokens == single.complete(prompt).tokens


@pytest.mark.slow
@pytest.mark.skipif(
    not {"avx512f", "amx_tile"} & CPU_FLAGS,
    reason="vLLM's CPU build keeps KV in fp8 with AVX-512 or AMX only",
)
def test_kv_of_eight_bits_is_read_by_its_like_alone(cluster: Cluster) -> None:
    """Engines compare the format that `fp8` stands for, not only its eight bits."""
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
